"""A fused encoder is used only if it matches the model's own modules."""

from __future__ import annotations

import logging
from importlib.metadata import version

import pytest
import torch
from helpers import FUSED_ENCODERS
from torch.nn import functional as F

from latentry.processors import processor_class
from latentry.processors.fused import causal, clip, ops, self_check
from latentry.processors.fused.clip import ClipEncoder
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.self_check import TOLERANCE, checked_encoder, relative_errors
from latentry.processors.fused.t5 import T5Encoder

CPU = torch.device("cpu")
CAPTIONS = ["a cat", "waves crashing on the beach at sunset", ""]


def without_bias(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return y.copy_(x + y)


def without_gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(a, approximate="tanh")


def without_attention(x: torch.Tensor, attention: object) -> torch.Tensor:
    return torch.zeros_like(x)


WRONG = {
    "image_vae": (ops, "add_rows", without_bias),
    "wan_vae": (ops, "add_rows", without_bias),
    "hunyuan_vae": (ops, "add_rows", without_bias),
    "t5": (ops, "gelu_gate", without_gate),
    "umt5": (ops, "gelu_gate", without_gate),
    "clip": (clip, "_attend", without_attention),
}
"""For each encoder an operation, and a replacement with other numbers."""
PROCESSOR_OF = {
    "image_vae": "flux",
    "clip": "flux",
    "t5": "flux",
    "wan_vae": "wan",
    "umt5": "wan",
    "hunyuan_vae": "hunyuan",
}


def raises(error: Exception):
    def fail(*arguments: object, **options: object) -> torch.Tensor:
        raise error

    return fail


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("latentry")
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FUSED_ENCODERS),
        *((name, torch.bfloat16) for name in FUSED_ENCODERS),
        # 3D convolutions in float16 take half a minute on a CPU.
        *((name, torch.float16) for name in ("image_vae", "t5", "umt5", "clip")),
    ],
)
def test_intact_encoders_pass(name, dtype, load_model, caplog):
    assert isinstance(checked_encoder(FUSED_ENCODERS[name], load_model(name, dtype)), FUSED_ENCODERS[name])
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        *((name, "numbers") for name in WRONG),
        *((name, "exception") for name in WRONG),
    ],
)
def test_processors_fall_back_to_the_models_own_modules(name, failure, model_folder, monkeypatch, caplog):
    family = PROCESSOR_OF[name]
    own, broken = (processor_class(family)(str(model_folder(family)), CPU, torch.float32) for _ in range(2))
    for processor in (own, broken):
        make_random(processor)
    module, operation, replacement = WRONG[name]
    if failure != "numbers":
        error = RuntimeError("no kernel")
        replacement = raises(error)
    with monkeypatch.context() as patch:
        patch.setattr(module, operation, replacement)
        broken.use_fused_encoders()
    (warning,) = warnings_in(caplog)
    assert f"the fused {FUSED_ENCODERS[name].name} encoder" in warning
    assert "the model's own modules encode instead" in warning
    for package in ("torch", "diffusers", "transformers"):
        assert f"{package} {version(package)}" in warning
    if failure == "numbers":
        assert "(tolerance 0.0001), relative maximum error" in warning
        assert "(tolerance 0.0002), in float32 on cpu" in warning
    else:
        assert f"({type(error).__name__}: {error})" in warning
    if name.endswith("_vae"):
        size = (2, 3, 64, 96) if family == "flux" else (1, 3, 9, 64, 96)
        pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
        assert torch.equal(broken.encode_pixels(pixels, None), own.encode_pixels(pixels, None))
        shape = (1, *pixels.shape[1:])
        assert broken._encoder._bytes_needed(shape) == own._encoder._bytes_needed(shape)
    else:
        keys = {
            "clip": ("clip_hidden", "pooled_prompt_embeds"),
            "t5": ("prompt_embeds",),
            "umt5": ("text_embeddings",),
        }[name]
        mine, expected = broken.encode_texts(CAPTIONS), own.encode_texts(CAPTIONS)
        assert all(torch.equal(mine[key], expected[key]) for key in keys)


def make_random(processor) -> None:
    """Biases and norms of fresh models are zero and one; leaving them out would not be seen."""
    generator = torch.Generator().manual_seed(1)
    for model in (part for part in vars(processor).values() if isinstance(part, torch.nn.Module)):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_found_in_any_dtype(name, dtype, load_model, monkeypatch, caplog):
    monkeypatch.setattr(*WRONG[name])
    assert checked_encoder(FUSED_ENCODERS[name], load_model(name, dtype)) is None
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("name", ["wan_vae", "hunyuan_vae"])
def test_wrong_frames_of_later_chunks_are_found(name, load_model, monkeypatch):
    """The check has more than one chunk: an encoder that forgets the frames before a chunk fails."""
    monkeypatch.setattr(causal.FrameCache, "get", lambda self, layer: None)
    assert checked_encoder(FUSED_ENCODERS[name], load_model(name)) is None


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_an_ignored_mask_is_found(name, load_model, monkeypatch):
    encode = T5Encoder.__call__
    monkeypatch.setattr(T5Encoder, "__call__", lambda self, tokens, mask=None: encode(self, tokens))
    assert checked_encoder(T5Encoder, load_model(name)) is None


def test_a_wrong_pooled_state_is_found(load_model, monkeypatch):
    encode = ClipEncoder.__call__

    def wrong(self, tokens):
        states = encode(self, tokens)
        return torch.cat([states[:, :-1], states[:, :1]], dim=1)

    monkeypatch.setattr(ClipEncoder, "__call__", wrong)
    assert checked_encoder(ClipEncoder, load_model("clip")) is None


def test_small_means_are_compared_apart_from_large_variances(load_model, monkeypatch):
    """A VAE's log variance may be a thousand times larger than its mean."""
    vae = load_model("image_vae")
    vae.encoder.conv_out.weight[16:] *= 1000
    encode = ImageEncoder.__call__

    def wrong_mean(self, pixels):
        mean, log_variance = encode(self, pixels).chunk(2, dim=1)
        return torch.cat([mean * 1.01, log_variance], dim=1)

    assert checked_encoder(ImageEncoder, vae) is not None
    monkeypatch.setattr(ImageEncoder, "__call__", wrong_mean)
    assert checked_encoder(ImageEncoder, vae) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x * float("nan"), "relative RMS error nan"),
        (lambda x: x[:, :-1], "gives torch.float32 (2, 31, 5, 7) where the model's own"),
        (lambda x: x.half(), "gives torch.float16"),
    ],
)
def test_nan_shapes_and_dtypes_are_compared(change, says, load_model, monkeypatch, caplog):
    encode = ImageEncoder.__call__
    monkeypatch.setattr(ImageEncoder, "__call__", lambda self, pixels: change(encode(self, pixels)))
    assert checked_encoder(ImageEncoder, load_model("image_vae")) is None
    assert says in caplog.text


def test_a_model_that_cannot_encode_the_check_input_keeps_its_own_modules(load_model, monkeypatch, caplog):
    monkeypatch.setattr(ImageEncoder, "reference", raises(ValueError("too small")))
    assert checked_encoder(ImageEncoder, load_model("image_vae")) is None
    assert "could not be checked (ValueError: too small)" in caplog.text


def test_unsupported_models_are_not_checked(load_model, monkeypatch, caplog):
    vae = load_model("image_vae")
    vae.encoder.conv_act = torch.nn.GELU()
    monkeypatch.setattr(ImageEncoder, "check_inputs", raises(AssertionError("checked")))
    with caplog.at_level(logging.INFO):
        assert checked_encoder(ImageEncoder, vae) is None
    assert "there is no fused encoder for this image VAE" in caplog.text
    assert warnings_in(caplog) == []


def test_relative_errors():
    reference = torch.tensor([3.0, -4.0])
    assert relative_errors(reference, reference) == (0, 0)
    rms, largest = relative_errors(torch.tensor([3.0, -5.0]), reference)
    assert rms == pytest.approx(0.2)
    assert largest == pytest.approx(0.25)


def test_float32_on_a_gpu_is_compared_as_tf32():
    class OnGpu(torch.Tensor):
        is_cuda = True

    assert self_check.tolerance_for(torch.ones(1)) == TOLERANCE[torch.float32]
    assert self_check.tolerance_for(torch.ones(1).as_subclass(OnGpu)) == TOLERANCE[torch.float16]
    for dtype in (torch.float16, torch.bfloat16):
        assert self_check.tolerance_for(torch.ones(1, dtype=dtype).as_subclass(OnGpu)) == TOLERANCE[dtype]
