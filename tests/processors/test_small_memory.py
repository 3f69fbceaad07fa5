"""Processors with little device memory, on a CPU: the same numbers, whatever is where.

The tiny models need kilobytes, so the amounts that the plan reserves for real models are set to zero.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latentry.errors import RunError
from latentry.processors import processor_class
from latentry.processors.fused.causal import TemporalChunks
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
    return processor._sizes()


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
        processor._plan_for_others = replace(processor.memory_plan, pixel_bytes=memory)
        lengths.clear()
        mine = processor.encode_pixels(clip, None)
        assert lengths == expected
        assert (mine.float() - whole.float()).abs().max() <= 2e-3 * whole.abs().max()
    assert "tiles" not in caplog.text
    lengths.clear()
    processor._plan_for_others = processor._plan_for_large_samples = replace(
        processor.memory_plan, pixel_bytes=memory - 1
    )
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
    for memory, most, expected in (
        (eight, 8, 8),
        (eight, 13, 8),
        (eight, 7, 7),
        (eight - 1, 8, 4),
        (one, 8, 1),
        (one - 1, 8, 0),
    ):
        assert encoder.max_batch_size(shape, most, memory) == expected
    assert processor.max_batch_size(shape, 13) == 13, "a batch that fits is not split"
    small = replace(processor.memory_plan, pixel_bytes=one)
    processor._plan_for_others = processor._plan_for_large_samples = small
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


@pytest.mark.parametrize("family", FAMILIES)
def test_captions_are_encoded_in_batches_that_fit(family, load):
    processor = load(family)
    processor.memory_plan = replace(processor.memory_plan, text_batch_size=2)
    sizes = []
    encode = processor._encode_texts
    processor._encode_texts = lambda captions: sizes.append(len(captions)) or encode(captions)
    columns = processor.encode_texts(CAPTIONS[:3])
    assert sizes == [2, 1]
    assert all(len(column) == 3 for column in columns.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_sample_gets_the_memory_of_the_text_encoders_before_it_is_tiled(family, load, caplog):
    unlimited = load(family)
    sizes = sizes_of(unlimited)
    small, large = noise(family), torch.cat([noise(family)] * 2, dim=-1)
    expected = [unlimited.encode_pixels(pixels, None) for pixels in (small, large, small)]
    processor = load(family, sizes.budget_for_all)
    assert processor.memory_plan.text == "together"
    encoder = processor._encoder
    one = encoder._bytes_needed((1, *small.shape[1:]))
    for name, memory in (("_plan_for_others", one), ("_plan_for_large_samples", 4 * one)):
        setattr(processor, name, replace(getattr(processor, name), pixel_bytes=memory))
    seen = []
    for pixels, wanted in zip((small, large, small), expected, strict=True):
        batches = [processor.max_batch_size(tensor.shape[1:], 4) for tensor in (small, large)]
        # HunyuanVideo's own modules take one clip at a time, so a batch of clips needs no more memory.
        expected_batches = [4, 4] if family == "hunyuan" else [1, 2]
        assert batches == expected_batches, "batches depend on the shape, not on what came before"
        mine = processor.encode_pixels(pixels, None)
        assert (mine.float() - wanted.float()).abs().max() <= 2e-3 * wanted.abs().max()
        seen.append((processor.memory_plan.text, encoder._memory_bytes == one))
    assert seen == [("together", True), ("turns", False), ("turns", True)]
    assert "tiles" not in caplog.text
    captions = processor.encode_texts(CAPTIONS)
    assert all(torch.equal(captions[key], column) for key, column in unlimited.encode_texts(CAPTIONS).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_and_image_encoder_come_for_a_moment(family, load):
    processor = load(family, sizes_of(load(family)).smallest_budget)
    pixels, events = noise(family), []
    latents = processor.encode_pixels(pixels, None)
    for name, offloaded in processor._offloaded.items():
        upload, release = offloaded.upload, offloaded.release
        offloaded.upload = lambda name=name, upload=upload: events.append(f"{name} comes") or upload()
        offloaded.release = lambda name=name, release=release: events.append(f"{name} goes") or release()
    processor.decode_latents(latents)
    processor.media_fields(pixels)
    expected = ["decoder comes", "decoder goes"]
    assert events == expected + (["image_encoder comes", "image_encoder goes"] if family == "hunyuan" else [])


def test_using_less_memory_moves_the_text_encoders(load):
    sizes = sizes_of(load("flux"))
    processor = load("flux", sizes.budget_for_all)
    assert processor.memory_plan.text == "together"
    assert not processor.takes_turns
    assert processor.use_less_memory()
    assert processor.takes_turns
    assert isinstance(processor._texts.layers, StreamedLayers)


def test_text_encoders_that_left_the_device_do_not_come_back(load):
    sizes = sizes_of(load("flux"))
    processor = load("flux", 2 * sizes.budget_for_all)
    processor._plan_for_others = replace(processor._plan_for_others, pixel_bytes=1)
    processor.encode_pixels(noise("flux"), None)
    assert processor.takes_turns
    assert not any(tensor.is_inference() for tensor in processor._texts.weights)
    assert processor.use_less_memory()
    assert processor.memory_plan.text == "turns"
    assert processor._plan_for_others.text == "together", "which decides the batches of other samples"


def test_what_is_available_limits_the_smaller_plan(load, monkeypatch):
    sizes = sizes_of(load("flux"))
    processor = load("flux", sizes.budget_for_all)
    monkeypatch.setattr("latentry.processors.diffusers_model.available_memory", lambda device: 1e9)
    assert processor.use_less_memory()
    assert processor._device_memory < 1.1e9


def test_working_memory_of_real_clips_is_what_was_measured():
    """On an H200, the clip included. Estimates may be a little higher, never lower."""
    for vae, channels, shape, measured in (
        ("wan", 288, (3, 81, 480, 832), {4: 3.68, 8: 6.53, 16: 10.01}),
        ("hunyuan", 256, (3, 121, 480, 848), {4: 4.74, 8: 7.82, 16: 11.93}),
    ):
        constants = {"wan": {"live": 1.9, "kept": 10.5}, "hunyuan": {"live": 2.5, "kept": 14}}[vae]
        chunks = TemporalChunks(channels, 4, 2, **constants)
        inputs_gb = 15 * shape[1] * shape[2] * shape[3] / 1e9
        for length, peak_gb in measured.items():
            estimate = chunks.bytes_needed(shape, length) / 1e9
            assert peak_gb + inputs_gb - 0.1 <= estimate <= 1.25 * (peak_gb + inputs_gb), (
                vae,
                length,
                estimate,
            )
