"""Text encoders with 8-bit weights: what rounding allows, what stays as it is, and that caches say so."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import rows_of, run_main, stopped_after
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from latentry import Recipe, prepare
from latentry.encode.planning import tasks
from latentry.encode.resolved_recipe import ResolvedRecipe
from latentry.errors import ConfigError, ModelError, RunError
from latentry.processors import PROCESSORS, fp8, processor_class
from latentry.processors.fp8 import Fp8Linear
from latentry.processors.fused.self_check import checked_encoder, relative_errors
from latentry.processors.fused.t5 import T5Encoder
from latentry.processors.memory.offload import weights_of
from latentry.processors.memory.plan import MemoryPlan
from latentry.testing import assert_same_cache

CPU = torch.device("cpu")
CAPTIONS = ["a photo of a cat", 'the "quick" brown fox, 85mm', ""]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES = {"flux": "prompt_embeds", "wan": "text_embeddings", "hunyuan": "text_embeddings"}
"""For each family, the field that its quantised text encoder computes."""


def random_linear(rows, columns, dtype=torch.float32, *, bias=False, seed=0, spread=0.0) -> nn.Linear:
    """A layer whose rows differ in size by factors of up to 10 to the power of ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(columns, rows, bias=bias)
    sizes = 10 ** (spread * (torch.rand(rows, 1, generator=generator) - 0.5))
    linear.weight.data = torch.randn(rows, columns, generator=generator) * sizes
    return linear.to(dtype).requires_grad_(False)


def allowed_errors(weight: torch.Tensor) -> torch.Tensor:
    """The largest error of each weight: half a step of e4m3, and half a step of the weight's own dtype.

    Above 2^-6 the steps of e4m3 are 1/8 of a power of two, below they are 2^-9. The largest value, 448, stands for the
    largest weight of the row.
    """
    numbers = torch.finfo(weight.dtype)
    weight = weight.double()
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    # A weight between two powers of two has the step of the lower one, so 1/16 of the weight is a bound.
    rounding = torch.maximum(weight.abs() / 16, scale * 2**-10) * (1 + 1e-5)
    return rounding + numbers.eps * weight.abs() + numbers.tiny * numbers.eps


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 7),
    bias=st.booleans(),
)
def test_error_of_a_layer_is_that_of_e4m3(rows, columns, dtype, seed, spread, bias):
    linear = random_linear(rows, columns, dtype, bias=bias, seed=seed, spread=spread)
    quantized = Fp8Linear(linear, CPU)
    allowed = allowed_errors(linear.weight)
    assert (quantized.weight.dtype, quantized.weight.shape) == (dtype, linear.weight.shape)
    assert quantized.rounded_weight().dtype == dtype
    assert ((quantized.rounded_weight().double() - linear.weight.double()).abs() <= allowed).all()

    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = quantized(x)
    assert found.dtype == dtype
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    # Each output channel may be off by what its weights may be off by, and by the rounding of its sum.
    largest_sum = x.double().abs() @ linear.weight.double().abs().T
    limit = x.double().abs() @ allowed.T + (columns + 2) * torch.finfo(dtype).eps * (largest_sum + 1)
    assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_not_larger_than_needed(dtype):
    """Rows of normally distributed weights, as those of transformers, lose 2 to 3%."""
    linear = random_linear(256, 512, dtype, spread=3)
    rms, _ = relative_errors(Fp8Linear(linear, CPU).rounded_weight(), linear.weight)
    assert 0.02 < rms < 0.03


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-44, 1e-38, 3e38, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_and_of_extreme_numbers(value, dtype):
    linear = random_linear(3, 4, dtype, bias=True)
    linear.weight[1] = value
    quantized = Fp8Linear(linear, CPU)
    assert quantized.rounded_weight().isfinite().all()
    torch.testing.assert_close(quantized.rounded_weight()[1], linear.weight[1], rtol=0.01, atol=1e-38)
    unchanged = Fp8Linear(random_linear(3, 4, dtype), CPU)
    assert torch.equal(quantized.rounded_weight()[[0, 2]], unchanged.rounded_weight()[[0, 2]])


def test_a_layer_moves_with_its_module_and_takes_half_the_bytes():
    model = nn.Sequential(
        nn.LayerNorm(512), nn.Sequential(nn.Linear(512, 256), nn.ReLU()), nn.Linear(256, 64)
    )
    model = model.to(torch.bfloat16).requires_grad_(False)
    linear = model[1][0]
    assert fp8.quantize(model, CPU) == 2
    held = dict(model.named_parameters())
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    assert kinds == {
        "0.weight": ((512,), torch.bfloat16),
        "0.bias": ((512,), torch.bfloat16),
        "1.0.quantized": ((256, 512), torch.float8_e4m3fn),
        "1.0.scale": ((256, 1), torch.float32),
        "1.0.bias": ((256,), torch.bfloat16),
        "2.quantized": ((64, 256), torch.float8_e4m3fn),
        "2.scale": ((64, 1), torch.float32),
        "2.bias": ((64,), torch.bfloat16),
    }
    assert not any(tensor.requires_grad for tensor in held.values())
    assert not list(model.buffers())
    assert not [value for value in vars(model[1][0]).values() if isinstance(value, torch.Tensor)]
    assert fp8.working_bytes(model) == linear.weight.nbytes
    quantized = held["1.0.quantized"]
    assert quantized.nbytes * 2 == linear.weight.nbytes
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    copy = nn.Sequential(nn.LayerNorm(512), nn.Sequential(nn.Linear(512, 256), nn.ReLU()), nn.Linear(256, 64))
    copy = copy.to(torch.bfloat16)
    fp8.quantize(copy, CPU)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(x), model(x)), "the state has everything that the output depends on"
    assert {tensor.device.type for tensor in copy.to("meta").parameters()} == {"meta"}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_fused_t5_equals_the_models_own_modules(name, dtype, flux_folder, wan_folder):
    """float16 included, for which transformers keeps some layers in float32."""
    import transformers

    kind, folder, subfolder = {
        "t5": (transformers.T5EncoderModel, flux_folder, "text_encoder_2"),
        "umt5": (transformers.UMT5EncoderModel, wan_folder, "text_encoder"),
    }[name]
    model = kind.from_pretrained(folder, subfolder=subfolder, dtype=dtype).eval().requires_grad_(False)
    model.encoder.embed_tokens.weight = model.shared.weight
    last_layer = model.encoder.block[0].layer[-1].DenseReluDense
    assert last_layer.wo.weight.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    tokens = torch.randint(0, 30, (3, 40), generator=torch.Generator().manual_seed(3))
    encoder = T5Encoder(model)
    before = encoder(tokens)
    assert fp8.quantize(model.encoder.block, CPU) == 7 * len(model.encoder.block)
    assert last_layer.wo.weight.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    own = model(tokens).last_hidden_state
    # Made before, and made and checked afterwards, as processors do it.
    for fused in (encoder, checked_encoder(T5Encoder, model)):
        found = fused(tokens)
        assert found.dtype == own.dtype == before.dtype
        rms, _ = relative_errors(found, own)
        assert rms < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}[dtype]
        if dtype == torch.float32:
            assert relative_errors(found, before)[0] > 100 * rms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_large_text_encoder_changes(family, dtype, model_folder):
    plain, quantized = (
        processor_class(family)(str(model_folder(family)), CPU, dtype, text_dtype=text_dtype)
        for text_dtype in ("auto", "fp8")
    )
    before, after = plain.encode_texts(CAPTIONS), quantized.encode_texts(CAPTIONS)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {FAMILIES[family]}
    (name,) = changed
    assert (after[name].shape, after[name].dtype) == (before[name].shape, before[name].dtype)
    rms, _ = relative_errors(after[name], before[name])
    assert 0.001 < rms < 0.1, rms

    shape = (2, 3, 64, 64) if family == "flux" else (2, 3, 5, 64, 64)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantized.encode_pixels(pixels, None), plain.encode_pixels(pixels, None))
    fields = plain.media_fields(pixels)
    assert bool(fields) == (family == "hunyuan")
    for key, value in quantized.media_fields(pixels).items():
        assert torch.equal(value, fields[key])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_every_layer_are_quantised(family, model_folder):
    processor = processor_class(family)(str(model_folder(family)), CPU, torch.bfloat16, text_dtype="fp8")
    layers = processor._qwen.layers if family == "hunyuan" else getattr(
        processor, {"flux": "_t5", "wan": "_umt5"}[family]
    ).encoder.block  # fmt: skip
    assert not [module for module in layers.modules() if isinstance(module, nn.Linear)]
    matrices = {
        name: tensor.dtype
        for name, tensor in layers.named_parameters()
        if tensor.ndim > 1 and tensor.shape[1] > 1
    }
    others = {name for name, dtype in matrices.items() if dtype != torch.float8_e4m3fn}
    assert all("relative_attention_bias" in name for name in others)
    assert len(matrices) - len(others) == 7 * len(layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_layers_give_the_same_numbers_in_less_memory(family, model_folder):
    plain, together, streamed = (
        processor_class(family)(str(model_folder(family)), CPU, torch.bfloat16, text_dtype=text_dtype)
        for text_dtype in ("auto", "fp8", "fp8")
    )
    sizes = [sum(tensor.nbytes for tensor in weights_of(p._texts.layers)) for p in (plain, streamed)]
    assert sizes[1] < sizes[0]
    plan = MemoryPlan(text="streamed", num_text_layers=2, text_batch_size=2, pixel_bytes=1e9, num_graphs=0)
    streamed._texts.place(plan, CPU)
    assert streamed.takes_turns
    expected = together.encode_texts(CAPTIONS)
    for _ in range(2):
        for name, embeddings in streamed.encode_texts(CAPTIONS).items():
            assert torch.equal(embeddings, expected[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_computes_the_same_weights(dtype):
    linear = random_linear(300, 500, dtype, spread=7)
    on_cpu, on_gpu = Fp8Linear(linear, CPU), Fp8Linear(linear, torch.device("cuda:0"))
    for name, tensor in on_gpu.named_parameters():
        assert tensor.device == CPU
        assert torch.equal(tensor.view(torch.uint8), getattr(on_cpu, name).view(torch.uint8)), name
    assert torch.equal(on_gpu.to("cuda:0").rounded_weight().cpu(), on_cpu.rounded_weight())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_matches_a_cpu_with_and_without_cuda_graphs(family, model_folder, caplog):
    on_cpu, on_gpu = (
        processor_class(family)(str(model_folder(family)), torch.device(device), dtype, text_dtype="fp8")
        for device, dtype in (("cpu", torch.float32), ("cuda:0", torch.bfloat16))
    )
    fused = [part for name, part in vars(on_gpu).items() if name.startswith("_fused")]
    assert None not in fused, caplog.text
    expected = on_cpu.encode_texts(CAPTIONS)[FAMILIES[family]]
    # The third call captures a CUDA graph; it and later calls replay it.
    found = [on_gpu.encode_texts(CAPTIONS)[FAMILIES[family]].cpu() for _ in range(5)]
    assert relative_errors(found[0], expected)[0] < 0.04
    assert all(torch.equal(embeddings, found[0]) for embeddings in found)


# ---- recipe ---------------------------------------------------------------------------------


@pytest.fixture
def recipe(flux_folder):
    def make(**options) -> Recipe:
        return Recipe(processor="flux", model_name=str(flux_folder), max_pixels=128 * 128, **options)

    return make


def test_caches_record_it_and_refuse_another(photos, tmp_path, recipe):
    cache, plain = tmp_path / "cache", tmp_path / "plain"
    prepare(recipe(text_dtype="fp8"), image_dir=photos, output_dir=cache, max_files=2)
    prepare(recipe(), image_dir=photos, output_dir=plain, max_files=2)
    recorded, usual = (json.loads((folder / "metadata.json").read_text()) for folder in (cache, plain))
    assert recorded["recipe"] == {**usual["recipe"], "text_dtype": "fp8"}
    assert "text_dtype" not in usual["recipe"], "caches of earlier releases can still be added to"
    assert recorded["fingerprint"] != usual["fingerprint"]
    assert ResolvedRecipe.from_recorded(recorded["recipe"]).text_dtype == "fp8"
    assert ResolvedRecipe.from_recorded(usual["recipe"]).text_dtype == "auto"
    for mine, others in zip(rows_of(cache), rows_of(plain), strict=True):
        ours, theirs = (torch.load(row["cache_file"], weights_only=True) for row in (mine, others))
        different = {
            name
            for name, value in theirs.items()
            if isinstance(value, torch.Tensor) and not torch.equal(value, ours[name])
        }
        assert different == {"prompt_embeds"}
    for dry_run in (False, True):
        with pytest.raises(
            RunError, match=r"another recipe: text_dtype was 'fp8', now 'auto'; choose another"
        ):
            prepare(recipe(), image_dir=photos, output_dir=cache, dry_run=dry_run)
        with pytest.raises(
            RunError, match=r"another recipe: text_dtype was 'auto', now 'fp8'; choose another"
        ):
            prepare(recipe(text_dtype="fp8"), image_dir=photos, output_dir=plain, dry_run=dry_run)
    result = prepare(recipe(text_dtype="fp8"), image_dir=photos, output_dir=cache, max_files=3)
    assert (result.num_already_done, result.num_encoded) == (2, 1)


def test_stopped_runs_are_resumed_with_it_only(photos, tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    quantized = recipe(text_dtype="fp8")
    prepare(quantized, image_dir=photos, output_dir=tmp_path / "undisturbed", max_files=6)
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        prepare(quantized, image_dir=photos, output_dir=cache, max_files=6, on_progress=stopped_after(3))
    assert not (cache / "metadata.json").exists()
    with pytest.raises(RunError, match="text_dtype was 'fp8', now 'auto'"):
        prepare(recipe(), image_dir=photos, output_dir=cache, max_files=6)
    result = prepare(quantized, image_dir=photos, output_dir=cache, max_files=6)
    assert result.num_already_done + result.num_encoded == 6
    assert result.num_already_done > 0
    assert_same_cache(cache, tmp_path / "undisturbed")


def test_command(photos, tmp_path, capsys, flux_folder):
    command = ["image", "--image_dir", photos, "--max_pixels", 64 * 64, "--max_images", 1, "--quiet"]
    flux = [*command, "--processor", "flux", "--model_name", flux_folder, "--output_dir", tmp_path / "cache"]
    assert run_main(capsys, *flux, "--text_dtype", "fp8")[0] == 0
    assert json.loads((tmp_path / "cache" / "metadata.json").read_text())["recipe"]["text_dtype"] == "fp8"
    status, _, err = run_main(capsys, *flux)
    assert status == 1
    assert "--text_dtype was 'fp8', now 'auto'" in err
    status, _, err = run_main(capsys, *flux, "--text_dtype", "int4")
    assert status == 1
    assert "--text_dtype" in err
    assert "'int4'" in err


@pytest.mark.parametrize("extra", [[], ["--dry_run"]])
def test_tiny_has_nothing_to_quantise(photos, tmp_path, capsys, extra):
    command = ["image", "--image_dir", photos, "--output_dir", tmp_path / "cache", "--quiet", *extra]
    status, out, err = run_main(capsys, *command, "--text-dtype", "fp8")
    assert (status, out) == (1, "")
    assert err == (
        "latentry: --text-dtype is 'fp8', but tiny has no text encoder that can be quantised; leave it out\n"
    )
    assert not (tmp_path / "cache").exists()


def test_unknown_values_and_other_processors():
    with pytest.raises(ConfigError, match="unknown text_dtype 'int4'; choose one of auto, fp8"):
        Recipe(text_dtype="int4")
    can = {name for name in PROCESSORS if "fp8" in processor_class(name).info.text_dtypes}
    assert can == set(PROCESSORS) - {"tiny"}


def test_a_device_without_such_numbers_is_refused(flux_folder, monkeypatch):
    def refuse(*_, **__):
        raise TypeError("Trying to convert Float8_e4m3fn to a backend without it.\nmore")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(
        ConfigError, match=r"the device cpu has no 8-bit .* without it\.\); leave out text_dtype"
    ):
        processor_class("flux")(str(flux_folder), CPU, torch.float32, text_dtype="fp8")


def test_a_model_whose_layers_are_not_found_is_refused(flux_folder, monkeypatch):
    """A cache never records 8-bit weights that were not used."""
    monkeypatch.setattr(fp8, "quantize", lambda *_: 0)
    with pytest.raises(ModelError, match="flux has no linear layers to quantise"):
        processor_class("flux")(str(flux_folder), CPU, torch.float32, text_dtype="fp8")
