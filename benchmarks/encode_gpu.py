"""Encode files to a committed cache on a GPU, compared with one sample at a time, in one run.

    python benchmarks/encode_gpu.py [--only flux1024,flux512,wan,hunyuan] [--output_format pt]

The models have their real sizes and random weights, created on the device, so nothing is downloaded. The images are
12-megapixel JPEGs and the clips 1280x720 h264, both made from the examples. "One at a time" is the usual script: decode,
scale with Lanczos, encode with the model's own diffusers VAE (clips in tiles, as people run it) and its text encoders,
``torch.save``, then the next sample.

Both sides exclude loading the models, which here includes the self check of the fused encoders. Planning, writing,
hashing and committing are included. A first run of a few samples compiles the kernels, which later runs reuse. "busy" is
the utilisation that the driver reports, sampled every tenth of a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import EXAMPLES, write_pictures
from PIL import Image

from latentry.encode.prepare import prepare
from latentry.encode.recipe import Recipe
from latentry.media.video_options import VideoOptions
from latentry.processors import PROCESSORS
from latentry.processors.flux import FluxProcessor
from latentry.processors.hunyuan import HunyuanProcessor
from latentry.processors.wan import WanProcessor
from latentry.testing.pipelines import clip_tokenizer, qwen_tokenizer, t5_tokenizer

WORDS = [
    "a",
    "photo",
    "of",
    "the",
    "old",
    "grey",
    "cat",
    "sitting",
    "on",
    "wooden",
    "table",
    "at",
    "sunset",
    "camera",
    "panning",
    "slowly",
    "over",
    "waves",
]

# ---- models of real size, with random weights -----------------------------------------------


class Loaded:
    """When the latest model was ready, and whether models keep their own modules."""

    at = 0.0
    own_modules = False


def on_device(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


class _Random:
    """Mixed into a processor: gives it random weights, and notes when it is ready."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Loaded.at = time.perf_counter()

    def use_fused_encoders(self) -> None:
        if not Loaded.own_modules:
            super().use_fused_encoders()

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        return "random"


class RandomFlux(_Random, FluxProcessor):
    def _load(self, model_name: str) -> tuple[Any, ...]:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

        vae = on_device(
            lambda: AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512),
                layers_per_block=2,
                latent_channels=16,
                norm_num_groups=32,
                use_quant_conv=False,
                use_post_quant_conv=False,
                shift_factor=0.1159,
                scaling_factor=0.3611,
            )
        )
        clip = on_device(
            lambda: CLIPTextModel(
                CLIPTextConfig(
                    hidden_size=768,
                    intermediate_size=3072,
                    num_hidden_layers=12,
                    num_attention_heads=12,
                    projection_dim=768,
                )
            )
        )
        t5 = on_device(lambda: T5EncoderModel(T5Config(**XXL, vocab_size=32128)))
        return vae, clip, t5, clip_tokenizer(), t5_tokenizer()


class RandomWan(_Random, WanProcessor):
    def _load(self, model_name: str) -> tuple[Any, ...]:
        from diffusers import AutoencoderKLWan
        from transformers import UMT5Config, UMT5EncoderModel

        umt5 = on_device(lambda: UMT5EncoderModel(UMT5Config(**XXL, vocab_size=256384)))
        return on_device(AutoencoderKLWan), umt5, t5_tokenizer()


class RandomHunyuan(_Random, HunyuanProcessor):
    def _load(self, model_name: str) -> tuple[Any, ...]:
        from diffusers import AutoencoderKLHunyuanVideo15
        from transformers import (
            ByT5Tokenizer,
            Qwen2_5_VLTextConfig,
            Qwen2_5_VLTextModel,
            SiglipImageProcessorPil,
            SiglipVisionConfig,
            SiglipVisionModel,
            T5Config,
            T5EncoderModel,
        )

        qwen = Qwen2_5_VLTextConfig(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            rope_scaling={"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        )
        byt5 = T5Config(
            vocab_size=384, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu"
        )  # fmt: skip
        siglip = SiglipVisionConfig(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=378, patch_size=14
        )  # fmt: skip
        return (
            on_device(AutoencoderKLHunyuanVideo15),
            on_device(lambda: Qwen2_5_VLTextModel(qwen)),
            on_device(lambda: T5EncoderModel(byt5)),
            qwen_tokenizer(),
            ByT5Tokenizer(),
            on_device(lambda: SiglipVisionModel(siglip)),
            SiglipImageProcessorPil(size={"height": 378, "width": 378}),
        )


XXL = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
}  # fmt: skip

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


# ---- one at a time --------------------------------------------------------------------------


@torch.inference_mode()
def one_at_a_time(
    family: str, folder: Path, output: Path, size: tuple[int, int], num_frames: int, count: int
) -> float:
    """Seconds per sample of the usual script."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    Loaded.own_modules = True
    processor = FAMILIES[family]("", device, dtype)
    Loaded.own_modules = False
    if num_frames > 1:
        processor._vae.enable_tiling()
    paths = sorted(p for p in folder.iterdir() if p.suffix != ".txt")
    started = 0.0
    for i, path in enumerate([paths[0], *paths[:count]]):
        if i == 1:
            torch.cuda.synchronize()
            started = time.perf_counter()
        pixels = read_simply(path, size, num_frames)
        scaled = torch.from_numpy(pixels).to(device, dtype) / 127.5 - 1
        latents = processor._vae.encode(scaled[None]).latent_dist.mode().half().cpu()
        text = processor.encode_texts([path.with_suffix(".txt").read_text()])
        data = {"latent": latents[0], **{k: v.cpu() for k, v in text.items()}, "image_path": str(path)}
        torch.save(data, output / f"{i}.pt")
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def read_simply(path: Path, size: tuple[int, int], num_frames: int) -> np.ndarray:
    width, height = size
    if num_frames == 1:
        image = Image.open(path).convert("RGB").resize((width * 4 // 3, height), Image.Resampling.LANCZOS)
        left = (image.width - width) // 2
        return np.array(image.crop((left, 0, left + width, height))).transpose(2, 0, 1).copy()
    import av

    with av.open(str(path)) as container:
        frames = [
            np.array(frame.to_image().resize((width, height), Image.Resampling.LANCZOS))
            for _, frame in zip(range(num_frames), container.decode(video=0), strict=False)
        ]
    return np.stack(frames).transpose(3, 0, 1, 2).copy()


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


FAMILIES = {"flux": RandomFlux, "wan": RandomWan, "hunyuan": RandomHunyuan}


def cases(scale: float) -> dict[str, Case]:
    def clip(frames: int) -> VideoOptions:
        return VideoOptions(target_frames=frames)

    return {
        "flux1024": Case("flux", {"max_pixels": 1024**2}, (1024, 1024), 1, int(1600 * scale), 16, 64),
        "flux512": Case("flux", {"max_pixels": 512**2}, (512, 512), 1, int(2400 * scale), 16, 128),
        "wan": Case("wan", {"video": clip(81), "size": (832, 480)}, (832, 480), 81, int(72 * scale), 3, 4),
        "hunyuan": Case(
            "hunyuan", {"video": clip(121), "size": (848, 480)}, (848, 480), 121, int(30 * scale), 2, 4
        ),
    }


def measure(name: str, case: Case, work: Path, output_format: str) -> None:
    sources, cache, plain = work / "sources", work / "cache", work / "plain"
    for folder in (sources, plain):
        folder.mkdir()
    if case.num_frames == 1:
        write_pictures(sources, case.count)
    else:
        write_clips(sources, case.count, case.num_frames + 4)
    write_captions(sources)
    usual_s = one_at_a_time(case.family, sources, plain, case.size, case.num_frames, case.usual_count)
    torch.cuda.empty_cache()
    PROCESSORS[f"random-{case.family}"] = f"{__name__}:{FAMILIES[case.family].__name__}"
    recipe = Recipe(
        processor=f"random-{case.family}", dtype="bfloat16", output_format=output_format, **case.recipe
    )
    where = {"image_dir" if case.num_frames == 1 else "video_dir": sources}

    def run(output: Path, max_files: int | None = None) -> tuple[float, float, float]:
        """When the run started, when planning was done, and when everything was committed."""
        planned: list[float] = []
        started = time.perf_counter()
        result = prepare(
            recipe,
            output_dir=output,
            devices="cuda:0",
            max_files=max_files,
            on_progress=lambda p: planned.append(time.perf_counter()) if p.phase == "plan" else None,
            **where,
        )
        finished = time.perf_counter()
        torch.cuda.empty_cache()
        assert result.num_encoded == (max_files or case.count), result.failures[:3]
        return started, planned[-1], finished

    _, _, finished = run(work / "first", case.first_count)
    first_s = finished - Loaded.at
    torch.cuda.reset_peak_memory_stats()
    with utilisation() as samples:
        started, planned, finished = run(cache)
    ours_s = (planned - started + finished - Loaded.at) / case.count
    busy = [percent for when, percent in samples if Loaded.at < when < finished]
    size_gb = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file()) / 1e9
    print(
        f"| {name}, {output_format} | {case.count} | {1 / ours_s:.1f}/s | {ours_s * 1e3:.0f} ms | "
        f"{sum(busy) / max(1, len(busy)):.0f}% | {usual_s * 1e3:.0f} ms | {usual_s / ours_s:.1f}x | "
        f"first {case.first_count} in {first_s:.1f} s; {size_gb:.1f} GB; peak {torch.cuda.max_memory_allocated() / 1e9:.0f} GB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="flux1024,flux512,wan,hunyuan", help="run only these cases")
    parser.add_argument("--output_format", default="pt", help="format of the cache (default pt)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiply the number of samples by this (default 1)"
    )
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(
        "| what | samples | rate | each | busy | one at a time | ratio | |\n|---|---|---|---|---|---|---|---|"
    )
    for name in options.only.split(","):
        work = Path(tempfile.mkdtemp(dir=options.folder))
        torch.cuda.reset_peak_memory_stats()
        try:
            measure(name, cases(options.scale)[name], work, options.output_format)
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
