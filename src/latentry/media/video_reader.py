"""Videos as samples: each is one, or several windows, or one per extracted frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from latentry.counted import counted
from latentry.errors import MediaError, UnsuitableMediaError
from latentry.media.clips.frames import Frames, VideoInfo, probe_video, read_frames
from latentry.media.clips.scenes import scene_starts
from latentry.media.clips.timeline import Timeline, read_timeline
from latentry.media.clips.windows import (
    Clock,
    evenly_spaced,
    find_windows,
    num_available,
    window_frames,
    window_length,
)
from latentry.media.content import MediaFile, read_media_file
from latentry.media.formats.content_type import PREFIX_BYTES, image_type_of, other_type
from latentry.media.images import Pixels, fit_to_bucket
from latentry.media.reader import Crop, ProbeResult
from latentry.media.video_options import VideoOptions
from latentry.storage import WHOLE_DIGEST_BYTES
from latentry.types import PlannedSample, Window

VIDEO_SUFFIXES = frozenset(
    {
        ".3gp", ".apng", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts",
        ".ogv", ".ts", ".webm", ".wmv",
    }
)  # fmt: skip
_MAX_CLIP_BYTES = 1 << 33
_HDR_NAMES = {"pq": "PQ", "hlg": "HLG"}


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Reads videos. Each is one sample, or several windows, or one sample per extracted frame."""

    options: VideoOptions
    crop_mode: str
    frame_step: int
    """Without ``target_frames``, a sample has a multiple of this many frames, plus one."""
    hdr: str = "tonemap"
    """One of ``HDR_MODES``."""
    suffixes: frozenset[str] = VIDEO_SUFFIXES

    def probe(self, path: Path) -> ProbeResult:
        with open(path, "rb") as file:
            prefix = file.read(PREFIX_BYTES)
        try:
            info = probe_video(path)
        except MediaError as error:
            raise MediaError(_other_type(prefix) or str(error)) from None
        if info.num_frames == 1 and image_type_of(prefix) is not None:
            raise MediaError(_other_type(prefix))
        notes = list(self._notes(info))
        options = self.options
        if options.mode == "frames":
            count = min(options.num_frames, info.num_frames)
            return ProbeResult(info.width, info.height, 1, count, notes=tuple(notes))
        clock = Clock(info.num_frames, info.timeline.times_s())
        starts = scene_starts(path, info.timeline) if options.split_scenes else [0]
        windows = find_windows(clock, options, self.frame_step, starts)
        available = num_available(clock, 0, info.num_frames - 1, options)
        if not windows:
            raise UnsuitableMediaError(self._too_short(available, len(starts)))
        notes += self._notes_on_length(available, windows)
        if _is_whole(options):
            return ProbeResult(info.width, info.height, windows[0].num_frames, notes=tuple(notes))
        return ProbeResult(
            info.width, info.height, None, len(windows), notes=tuple(notes), windows=tuple(windows)
        )

    def _notes(self, info: VideoInfo) -> list[str]:
        notes = [
            "frames counted from the index in the header"
            if info.timeline.from_index
            else "frames counted by reading the whole file"
        ]
        if info.hdr is not None:
            name = _HDR_NAMES[info.hdr]
            if self.hdr == "skip":
                raise UnsuitableMediaError(f"is HDR ({name}); leave out --hdr skip to convert it to sRGB")
            notes.append(f"HDR ({name}), tone-mapped to sRGB")
        return notes

    def _notes_on_length(self, available: int, windows: Sequence[Window]) -> list[str]:
        options = self.options
        limit = options.max_frames
        if not options.target_frames and limit is not None and available > limit:
            return [f"more than {limit} frames: a sample has {windows[0].num_frames} of them (--max_frames)"]
        if _is_whole(options) and options.windows == "head" and available > windows[0].num_frames:
            unused = available - windows[0].num_frames
            if unused >= windows[0].num_frames:
                return ["long enough for further windows, which are not used (--windows chunks uses them)"]
        return []

    def _too_short(self, available: int, num_scenes: int) -> str:
        options = self.options
        count = window_length(available, options, self.frame_step)
        rate = f" at {options.target_fps:g} fps" if options.target_fps else ""
        if num_scenes > 1:
            return f"has {num_scenes} scenes, each with fewer than the {count} frames{rate} requested"
        return f"has {counted(available, 'frame')}{rate}, fewer than the {count} requested"

    def load(self, path: Path) -> MediaFile:
        return read_media_file(path, WHOLE_DIGEST_BYTES)

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop | str]:
        timeline = read_timeline(file)
        bucket = samples[0].bucket
        count = bucket.num_frames or 1
        if count * bucket.width * bucket.height * 3 > _MAX_CLIP_BYTES:
            raise MediaError(
                f"gives {count} frames of {bucket.folder}, which do not fit in "
                f"{_MAX_CLIP_BYTES >> 30} GB of memory; set target_frames"
            )
        offsets: list[tuple[int, int]] = []

        def keep(frame: Pixels) -> torch.Tensor:
            window, offset = fit_to_bucket(
                frame, bucket.resolution, self.crop_mode, seed, self.options.resize_mode
            )
            offsets.append(offset)
            return window

        wanted = [self.sample_frames(timeline, sample) for sample in samples]
        frames = read_frames(file, timeline, [number for numbers in wanted for number in numbers], keep)
        if not frames.kept:
            raise MediaError(f"is damaged: {next(iter(frames.damage.values()))}")
        return [self._crop(timeline, frames, numbers, offsets[0]) for numbers in wanted]

    def _crop(
        self,
        timeline: Timeline,
        frames: Frames[torch.Tensor],
        numbers: Sequence[int],
        offset: tuple[int, int],
    ) -> Crop | str:
        """The frames of one sample. A frame that cannot be decoded is replaced by the one before, as players do."""
        damage = next((frames.damage[number] for number in numbers if number in frames.damage), None)
        damage = damage or timeline.loss_between(min(numbers), max(numbers))
        known = [number for number in numbers if number in frames.kept]
        if not known:
            return f"is damaged: {damage}"
        shown = [max((k for k in known if k <= number), default=known[0]) for number in numbers]
        pixels = torch.stack([frames.kept[number] for number in shown], dim=1)
        return Crop(pixels, offset, numbers[0] if self.options.mode == "frames" else None, damage)

    def sample_frames(self, timeline: Timeline, sample: PlannedSample) -> list[int]:
        """The numbers of the frames that make up a sample."""
        num_frames, options = timeline.num_frames, self.options
        if options.mode == "frames":
            return [evenly_spaced(num_frames, sample.num_samples)[sample.number]]
        window = sample.window
        if window is None:
            count = sample.bucket.num_frames or 1
            window = Window(0.0, 0, num_frames - 1, count)
            available = num_available(Clock(num_frames, timeline.times_s()), 0, num_frames - 1, options)
            if available < count and options.short_clips == "skip":
                raise UnsuitableMediaError(
                    f"has {counted(available, 'frame')} that can be listed, fewer than the {count} requested"
                )
        elif window.last_frame >= num_frames:
            raise MediaError("has fewer frames than when it was planned")
        return window_frames(Clock(num_frames, timeline.times_s()), window, options)


def _other_type(prefix: bytes) -> str | None:
    """What a file that is not a video is, by its first bytes; None if unknown."""
    if not prefix:
        return "is empty"
    if image_type := image_type_of(prefix):
        return f"is an image ({image_type}), not a video; encode it with: latentry image"
    other = other_type(prefix)
    return f"is {other}, not a video" if other and "video" not in other else None


def _is_whole(options: VideoOptions) -> bool:
    """Whether each video gives one sample whose frames start with the first of the video."""
    return options.windows in ("head", "uniform") and not options.split_scenes
