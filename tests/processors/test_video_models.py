"""Wan and HunyuanVideo equal their diffusers pipelines, tensor for tensor."""

from __future__ import annotations

import torch
from PIL import Image

from latentry.processors import processor_class
from latentry.testing import make_hunyuan_pipeline

CPU = torch.device("cpu")


CAPTIONS = ['a cat &amp; a "HELLO" sign', "waves  on the beach", ""]


def random_clip() -> torch.Tensor:
    return torch.randint(
        0, 256, (1, 3, 9, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def as_images(clip: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in clip.unbind(dim=1)]


@torch.no_grad()
def test_wan_equals_its_pipeline(wan_folder):
    from diffusers import WanPipeline

    wan = processor_class("wan")(str(wan_folder), CPU, torch.float32)
    pipeline = WanPipeline.from_pretrained(wan_folder, transformer=None)
    expected, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    text = wan.encode_texts(CAPTIONS)["text_embeddings"]
    assert text.shape == (3, 226, 32)
    assert torch.equal(text, expected.bfloat16())
    assert text[0].abs().sum() > 1
    assert text[1, 100:].abs().sum() == 0

    clip = random_clip()
    posterior = pipeline.vae.encode(
        pipeline.video_processor.preprocess_video([as_images(clip[0])])
    ).latent_dist
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config.latents_std).view(1, -1, 1, 1, 1)
    latents = wan.encode_pixels(clip, None)
    assert latents.shape == (1, 16, 3, 8, 12)
    assert torch.equal(latents, ((posterior.mode() - mean) * (1.0 / std)).half())
    assert wan.decode_latents(latents).shape == clip.shape


def test_wan_ties_the_text_embedding(wan_folder, monkeypatch):
    """Some releases of transformers 5 leave the encoder's copy of the embedding empty."""
    from transformers import UMT5EncoderModel

    expected = processor_class("wan")(str(wan_folder), CPU, torch.float32).encode_texts(CAPTIONS)
    load = UMT5EncoderModel.from_pretrained

    def load_untied(*arguments, **options):
        model = load(*arguments, **options)
        model.encoder.embed_tokens.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
        return model

    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", load_untied)
    mine = processor_class("wan")(str(wan_folder), CPU, torch.float32).encode_texts(CAPTIONS)
    assert torch.equal(mine["text_embeddings"], expected["text_embeddings"])
    assert mine["text_embeddings"].abs().sum(dim=(1, 2)).min() > 0


@torch.no_grad()
def test_hunyuan_equals_its_pipeline(hunyuan_folder, tmp_path):
    from diffusers import HunyuanVideo15ImageToVideoPipeline

    hunyuan = processor_class("hunyuan")(str(hunyuan_folder), CPU, torch.float32)
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(hunyuan_folder, transformer=None)
    expected = pipeline.encode_prompt(CAPTIONS, batch_size=len(CAPTIONS))
    fields = hunyuan.encode_texts(CAPTIONS)
    for key, value in zip(
        ("text_embeddings", "text_mask", "text_embeddings_2", "text_mask_2"), expected, strict=True
    ):
        assert torch.equal(fields[key], value.to(fields[key].dtype)), key
    assert fields["text_mask_2"][0].sum() > 0
    assert fields["text_mask_2"][1].sum() == 0

    clip = random_clip()
    images = as_images(clip[0])
    posterior = pipeline.vae.encode(pipeline.video_processor.preprocess_video([images])).latent_dist
    latents = hunyuan.encode_pixels(clip, None)
    assert latents.shape == (1, 32, 3, 4, 6)
    assert torch.equal(latents, (posterior.mode() * pipeline.vae.config.scaling_factor).half())
    media = hunyuan.media_fields(clip)
    assert torch.equal(
        media["image_embeds"], pipeline.encode_image(images[0], 1, CPU, torch.float32).bfloat16()
    )
    assert hunyuan.decode_latents(latents).shape == clip.shape

    text_only = make_hunyuan_pipeline(tmp_path / "t2v", image_to_video=False)
    assert processor_class("hunyuan")(str(text_only), CPU, torch.float32).media_fields(clip) == {}
