"""The planner of passes, as a pure function of sizes and budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentry.errors import RunError
from latentry.processors.memory.plan import (
    FULL_SPEED_BYTES,
    RESERVED_BYTES,
    TEXT_BATCH_SIZE,
    ModelSizes,
    gigabytes,
    plan_memory,
)

GB = 1_000_000_000
FLUX = ModelSizes(
    vae_encoder=68 * GB // 1000,
    decoder=100 * GB // 1000,
    num_text_layers=24,
    text_layer=386 * GB // 1000,
    other_text=510 * GB // 1000,
    caption=50 * GB // 1000,
)
WAN = ModelSizes(
    vae_encoder=107 * GB // 1000,
    decoder=147 * GB // 1000,
    num_text_layers=24,
    text_layer=386 * GB // 1000,
    other_text=2100 * GB // 1000,
    caption=35 * GB // 1000,
)
HUNYUAN = ModelSizes(
    vae_encoder=779 * GB // 1000,
    decoder=1743 * GB // 1000,
    image_encoder=860 * GB // 1000,
    num_text_layers=28,
    text_layer=466 * GB // 1000,
    other_text=1530 * GB // 1000,
    caption=211 * GB // 1000,
)

sizes = st.builds(
    ModelSizes,
    vae_encoder=st.integers(0, 5 * GB),
    decoder=st.integers(0, 5 * GB),
    image_encoder=st.integers(0, 3 * GB),
    num_text_layers=st.integers(2, 60),
    text_layer=st.integers(1, 2 * GB),
    other_text=st.integers(0, 5 * GB),
    caption=st.integers(1, GB),
)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (FLUX, {140: "together", 24: "together", 16: "turns", 12: "turns", 8: "streamed"}),
        (WAN, {140: "together", 24: "together", 16: "turns", 12: "streamed", 8: "streamed"}),
        (HUNYUAN, {140: "together", 24: "turns", 16: "streamed", 12: "streamed", 8: "streamed"}),
    ],
    ids=["flux", "wan", "hunyuan"],
)
def test_models_of_real_size_on_common_cards(model, expected):
    assert {budget: plan_memory(model, budget * GB).text for budget in expected} == expected


@given(sizes, st.integers(0, 200 * GB))
def test_everything_that_is_on_the_device_at_once_fits(model, budget):
    if budget < model.smallest_budget:
        with pytest.raises(RunError, match=f"at least {gigabytes(model.smallest_budget)} of device memory"):
            plan_memory(model, budget)
        return
    plan = plan_memory(model, budget)
    captions = plan.text_batch_size * model.caption
    on_device = RESERVED_BYTES + model.vae_encoder
    if plan.text == "together":
        assert (
            on_device + model.decoder + model.image_encoder + model.text + captions + plan.pixel_bytes
            <= budget
        )
        assert plan.pixel_bytes >= FULL_SPEED_BYTES
        assert plan.text_batch_size == TEXT_BATCH_SIZE
    else:
        assert on_device + model.other_text + plan.num_text_layers * model.text_layer + captions <= budget
        assert on_device + plan.pixel_bytes + (model.image_encoder if plan.num_graphs else 0) <= budget
        assert (plan.num_text_layers == model.num_text_layers) == (plan.text == "turns")
        assert plan.num_text_layers >= 2
    assert plan.text_batch_size in (1, 2, 4, 8, 16, 32)


@given(sizes, st.integers(0, 200 * GB), st.integers(0, 100 * GB))
def test_more_memory_is_never_used_worse(model, budget, more):
    budget = max(budget, model.smallest_budget)
    order = ["streamed", "turns", "together"]
    small, large = plan_memory(model, budget), plan_memory(model, budget + more)
    # Larger batches of captions come first, and may leave fewer layers on the device.
    ranks = [(plan.text_batch_size, order.index(plan.text)) for plan in (small, large)]
    assert ranks == sorted(ranks)
    if small.text == large.text:
        assert small.pixel_bytes <= large.pixel_bytes or large.num_graphs > small.num_graphs


def test_without_a_limit_everything_stays_on_the_device():
    plan = plan_memory(HUNYUAN, math.inf)
    assert (plan.text, plan.num_graphs, plan.pixel_bytes) == ("together", 2, math.inf)


def test_a_budget_that_is_too_small_is_one_line():
    with pytest.raises(RunError) as error:
        plan_memory(HUNYUAN, 2 * GB)
    assert str(error.value) == (
        "this model needs at least 4.0 GB of device memory, and 2.0 GB may be used; free memory on the device or raise "
        "--device_memory, or use --devices cpu"
    )


def test_plans_say_what_they_do():
    assert str(plan_memory(FLUX, 24 * GB)) == "the text encoders stay on the device; 12.1 GB for pixels"
    assert "text encoders and VAE take turns" in str(plan_memory(FLUX, 12 * GB))
    assert "layers of the text encoder at a time take turns with the VAE" in str(plan_memory(FLUX, 8 * GB))


@given(sizes, st.integers(0, 200 * GB), st.integers(0, 100 * GB))
def test_more_memory_never_leaves_less_for_a_large_sample(model, budget, more):
    budget = max(budget, model.smallest_budget)
    small, large = (plan_memory(model, b, for_large_samples=True) for b in (budget, budget + more))
    assert small.text != "together"
    assert small.pixel_bytes <= large.pixel_bytes
    assert plan_memory(model, budget).pixel_bytes <= small.pixel_bytes
