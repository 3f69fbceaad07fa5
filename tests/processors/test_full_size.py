"""Models of real size with random weights: their sizes on the meta device, and the rest with small ones."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import FUSED_ENCODERS, rows_of

from latentry import Recipe, prepare
from latentry.media.video_options import VideoOptions
from latentry.processors import PROCESSORS
from latentry.processors.fused.self_check import checked_encoder
from latentry.processors.memory.text_encoders import TextEncoders
from latentry.testing import full_size, make_counter_clip
from latentry.testing.full_size import RandomFlux, RandomHunyuan, RandomWan, forget_weights

_T5 = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
_QWEN = {
    "vocab_size": 700, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
}  # fmt: skip
SMALL = {
    "flux": {
        "vae": RandomFlux.sizes["vae"] | {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4},
        "clip": {
            "vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "projection_dim": 32, "bos_token_id": 598, "eos_token_id": 599,
        },
        "t5": _T5 | {"vocab_size": 256},
    },
    "wan": {"vae": {"base_dim": 8, "num_res_blocks": 1}, "umt5": _T5 | {"vocab_size": 256}},
    "hunyuan": {
        "vae": {"block_out_channels": (16, 16, 16, 32, 64), "layers_per_block": 1},
        "qwen": _QWEN,
        "byt5": _T5 | {"vocab_size": 384},
        "siglip": {
            "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14,
        },
    },
}  # fmt: skip
FAMILIES = {"flux": RandomFlux, "wan": RandomWan, "hunyuan": RandomHunyuan}


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch):
    """Each processor, with small models."""
    monkeypatch.setattr(FAMILIES[request.param], "sizes", SMALL[request.param])
    yield FAMILIES[request.param]
    forget_weights()


def load(family, dtype=torch.bfloat16):
    return family("", torch.device("cpu"), dtype)


def models_of(processor) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in vars(processor).items() if isinstance(part, torch.nn.Module)}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (RandomFlux, {"vae": 83_819_683, "clip": 123_060_480, "t5": 4_762_310_656}),
        (RandomWan, {"vae": 126_892_531, "umt5": 5_680_910_336}),
        (
            RandomHunyuan,
            {"vae": 1_260_634_115, "qwen": 7_070_619_136, "byt5": 217_657_472, "siglip": 428_225_600},
        ),
    ],
)
def test_models_have_their_real_sizes(family, expected):
    skeletons = family.skeletons(torch.bfloat16)
    found = {name: sum(p.numel() for p in model.parameters()) for name, model in skeletons.items()}
    assert found == expected
    for model in skeletons.values():
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "meta")}
    assert torch.get_default_dtype() == torch.float32
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (RandomFlux, ["together", "turns", "turns", "streamed"]),
        (RandomWan, ["together", "turns", "streamed", "streamed"]),
        (RandomHunyuan, ["turns", "streamed", "streamed", "streamed"]),
    ],
)
def test_plans_for_real_sizes(family, expected, monkeypatch):
    monkeypatch.setattr(family, "_models", lambda self: list(self.skeletons(self._dtype).values()))
    monkeypatch.setattr(family, "_place", lambda self: None)  # there is nothing to place
    monkeypatch.setattr(
        TextEncoders, "caption_bytes", lambda self, *, fused: self._caption_bytes
    )  # as on a GPU
    plans = [
        family("", torch.device("cpu"), torch.bfloat16, device_memory=gb * 10**9).memory_plan
        for gb in (24, 16, 12, 8)
    ]
    assert [plan.text for plan in plans] == expected


def test_buffers_are_those_of_an_ordinary_model(family):
    for name, skeleton in family.skeletons(torch.bfloat16).items():
        ordinary = dict(family.constructors()[name](**family.sizes[name]).named_buffers())
        buffers = dict(skeleton.named_buffers())
        assert buffers.keys() == ordinary.keys()
        for key, buffer in buffers.items():
            assert buffer.dtype == ordinary[key].dtype
            assert torch.equal(buffer, ordinary[key]), f"{name}.{key}"


def test_weights_have_the_scale_of_fresh_models(family):
    for model in models_of(load(family)).values():
        embeddings = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16
            if name.endswith("bias"):
                assert not parameter.any(), name
            elif parameter.ndim == 1 or name.endswith("gamma"):
                assert (parameter == 1).all(), name
            elif parameter.numel() > 1000:
                fan_in = parameter.numel() / len(parameter)
                expected = 0.02 if any(parameter is e for e in embeddings) else 1 / math.sqrt(3 * fan_in)
                if name.endswith("SelfAttention.q.weight"):
                    expected /= 8
                assert parameter.float().std() == pytest.approx(expected, rel=0.15), name


def test_weights_depend_on_the_seed_only(family, monkeypatch):
    def weights() -> list[torch.Tensor]:
        forget_weights()
        return [p for model in models_of(load(family)).values() for p in model.parameters()]

    whole = weights()
    assert all(map(torch.equal, whole, weights()))
    monkeypatch.setattr(family, "seed", 1)
    assert not all(map(torch.equal, whole, weights()))


def test_large_weights_are_drawn_in_several_parts(monkeypatch):
    monkeypatch.setattr(full_size, "_VALUES_PER_DRAW", 1000)
    weight = torch.zeros(50, 50)
    full_size._draw(weight, 1.0, seed=0)
    parts = weight.view(-1).split(1000)
    assert [len(part) for part in parts] == [1000, 1000, 500]
    assert not torch.equal(parts[0], parts[1])
    for part in parts:
        assert part.std() == pytest.approx(1, rel=0.1)


def test_tied_embeddings_are_one_parameter(family):
    tied = [model for model in models_of(load(family)).values() if hasattr(model, "shared")]
    assert len(tied) == 1
    for model in tied:
        assert model.shared.weight is model.encoder.embed_tokens.weight
        model.to(torch.float32)
        assert model.shared.weight is model.encoder.embed_tokens.weight


def test_processors_share_weights_and_leave_them_as_they_are(family):
    first = models_of(load(family))
    drawn = {key: {n: w.clone() for n, w in weights.items()} for key, weights in full_size._drawn.items()}
    second = models_of(load(family))
    for mine, other in zip(first.values(), second.values(), strict=True):
        assert mine is not other
        for parameter, same in zip(mine.parameters(), other.parameters(), strict=True):
            assert parameter is not same
            assert parameter.data_ptr() == same.data_ptr()
    for name, model in first.items():
        for fused in FUSED_ENCODERS.values():
            if fused.supports(model):  # which may change the memory layout of weights
                assert checked_encoder(fused, model) is not None, name
        model.to(torch.float64)
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
    assert full_size._drawn.keys() == drawn.keys()
    for key, weights in full_size._drawn.items():
        for name, weight in weights.items():
            assert weight.is_contiguous()
            assert torch.equal(weight, drawn[key][name]), f"{key} {name}"


def test_a_run_with_random_weights(family, photos, tmp_path, monkeypatch):
    name = f"random-{family.info.name}"
    monkeypatch.setitem(PROCESSORS, name, f"{family.__module__}:{family.__name__}")
    if family is RandomFlux:
        recipe = Recipe(processor=name, dtype="bfloat16", max_pixels=64 * 64)
        where = {"image_dir": photos}
    else:
        video = VideoOptions(target_frames=9)
        recipe = Recipe(processor=name, dtype="bfloat16", size=(96, 64), video=video)
        make_counter_clip(photos / "clip.mp4", 12)
        where = {"video_dir": photos}
    result = prepare(recipe, output_dir=tmp_path / "cache", devices="cpu", **where)
    assert not result.failures
    rows = rows_of(tmp_path / "cache")
    assert len(rows) == result.num_encoded > 0
    data = torch.load(rows[0]["cache_file"], weights_only=True)
    for key in ("latent", "video_latents", "prompt_embeds", "text_embeddings"):
        if key in data:
            assert data[key].float().std() > 0.01, key
