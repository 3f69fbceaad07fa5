"""Processors with little device memory, on a CPU: the same numbers, whatever is where.

The tiny models need kilobytes, so the amounts that the plan reserves for real models are set to zero.
"""

from __future__ import annotations

import pytest
import torch

from latentry.errors import RunError
from latentry.processors import processor_class
from latentry.processors.memory import plan
from latentry.processors.memory.offload import StreamedLayers

CPU = torch.device("cpu")
CAPTIONS = ["a cat", 'a video of waves at sunset, "camera" panning slowly', "", "one more"]
FAMILIES = ["flux", "wan", "hunyuan"]


@pytest.fixture
def nothing_reserved(monkeypatch):
    for name in ("RESERVED_BYTES", "LEAST_PIXEL_BYTES"):
        monkeypatch.setattr(plan, name, 0)


@pytest.fixture
def load(model_folder, nothing_reserved):
    """``load(family, budget)``, with a budget in bytes or None for no limit."""

    def load(family: str, budget: float | None = None, dtype: torch.dtype = torch.float32):
        options = {} if budget is None else {"device_memory": budget}
        return processor_class(family)(str(model_folder(family)), CPU, dtype, **options)

    return load


def sizes_of(processor) -> plan.ModelSizes:
    found: list[plan.ModelSizes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "latentry.processors.diffusers_model.plan_memory", lambda sizes, budget: found.append(sizes)
        )
        processor._plan(0)
    return found[0]


def noise(family: str) -> torch.Tensor:
    size = (2, 3, 64, 96) if family == "flux" else (1, 3, 9, 64, 96)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", ["turns", "streamed", "smallest"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_placement_gives_the_same_numbers(family, mode, load):
    unlimited = load(family)
    assert unlimited.memory_plan.text == "together"
    sizes = sizes_of(unlimited)
    budget = {
        "turns": sizes.vae_encoder + sizes.text + 32 * sizes.caption,
        "streamed": sizes.vae_encoder + sizes.text + 32 * sizes.caption - sizes.text_layer,
        "smallest": sizes.smallest_budget,
    }[mode]
    small = load(family, budget)
    assert small.memory_plan.text in {"smallest": ("turns", "streamed")}.get(mode, (mode,))
    assert small.takes_turns
    for _ in range(2):
        with small.text_pass():
            mine = [small.encode_texts(CAPTIONS), small.encode_texts(CAPTIONS[:1])]
        expected = [unlimited.encode_texts(CAPTIONS), unlimited.encode_texts(CAPTIONS[:1])]
        for one, other in zip(mine, expected, strict=True):
            assert one.keys() == other.keys()
            for key, column in other.items():
                assert torch.equal(one[key], column), key
        pixels = noise(family)
        for key, column in unlimited.media_fields(pixels).items():
            assert torch.equal(small.media_fields(pixels)[key], column)
    latents = unlimited.encode_pixels(noise(family), None)
    difference = small.decode_latents(latents).float() - unlimited.decode_latents(latents).float()
    assert difference.abs().mean() < 16, "up to what tiles do not see of each other"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_encoders_are_in_place_only_during_a_pass(family, load):
    sizes = sizes_of(load(family))
    small = load(family, sizes.smallest_budget)
    layers = small._texts.layers
    assert isinstance(layers, StreamedLayers)
    assert not layers.is_open
    with small.text_pass():
        assert layers.is_open
        with small.text_pass():
            pass
        assert layers.is_open, "passes may be nested"
    assert not layers.is_open
    small.encode_texts(["outside of a pass"])
    assert not layers.is_open


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_encoders_work_with_streamed_layers(family, load):
    unlimited, small = load(family), load(family, sizes_of(load(family)).smallest_budget)
    for processor in (unlimited, small):
        with processor.text_pass():
            processor.use_fused_encoders()
    expected = unlimited.encode_texts(CAPTIONS)
    for key, column in small.encode_texts(CAPTIONS).items():
        assert torch.equal(column, expected[key]), key


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_clips_get_shorter_chunks_before_they_are_tiled(family, load, caplog):
    processor = load(family)
    processor.use_fused_encoders()
    encoder = processor._encoder
    clip = noise(family)
    whole = processor.encode_pixels(clip, None)
    lengths = []
    split = encoder._fused._chunks.split
    encoder._fused._chunks.split = lambda frames, most: [
        lengths.append(len(chunk)) or chunk for chunk in split(frames, most)
    ]
    for memory, expected in (
        (encoder._fused._chunks.bytes_needed(clip.shape[1:], 8), [9]),
        (encoder._fused._chunks.bytes_needed(clip.shape[1:]), [1, 4, 4]),
    ):
        encoder.use_memory(memory, num_graphs=1)
        lengths.clear()
        mine = processor.encode_pixels(clip, None)
        assert lengths == expected
        assert (mine.float() - whole.float()).abs().max() <= 2e-3 * whole.abs().max()
    assert "tiles" not in caplog.text
    lengths.clear()
    encoder.use_memory(memory - 1, num_graphs=1)
    for _ in range(2):
        tiled = processor.encode_pixels(clip, None)
    assert caplog.text.count("9x64x96 does not fit into the device's memory as a whole") == 1
    assert tiled.shape == whole.shape
    assert (tiled.float() - whole.float()).norm() < 0.3 * whole.float().norm()


def test_batches_of_images_follow_from_the_memory(load):
    processor = load("flux")
    processor.use_fused_encoders()
    encoder = processor._encoder
    shape = (3, 64, 96)
    one, eight = (encoder._bytes_needed((n, *shape)) for n in (1, 8))
    for memory, expected in ((eight, 8), (eight - 1, 4), (one, 1), (one - 1, 1)):
        encoder.use_memory(memory, num_graphs=1)
        assert processor.max_batch_size(shape, 8) == expected
        assert processor.max_batch_size(shape, 13) >= expected
    encoder.use_memory(one, num_graphs=1)
    sizes = []
    encode = processor._encode_pixels
    processor._encode_pixels = lambda pixels, seeds: sizes.append(len(pixels)) or encode(pixels, seeds)
    assert processor.encode_pixels(noise("flux"), [3, 4]).shape[0] == 2
    assert sizes == [1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_using_less_memory_ends_with_a_line_that_names_enough(family, load, caplog):
    unlimited = load(family)
    sizes = sizes_of(unlimited)
    processor = load(
        family,
        plan.FULL_SPEED_BYTES + sizes.vae_encoder + sizes.decoder + sizes.text * 3 + 64 * sizes.caption,
    )
    assert processor.memory_plan.text == "together"
    expected = unlimited.encode_texts(CAPTIONS)
    seen = []

    def use_less_and_less() -> None:
        while processor.use_less_memory():
            seen.append(processor.memory_plan.text)
            for key, column in processor.encode_texts(CAPTIONS).items():
                assert torch.equal(column, expected[key]), key

    with pytest.raises(RunError, match=r"out of memory with 6\.\d GB, .* about [78]\.\d GB would do"):
        use_less_and_less()
    assert "together" not in seen
    assert "the device ran out of memory: encoding continues with" in caplog.text


def test_a_cpu_has_nothing_to_give_up(load):
    assert not load("flux").use_less_memory()
