"""Processors and caption loaders, under the names that NeMo AutoModel's tools export.

They are adapters: Latentry's own processors and caption finder do the work. A family that Latentry does not have yet
is an ``ImportError`` that says so.
"""

from typing import Any

from tools.diffusion.processors.base import BaseModelProcessor, BaseVideoProcessor
from tools.diffusion.processors.caption_loaders import (
    CaptionLoader,
    CaptionLoadingStats,
    JSONLCaptionLoader,
    JSONSidecarCaptionLoader,
    MetaJSONCaptionLoader,
    get_caption_loader,
)
from tools.diffusion.processors.families import (
    FluxProcessor,
    HunyuanVideoProcessor,
    Wan22Processor,
    WanProcessor,
)
from tools.diffusion.processors.registry import ProcessorRegistry

__all__ = [
    "BaseModelProcessor",
    "BaseVideoProcessor",
    "CaptionLoader",
    "CaptionLoadingStats",
    "FluxProcessor",
    "HunyuanVideoProcessor",
    "JSONLCaptionLoader",
    "JSONSidecarCaptionLoader",
    "MetaJSONCaptionLoader",
    "ProcessorRegistry",
    "Wan22Processor",
    "WanProcessor",
    "get_caption_loader",
]

_NOT_AVAILABLE = {
    "Flux2Processor": "FLUX.2",
    "LTX2Processor": "LTX-2",
    "QwenImageEditProcessor": "Qwen-Image-Edit",
    "QwenImageProcessor": "Qwen-Image",
}


def __getattr__(name: str) -> Any:
    if name in _NOT_AVAILABLE:
        raise ImportError(
            f"{name} is not available: Latentry has no processor for {_NOT_AVAILABLE[name]} yet; "
            "`latentry processors` lists those it has"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
