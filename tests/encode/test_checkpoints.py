"""Checkpoints: a task that is interrupted in the middle continues there, and the cache has the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import PACKED, SMALL, stopped_after
from PIL import Image

from latentry import Recipe, VideoOptions, prepare
from latentry.cache.write import packed_writer
from latentry.cache.write.workspace import Workspace
from latentry.encode.planning import tasks
from latentry.encode.running import caption_batches, pipeline
from latentry.encode.running.running_task import RunningTask
from latentry.processors.tiny import TinyProcessor
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache, make_counter_clip

NUM_PICTURES = 40
EQUAL_SAMPLES = (0, 1, 2, 4, 5, 6, 7, 8)
"""Pictures that are equal and have the same caption: each still has its own latents."""
FORMATS = ["pt", "meta", "safetensors", "packed"]


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Forty pictures in one bucket, so in one task. The first twelve are equal, captions repeat, and two files cannot
    be read."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(NUM_PICTURES):
        Image.effect_noise((300, 300), 50 + i).save(folder / f"{i:03d}.jpg")
        (folder / f"{i:03d}.txt").write_text(f"caption {4 if i in EQUAL_SAMPLES else i % 7}")
    whole = (folder / "000.jpg").read_bytes()
    for i in range(12):
        (folder / f"{i:03d}.jpg").write_bytes(whole[:20_000] if i in (3, 11) else whole)
    return folder


@pytest.fixture
def small_shards(monkeypatch) -> None:
    """Shards of a few samples: some are full before the interruption, and some are not."""
    monkeypatch.setattr(packed_writer, "TARGET_SHARD_BYTES", 80_000)
    monkeypatch.setattr(packed_writer, "MIN_SHARD_BYTES", 40_000)


def interrupted(run: Callable[..., object], after: int, cache: Path) -> int:
    """Run until the progress shows more than ``after`` samples; how many were encoded by then."""
    encoded: list[int] = []
    stop = stopped_after(after)

    def watch(progress):
        if progress.phase == "encode":
            encoded.append(progress.done - progress.failures)
        stop(progress)

    with pytest.raises(KeyboardInterrupt):
        run(output_dir=cache, on_progress=watch)
    return encoded[-1]


@pytest.mark.parametrize("interval_s", [0, 30], ids=["often", "when stopped"])
@pytest.mark.parametrize("output_format", FORMATS)
def test_interrupted_task_continues(pictures, tmp_path, small_shards, monkeypatch, output_format, interval_s):
    """Interrupted three times within one task: nothing that was reported is encoded again."""
    monkeypatch.setattr(caption_batches, "TEXT_BATCH_SIZE", 2)
    recipe = Recipe(max_pixels=128 * 128, output_format=output_format)
    run = partial(prepare, recipe, image_dir=pictures, batch_size=3, checkpoint_interval_s=interval_s)
    undisturbed = run(output_dir=tmp_path / "undisturbed")
    cache = tmp_path / "cache"
    num_saved = 0
    for after in (9, 7, 10):
        num_reported = interrupted(run, after, cache)
        planned = run(output_dir=cache, dry_run=True)
        assert 0 <= planned.num_already_done - num_saved - num_reported < 3, "the rest of a batch"
        num_saved = planned.num_already_done
    resumed = run(output_dir=cache)
    assert resumed.num_already_done == num_saved > 20
    assert resumed.num_encoded == NUM_PICTURES - 2 - num_saved
    assert [f.name for f in resumed.failures] == [f.name for f in undisturbed.failures]
    assert resumed.buckets == undisturbed.buckets
    assert_same_cache(cache, tmp_path / "undisturbed")


@pytest.mark.parametrize("output_format", ["pt", "packed"])
def test_long_batches_are_saved_at_once(pictures, tmp_path, output_format):
    """If a batch takes longer than the interval, its checkpoint does not wait for the end of the next one."""
    recipe = Recipe(max_pixels=128 * 128, output_format=output_format)
    cache, lags = tmp_path / "cache", []

    def watch(progress):
        if progress.phase == "encode":
            saved = sum(checkpoint.num_samples for checkpoint in Workspace(cache).checkpoints())
            lags.append(progress.done - saved)

    prepare(
        recipe, image_dir=pictures, output_dir=cache, batch_size=1, checkpoint_interval_s=0, on_progress=watch
    )
    assert max(lags[:-1]) <= 1, "all but the sample that is being reported"


def test_equal_samples_keep_their_own_latents(pictures, tmp_path):
    """A resumed run finds a temporary shard with the content of its own first one, and does not write it again."""
    recipe = Recipe(max_pixels=128 * 128, output_format="packed")
    run = partial(prepare, recipe, image_dir=pictures, batch_size=3, checkpoint_interval_s=0)
    run(output_dir=tmp_path / "undisturbed")
    for _ in range(2):
        interrupted(run, 2, tmp_path / "cache")
    run(output_dir=tmp_path / "cache")
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


def test_resumed_task_forms_the_same_batches(pictures, tmp_path, monkeypatch):
    """Of samples and of captions, those after the checkpoint."""
    monkeypatch.setattr(caption_batches, "TEXT_BATCH_SIZE", 3)
    encode, texts = TinyProcessor.encode_pixels, TinyProcessor.encode_texts
    calls: list[object] = []
    monkeypatch.setattr(
        TinyProcessor, "encode_pixels", lambda self, *a: calls.append(len(a[0])) or encode(self, *a)
    )
    monkeypatch.setattr(
        TinyProcessor, "encode_texts", lambda self, c: calls.append(tuple(c)) or texts(self, c)
    )
    run = partial(prepare, SMALL, image_dir=pictures, batch_size=4)
    run(output_dir=tmp_path / "undisturbed")
    undisturbed = list(calls)
    interrupted(run, 22, tmp_path / "cache")
    calls.clear()
    run(output_dir=tmp_path / "cache")
    pixels = [call for call in calls if isinstance(call, int)]
    assert pixels == [call for call in undisturbed if isinstance(call, int)][-len(pixels) :]
    assert 0 < len(pixels) < 6
    captions = [call for call in calls if isinstance(call, tuple)]
    assert set(captions) <= {call for call in undisturbed if isinstance(call, tuple)}


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_interrupted_while_batches_are_on_the_device(pictures, tmp_path, small_shards, monkeypatch, recipe):
    """As on a GPU, whose results come two batches later, across the ends of tasks."""
    due = pipeline._first_is_due
    monkeypatch.setattr(pipeline, "_first_is_due", lambda queued, _: due(queued, 2))
    monkeypatch.setattr(tasks, "task_size_of", lambda *_: lambda bucket: 14)
    monkeypatch.setattr("latentry.encode.inputs.task_size_of", lambda *_: lambda bucket: 14)
    run = partial(prepare, recipe, image_dir=pictures, batch_size=2, checkpoint_interval_s=0)
    run(output_dir=tmp_path / "undisturbed")
    num_saved = 0
    for after in (9, 4, 6):
        num_reported = interrupted(run, after, tmp_path / "cache")
        planned = run(output_dir=tmp_path / "cache", dry_run=True)
        assert planned.num_already_done >= num_saved + num_reported
        num_saved = planned.num_already_done
    assert run(output_dir=tmp_path / "cache").num_already_done == num_saved
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_checkpoint_of_a_task_that_is_cut_differently(pictures, tmp_path, recipe):
    """A changed caption and a new file: the other samples of the checkpoint are still done."""
    run = partial(prepare, recipe, image_dir=pictures)
    num_encoded = interrupted(run, 20, tmp_path / "cache")
    (pictures / "000.txt").write_text("another caption")
    shutil.copy(pictures / "000.jpg", pictures / "new.jpg")
    resumed = run(output_dir=tmp_path / "cache")
    assert resumed.num_already_done == num_encoded - 1
    assert resumed.num_encoded == NUM_PICTURES - 2 + 1 - resumed.num_already_done
    run(output_dir=tmp_path / "fresh")
    items = [list(TextToImageDataset(tmp_path / name)) for name in ("cache", "fresh")]
    for one, other in zip(*items, strict=True):
        assert one["prompt"] == other["prompt"]
        assert torch.equal(one["latent"], other["latent"])
    assert run(output_dir=tmp_path / "cache").num_encoded == 0
    assert not (tmp_path / "cache" / ".latentry").exists()


def test_failure_before_a_checkpoint_is_tried_again(pictures, tmp_path):
    """For example because the disk of the inputs was away."""
    run = partial(prepare, SMALL, image_dir=pictures)
    times = (pictures / "000.jpg").stat()
    whole = (pictures / "000.jpg").read_bytes()
    victim = pictures / "005.jpg"
    os.chmod(victim, 0)
    if os.access(victim, os.R_OK):  # root reads everything
        os.chmod(victim, 0o644)
        victim.write_bytes(whole[:20_000].ljust(len(whole), b"\0"))
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    interrupted(run, 20, tmp_path / "cache")
    os.chmod(victim, 0o644)
    victim.write_bytes(whole)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    resumed = run(output_dir=tmp_path / "cache")
    assert [failure.name for failure in resumed.failures] == ["003.jpg", "011.jpg"]
    assert len(list(TextToImageDataset(tmp_path / "cache"))) == NUM_PICTURES - 2


def test_damaged_checkpoint_is_repaired_with_verify(pictures, tmp_path):
    run = partial(prepare, PACKED, image_dir=pictures)
    interrupted(run, 20, tmp_path / "cache")
    (shard,) = (tmp_path / "cache").glob("*x*/*.latents.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Exception, match=r"the checksum differs.*--verify"):
        run(output_dir=tmp_path / "cache")
    repaired = run(output_dir=tmp_path / "cache", verify=True)
    assert repaired.num_encoded + repaired.num_already_done == NUM_PICTURES - 2
    run(output_dir=tmp_path / "fresh")
    items = [list(TextToImageDataset(tmp_path / name)) for name in ("cache", "fresh")]
    for one, other in zip(*items, strict=True):
        assert torch.equal(one["latent"], other["latent"])


# ---- real processes -------------------------------------------------------------------------

COMMAND = """
import json, sys, time
from latentry import Recipe, VideoOptions, prepare
from latentry.cache.write import packed_writer
from latentry.cli import _stop_at_sigterm
from latentry.encode.planning import tasks
from latentry.processors.tiny import TinyProcessor
options = json.loads(sys.argv[1])
packed_writer.TARGET_SHARD_BYTES, packed_writer.MIN_SHARD_BYTES = 80_000, 40_000
tasks.TASK_SIZE = 14
encode = TinyProcessor.encode_pixels
def slow(self, *arguments):
    time.sleep(options["pause_s"])
    return encode(self, *arguments)
TinyProcessor.encode_pixels = slow
def show(progress):
    if progress.phase == "encode":
        print(progress.done, flush=True)
if __name__ == "__main__":
    video = options["recipe"].pop("video")
    recipe = Recipe(**options["recipe"], video=VideoOptions(**video) if video else None)
    with _stop_at_sigterm():
        result = prepare(recipe, **options["arguments"], on_progress=show)
    print(json.dumps({"encoded": result.num_encoded, "done": result.num_already_done}))
"""


def start(options: dict[str, object], script: Path) -> subprocess.Popen[str]:
    script.write_text(COMMAND)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, previous)


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def saved_samples(cache: Path) -> int:
    files = (cache / ".latentry" / "commits").glob("*.json")
    return sum(len(json.loads(path.read_text())["rows"]) for path in files)


@pytest.fixture
def clips(tmp_path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(12):
        make_counter_clip(folder / f"{i:02d}.mp4", 20 + i, size=(160, 96))
        (folder / f"{i:02d}.txt").write_text(f"caption {i % 3}")
    return folder


IMAGES = {"max_pixels": 128 * 128, "video": None}
CLIPS = {"max_pixels": 128 * 128, "video": {"target_frames": 5}}
FRAMES = {"max_pixels": 128 * 128, "video": {"mode": "frames", "num_frames": 4}}
assert VideoOptions(**CLIPS["video"]) != VideoOptions(**FRAMES["video"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
@pytest.mark.parametrize(
    ("recipe", "output_format"),
    [
        (IMAGES, "pt"),
        (IMAGES, "packed"),
        (CLIPS, "safetensors"),
        (CLIPS, "packed"),
        (FRAMES, "packed"),
        (FRAMES, "meta"),
    ],
    ids=["images-pt", "images-packed", "clips-safetensors", "clips-packed", "frames-packed", "frames-meta"],
)
def test_stopped_process_continues_in_its_task(
    pictures, clips, tmp_path, small_shards, monkeypatch, number, recipe, output_format
):
    monkeypatch.setattr(tasks, "TASK_SIZE", 14)
    recipe = {**recipe, "output_format": output_format}
    inputs = {"video_dir": str(clips)} if recipe["video"] else {"image_dir": str(pictures)}
    arguments = {**inputs, "batch_size": 2, "checkpoint_interval_s": 0}
    options = {"recipe": recipe, "arguments": {**arguments, "output_dir": str(tmp_path / "cache")}}
    process = start({**options, "pause_s": 0.3}, tmp_path / "run.py")
    assert process.stdout is not None
    num_seen = 0
    while num_seen < 7 or (number == signal.SIGKILL and not saved_samples(tmp_path / "cache")):
        num_seen = int(process.stdout.readline() or pytest.fail(process.communicate()[1]))
    process.send_signal(number)
    process.communicate(timeout=120)
    num_saved = saved_samples(tmp_path / "cache")
    assert num_saved > 0
    if number == signal.SIGINT:
        assert num_saved >= num_seen - 2 - 2, "two of them are failures, and two are a batch"
    resumed = finish(start({**options, "pause_s": 0}, tmp_path / "run.py"))
    assert resumed["done"] == num_saved
    video = VideoOptions(**recipe.pop("video")) if recipe["video"] else None
    recipe.pop("video", None)
    undisturbed = prepare(Recipe(**recipe, video=video), **arguments, output_dir=tmp_path / "undisturbed")
    assert resumed["encoded"] + num_saved == undisturbed.num_encoded
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
def test_workers_save_before_they_stop(pictures, tmp_path, small_shards, monkeypatch, recipe, number):
    """With the usual interval, so that only the stop makes checkpoints."""
    monkeypatch.setattr(tasks, "TASK_SIZE", 14)
    arguments = {"image_dir": str(pictures), "output_dir": str(tmp_path / "cache"), "devices": "cpu,cpu"}
    chosen = {**IMAGES, "output_format": recipe.output_format}
    options = {"recipe": chosen, "arguments": arguments, "pause_s": 0.3}
    process = start(options, tmp_path / "run.py")
    assert process.stdout is not None
    while int(process.stdout.readline() or pytest.fail(process.communicate()[1])) < 7:
        pass
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert errors.count("Traceback") == 1, f"only the calling process reports the interruption: {errors}"
    assert list((tmp_path / "cache" / ".latentry" / "commits").glob("*.checkpoint.json"))
    num_saved = saved_samples(tmp_path / "cache")
    assert 7 - 2 - 1 <= num_saved < NUM_PICTURES - 2
    resumed = prepare(recipe, image_dir=pictures, output_dir=tmp_path / "cache")
    assert resumed.num_already_done == num_saved
    prepare(recipe, image_dir=pictures, output_dir=tmp_path / "undisturbed")
    assert_same_cache(tmp_path / "cache", tmp_path / "undisturbed")


def test_time_decides_when_a_checkpoint_is_written(pictures, tmp_path, monkeypatch):
    """With a clock that moves by ten seconds a batch: after three batches, a fourth would end after the interval."""
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    finished = RunningTask.finished_checkpoint
    monkeypatch.setattr(RunningTask, "finished_checkpoint", lambda task, wait=True: finished(task, wait=True))
    commit = Workspace.commit
    sizes: list[int] = []

    def watched(workspace, found):
        sizes.append(len(found.rows))
        commit(workspace, found)

    monkeypatch.setattr(Workspace, "commit", watched)
    prepare(SMALL, image_dir=pictures, output_dir=tmp_path / "cache", batch_size=1, checkpoint_interval_s=39)
    assert sizes == [*range(3, NUM_PICTURES - 2, 3), NUM_PICTURES - 2]
