"""Encode files to a committed cache on a GPU, compared with one sample at a time, in one run.

    python benchmarks/encode_gpu.py [--only flux1024,flux512,wan,hunyuan] [--output_format pt]
    python benchmarks/encode_gpu.py --device_memory 24GB,16GB,12GB,8GB [--only wan]

The models have their real sizes and random weights, so nothing is downloaded. They start in main memory, like those of a
checkpoint. The images are 12-megapixel JPEGs and the clips 1280x720 h264, both made from the examples. "One at a time" is
the usual script: decode, scale with Lanczos, encode with the model's own diffusers VAE (clips in tiles, as people run it)
and its text encoders, ``torch.save``, then the next sample.

Both sides exclude loading the models, which here includes the self check of the fused encoders. Planning, writing,
hashing and committing are included. "Second half" is the rate after half of the samples were reported, without the start
of the run. A first run of a few samples compiles the kernels, which later runs reuse. "busy" is the utilisation that the
driver reports, sampled every tenth of a second.

With ``--device_memory``, each case runs once for each budget, without the usual script. torch's allocator is limited to
the budget as well, so a run that needs more fails.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import EXAMPLES, write_pictures
from usual_script import one_at_a_time

from latentry.encode.prepare import Progress, prepare
from latentry.encode.recipe import Recipe
from latentry.errors import LatentryError
from latentry.hardware import memory_limit
from latentry.media.video_options import VideoOptions
from latentry.processors import PROCESSORS
from latentry.testing.full_size import RandomFlux, RandomHunyuan, RandomWan, forget_weights

DEVICE = "cuda:0"
WORDS = [
    "a", "photo", "of", "the", "old", "grey", "cat", "sitting", "on", "wooden", "table", "at", "sunset", "camera",
    "panning", "slowly", "over", "waves",
]  # fmt: skip

# ---- the processors -------------------------------------------------------------------------


class Loaded:
    """The latest processor, when it was ready, and whether processors keep the model's own modules."""

    at = 0.0
    processor: Any = staticmethod(lambda: None)
    own_modules = False


class Noted:
    """Mixed into a processor: notes when it is ready."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Loaded.at, Loaded.processor = time.perf_counter(), weakref.ref(self)

    def use_fused_encoders(self) -> None:
        if not Loaded.own_modules:
            super().use_fused_encoders()


class NotedFlux(Noted, RandomFlux): ...


class NotedWan(Noted, RandomWan): ...


class NotedHunyuan(Noted, RandomHunyuan): ...


FAMILIES = {"flux": NotedFlux, "wan": NotedWan, "hunyuan": NotedHunyuan}

# ---- images and clips -----------------------------------------------------------------------


def write_clips(folder: Path, count: int, num_frames: int) -> None:
    import av

    with av.open(str(EXAMPLES / "clips" / "bunny.mp4")) as container:
        frames = [frame.to_image().resize((1280, 720)) for frame in container.decode(video=0)]
    path = folder / "clip.tmp.mp4"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=24, options={"crf": "20", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for i in range(num_frames):
            output.mux(stream.encode(av.VideoFrame.from_image(frames[i % len(frames)])))
        output.mux(stream.encode())
    for i in range(count):
        os.link(path, folder / f"{i:05d}.mp4")
    path.unlink()


def write_captions(folder: Path) -> None:
    for number, path in enumerate(sorted(folder.iterdir())):
        rng = np.random.default_rng(number)
        caption = " ".join(rng.choice(WORDS, size=rng.integers(8, 60)))
        path.with_suffix(".txt").write_text(f"{caption}, number {number}")


# ---- this library ---------------------------------------------------------------------------


@contextmanager
def utilisation() -> Iterator[list[tuple[float, int]]]:
    """Samples of the device's utilisation, as (time, percent)."""
    samples: list[tuple[float, int]] = []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        samples.extend((time.perf_counter(), int(line)) for line in process.stdout or ())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield samples
    finally:
        process.terminate()
        thread.join()


@dataclass
class Case:
    family: str
    recipe: dict[str, Any]
    size: tuple[int, int]
    num_frames: int
    count: int
    usual_count: int
    first_count: int
    """The number of samples in the first run, which compiles the kernels."""


def cases(scale: float) -> dict[str, Case]:
    def clip(frames: int) -> VideoOptions:
        return VideoOptions(target_frames=frames)

    def scaled(count: int) -> int:
        return max(1, int(count * scale))

    return {
        "flux1024": Case("flux", {"max_pixels": 1024**2}, (1024, 1024), 1, scaled(1600), 16, 64),
        "flux512": Case("flux", {"max_pixels": 512**2}, (512, 512), 1, scaled(2400), 16, 128),
        "wan": Case("wan", {"video": clip(81), "size": (832, 480)}, (832, 480), 81, scaled(72), 3, 4),
        "hunyuan": Case(
            "hunyuan", {"video": clip(121), "size": (848, 480)}, (848, 480), 121, scaled(30), 2, 4
        ),
    }


@dataclass
class Run:
    """The times of a run, in seconds of the performance counter."""

    started: float
    planned: float
    loaded: float
    finished: float
    reports: list[tuple[float, int]]
    """When samples were reported, and how many there were by then."""
    memory_plan: Any
    """How the processor used the device's memory, if it says so."""

    @property
    def num_samples(self) -> int:
        return self.reports[-1][1]

    @property
    def each_s(self) -> float:
        return (self.planned - self.started + self.finished - self.loaded) / self.num_samples

    @property
    def second_half_rate(self) -> float:
        """Samples per second after half of them were reported."""
        half = next(i for i, (_, done) in enumerate(self.reports) if 2 * done >= self.num_samples)
        # The samples of a batch are reported one after the other, within milliseconds.
        while half + 1 < len(self.reports) and self.reports[half + 1][0] - self.reports[half][0] < 0.01:
            half += 1
        when, done = self.reports[half]
        return (self.num_samples - done) / (self.finished - when)


def run(
    recipe: Recipe, where: dict[str, Path], output: Path, count: int, device_memory: int | None = None
) -> Run:
    """Encode the first samples, within a budget of device memory if there is one."""
    planned: list[float] = []
    reports: list[tuple[float, int]] = []
    plans: list[Any] = []

    def note(progress: Progress) -> None:
        now = time.perf_counter()
        if progress.phase == "plan":
            planned.append(now)
        else:
            reports.append((now, progress.done))
            # Asked again and again: a plan that needs too much memory is replaced by a smaller one.
            plans[:] = [getattr(Loaded.processor(), "memory_plan", None)]

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = {} if device_memory is None else {"device_memory": device_memory}
    with memory_limit(DEVICE, device_memory or math.inf):
        started = time.perf_counter()
        result = prepare(
            recipe, output_dir=output, devices=DEVICE, max_files=count, on_progress=note, **where, **budget
        )
        finished = time.perf_counter()
    assert result.num_encoded == count, result.failures[:3]
    return Run(started, planned[-1], Loaded.at, finished, reports, plans[0])


def measured(
    case: Case, work: Path, recipe: Recipe, where: dict[str, Path], device_memory: int | None
) -> tuple[Run, list[str]]:
    """A run after a shorter first one, and what to print about it."""
    first_count = min(case.first_count, case.count)
    try:
        first = run(recipe, where, work / "first", first_count, device_memory)
        with utilisation() as samples:
            ours = run(recipe, where, work / "cache", case.count, device_memory)
        size_gb = sum(p.stat().st_size for p in (work / "cache").rglob("*") if p.is_file()) / 1e9
    finally:
        for folder in (work / "first", work / "cache"):
            shutil.rmtree(folder, ignore_errors=True)
    percents = [percent for when, percent in samples if ours.loaded < when < ours.finished]
    return ours, [
        f"{case.count}",
        f"{1 / ours.each_s:.2f}/s",
        f"{ours.second_half_rate:.2f}/s",
        f"{ours.each_s * 1e3:.0f} ms",
        f"{sum(percents) / max(1, len(percents)):.0f}%",
        f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB",
        f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB",
        f"first {first_count} in {first.finished - first.loaded:.1f} s; {size_gb:.1f} GB written",
    ]


def measure(name: str, case: Case, work: Path, output_format: str, budgets: list[int]) -> None:
    """Print a row, or one for each budget."""
    sources, plain = work / "sources", work / "plain"
    for folder in (sources, plain):
        folder.mkdir()
    if case.num_frames == 1:
        write_pictures(sources, case.count)
    else:
        write_clips(sources, case.count, case.num_frames + 4)
    write_captions(sources)
    PROCESSORS[f"random-{case.family}"] = f"{__name__}:{FAMILIES[case.family].__name__}"
    recipe = Recipe(
        processor=f"random-{case.family}", dtype="bfloat16", output_format=output_format, **case.recipe
    )
    where = {"image_dir" if case.num_frames == 1 else "video_dir": sources}
    label = f"{name}, {output_format}"
    for budget in budgets:
        try:
            ours, columns = measured(case, work, recipe, where, budget)
            columns.append(str(ours.memory_plan or ""))
        except (LatentryError, torch.OutOfMemoryError) as error:
            columns = [f"{type(error).__name__}: {error}".partition("\n")[0]]
        print_row([f"{budget / 1e9:g} GB", label, *columns])
    if not budgets:
        Loaded.own_modules = True
        processor = FAMILIES[case.family]("", torch.device(DEVICE), torch.bfloat16)
        Loaded.own_modules = False
        usual_s = one_at_a_time(processor, sources, plain, case.size, case.num_frames, case.usual_count)
        del processor
        ours, columns = measured(case, work, recipe, where, None)
        print_row([label, *columns, f"{usual_s * 1e3:.0f} ms", f"{usual_s / ours.each_s:.1f}x"])


def print_row(columns: list[str]) -> None:
    print(f"| {' | '.join(columns)} |", flush=True)


def list_of_bytes(text: str) -> list[int]:
    """``"24GB,16GB"`` as numbers of bytes."""
    return [int(float(part.removesuffix("GB")) * 1e9) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="flux1024,flux512,wan,hunyuan", help="run only these cases")
    parser.add_argument("--output_format", default="pt", help="format of the cache (default pt)")
    parser.add_argument(
        "--device_memory",
        type=list_of_bytes,
        default=[],
        help="run each case with each of these budgets, for example 24GB,8GB (default: one run without a budget)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        help="multiply the number of samples by this (default 1, or 0.5 with --device_memory)",
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    budgets = options.device_memory
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    header = ["what", "samples", "rate", "second half", "each", "busy", "allocated", "reserved", "first run"]
    header = ["memory", *header, "plan"] if budgets else [*header, "one at a time", "ratio"]
    print_row(header)
    print_row(["---"] * len(header))
    family = ""
    for name in options.only.split(","):
        case = cases(options.scale or (0.5 if budgets else 1.0))[name]
        if case.family != family:
            forget_weights()
        family = case.family
        work = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            measure(name, case, work, options.output_format, budgets)
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
