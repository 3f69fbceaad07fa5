"""The model, and how its results are stored."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag


def add_encoding_flags(parser: argparse.ArgumentParser, *, output_format: str) -> Any:
    """Add the flags about model and storage, and return their group.

    Args:
        parser: The parser of ``latentry image`` or ``latentry video``.
        output_format: The default of ``--output_format``.
    """
    group = parser.add_argument_group(
        "recipe", "A cache has one recipe: to change it, use another --output_dir or --overwrite."
    )
    add_flag(
        group,
        "--processor",
        metavar="NAME",
        default="tiny",
        help="encode with this model family; `latentry processors` lists them (default: tiny, which is built in)",
    )
    add_flag(
        group,
        "--model_name",
        metavar="MODEL",
        help="load this folder in the diffusers layout, or this hub name (default: the processor's own)",
    )
    add_flag(
        group,
        "--dtype",
        metavar="DTYPE",
        default="auto",
        help="compute in float32, float16 or bfloat16 (default: auto, bfloat16 on GPUs and float32 on the CPU)",
    )
    add_flag(
        group,
        "--output_format",
        metavar="FORMAT",
        default=output_format,
        help="write meta, pt or safetensors files, or packed shards for a million samples and more "
        f"(default: {output_format})",
    )
    add_flag(
        group,
        "--stochastic",
        action="store_true",
        help="sample the VAE's posterior instead of storing its mean",
    )
    add_flag(
        group,
        "--seed",
        metavar="N",
        type=int,
        default=42,
        help="seed random crops and --stochastic (default: 42)",
    )
    return group


def add_deterministic_flag(group: Any) -> None:
    """Add the opposite of ``--stochastic``, which NeMo AutoModel's command for videos has."""
    add_flag(
        group,
        "--deterministic",
        dest="stochastic",
        action="store_false",
        help="store the mean of the VAE's posterior (default)",
    )


def encoding_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    names = ("processor", "model_name", "dtype", "output_format", "stochastic", "seed")
    return {name: getattr(options, name) for name in names}
