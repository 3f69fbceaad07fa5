"""The model, and how its results are stored."""

from __future__ import annotations

import argparse
from typing import Any

from latentry.cli.flags import add_flag, whole_number

PROCESSORS_OF = {"image": ("tiny", "flux"), "video": ("tiny", "wan", "wan2.2", "hunyuan")}
"""The processors of each kind of media, for help texts and shell completion."""


def add_encoding_flags(parser: argparse.ArgumentParser, media: str, *, output_format: str) -> None:
    """Add the flags about model and storage.

    Args:
        parser: The parser of ``latentry image`` or ``latentry video``.
        media: ``image`` or ``video``.
        output_format: The default of ``--output_format``.
    """
    names = PROCESSORS_OF[media]
    group = parser.add_argument_group(
        "recipe", "A cache has one recipe: to change it, use another --output_dir or --overwrite."
    )
    add_flag(
        group,
        "--processor",
        metavar="NAME",
        default="tiny",
        help=f"encode with the model family {', '.join(names[:-1])} or {names[-1]} (default: tiny, an embedded model "
        "for trying things out)",
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
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="compute in float32, float16 or bfloat16 (default: auto, bfloat16 on GPUs and float32 on the CPU)",
    )
    add_flag(
        group,
        "--text_dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="store the weights of text encoders in 8 bits with fp8, which takes half the memory and changes the "
        "embeddings (default: auto, as --dtype)",
    )
    add_flag(
        group,
        "--output_format",
        choices=("meta", "pt", "safetensors", "packed"),
        default=output_format,
        help="write meta, pt or safetensors files, or packed shards for a million samples and more "
        f"(default: {output_format})",
    )
    posterior = group.add_mutually_exclusive_group()
    add_flag(
        posterior,
        "--stochastic",
        action="store_true",
        help="sample the VAE's posterior instead of storing its mean",
    )
    if media == "video":  # NeMo AutoModel's command for videos has this flag
        add_flag(
            posterior,
            "--deterministic",
            dest="stochastic",
            action="store_false",
            help="store the mean of the VAE's posterior (default)",
        )
    add_flag(
        group,
        "--seed",
        metavar="N",
        type=whole_number(0),
        default=42,
        help="seed random crops and --stochastic (default: 42)",
    )


def encoding_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a ``Recipe`` that these flags give."""
    names = ("processor", "model_name", "dtype", "text_dtype", "output_format", "stochastic", "seed")
    return {name: getattr(options, name) for name in names}
