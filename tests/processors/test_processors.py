from __future__ import annotations

import gc
import hashlib
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import EXAMPLES
from PIL import Image
from safetensors.torch import load_file

from latentry.cache.latent_checks import psnr_db
from latentry.errors import ConfigError, ModelError
from latentry.media.images import decode_image, fit_to_bucket
from latentry.processors import PROCESSORS, processor_class
from latentry.processors.flux import FluxProcessor
from latentry.processors.model_folder import folder_identity
from latentry.processors.tiny import TinyProcessor
from latentry.processors.tokens import padded_tokens

CPU = torch.device("cpu")
CAPTIONS = ["a photo of a cat", "the quick brown fox, 85mm", ""]


def example_pixels(side: int) -> list[torch.Tensor]:
    files = sorted(p for p in EXAMPLES.rglob("*") if p.suffix in (".jpg", ".png", ".webp"))
    return [fit_to_bucket(decode_image(path.read_bytes()).pixels, (side, side))[0] for path in files]


def test_processors_describe_themselves():
    for name in PROCESSORS:
        info = processor_class(name).info
        assert info.name == name
        assert set(info.media) <= {"image", "video"}
        assert info.quantum % info.spatial_factor == 0
    with pytest.raises(ConfigError, match=r"'sdxl'; choose one of tiny, flux, wan, wan2\.2, hunyuan"):
        processor_class("sdxl")


# ---- tiny -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return TinyProcessor("embedded", CPU, torch.float32)


def test_tiny_restores_photographs_outside_its_training_data(tiny):
    values = []
    for pixels in example_pixels(512):
        latents = tiny.encode_pixels(pixels[None], None)
        assert latents.shape == (1, 16, 64, 64)
        assert latents.dtype == torch.float16
        values.append(psnr_db(pixels, tiny.decode_latents(latents)[0]))
    assert len(values) == 12
    assert sum(values) / 12 > 32
    assert min(values) > 27


def test_tiny_latents_have_about_unit_variance(tiny):
    latents = torch.cat([tiny.encode_pixels(pixels[None], None) for pixels in example_pixels(256)]).float()
    assert 0.5 < latents.std() < 2
    assert latents.mean().abs() < 0.5


ASSETS = Path(__file__).parents[2] / "src" / "latentry" / "processors" / "assets"


def test_tiny_weights_are_small():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 6_000_000


def test_tiny_encoder_is_the_one_that_its_identity_names():
    """If this fails, the encoder has changed: give it a new identity, or old latents are mixed with new ones."""
    weights = load_file(ASSETS / "tiny_autoencoder.safetensors")
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in weights if not name.startswith("decoder.")):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    identity = TinyProcessor.weights_identity("embedded")
    assert (identity[:32], digest.hexdigest()) == (
        "bdb82c7b6aaf486540227fdeb4e1bee2",
        "967bc523ad66d8b478d293fea4829fe6",
    )


SIMILAR = [
    ("a cat sleeping on a sofa", "a kitten naps on the couch"),
    ("a red sports car on a road", "an automobile driving down the highway"),
    ("snowy mountains at sunrise", "alpine peaks covered in snow in the morning"),
    ("a plate of pasta with tomato sauce", "spaghetti and marinara for dinner"),
    ("a man playing the guitar", "a musician performs on stage with an instrument"),
    ("waves crashing on the beach", "the ocean surf hits the sandy shore"),
]


def test_tiny_text_is_similar_for_similar_captions(tiny):
    def embed(captions):
        fields = tiny.encode_texts(captions)
        assert fields["prompt_embeds"].shape == (len(captions), 64, 64)
        return fields["pooled_prompt_embeds"].float()

    similarity = embed([a for a, _ in SIMILAR]) @ embed([b for _, b in SIMILAR]).T
    assert similarity.argmax(dim=1).tolist() == list(range(len(SIMILAR)))
    assert similarity.argmax(dim=0).tolist() == list(range(len(SIMILAR)))
    same, other = similarity.diagonal().mean(), similarity[~torch.eye(len(SIMILAR), dtype=bool)].mean()
    assert same > other + 0.3


def test_tiny_text_encodes_any_string(tiny):
    for caption in ("", "日本語 🎉", "x" * 10_000, "word " * 500):
        fields = tiny.encode_texts([caption])
        assert all(torch.isfinite(value).all() for value in fields.values())


def test_tiny_refuses_other_weights_and_sampling(tiny):
    with pytest.raises(ConfigError, match="leave out --model_name 'other'"):
        TinyProcessor.weights_identity("other")
    with pytest.raises(ConfigError, match="leave out --stochastic"):
        tiny.encode_pixels(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), [1])


# ---- flux -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flux(flux_folder):
    return FluxProcessor(str(flux_folder), CPU, torch.float32)


@pytest.fixture(scope="module")
def pipeline(flux_folder):
    from diffusers import FluxImg2ImgPipeline

    return FluxImg2ImgPipeline.from_pretrained(flux_folder, transformer=None)


@torch.no_grad()
def test_flux_text_equals_its_pipeline(flux, pipeline):
    for captions in (CAPTIONS, CAPTIONS[:1]):
        prompt_embeds, pooled, _ = pipeline.encode_prompt(captions, prompt_2=None)
        fields = flux.encode_texts(captions)
        assert torch.equal(fields["prompt_embeds"], prompt_embeds.bfloat16())
        assert torch.equal(fields["pooled_prompt_embeds"], pooled.bfloat16())
        shapes = {key: tuple(value.shape[1:]) for key, value in fields.items()}
        assert shapes == {
            "clip_tokens": (77,),
            "clip_hidden": (77, 32),
            "pooled_prompt_embeds": (32,),
            "t5_tokens": (512,),
            "prompt_embeds": (512, 32),
        }


@torch.no_grad()
def test_flux_latents_equal_its_pipeline(flux, pipeline):
    for pixels in example_pixels(128)[:4]:
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        posterior = pipeline.vae.encode(pipeline.image_processor.preprocess(image)).latent_dist
        expected = (posterior.mode() - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
        assert torch.equal(flux.encode_pixels(pixels[None], None), expected.half())


def test_flux_draws_do_not_depend_on_the_batch(flux):
    pixels = torch.stack(example_pixels(64)[:3])
    mean = flux.encode_pixels(pixels, None)
    drawn = flux.encode_pixels(pixels, [1, 2, 3])
    assert not torch.equal(drawn, mean)
    backwards = flux.encode_pixels(pixels.flip(0), [3, 2, 1]).flip(0)
    torch.testing.assert_close(backwards, drawn, rtol=0, atol=2e-3)
    again = flux.encode_pixels(pixels, [1, 2, 4])
    assert torch.equal(again[:2], drawn[:2])
    assert not torch.equal(again[2], drawn[2])


def test_flux_decodes_latents(flux):
    pixels = example_pixels(64)[0][None]
    restored = flux.decode_latents(flux.encode_pixels(pixels, None))
    assert (restored.shape, restored.dtype) == (pixels.shape, torch.uint8)


@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_are_padded_as_by_the_tokenizer(flux, side):
    captions = [*CAPTIONS, "a very long caption " * 40]
    for tokenizer, length in (
        (flux._clip_tokenizer, 77),
        (flux._t5_tokenizer, 512),
        (flux._t5_tokenizer, 20),
    ):
        tokenizer.padding_side = side
        expected = tokenizer(
            captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        tokens, mask = padded_tokens(tokenizer, captions, length)
        tokenizer.padding_side = "right"
        assert torch.equal(tokens, expected.input_ids)
        assert torch.equal(mask, expected.attention_mask)
    with pytest.raises(ModelError, match="no padding token"):
        padded_tokens(SimpleNamespace(pad_token_id=None), captions, 77)


@pytest.mark.parametrize("family", ["flux", "wan", "hunyuan"])
def test_deleting_a_processor_frees_its_model(family, model_folder):
    """At once, without the garbage collector: a GPU cannot hold two models."""
    processor = processor_class(family)(str(model_folder(family)), CPU, torch.float32)
    processor.use_fused_encoders()
    processor.encode_texts(CAPTIONS)
    models = [weakref.ref(part) for part in vars(processor).values() if isinstance(part, torch.nn.Module)]
    assert len(models) >= 2
    gc.disable()
    try:
        del processor
        assert all(model() is None for model in models)
    finally:
        gc.enable()


def test_flux_refuses_unusable_folders(flux_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="is not a folder, and it could not be downloaded"):
        FluxProcessor.weights_identity("nobody/nothing")
    (tmp_path / "vae").mkdir()
    with pytest.raises(ModelError, match="has no folder text_encoder, tokenizer"):
        FluxProcessor.weights_identity(str(tmp_path))
    for component in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"):
        (tmp_path / component).mkdir()
    with pytest.raises(ModelError, match="cannot be loaded"):
        FluxProcessor(str(tmp_path), CPU, torch.float32)


def test_a_missing_package_names_the_install_command(flux_folder, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else real(name))
    with pytest.raises(ModelError, match=r"needs diffusers; install with: pip install 'latentry\[models\]'"):
        FluxProcessor(str(flux_folder), CPU, torch.float32)


def test_the_identity_depends_on_the_weights_only(tmp_path):
    weights = tmp_path / "vae" / "weights.bin"
    weights.parent.mkdir()
    content = np.random.default_rng(0).bytes(6_000_000)
    weights.write_bytes(content)
    first = folder_identity(tmp_path, ("vae",))
    assert folder_identity(tmp_path, ("vae",)) == first
    os.utime(weights, (1, 1))
    assert folder_identity(tmp_path, ("vae",)) == first
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert folder_identity(tmp_path, ("vae",)) != first
    weights.write_bytes(content + b"x")
    assert folder_identity(tmp_path, ("vae",)) != first
