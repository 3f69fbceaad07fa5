"""What a dataloader configuration builds, under the documented names."""

from latentry.serve.dataloader_build import DiffusionDataloaderBuild, DiffusionDataloaderConfig

__all__ = ["DiffusionDataloaderBuild", "DiffusionDataloaderConfig"]
