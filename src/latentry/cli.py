"""The commands: arguments in, one function called, a table or a line out. No logic of its own."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from latentry.errors import ConfigError, LatentryError

if TYPE_CHECKING:
    from latentry.encode.prepare import Progress

_PRESETS = ("256p", "512p", "768p", "1024p", "1536p")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 1 as every usage error does."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None, prog: str = "latentry") -> int:
    """Run a command; the exit status is 0 for success, 1 for an error, 2 if some inputs failed."""
    parser = _build_parser(prog)
    options = parser.parse_args(arguments)
    if options.list_processors:
        options.run = _list_processors
    elif options.run is None:
        parser.error("name a command: image, video, verify, convert, processors")
    warnings.filterwarnings("ignore", module="PIL")  # what a picture's header has wrong is no news here
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        status: int = options.run(options)
        return status
    except LatentryError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"\n{prog}: stopped; what is committed is kept, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


# ---- arguments ------------------------------------------------------------------------------


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description="Turn images, videos and captions into training-ready latents.")
    parser.set_defaults(run=None)
    _flag(parser, "--list_processors", action="store_true", help="list the processors and stop")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    _add_image(commands.add_parser("image", help="encode a folder of images into a cache"))
    _add_video(commands.add_parser("video", help="encode a folder of clips into a cache"))
    _add_verify(commands.add_parser("verify", help="check a finished cache, file by file"))
    _add_convert(commands.add_parser("convert", help="write a cache anew, packed or in files of their own"))
    processors = commands.add_parser("processors", help="list the processors")
    processors.set_defaults(run=_list_processors)
    return parser


def _flag(parser: Any, name: str, **options: Any) -> None:
    """A flag that may be written with underscores, as documented, or with hyphens."""
    hyphenated = "--" + name[2:].replace("_", "-")
    parser.add_argument(name, *([hyphenated] if hyphenated != name else []), **options)


def _add_image(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_image)
    where = parser.add_argument_group("where")
    _flag(where, "--image_dir", required=True, help="the folder of images, searched recursively")
    _flag(where, "--max_images", type=int, help="take only the first so many, by name")
    recipe = _add_common(parser, where, preset="256p", output_format="pt")
    _flag(recipe, "--crop_mode", default="center", help="center, random or smart")


def _add_video(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_video)
    where = parser.add_argument_group("where")
    _flag(where, "--video_dir", required=True, help="the folder of clips, searched recursively")
    _flag(where, "--max_videos", type=int, help="take only the first so many, by name")
    recipe = _add_common(parser, where, preset="512p", output_format="meta")
    _flag(recipe, "--mode", default="video", help="video (a clip is a sample) or frames (each frame is one)")
    _flag(recipe, "--num_frames", type=int, default=10, help="frames taken from each file with --mode frames")
    _flag(
        recipe, "--target_frames", type=int, help="the length of every clip (default: as long as each allows)"
    )
    _flag(recipe, "--target_fps", type=float, help="take frames by time at this rate, from the beginning")
    _flag(
        recipe,
        "--short_clips",
        default="skip",
        help="shorter than --target_frames: skip, or pad with the last frame",
    )
    _flag(recipe, "--height", type=int, help="a fixed size instead of buckets, with --width")
    _flag(recipe, "--width", type=int, help="a fixed size instead of buckets, with --height")
    _flag(recipe, "--resize_mode", default="bilinear", help="bilinear, bicubic, nearest, area or lanczos")
    crop = recipe.add_mutually_exclusive_group()
    _flag(
        crop,
        "--center_crop",
        action="store_true",
        default=True,
        help="keep the shape, cut the centre (default)",
    )
    _flag(
        crop,
        "--no_center_crop",
        dest="center_crop",
        action="store_false",
        help="scale to the size, whatever the shape",
    )
    _flag(
        recipe,
        "--deterministic",
        dest="stochastic",
        action="store_false",
        help="the posterior's mean (default)",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_verify)
    parser.add_argument("cache_dir", help="the folder of the cache")
    _flag(
        parser,
        "--decode",
        action="store_true",
        help="load the cache's model and compare latents with their sources",
    )
    _flag(parser, "--devices", default="auto", help="where to decode: auto, cpu or cuda:0")
    _flag(parser, "--quiet", action="store_true", help="say nothing but errors")
    _flag(parser, "--json", action="store_true", help="print the result as JSON")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_convert)
    parser.add_argument("cache_dir", help="the folder of the cache, which is left as it is")
    _flag(parser, "--output_dir", required=True, help="the folder of the new one; made if need be")
    _flag(parser, "--output_format", default="packed", help="packed (default), meta, pt or safetensors")
    _flag(parser, "--quiet", action="store_true", help="say nothing but errors")


def _add_common(parser: argparse.ArgumentParser, where: Any, *, preset: str, output_format: str) -> Any:
    _flag(where, "--output_dir", required=True, help="the folder of the cache; made if need be")
    recipe = parser.add_argument_group("recipe (changing one of these needs another folder, or --overwrite)")
    _flag(recipe, "--processor", default="tiny", help="the model family (default: tiny, which is embedded)")
    _flag(recipe, "--model_name", help="a folder in the diffusers layout, or a hub name")
    size = recipe.add_mutually_exclusive_group()
    _flag(size, "--resolution_preset", choices=_PRESETS, help=f"the resolution budget (default: {preset})")
    _flag(size, "--max_pixels", type=int, help="the resolution budget in pixels")
    parser.set_defaults(default_preset=preset)
    _flag(recipe, "--caption_format", default="auto", help="auto, sidecar, txt, jsonl or meta_json")
    _flag(recipe, "--caption_field", help="the captions' key (default: caption in JSON, internvl in JSONL)")
    _flag(recipe, "--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    _flag(
        recipe,
        "--output_format",
        default=output_format,
        help=f"meta, pt, safetensors, or packed for a million samples and more (default: {output_format})",
    )
    _flag(recipe, "--stochastic", action="store_true", help="sample the posterior instead of taking its mean")
    _flag(recipe, "--seed", type=int, default=42, help="for random crops and --stochastic")

    how = parser.add_argument_group("how")
    _flag(
        how, "--devices", default="auto", help="auto (every GPU, else the CPU), cpu, or a list: cuda:0,cuda:1"
    )
    _flag(
        how,
        "--batch_size",
        type=int,
        help="samples encoded together (default: by the GPU's memory; 1 on a CPU and for clips)",
    )
    _flag(how, "--shard_size", type=int, default=10_000, help="samples per metadata shard")
    _flag(how, "--verify", action="store_true", help="decode every latent again and report how close it is")
    _flag(how, "--overwrite", action="store_true", help="replace a cache that another recipe made")
    _flag(how, "--dry_run", action="store_true", help="show the plan and write nothing")
    _flag(how, "--quiet", action="store_true", help="say nothing but errors")
    _flag(how, "--json", action="store_true", help="print the result as JSON")
    return recipe


# ---- commands -------------------------------------------------------------------------------


def _image(options: argparse.Namespace) -> int:
    return _prepare(
        options, {"crop_mode": options.crop_mode}, image_dir=options.image_dir, max_files=options.max_images
    )


def _video(options: argparse.Namespace) -> int:
    from latentry.media.reader import VideoOptions

    if (options.width is None) != (options.height is None):
        raise ConfigError("--height and --width go together; give both, or neither for buckets")
    if options.width is not None and (options.resolution_preset or options.max_pixels):
        raise ConfigError("--height and --width fix the size; leave out --resolution_preset and --max_pixels")
    choices = VideoOptions(
        mode=options.mode,
        num_frames=options.num_frames,
        target_frames=options.target_frames,
        target_fps=options.target_fps,
        short_clips=options.short_clips,
        resize_mode=options.resize_mode,
    )
    more = {
        "crop_mode": "center" if options.center_crop else "none",
        "video": choices,
        "size": None if options.width is None else (options.width, options.height),
    }
    return _prepare(options, more, video_dir=options.video_dir, max_files=options.max_videos)


def _prepare(options: argparse.Namespace, more: dict[str, Any], **where: Any) -> int:
    from rich.console import Console

    from latentry.buckets import MultiTierBucketCalculator
    from latentry.encode.prepare import prepare
    from latentry.encode.recipe import Recipe
    from latentry.engines.local import find_devices

    preset = MultiTierBucketCalculator.RESOLUTION_PRESETS[options.resolution_preset or options.default_preset]
    recipe = Recipe(
        processor=options.processor,
        model_name=options.model_name,
        max_pixels=preset if options.max_pixels is None else options.max_pixels,
        caption_format=options.caption_format,
        caption_field=options.caption_field,
        dtype=options.dtype,
        output_format=options.output_format,
        stochastic=options.stochastic,
        seed=options.seed,
        **more,
    )
    if not options.quiet and find_devices(options.devices) == ["cpu"]:
        print("no GPU in use: encoding on the CPU", file=sys.stderr)
    with _progress(quiet=options.quiet or options.dry_run) as on_progress:
        result = prepare(
            recipe,
            output_dir=options.output_dir,
            devices=options.devices,
            batch_size=options.batch_size,
            shard_size=options.shard_size,
            verify=options.verify,
            overwrite=options.overwrite,
            dry_run=options.dry_run,
            on_progress=on_progress,
            **where,
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        Console().print(result)
        for failure in result.failures if options.dry_run else ():
            print(f"{failure.name} {failure.reason}")
    return result.exit_status


def _verify(options: argparse.Namespace) -> int:
    from latentry.encode.prepare import Progress
    from latentry.encode.verify import verify_cache

    with _progress(quiet=options.quiet) as on_progress:
        result = verify_cache(
            options.cache_dir,
            decode=options.decode,
            device=options.devices,
            on_progress=lambda done, total: on_progress(Progress("verify", done, total)),
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        print(result)
    return result.exit_status


def _convert(options: argparse.Namespace) -> int:
    from latentry.cache.convert import convert_cache
    from latentry.encode.prepare import Progress

    with _progress(quiet=options.quiet) as on_progress:
        result = convert_cache(
            options.cache_dir,
            options.output_dir,
            options.output_format,
            on_progress=lambda done, total: on_progress(Progress("convert", done, total)),
        )
    if not options.quiet:
        print(result)
    return 0


def _list_processors(options: argparse.Namespace) -> int:
    from latentry.processors import PROCESSORS, processor_class

    rows = [("name", "media", "space", "time", "frames", "quantum", "default model name", "model")]
    for info in (processor_class(name).info for name in PROCESSORS):
        factors = (f"{info.spatial_factor}x", f"{info.temporal_factor}x")
        rows.append(
            (
                info.name,
                "/".join(info.media),
                *factors,
                info.frame_rule,
                str(info.quantum),
                info.default_model_name,
                info.model,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


# ---- progress -------------------------------------------------------------------------------


def _progress(quiet: bool) -> AbstractContextManager[Any]:
    if quiet:
        return nullcontext(lambda _: None)
    return _LiveProgress() if sys.stderr.isatty() else nullcontext(_PlainProgress())


class _PlainProgress:
    """A line now and then, for logs."""

    _EVERY_S = 10.0

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.done < progress.total and now - self._said < self._EVERY_S:
            return
        if progress.phase == "plan" and progress.done < progress.total:
            return
        self._said = now
        rate = progress.done / max(now - self._started, 1e-9)
        print(
            f"{progress.phase}: {progress.done}/{progress.total}, {progress.failures} failed, {rate:.1f}/s",
            file=sys.stderr,
            flush=True,
        )


class _LiveProgress:
    """Bars with rate, time left and failures, one line more for each device where there are several."""

    def __enter__(self) -> _LiveProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, Any] = {}
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        self._update(progress.phase, progress.done, progress.total, progress.failures)
        if len(progress.by_device) > 1:
            for device, count in progress.by_device.items():
                self._update(device, count, progress.total, 0)

    def _update(self, name: str, done: int, total: int, failures: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = (self._bars.add_task(name, total=total, note=""), time.monotonic())
        task, started = self._tasks[name]
        note = f"{done / max(time.monotonic() - started, 1e-9):.1f}/s" + (
            f", {failures} failed" if failures else ""
        )
        self._bars.update(task, completed=done, note=note)
