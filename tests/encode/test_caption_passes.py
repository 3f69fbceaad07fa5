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
from latentry.processors import PROCESSORS
from latentry.processors.tiny import TinyProcessor
from latentry.testing import assert_same_cache


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


def test_a_share_of_main_memory_is_used(monkeypatch):
    for memory, expected in ((16 << 30, 1 << 30), (1 << 40, 4 << 30)):
        monkeypatch.setattr(caption_batches, "main_memory", lambda memory=memory: memory)
        assert caption_batches.caption_memory() == expected
