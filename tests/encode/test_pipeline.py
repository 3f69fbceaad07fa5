"""The parts of the pipeline: reading ahead, queueing on the device, captions, threads."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch
from helpers import SMALL

import latentry
from latentry import prepare
from latentry.encode.running.batch_encoder import QueuedBatch
from latentry.encode.running.pipeline import _first_is_due
from latentry.encode.running.read_ahead import ReadAhead
from latentry.encode.running.running_task import RunningTask
from latentry.engines import local
from latentry.media.image_reader import ImageReader


def test_encoded_captions_are_released_after_use(monkeypatch):
    from latentry.encode.running.caption_batches import CaptionPasses
    from latentry.encode.running.memory import WithinMemory
    from latentry.processors.tiny import TinyProcessor
    from latentry.types import Bucket, Caption, PlannedSample, SourceFile, Task

    samples = [
        PlannedSample(
            SourceFile(f"{i}.jpg", 1, 1), Caption(f"number {i % 40}", "txt"), 64, 64, 0, Bucket(64, 64)
        )
        for i in range(80)
    ]
    monkeypatch.setattr("latentry.encode.running.caption_batches._SMALL_BYTES", 64)
    device = torch.device("cpu")
    processor = TinyProcessor("embedded", device, torch.float32)
    passes = CaptionPasses(processor, WithinMemory(processor, device), max_samples_ahead=0)
    ((_, texts),) = passes.begin([Task("id", Bucket(64, 64), tuple(samples))])
    for sample in samples[:40]:
        for field in passes.take(texts, sample.caption.text).fields.values():
            assert field.untyped_storage().nbytes() <= max(field.nbytes, 64)
    assert len(texts._encoded) == 40
    for sample in samples[40:]:
        texts.drop(sample.caption.text)
    assert not texts._encoded


def test_end_of_task_does_not_count_as_queued_batch():
    nothing = torch.empty(0)
    end = RunningTask(None, None, None, 1)
    batch = QueuedBatch(end, [], nothing, nothing, {}, [], [], None)
    for queued, due in (
        ([], False),
        ([batch, batch], False),
        ([batch, batch, batch], True),
        ([batch, batch, end], False),
        ([batch, batch, end, batch], True),
        ([batch, end, batch], False),
        ([end, batch], True),
    ):
        assert _first_is_due(queued, 2) == due, queued
        assert _first_is_due(queued, 0) == bool(queued), queued


def test_read_ahead_starts_small(photos, tmp_path, monkeypatch):
    """Clips that are decoded beside the first make the device wait for it."""
    begun: list[object] = []
    ahead: list[int] = []
    batches = ReadAhead.batches

    class Readers:
        def submit(self, function, *arguments):
            begun.append(arguments)
            future = Future()
            future.set_result(function(*arguments))
            return future

    def watched(self, tasks, on_failure):
        self._pool = Readers()
        for number, batch in enumerate(batches(self, tasks, on_failure)):
            ahead.append(len(begun) - number)
            yield batch

    monkeypatch.setattr(ReadAhead, "batches", watched)
    monkeypatch.setattr(local, "num_cores", lambda: 4)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", batch_size=1)
    assert ahead[0] == 2
    assert max(ahead) > 3


def test_decoding_threads_use_one_torch_thread_each():
    from latentry.encode.running.device import single_threaded_pool

    before = torch.get_num_threads()
    with single_threaded_pool(3) as pool:

        def work(_):
            torch.nn.functional.interpolate(torch.rand(1, 3, 256, 256), size=(64, 64), mode="bicubic")
            return torch.get_num_threads()

        assert list(pool.map(work, range(6))) == [1] * 6
    assert torch.get_num_threads() == before


def test_nothing_is_written_after_a_failed_run(photos, tmp_path, monkeypatch):
    from latentry.cache.write import file_writer as writer

    parts = writer.cache_file_parts

    def slow(*arguments):
        time.sleep(0.2)
        return parts(*arguments)

    monkeypatch.setattr(writer, "cache_file_parts", slow)

    def fail(progress):
        if progress.phase == "encode" and progress.done > 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=fail)
    before = sorted((tmp_path / "cache").rglob("*"))
    time.sleep(0.6)
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_interrupting_planning_does_not_wait_for_all_headers(tmp_path, monkeypatch):

    (tmp_path / "photos").mkdir()
    for i in range(2000):
        (tmp_path / "photos" / f"{i}.jpg").touch()
    probed = []
    monkeypatch.setattr(
        ImageReader,
        "probe",
        lambda self, path: (
            probed.append(path)
            or time.sleep(0.001)
            or (_ for _ in ()).throw(latentry.errors.MediaError("is odd"))
        ),
    )

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=tmp_path / "photos", output_dir=tmp_path / "cache", on_progress=stop)
    assert len(probed) < 1500
