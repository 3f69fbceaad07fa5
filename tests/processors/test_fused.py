"""The encoders arranged for a GPU against the models' own, on a CPU in float32: what differs is rounding.

Tolerance: 1e-5 of the largest value. (On an H200 in bfloat16 they are closer to the models in float32 than the
models' own modules in bfloat16 are; ``docs/benchmarks.md`` has the numbers.) The kernels themselves are held
against the torch code beside them wherever Triton is installed, which includes every machine with a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from latentry.processors import processor_class
from latentry.processors.fused import causal, cuda_graphs
from latentry.processors.fused.clip import ClipEncoder, states_of
from latentry.processors.fused.hunyuan_vae import HunyuanEncoder
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.t5 import T5Encoder
from latentry.processors.fused.wan_vae import WanEncoder

TOLERANCE = 1e-5
CPU = torch.device("cpu")
CAPTIONS = ["a cat", 'a video of waves crashing on the beach at sunset, "camera" panning slowly', ""]


def assert_close(mine: torch.Tensor, reference: torch.Tensor) -> None:
    assert mine.shape == reference.shape
    assert mine.dtype == reference.dtype
    difference = (mine.float() - reference.float()).abs().max().item()
    assert difference <= TOLERANCE * max(1.0, reference.abs().max().item()), difference


def livelier(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms that are not zero and one, so that leaving one out is seen."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval().requires_grad_(False)


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 - 1


@torch.inference_mode()
def test_image_vae(flux_folder):
    from diffusers import AutoencoderKL

    vae = livelier(AutoencoderKL.from_pretrained(flux_folder, subfolder="vae"))
    assert ImageEncoder.supports(vae)
    for pixels in (noise(3, 3, 64, 96), noise(1, 3, 128, 64)):
        assert_close(ImageEncoder(vae)(pixels), vae.encode(pixels).latent_dist.parameters)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_text_encoders(family, flux_folder, wan_folder):
    from transformers import T5EncoderModel, UMT5EncoderModel

    if family == "t5":
        model = T5EncoderModel.from_pretrained(flux_folder, subfolder="text_encoder_2")
    else:
        model = UMT5EncoderModel.from_pretrained(wan_folder, subfolder="text_encoder")
        model.encoder.embed_tokens.weight = model.shared.weight
    model.eval()
    tokens = torch.randint(0, 30, (4, 40), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(40)[None] < torch.tensor([5, 40, 17, 1])[:, None]).long()
    assert T5Encoder.supports(model)
    encoder = T5Encoder(model)
    assert_close(encoder(tokens), model(tokens).last_hidden_state)
    shown = mask[:, :, None]
    assert_close(encoder(tokens, mask) * shown, model(tokens, mask).last_hidden_state * shown)


@torch.inference_mode()
@pytest.mark.parametrize("end", ["the tokenizer's", "one that is not the highest", "2, which is wrong"])
def test_clip(end, flux_folder):
    from transformers import AutoTokenizer, CLIPTextModel

    model = livelier(CLIPTextModel.from_pretrained(flux_folder, subfolder="text_encoder"))
    tokenizer = AutoTokenizer.from_pretrained(flux_folder, subfolder="tokenizer")
    tokens = tokenizer(CAPTIONS, padding="max_length", max_length=77, return_tensors="pt").input_ids
    if end != "the tokenizer's":
        number = 2 if end.startswith("2") else int(tokens[0, 1])
        for owner in (model, model.config, getattr(model, "text_model", model)):
            owner.eos_token_id = number
    assert ClipEncoder.supports(model)
    assert_close(ClipEncoder(model)(tokens), states_of(model, tokens))


@torch.inference_mode()
def test_text_encoders_in_float16_do_not_overflow(flux_folder):
    """Large models overflow float16 unless the sum of their layers is kept in float32, as transformers does."""
    from transformers import T5EncoderModel

    model = T5EncoderModel.from_pretrained(
        flux_folder, subfolder="text_encoder_2", dtype=torch.float16
    ).eval()
    for block in model.encoder.block:
        wo = block.layer[-1].DenseReluDense.wo
        wo.to(torch.float32).weight.mul_(3e4)
    tokens = torch.randint(0, 30, (2, 20), generator=torch.Generator().manual_seed(3))
    mine, reference = T5Encoder(model)(tokens), model(tokens).last_hidden_state
    assert torch.isfinite(mine).all()
    assert (mine.float() - reference.float()).abs().max() < 0.02 * reference.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("frames", [1, 5, 21])
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_video_vaes_in_stretches_of_any_length(family, frames, wan_folder, hunyuan_folder, monkeypatch):
    from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan

    if family == "wan":
        vae = livelier(AutoencoderKLWan.from_pretrained(wan_folder, subfolder="vae"))
        family_encoder, per_pixel = WanEncoder, 24
        assert WanEncoder.supports(vae)
    else:
        vae = livelier(AutoencoderKLHunyuanVideo15.from_pretrained(hunyuan_folder, subfolder="vae"))
        family_encoder, per_pixel = HunyuanEncoder, 32
        assert HunyuanEncoder.supports(vae)
    clips = noise(2, 3, frames, 64, 32)
    # Its own encoder takes one clip at a time: with more, HunyuanVideo's attention mask does not fit.
    expected = torch.cat([vae.encode(clip[None]).latent_dist.parameters for clip in clips])
    for most_frames in (None, 5, 9):
        if most_frames:
            monkeypatch.setattr(causal, "_MAX_VALUES", 64 * 32 * per_pixel * most_frames)
        assert_close(family_encoder(vae)(clips), expected)


def test_stretches_cover_every_frame_once():
    for frames in range(1, 130, 4):
        clip = torch.arange(frames).view(-1, 1, 1, 1).expand(-1, 2, 2, 3)
        for most in (1, 5, 9, 17, 1000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(causal, "_MAX_VALUES", 2 * 2 * 7 * most)
                parts = list(causal.TemporalChunks(7, 4).of(clip))
            assert torch.cat(parts).equal(clip)
            assert len(parts[0]) % 4 == 1
            assert all(len(part) % 4 == 0 for part in parts[1:])
            assert max(len(part) for part in parts) <= max(5, most)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["flux", "wan", "hunyuan"])
def test_processors_give_the_same_with_and_without(family, flux_folder, wan_folder, hunyuan_folder):
    folder = {"flux": flux_folder, "wan": wan_folder, "hunyuan": hunyuan_folder}[family]
    plain, arranged = (processor_class(family)(str(folder), CPU, torch.float32) for _ in range(2))
    arranged.use_fused_encoder()
    size = (2, 3, 64, 96) if family == "flux" else (1, 3, 9, 64, 96)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    seeds = list(range(len(pixels)))
    for drawn in (None, seeds):
        mine, reference = arranged.encode_pixels(pixels, drawn), plain.encode_pixels(pixels, drawn)
        assert mine.dtype == torch.float16
        assert (mine.float() - reference.float()).abs().max() <= 2e-3 * reference.abs().max()
    mine, reference = arranged.encode_texts(CAPTIONS), plain.encode_texts(CAPTIONS)
    assert mine.keys() == reference.keys()
    for key, value in reference.items():
        assert (mine[key].float() - value.float()).abs().max() <= 2**-7 * value.float().abs().max(), key
    assert arranged.enable_tiling()
    mine, reference = arranged.encode_pixels(pixels, None), plain.encode_pixels(pixels, None)
    assert (mine.float() - reference.float()).abs().max() <= 2e-3 * reference.abs().max(), "one tile"


@torch.inference_mode()
def test_hunyuan_takes_several_clips_at_once(hunyuan_folder):
    """Its own VAE does not: the mask in its attention is for one."""
    hunyuan = processor_class("hunyuan")(str(hunyuan_folder), CPU, torch.float32)
    clips = torch.randint(
        0, 256, (2, 3, 5, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(5)
    )
    both = hunyuan.encode_pixels(clips, None)
    assert torch.equal(both, torch.cat([hunyuan.encode_pixels(clip[None], None) for clip in clips]))
    assert hunyuan.decode_latents(both).shape == clips.shape


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Recording without a device: what is recorded is called again, and says so."""
    events: list[str] = []

    class Recording:
        refuse: type[Exception] | None = None

        def __init__(self, function, x):
            if Recording.refuse:
                raise Recording.refuse("no")
            self._function = function
            events.append("recorded")

        def replay(self, x):
            events.append("replayed")
            return self._function(x)

    monkeypatch.setattr(cuda_graphs, "_Recording", Recording)
    for name in ("current_stream", "set_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return events, Recording


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape).as_subclass(_OnGpu)


def test_a_shape_is_recorded_when_it_has_come_up_three_times(pretended_gpu):
    events, _ = pretended_gpu
    calls = []
    twice = cuda_graphs.CudaGraphed(lambda x: calls.append("called") or x * 2)
    for _ in range(5):
        assert twice(on_gpu(3)).sum() == 6
    assert events == ["recorded", "replayed", "replayed", "replayed"]
    twice(on_gpu(4))
    assert events[-1] == "replayed", "another shape is not recorded at once"
    assert len(calls) == 6
    for side in range(10, 14):
        for _ in range(3):
            twice(on_gpu(side))
    assert len(twice._recorded) == 2, "and no more than two are kept"


def test_where_recording_fails_nothing_is_recorded_any_more(pretended_gpu):
    events, recording = pretended_gpu
    recording.refuse = torch.OutOfMemoryError
    twice = cuda_graphs.CudaGraphed(lambda x: x * 2)
    for _ in range(6):
        assert twice(on_gpu(3)).sum() == 6
    assert events == []


def test_memory_that_recordings_hold_is_given_back_before_anything_fails(pretended_gpu):
    events, _ = pretended_gpu

    def needs_memory(x):
        if len(x) == 9 and twice._recorded:
            raise torch.OutOfMemoryError
        return x * 2

    twice = cuda_graphs.CudaGraphed(needs_memory)
    for _ in range(4):
        twice(on_gpu(3))
    assert events.count("replayed") == 2
    assert twice(on_gpu(9)).sum() == 18
    assert not twice._recorded
    twice(on_gpu(3))
    assert events.count("replayed") == 2


KERNELS = """
import sys
import torch
from latentry.processors.fused import ops, triton_kernels as kernels
torch.manual_seed(0)
device = sys.argv[1]
def run(kernel, *arguments, **options):
    moved = (a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments)
    return kernel(*moved, **options).cpu()
def close(mine, reference):
    assert mine.shape == reference.shape
    assert (mine - reference).abs().max() < 2e-5 * max(1, reference.abs().max())
def poisoned(like):
    return torch.full_like(like, float("nan"))
for channels in (3, 8, 96):
    x, y = torch.randn(2, 5, 6, channels), torch.randn(2, 5, 6, channels)
    gamma, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    for pad in (0, 1):
        for g in (gamma, None):
            for b in (bias, None):
                expected = ops.norm_rows(x, g, b, pad=pad)
                out = poisoned(expected)
                close(run(kernels.norm_rows, x, g, b, out, silu=True, pad=pad, fold=False), expected)
    close(run(kernels.add_rows, x, y, bias, poisoned(x)), x + y + bias)
    rows = x.view(2, 30, channels)
    close(run(kernels.channel_sums, rows), torch.stack([rows.sum(1), rows.square().sum(1)], 1))
    scale, shift = torch.randn(2, channels), torch.randn(2, channels)
    scaled = torch.nn.functional.silu(rows * scale[:, None] + shift[:, None])
    close(run(kernels.scale_rows, rows, scale, shift, poisoned(rows), silu=True), scaled)
for frames in (1, 2, 5):
    x, gamma = torch.randn(frames, 3, 4, 8), torch.rand(8)
    out, expected = torch.zeros(frames, 3, 4, 24), torch.zeros(frames, 3, 4, 24)
    ops.norm_rows(x, gamma, fold=True, out=expected)
    close(run(kernels.norm_rows, x, gamma, None, out, silu=True, pad=0, fold=True), expected)
h, x, bias = torch.randn(7, 3, 8), torch.randn(7, 3, 32), torch.randn(8)
close(run(kernels.add_group_mean, h, bias, x, poisoned(h), 4), ops.add_group_mean(h, bias, x))
scores = torch.randn(5, 77)
close(run(kernels.softmax_rows, scores, 0.3, poisoned(scores)), torch.softmax(scores * 0.3, -1))
a, b = torch.randn(3, 1000) * 5, torch.randn(3, 1000)
gated = torch.nn.functional.gelu(a, approximate="tanh") * b
close(run(kernels.gelu_gate, a, b, poisoned(a)), gated)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_kernels_compute_what_the_torch_code_says():
    """On a GPU, or where there is none in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = {**os.environ, "TRITON_INTERPRET": str(int(device == "cpu"))}
    subprocess.run([sys.executable, "-c", KERNELS, device], check=True, env=environment, timeout=300)
