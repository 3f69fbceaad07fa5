"""Videos as samples: each file is one clip, or one sample per extracted frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from latentry.errors import MediaError
from latentry.media.content import MediaFile, read_media_file
from latentry.media.images import Pixels, fit_to_bucket
from latentry.media.reader import Crop, ProbeResult
from latentry.media.video_options import VideoOptions
from latentry.media.videos import Timeline, probe_video, read_frames, read_timeline
from latentry.storage import WHOLE_DIGEST_BYTES
from latentry.types import PlannedSample

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})
_MAX_CLIP_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Reads videos. Each is one sample, or one sample per extracted frame."""

    options: VideoOptions
    crop_mode: str
    frame_step: int
    """Without ``target_frames``, a sample has a multiple of this many frames, plus one."""
    suffixes: frozenset[str] = VIDEO_SUFFIXES

    def probe(self, path: Path) -> ProbeResult:
        info = probe_video(path)
        options = self.options
        if options.mode == "frames":
            return ProbeResult(info.width, info.height, 1, min(options.num_frames, info.num_frames))
        available = info.num_frames
        if options.target_fps is not None:
            if info.last_frame_s is None:
                raise MediaError("has no usable time stamps, which target_fps needs; leave out target_fps")
            available = int(info.last_frame_s * options.target_fps + 1e-6) + 1
        count = options.target_frames or (available - 1) // self.frame_step * self.frame_step + 1
        if available < count and options.short_clips == "skip":
            rate = f" at {options.target_fps:g} fps" if options.target_fps else ""
            raise MediaError(f"has {available} frames{rate}, fewer than the {count} requested")
        return ProbeResult(info.width, info.height, count)

    def load(self, path: Path) -> MediaFile:
        return read_media_file(path, WHOLE_DIGEST_BYTES)

    def read(self, file: MediaFile, samples: Sequence[PlannedSample], seed: int) -> list[Crop]:
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

        if self.options.mode == "frames":
            numbers = evenly_spaced(timeline.num_frames, samples[0].num_samples)
            wanted = [numbers[sample.number] for sample in samples]
            windows = read_frames(file, timeline, wanted, keep)
            return [Crop(w[:, None], offsets[0], number) for w, number in zip(windows, wanted, strict=True)]
        windows = read_frames(file, timeline, self.clip_frames(timeline, count), keep)
        return [Crop(torch.stack(windows, dim=1), offsets[0])]

    def clip_frames(self, timeline: Timeline, count: int) -> list[int]:
        """The numbers of the ``count`` frames that make up a sample."""
        last = timeline.num_frames - 1
        if self.options.target_fps is None:
            if last + 1 < count:
                if self.options.short_clips == "skip":
                    raise MediaError(
                        f"has {last + 1} frames that can be listed, fewer than the {count} requested"
                    )
                return [min(i, last) for i in range(count)]
            return evenly_spaced(last + 1, count)
        stamps = np.array(timeline.stamps, dtype=np.float64)
        times_s = (stamps - stamps[0]) * timeline.seconds_per_unit
        wanted_s = np.arange(count) / self.options.target_fps
        shown = np.searchsorted(times_s, wanted_s + 1e-6, side="right") - 1
        return [int(number) for number in shown.clip(0, last)]


def evenly_spaced(num_frames: int, count: int) -> list[int]:
    """``count`` frame numbers from the first to the last of ``num_frames``, as evenly as integers allow."""
    return [int(number) for number in np.linspace(0, num_frames - 1, count).astype(np.int64)]
