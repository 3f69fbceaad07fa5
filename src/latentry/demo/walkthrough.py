"""The steps of ``latentry demo``: the commands that a user would type, and a training loop over their cache."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from latentry.demo.contact_sheet import draw_contact_sheet
from latentry.serve.config import build_text_to_image_multiresolution_dataloader

PICTURES = Path(__file__).parent / "pictures"
CLIPS = Path(__file__).parent / "clips"

_STEPS = [
    (
        "Encode twelve images into a cache of latents",
        "image --image_dir {PICTURES} --output_dir {cache} --processor tiny --resolution_preset 512p --verify",
    ),
    (
        "Encode nine frames, spread over a clip",
        "video --video_dir {CLIPS} --output_dir {clips} --processor tiny --resolution_preset 256p "
        "--target_frames 9 --windows uniform --verify",
    ),
    ("Check the clip's cache, and decode its latents", "verify {clips} --decode"),
    ("Pack the images into shards", "convert {cache} --output_dir {packed}"),
    ("Check the shards", "verify {packed} --decode"),
]


def run_demo(output_dir: Path, run_command: Callable[[Sequence[str]], int]) -> int:
    """Encode the example images and the clip, train for an epoch, verify, convert, and draw what came out.

    A second run in the same folder keeps what is finished and repeats the rest.

    Args:
        output_dir: The folder for the caches and the contact sheet, created if missing.
        run_command: Runs a ``latentry`` command, given as its arguments, and returns its exit status.

    Returns:
        0, or the exit status of the command that failed.
    """
    cache, clips, packed = output_dir / "cache", output_dir / "clips", output_dir / "packed"
    paths = {"PICTURES": PICTURES, "CLIPS": CLIPS, "cache": cache, "clips": clips, "packed": packed}
    for title, command in _STEPS:
        arguments = [part.format(**paths) for part in command.split()]
        if arguments[0] == "convert" and (packed / "metadata.json").exists():
            continue  # done by an earlier run: convert does not replace a finished cache
        print(f"\n# {title}\n$ {shlex.join(['latentry', *arguments])}", flush=True)
        if status := run_command(arguments):
            return status
    print("\n# Train for an epoch: what a trainer receives from the cache")
    _train(cache)
    sheet = output_dir / "contact_sheet.png"
    num_pairs = draw_contact_sheet(sheet, cache, clips)
    print(f"\n{_CLOSING.format(cache=cache, clips=clips, packed=packed, sheet=sheet, num_pairs=num_pairs)}")
    return 0


def _train(cache: Path) -> None:
    loader, sampler = build_text_to_image_multiresolution_dataloader(
        cache_dir=str(cache), batch_size=2, drop_last=False, num_workers=0
    )
    for step, batch in enumerate(loader):
        latents, text, prompts = (
            batch["image_latents"],
            batch["text_embeddings"],
            batch["metadata"]["prompts"],
        )
        print(f"step {step}: latents {list(latents.shape)}, text {list(text.shape)}: {prompts}")
    print(
        f"epoch {sampler.epoch}: received {loader.state_dict()['batches_yielded']} of {len(loader)} batches"
    )


_CLOSING = """\
Results:
  {sheet}  {num_pairs} pairs: the original on the left, its decoded latent on the right
  {cache}  the images, one file per sample
  {packed}  the same images in shards
  {clips}  the clip

Next, encode your own folder:
  latentry image --image_dir PHOTOS --output_dir CACHE --verify
  latentry image --image_dir PHOTOS --output_dir CACHE --processor flux   (pip install 'latentry[models]')
`tiny` is for trying out and for tests. `latentry processors` lists the models for real training."""
