"""How a run works and what it prints."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that do not change what a cache contains."""
    run = parser.add_argument_group("run")
    add_flag(
        run,
        "--devices",
        metavar="DEVICES",
        default="auto",
        help="use cpu, mps, or GPUs such as cuda:0,cuda:1 or xpu:0 (default: auto, every GPU or else the CPU)",
    )
    add_flag(
        run,
        "--batch_size",
        metavar="N",
        type=whole_number(1),
        help="encode N samples together (default: as many as fit on the GPU; 1 on a CPU and for clips)",
    )
    add_flag(
        run,
        "--device_memory",
        metavar="SIZE",
        help="use at most SIZE, such as 12GB, of each GPU's memory (default: what is free when the run starts)",
    )
    add_flag(
        run,
        "--shard_size",
        metavar="N",
        type=whole_number(1),
        default=10_000,
        help="write N rows per metadata shard, except with --output_format packed (default: 10000)",
    )
    add_flag(
        run,
        "--verify",
        action="store_true",
        help="decode what this run encodes and report its PSNR; encode damaged samples again",
    )
    add_flag(
        run,
        "--damaged",
        choices=("skip", "keep", "error"),
        default="skip",
        help="report damaged inputs as failures (skip), encode them all the same (keep) or stop the run (error) "
        "(default: skip)",
    )
    add_flag(
        run,
        "--max_failures",
        metavar="N",
        type=whole_number(0),
        default=100,
        help="stop the run when N inputs in a row fail on a device; 0 removes the limit (default: 100)",
    )
    add_flag(run, "--overwrite", action="store_true", help="replace a cache that another recipe made")
    add_flag(
        run, "--dry_run", action="store_true", help="show the plan and write nothing; needs no model weights"
    )
    add_output_flags(run)


def add_output_flags(parser: Any) -> None:
    """Add the flags about what a command prints."""
    add_flag(parser, "--quiet", action="store_true", help="print errors only")
    add_flag(parser, "--json", action="store_true", help="print the result as JSON")


def run_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``prepare()`` that these flags give."""
    names = (
        "devices", "batch_size", "device_memory", "shard_size", "verify", "damaged", "max_failures", "overwrite",
        "dry_run",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names}
