"""Running out of device memory, simulated: the run goes on with less, or ends with one line."""

from __future__ import annotations

import pytest
import torch

from latentry import Recipe, prepare
from latentry.encode.running.memory import WithinMemory, load_within_memory
from latentry.errors import RunError
from latentry.processors.tiny import TinyProcessor

CPU = torch.device("cpu")


class Stingy:
    """A processor that can be told to use less, a number of times."""

    def __init__(self, num_smaller_plans: int) -> None:
        self.num_smaller_plans = num_smaller_plans
        self.calls: list[str] = []

    def use_less_memory(self) -> bool:
        self.calls.append("use less")
        self.num_smaller_plans -= 1
        return self.num_smaller_plans >= 0


def doubling(calls: list, most: int):
    """Doubles up to ``most`` numbers at a time."""

    def double(batch):
        calls.append(len(batch))
        if len(batch) > most:
            raise torch.OutOfMemoryError
        return {"doubled": torch.tensor(batch) * 2}

    return double


def test_a_smaller_plan_comes_first():
    processor = Stingy(2)
    tries = iter([torch.OutOfMemoryError, torch.OutOfMemoryError])

    def step(batch):
        if error := next(tries, None):
            raise error
        return {"sum": torch.tensor(batch)}

    assert WithinMemory(processor, CPU).call(step, [1, 2])["sum"].tolist() == [1, 2]
    assert processor.calls == ["use less", "use less"]


def test_batches_are_halved_where_there_is_no_smaller_plan():
    calls: list[int] = []
    columns = WithinMemory(Stingy(0), CPU).call(doubling(calls, 2), list(range(5)))
    assert columns["doubled"].tolist() == [0, 2, 4, 6, 8]
    assert calls == [5, 2, 3, 1, 2]


def test_a_single_sample_that_does_not_fit_is_an_error():
    with pytest.raises(
        RunError, match="the memory of cpu is too small for a single sample; choose a smaller"
    ):
        WithinMemory(Stingy(0), CPU).call(doubling([], 0), [1, 2])


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def step(batch):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        WithinMemory(Stingy(9), CPU).call(step, [1])


def test_a_model_is_loaded_with_a_smaller_budget():
    budgets = []

    def load(budget: float) -> str:
        budgets.append(budget)
        if budget > 3e9:
            raise torch.OutOfMemoryError
        return "loaded"

    assert load_within_memory(load, 8e9, CPU) == "loaded"
    assert budgets == [8e9, 6e9, 4.5e9, 3.375e9, 2.53125e9]


def test_a_model_that_never_loads_is_one_line(caplog):
    def load(budget: float) -> str:
        raise torch.OutOfMemoryError

    with pytest.raises(RunError, match=r"while the model was loaded, with a budget of 0\.7 GB; free"):
        load_within_memory(load, 8e9, CPU)
    assert "trying with less" in caplog.text


@pytest.mark.parametrize("method", ["encode_pixels", "encode_texts", "decode_latents", "media_fields"])
def test_a_run_that_has_no_memory_ends_with_one_line_and_keeps_what_is_finished(
    method, photos, tmp_path, monkeypatch
):
    options = {"image_dir": photos, "output_dir": tmp_path / "cache", "verify": True, "batch_size": 1}
    whole = prepare(Recipe(), **{**options, "output_dir": tmp_path / "whole"})
    original, calls = getattr(TinyProcessor, method), []

    def limited(self, *arguments):
        calls.append(1)
        if len(calls) > 4:
            raise torch.OutOfMemoryError
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TinyProcessor, method, limited)
        if method == "encode_texts":
            patch.setattr("latentry.encode.running.caption_batches.TEXT_BATCH_SIZE", 1)
        with pytest.raises(RunError, match="too small for a single sample"):
            prepare(Recipe(), **options)
    resumed = prepare(Recipe(), **options)
    assert resumed.num_already_done > 0
    assert resumed.num_already_done + resumed.num_encoded == whole.num_encoded


def test_memory_that_runs_out_elsewhere_is_one_line_too(photos, tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("latentry.encode.running.batch_encoder.latent_flags", out_of_memory)
    with pytest.raises(RunError, match="cpu ran out of memory; finished samples are kept") as error:
        prepare(Recipe(), image_dir=photos, output_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)
