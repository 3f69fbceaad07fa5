"""Passes over captions: many tasks at a time where text encoders take turns, with the same batches as one at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from helpers import stopped_after

from latentry import Recipe, prepare
from latentry.encode.planning import tasks
from latentry.encode.running import caption_batches
from latentry.encode.running.caption_batches import CaptionPasses
from latentry.encode.running.memory import WithinMemory
from latentry.processors import PROCESSORS
from latentry.processors.tiny import TinyProcessor
from latentry.testing import assert_same_cache
from latentry.types import Bucket, Caption, PlannedSample, SourceFile, Task


class TurnTaking(TinyProcessor):
    """Takes turns, and records what it does."""

    events: ClassVar[list[str | tuple[str, ...]]] = []
    is_open = False

    @property
    def takes_turns(self) -> bool:
        return True

    @contextmanager
    def text_pass(self):
        TurnTaking.is_open = True
        self.events.append("pass")
        yield
        TurnTaking.is_open = False

    def encode_texts(self, captions):
        assert self.is_open, "captions are encoded in passes only"
        self.events.append(tuple(captions))
        return super().encode_texts(captions)

    def encode_pixels(self, pixels, seeds):
        assert not self.is_open
        self.events.append("pixels")
        return super().encode_pixels(pixels, seeds)


@pytest.fixture
def small_tasks(monkeypatch):
    """Tasks of three samples, and batches of two captions."""
    monkeypatch.setattr(tasks, "TASK_SIZE", 3)
    monkeypatch.setattr(caption_batches, "TEXT_BATCH_SIZE", 2)
    monkeypatch.setitem(PROCESSORS, "turns", f"{__name__}:TurnTaking")
    TurnTaking.events.clear()


def caption_size(count: int) -> int:
    """Bytes of the embeddings of this many captions."""
    one = TinyProcessor("embedded", torch.device("cpu"), torch.float32).encode_texts(["a"])
    return count * sum(column.nbytes for column in one.values())


def test_one_pass_serves_several_tasks(photos, tmp_path, small_tasks, monkeypatch):
    plain = prepare(Recipe(), image_dir=photos, output_dir=tmp_path / "plain")
    assert plain.num_encoded >= 9
    prepare(Recipe(processor="turns"), image_dir=photos, output_dir=tmp_path / "one_pass")
    events = list(TurnTaking.events)
    assert events.count("pass") == 1
    assert events[0] == "pass"
    batches = [event for event in events if isinstance(event, tuple)]
    assert len(batches) > plain.num_encoded // 3
    assert events.index("pixels") > events.index(batches[-1]), "first all captions, then all pixels"

    TurnTaking.events.clear()
    monkeypatch.setattr(caption_batches, "caption_memory", lambda: caption_size(4))
    prepare(Recipe(processor="turns"), image_dir=photos, output_dir=tmp_path / "passes")
    assert TurnTaking.events.count("pass") > 1
    assert sorted(event for event in TurnTaking.events if isinstance(event, tuple)) == sorted(batches)
    assert_same_cache(tmp_path / "one_pass", tmp_path / "passes")


def test_a_resumed_run_forms_the_same_batches_of_captions(photos, tmp_path, small_tasks, monkeypatch):
    monkeypatch.setattr(caption_batches, "caption_memory", lambda: caption_size(3))
    recipe = Recipe(processor="turns")
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "undisturbed")
    batches = {event for event in TurnTaking.events if isinstance(event, tuple)}
    TurnTaking.events.clear()
    for count in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, image_dir=photos, output_dir=tmp_path / "cache", on_progress=stopped_after(count))
        TurnTaking.is_open = False
    prepare(recipe, image_dir=photos, output_dir=tmp_path / "cache")
    assert {event for event in TurnTaking.events if isinstance(event, tuple)} == batches
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


def test_captions_of_failed_samples_are_not_waited_for(photos, tmp_path, small_tasks):
    for path in sorted(photos.rglob("*.jpg"))[:3]:
        path.write_bytes(b"\xff\xd8 not an image")
    result = prepare(Recipe(processor="turns"), image_dir=photos, output_dir=tmp_path / "cache")
    assert result.num_encoded > 0
    assert TurnTaking.events.count("pixels") == result.num_encoded


def test_one_of_several_workers_leaves_tasks_to_the_others(photos, tmp_path, small_tasks):
    processor = TurnTaking("embedded", torch.device("cpu"), torch.float32)
    samples = [
        PlannedSample(SourceFile(f"{i}.jpg", 1, 1), Caption(f"number {i}", "txt"), 64, 64, 0, Bucket(64, 64))
        for i in range(12)
    ]
    queue = iter([Task(str(i), Bucket(64, 64), tuple(samples[3 * i : 3 * i + 3])) for i in range(4)])
    passes = CaptionPasses(processor, WithinMemory(processor, torch.device("cpu")), max_samples_ahead=3)
    begun = passes.begin(queue)
    _, captions = next(begun)
    passes.take(captions, "number 0")
    assert [task.id for task in queue] == ["2", "3"], "one task ahead, and the rest for other workers"
    assert [task.id for task, _ in begun] == ["1"]


def test_captions_that_no_sample_needs_are_not_encoded(small_tasks):
    processor = TurnTaking("embedded", torch.device("cpu"), torch.float32)
    samples = [
        PlannedSample(SourceFile(f"{i}.jpg", 1, 1), Caption(f"number {i}", "txt"), 64, 64, 0, Bucket(64, 64))
        for i in range(6)
    ]
    passes = CaptionPasses(processor, WithinMemory(processor, torch.device("cpu")), max_samples_ahead=9)
    ((_, captions),) = passes.begin([Task("id", Bucket(64, 64), tuple(samples), num_finished=1)])
    captions.drop("number 2")
    captions.drop("number 3")
    passes.take(captions, "number 1")
    assert [event for event in TurnTaking.events if event != "pass"] == [
        ("number 0", "number 1"),
        ("number 4", "number 5"),
    ]
    assert not captions.has("number 0"), "an interrupted run has encoded its sample"
    assert captions.has("number 5")


class FailsToOpen(TurnTaking):
    """Runs out of memory when its first pass begins."""

    num_failures = 1

    def text_pass(self):
        if FailsToOpen.num_failures:
            FailsToOpen.num_failures -= 1
            raise torch.OutOfMemoryError
        return super().text_pass()

    def use_less_memory(self) -> bool:
        self.events.append("less")
        return True


def test_memory_that_runs_out_when_a_pass_begins_gives_a_smaller_plan(
    photos, tmp_path, small_tasks, monkeypatch
):
    monkeypatch.setitem(PROCESSORS, "turns", f"{__name__}:FailsToOpen")
    result = prepare(Recipe(processor="turns"), image_dir=photos, output_dir=tmp_path / "cache")
    assert not result.failures
    assert TurnTaking.events[:2] == ["less", "pass"]


def test_a_share_of_main_memory_is_used(monkeypatch):
    for memory, expected in ((16 << 30, 1 << 30), (1 << 40, 4 << 30)):
        monkeypatch.setattr(caption_batches, "main_memory", lambda memory=memory: memory)
        assert caption_batches.caption_memory() == expected
