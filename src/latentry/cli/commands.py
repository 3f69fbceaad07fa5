"""One function per command: parsed arguments in, exit status out. The work is done elsewhere.

Each function imports what it needs when it is called. ``convert``, ``processors`` and ``verify`` without
``--decode`` need the core packages only; the others ask for ``latentry[encode]`` first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from latentry.cli.arguments import parse_arguments
from latentry.cli.flag_names import in_flags
from latentry.cli.flags.captions import caption_fields
from latentry.cli.flags.clips import clip_fields
from latentry.cli.flags.encoding import PROCESSORS_OF, encoding_fields
from latentry.cli.flags.inputs import input_arguments
from latentry.cli.flags.run import run_arguments
from latentry.cli.flags.sizes import size_fields
from latentry.errors import ConfigError, RunError
from latentry.extras import require_extra
from latentry.report.progress import progress_display
from latentry.types import ProcessorInfo


def run_command(arguments: Sequence[str] | None, prog: str = "latentry", *, whole_clips: bool = False) -> int:
    """Parse the arguments and run the command they name."""
    options = parse_arguments(arguments, prog)
    options.whole_clips = whole_clips
    options.typed = sys.argv[1:] if arguments is None else arguments
    try:
        return _COMMANDS[options.command](options)
    except (ConfigError, RunError) as error:
        raise type(error)(in_flags(str(error), vars(options).keys(), options.typed)) from None


def _image(options: argparse.Namespace) -> int:
    require_extra("encode")
    return _prepare(options, {"crop_mode": options.crop_mode}, "image")


def _video(options: argparse.Namespace) -> int:
    require_extra("encode")
    return _prepare(options, clip_fields(options), "video")


def _prepare(options: argparse.Namespace, media_fields: Mapping[str, Any], media: str) -> int:
    from rich.console import Console

    from latentry.encode.prepare import prepare
    from latentry.encode.recipe import Recipe
    from latentry.hardware import find_devices
    from latentry.processors import processor_class

    processor_class(options.processor, media)
    recipe = Recipe(
        **encoding_fields(options), **size_fields(options), **caption_fields(options), **media_fields
    )
    if not options.quiet:
        if "processor" not in options.given:
            *others, last = PROCESSORS_OF[media][1:]
            choice = f"{', '.join(others)} or {last}" if others else last
            print(
                f"encoding with tiny, the embedded model for trying things out; to train, choose --processor {choice}",
                file=sys.stderr,
            )
        if not options.dry_run and find_devices(options.devices) == ["cpu"]:
            print("no GPU in use: encoding on the CPU", file=sys.stderr)
    with progress_display(quiet=options.quiet or options.dry_run) as show:
        result = prepare(
            recipe,
            **input_arguments(options, media),
            **run_arguments(options),
            on_progress=lambda now: show(now.phase, now.done, now.total, now.failures, now.by_device),
        )
    result = replace(
        result,
        left_out=tuple(
            replace(failure, reason=in_flags(failure.reason, vars(options).keys(), options.typed))
            for failure in result.left_out
        ),
    )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        Console().print(result)
        for failure in result.failures if options.dry_run else ():
            print(f"{failure.name} {failure.reason}")
    return result.exit_status


def _verify(options: argparse.Namespace) -> int:
    if options.decode:
        require_extra("encode")
    from latentry.encode.verify import verify_cache

    with progress_display(quiet=options.quiet) as show:
        result = verify_cache(
            options.cache_dir,
            decode=options.decode,
            device=options.devices,
            on_progress=lambda done, total: show("verify", done, total),
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        print(result)
    return result.exit_status


def _convert(options: argparse.Namespace) -> int:
    from latentry.cache.convert import convert_cache

    with progress_display(quiet=options.quiet) as show:
        result = convert_cache(
            options.cache_dir,
            options.output_dir,
            options.output_format,
            on_progress=lambda done, total: show("convert", done, total),
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    elif not options.quiet:
        print(result)
    return 0


def _completion(options: argparse.Namespace) -> int:
    from latentry.cli.completion import completion_script

    print(completion_script(options.shell))
    return 0


def _demo(options: argparse.Namespace) -> int:
    require_extra("encode")
    from latentry.demo.walkthrough import run_demo

    return run_demo(Path(options.output_dir), run_command)


def _processors(options: argparse.Namespace) -> int:
    from latentry.processors import ALIASES, PROCESSORS, processor_class

    aliases = {name: [alias for alias, of in ALIASES.items() if of == name] for name in PROCESSORS}
    header = ("name", "aliases", "media", "space", "time", "frames", "quantum", "default model name", "model")
    rows = [header, *(_row(processor_class(name).info, aliases[name]) for name in PROCESSORS)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(info: ProcessorInfo, aliases: Sequence[str]) -> tuple[str, ...]:
    return (
        info.name,
        ", ".join(aliases) or "-",
        "/".join(info.media),
        f"{info.spatial_factor}x",
        f"{info.temporal_factor}x",
        info.frame_rule,
        str(info.quantum),
        info.default_model_name,
        info.model,
    )


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "image": _image,
    "video": _video,
    "verify": _verify,
    "convert": _convert,
    "processors": _processors,
    "completion": _completion,
    "demo": _demo,
}
