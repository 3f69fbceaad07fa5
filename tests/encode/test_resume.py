"""Interrupted runs: killed, stopped, resumed, overwritten; the cache is that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import PACKED, SMALL, edit_json, files_of, rows_of, stopped_after

from latentry import Recipe, prepare
from latentry.encode.planning import tasks
from latentry.errors import ConfigError, MetadataError, RunError
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache

COMMAND = """
import sys
from latentry import Recipe, prepare
from latentry.encode.planning import tasks
tasks.TASK_SIZE = 2
result = prepare(Recipe(max_pixels=128 * 128), image_dir=sys.argv[1], output_dir=sys.argv[2], shard_size=5,
                 devices=sys.argv[3])
sys.exit(result.exit_status)
"""


def start(photos: Path, cache: Path, devices: str = "cpu") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(photos), str(cache), devices],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (0, 2), errors.decode()
    return process.returncode


@pytest.fixture
def undisturbed(photos, tmp_path, monkeypatch) -> Path:
    (photos / "broken.jpg").write_bytes((photos / "space" / "astronaut.jpg").read_bytes()[:20_000])
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "undisturbed", shard_size=5)
    return tmp_path / "undisturbed"


def test_drafts_of_the_metadata_are_removed(photos, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    names = ("metadata_shard_0000.json", "metadata.json", "packed_index_b.arrow", "failures.jsonl")
    drafts = [cache / f".{name}.{'0a' * 16}.tmp" for name in names]
    for draft in drafts:
        draft.touch()
    (cache / ".notes.tmp").touch()
    prepare(SMALL, image_dir=photos, output_dir=cache)
    assert [path.exists() for path in drafts] == [False] * 4
    assert (cache / ".notes.tmp").exists(), "only files that a run writes are removed"


@pytest.mark.slow
def test_resume_after_kill_at_random_points(photos, tmp_path, undisturbed):
    rng = random.Random(0)
    cache = tmp_path / "cache"
    kills = 0
    for _ in range(12):
        process = start(photos, cache)
        # From the first commit on there is something to lose; importing takes the seconds before.
        while process.poll() is None and not (cache / ".latentry").exists():
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
        if process.poll() is not None:
            process.communicate()
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills >= 1
    assert finish(start(photos, cache)) == 2
    assert_same_cache(cache, undisturbed)


def test_resume_after_interrupt_at_each_task(photos, tmp_path, undisturbed, monkeypatch):
    """Every single commit is a point to go on from, and no committed task is done twice."""
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    cache = tmp_path / "cache"
    encoded = []
    while True:
        mine: list[str] = []

        def stop_soon(progress, mine=mine):
            if progress.phase == "encode":
                mine.append("sample")
                if len(mine) > 3:
                    raise KeyboardInterrupt

        try:
            result = prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5, on_progress=stop_soon)
        except KeyboardInterrupt:
            encoded.append(len(mine))
            assert len(encoded) < 20
            continue
        break
    assert len(encoded) >= 2
    assert result.num_already_done > 0
    assert_same_cache(cache, undisturbed)


def test_kill_during_publication_loses_no_row(photos, tmp_path, undisturbed, monkeypatch):
    """Until metadata.json is replaced, the earlier cache opens as it was; then, the new one does."""
    from latentry.cache.write import publishing

    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5, max_files=7)
    earlier = len(TextToImageDataset(cache))
    write, interruptions = publishing.write_text, 0
    for allowed in range(20):

        def write_some(path, text, budget=[allowed]):  # noqa: B006 - one per pass
            if path.parent == cache:
                budget[0] -= 1
                if budget[0] < 0:
                    raise KeyboardInterrupt
            write(path, text)

        monkeypatch.setattr(publishing, "write_text", write_some)
        try:
            result = prepare(SMALL, image_dir=photos, output_dir=cache, shard_size=5)
            break
        except KeyboardInterrupt:
            interruptions += 1
            assert len(TextToImageDataset(cache)) in (earlier, 12)
    assert interruptions >= 4
    assert result.num_already_done == 12
    assert [row["source_name"] for row in rows_of(cache)] == [
        row["source_name"] for row in rows_of(undisturbed)
    ]
    assert len(list(TextToImageDataset(cache))) == 12
    assert len(files_of(cache)) == 12


def test_inputs_changed_before_resume_are_encoded_again(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    cache = tmp_path / "cache"
    for attempt in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepare(SMALL, image_dir=photos, output_dir=cache, on_progress=stopped_after(4))
        for name in ("space/astronaut_portrait", "space/rocket_sideways", "home/chelsea"):
            (photos / f"{name}.txt").write_text(f"caption {attempt}")
    prepare(SMALL, image_dir=photos, output_dir=cache)
    prepare(SMALL, image_dir=photos, output_dir=tmp_path / "fresh")
    assert_same_cache(cache, tmp_path / "fresh")
    prompts = {row["source_name"]: row["prompt"] for row in rows_of(cache)}
    assert prompts["space/rocket_sideways.jpg"] == "caption 2"


def test_overwrite_keeps_the_old_cache_until_the_new_one_is_published(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache)
    other = Recipe(max_pixels=192 * 192)
    with pytest.raises(ConfigError, match="stochastic"):
        prepare(Recipe(stochastic=True), image_dir=photos, output_dir=cache, overwrite=True)
    assert len(list(TextToImageDataset(cache))) == 12
    with pytest.raises(KeyboardInterrupt):
        prepare(other, image_dir=photos, output_dir=cache, overwrite=True, on_progress=stopped_after(8))
    assert len(list(TextToImageDataset(cache))) == 12, "the old one still opens"
    result = prepare(other, image_dir=photos, output_dir=cache, overwrite=True)
    assert result.num_already_done > 0, "an interrupted overwrite goes on"
    prepare(other, image_dir=photos, output_dir=tmp_path / "fresh")
    assert_same_cache_but_shard_names(cache, tmp_path / "fresh")
    again = prepare(other, image_dir=photos, output_dir=cache, overwrite=True)
    assert again.num_encoded == 12, "a new overwrite starts over"


def assert_same_cache_but_shard_names(first: Path, second: Path) -> None:
    assert set(files_of(first)) == set(files_of(second))
    assert [{**row, "cache_file": ""} for row in rows_of(first)] == [
        {**row, "cache_file": ""} for row in rows_of(second)
    ]


def test_damaged_cache_file_is_encoded_again(photos, tmp_path):
    cache = tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=cache)
    emptied, flipped = sorted(cache.glob("*x*/*.pt"))[:2]
    emptied.write_bytes(b"")
    assert prepare(SMALL, image_dir=photos, output_dir=cache).num_encoded == 1
    content = bytearray(flipped.read_bytes())
    content[-9] ^= 1
    flipped.write_bytes(content)
    assert prepare(SMALL, image_dir=photos, output_dir=cache).num_encoded == 0, "its size is right"
    assert prepare(SMALL, image_dir=photos, output_dir=cache, verify=True).num_encoded == 1


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (".latentry/commits/*.json", "{}", "is damaged .*; start over with --overwrite"),
        (
            ".latentry/commits/*.json",
            '{"rows": [1], "failures": []}',
            "is damaged .*; start over with --overwrite",
        ),
        (".latentry/recipe.json", "{", "is damaged .*; start over with --overwrite"),
        ("metadata.json", '{"shards": [5]}', "Expected `str`.*; start over with --overwrite"),
        (
            "metadata.json",
            '{"shards": [], "format_version": 99, "recipe": 5}',
            "has format_version 99, this release",
        ),
    ],
)
def test_damaged_state_is_a_one_line_error(photos, tmp_path, monkeypatch, file, content, says):
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=stopped_after(4))
    victim = next(iter((tmp_path / "cache").glob(file)), tmp_path / "cache" / file)
    victim.write_text(content)
    with pytest.raises((MetadataError, RunError), match=rf"{victim.name}:? {says}") as raised:
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_workers_exit_with_their_parent(photos, tmp_path):
    process = start(photos, tmp_path / "cache", devices="cpu,cpu")
    while not list((tmp_path / "cache").glob("*x*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while _group_alive(process.pid):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.1)


def _group_alive(group: int) -> bool:
    """Whether a process of this group still runs (a zombie does not)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(group) and fields[0] != "Z":
            return True
    return False


@pytest.mark.slow
def test_two_workers_make_the_same_cache(photos, tmp_path, undisturbed):
    assert finish(start(photos, tmp_path / "cache", devices="cpu,cpu")) == 2
    assert_same_cache(tmp_path / "cache", undisturbed)


@pytest.mark.slow
def test_second_run_in_the_same_folder_is_refused(photos, tmp_path):
    first = start(photos, tmp_path / "cache")
    try:
        while not (tmp_path / "cache" / ".latentry" / "lock").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(RunError, match=rf"another run \(process {first.pid}\) is writing to"):
            prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache")
    finally:
        os.kill(first.pid, signal.SIGCONT)
        first.communicate(timeout=60)
    assert first.returncode == 0


@pytest.mark.slow
def test_worker_killed_while_reporting(photos, tmp_path):
    """With two workers on the CPU; the parent is slow, so that their reports pile up."""
    code = f"""
import os, signal, time
import multiprocessing
from latentry import Recipe, prepare
def slow(progress):
    if progress.phase == "encode":
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
if __name__ == "__main__":
    prepare(Recipe(max_pixels=128 * 128), image_dir={str(photos)!r}, output_dir={str(tmp_path / "cache")!r}, devices="cpu,cpu", on_progress=slow)
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "died (exit code -9): committed work is kept; rerun" in done.stderr


def test_overwrite_discards_the_commits_of_another_recipe(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    other = Recipe(max_pixels=128 * 128, crop_mode="random")
    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=photos, output_dir=tmp_path / "cache", on_progress=stopped_after(6))
    prepare(other, image_dir=photos, output_dir=tmp_path / "cache", overwrite=True)
    prepare(other, image_dir=photos, output_dir=tmp_path / "fresh")
    assert_same_cache(tmp_path / "cache", tmp_path / "fresh")


@pytest.mark.parametrize("recipe", [SMALL, PACKED], ids=["files", "packed"])
@pytest.mark.parametrize("version", [1, 99])
def test_kill_before_metadata_is_replaced_keeps_the_old_cache(photos, tmp_path, monkeypatch, recipe, version):
    """Also if another release made it, and it is being overwritten."""
    cache = tmp_path / "cache"
    prepare(recipe, image_dir=photos, output_dir=cache, max_files=7)
    edit_json(cache / "metadata.json", lambda metadata: metadata.update(format_version=version))
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}

    def kill(metadata):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("latentry.cache.format.CacheMetadata.to_json", kill)
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, image_dir=photos, output_dir=cache, overwrite=version != 1)
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(TextToImageDataset(cache))) == 7
    prepare(recipe, image_dir=photos, output_dir=cache, overwrite=version != 1)
    assert len(list(TextToImageDataset(cache))) == 12
