"""The inputs of a run: its folders, listed, with their captions, ready to be planned."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from latentry.cache.format import Row
from latentry.cache.write.commits import Checkpoint
from latentry.cache.write.workspace import Workspace
from latentry.encode.planning.headers import bucket_chooser
from latentry.encode.planning.plan import Plan, make_plan
from latentry.encode.planning.tasks import task_size_of
from latentry.encode.progress import OnProgress, Progress
from latentry.encode.recipe import Recipe
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.errors import ConfigError, RunError
from latentry.processors import processors_for
from latentry.sources.caption_folders import CaptionFolders
from latentry.sources.captions import NO_CAPTION
from latentry.sources.folder import SourceFolders, list_folders
from latentry.types import ProcessorInfo, SourceFile

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A folder, or several."""


def source_folders(
    recipe: Recipe, info: ProcessorInfo, image_dir: Folders | None, video_dir: Folders | None
) -> SourceFolders:
    """The folders of the inputs, if they fit the recipe and the processor."""
    media = recipe.media
    if media not in info.media:
        raise ConfigError(
            f"the processor {recipe.processor!r} encodes {' and '.join(info.media)}s, not {media}s; choose one of "
            f"{', '.join(processors_for(media))}"
        )
    folders = image_dir if media == "image" else video_dir
    if folders is None or (image_dir is not None and video_dir is not None):
        raise ConfigError(
            f"a recipe for {media}s needs {media}_dir, the folder of the {media}s, and no other folder"
        )
    return SourceFolders.of([folders] if isinstance(folders, (str, os.PathLike)) else folders)


class Inputs:
    """The listed inputs of a run, ready to be planned."""

    def __init__(
        self,
        recipe: Recipe,
        resolved: ResolvedRecipe,
        info: ProcessorInfo,
        source: SourceFolders,
        output: Path,
        max_files: int | None,
        damaged: str,
        on_progress: OnProgress,
    ) -> None:
        self._resolved, self._info = resolved, info
        self._source, self._output = source, output
        self._damaged, self._on_progress = damaged, on_progress
        self._sizes = recipe.size_rules()
        self._choose_buckets = bucket_chooser(resolved)
        self._reader = resolved.media_reader()
        self._listing = list_folders(source, self._reader.suffixes, media=recipe.media, leave_out=output)
        self._files: Sequence[SourceFile] = self._listing.files[:max_files]
        self._finder = CaptionFolders(source, recipe.caption_finder)

    def ignored(self) -> dict[str, int]:
        """Files of the folders that were not taken, by ending. Known once captions were looked up."""
        return self._listing.ignored({file.name for file in self._files} | self._finder.files_read)

    def plan(self, workspace: Workspace, known: Mapping[str, Row], checkpoints: Sequence[Checkpoint]) -> Plan:
        """Decide what happens to every input. Raises an error if the run would make no sense."""
        plan = make_plan(
            self._files,
            self._source,
            self._reader,
            self._choose_buckets,
            self._finder,
            known=known,
            sizes=self._sizes,
            checkpoints=checkpoints,
            task_size=task_size_of(self._resolved, self._info),
            unreadable=self._listing.unreadable,
            failed_before=workspace.failed_before(),
            keep_damaged=self._damaged == "keep",
            on_progress=lambda *counts: self._on_progress(Progress("plan", *counts)),
        )
        if plan.vanished and not (plan.done or plan.captions_only):
            raise RunError(self._nothing_in_common(len(plan.vanished)))
        if plan.left_out and not (plan.tasks or plan.done):
            name, reason = plan.left_out[0].name, plan.left_out[0].reason
            raise RunError(f"every input is left out, such as {name}, which {reason}; loosen that rule")
        damaged = [f for f in plan.skipped if f.reason != NO_CAPTION and f.name not in plan.unsuitable]
        if damaged and self._damaged == "error":
            raise RunError(
                f"{damaged[0].name} {damaged[0].reason}; mend or move the file, or leave out --damaged error"
            )
        return plan

    def _nothing_in_common(self, num_samples: int) -> str:
        """What to say if the cache holds samples, and none of them is an input of this run."""
        if len(self._source.roots) == 1:
            return (
                f"none of the {num_samples} samples in {self._output} comes from {self._source}; choose another "
                "output_dir, give the folders in the same order as before, or replace that cache with --overwrite"
            )
        return (
            f"no input has the name of a sample in {self._output}, and names are relative to the first folder, here "
            f"{self._source.roots[0]}; give the folders in the same order as before, choose another output_dir, or "
            "replace that cache with --overwrite"
        )
