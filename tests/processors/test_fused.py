"""Fused encoders against the models' own modules, on a CPU in float32, where they differ by rounding only.

Tolerance: 1e-5 of the largest value. On an H200 in bfloat16 the fused encoders are closer to the models in float32 than
the models' own modules in bfloat16 are; ``docs/benchmarks.md`` has the numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latentry.processors import processor_class
from latentry.processors.fused import causal
from latentry.processors.fused.clip import ClipEncoder
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


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 - 1


@torch.inference_mode()
def test_image_vae(load_model):
    vae = load_model("image_vae")
    for pixels in (noise(3, 3, 64, 96), noise(1, 3, 128, 64)):
        assert_close(ImageEncoder(vae)(pixels), vae.encode(pixels).latent_dist.parameters)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_t5_with_and_without_mask(name, load_model):
    model = load_model(name)
    tokens = torch.randint(0, 30, (4, 40), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(40)[None] < torch.tensor([5, 40, 17, 1])[:, None]).long()
    encoder = T5Encoder(model)
    assert_close(encoder(tokens), model(tokens).last_hidden_state)
    shown = mask[:, :, None]
    assert_close(encoder(tokens, mask) * shown, model(tokens, mask).last_hidden_state * shown)


@torch.inference_mode()
@pytest.mark.parametrize("end_token", ["the tokenizer's", "not the highest", "2, as in old configurations"])
def test_clip(end_token, load_model, flux_folder):
    from transformers import AutoTokenizer

    model = load_model("clip")
    tokenizer = AutoTokenizer.from_pretrained(flux_folder, subfolder="tokenizer")
    tokens = tokenizer(CAPTIONS, padding="max_length", max_length=77, return_tensors="pt").input_ids
    if end_token != "the tokenizer's":
        number = 2 if end_token.startswith("2") else int(tokens[0, 1])
        for owner in (model, model.config, getattr(model, "text_model", model)):
            owner.eos_token_id = number
    assert_close(ClipEncoder(model)(tokens), ClipEncoder.reference(model, tokens))


@torch.inference_mode()
def test_t5_in_float16_does_not_overflow(flux_folder):
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
@pytest.mark.parametrize("num_frames", [1, 5, 21])
@pytest.mark.parametrize(
    ("name", "family", "per_pixel"), [("wan_vae", WanEncoder, 24), ("hunyuan_vae", HunyuanEncoder, 32)]
)
def test_video_vaes_with_any_chunk_length(name, family, per_pixel, num_frames, load_model, monkeypatch):
    vae = load_model(name)
    clips = noise(2, 3, num_frames, 64, 32)
    # One clip at a time: diffusers builds HunyuanVideo's attention mask for a single clip.
    expected = torch.cat([vae.encode(clip[None]).latent_dist.parameters for clip in clips])
    for max_frames in (None, 5):
        assert_close(family(vae)(clips, max_frames), expected)
    monkeypatch.setattr(causal, "_MAX_VALUES", 64 * 32 * per_pixel * 9)
    assert_close(family(vae)(clips), expected)


def test_chunks_cover_every_frame_once():
    for num_frames in range(1, 130, 4):
        clip = torch.arange(num_frames).view(-1, 1, 1, 1).expand(-1, 2, 2, 3)
        for most in (1, 5, 9, 17, 1000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(causal, "_MAX_VALUES", 2 * 2 * 7 * most)
                by_memory = list(causal.TemporalChunks(7, 4, live=2, kept=3).split(clip))
            by_request = list(causal.TemporalChunks(7, 4, live=2, kept=3).split(clip, max(5, most)))
            for chunks in (by_memory, by_request):
                assert torch.cat(chunks).equal(clip)
                assert len(chunks[0]) % 4 == 1
                assert all(len(chunk) % 4 == 0 for chunk in chunks[1:])
                assert max(len(chunk) for chunk in chunks) <= max(5, most)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["flux", "wan", "hunyuan"])
def test_processors_match_with_and_without_fused_encoders(family, model_folder):
    plain, fused = (processor_class(family)(str(model_folder(family)), CPU, torch.float32) for _ in range(2))
    fused.use_fused_encoders()
    assert fused._encoder._fused is not None
    size = (2, 3, 64, 96) if family == "flux" else (1, 3, 9, 64, 96)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    for seeds in (None, list(range(len(pixels)))):
        mine, reference = fused.encode_pixels(pixels, seeds), plain.encode_pixels(pixels, seeds)
        assert mine.dtype == torch.float16
        assert (mine.float() - reference.float()).abs().max() <= 2e-3 * reference.abs().max()
    mine, reference = fused.encode_texts(CAPTIONS), plain.encode_texts(CAPTIONS)
    assert mine.keys() == reference.keys()
    for key, value in reference.items():
        assert (mine[key].float() - value.float()).abs().max() <= 2**-7 * value.float().abs().max(), key
    for processor in (plain, fused):
        nothing = replace(processor.memory_plan, pixel_bytes=0)
        processor._plan_for_others = processor._plan_for_large_samples = nothing
    mine, reference = fused.encode_pixels(pixels, None), plain.encode_pixels(pixels, None)
    assert (mine.float() - reference.float()).abs().max() <= 2e-3 * reference.abs().max(), "one tile"


@torch.inference_mode()
def test_hunyuan_encodes_several_clips_at_once(hunyuan_folder):
    """Its own VAE does not: diffusers builds the attention mask for a single clip."""
    hunyuan = processor_class("hunyuan")(str(hunyuan_folder), CPU, torch.float32)
    clips = torch.randint(
        0, 256, (2, 3, 5, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(5)
    )
    both = hunyuan.encode_pixels(clips, None)
    assert torch.equal(both, torch.cat([hunyuan.encode_pixels(clip[None], None) for clip in clips]))
    assert hunyuan.decode_latents(both).shape == clips.shape
