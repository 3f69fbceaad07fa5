"""A cache that is being made: commits and their order, and files of earlier releases."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from helpers import SMALL, edit_json, rows_of, stopped_after

from latentry import Recipe, prepare
from latentry.cache.format import Row
from latentry.cache.write.commits import Commit, CommitLog
from latentry.cache.write.workspace import Workspace
from latentry.encode.planning import tasks
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import assert_same_cache
from latentry.types import Failure


def row(name: str, prompt: str) -> Row:
    return Row(cache_file="a.pt", sample_name=name, prompt=prompt)


def test_the_later_run_counts_whatever_the_file_times(tmp_path):
    CommitLog(tmp_path, 2).write(Commit("ff", (row("x", "second"),), ()))
    CommitLog(tmp_path, 1).write(Commit("aa", (row("x", "first"), row("y", "first")), (Failure("z", "why"),)))
    for age, path in enumerate(sorted(tmp_path.iterdir(), reverse=True)):
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    log = CommitLog(tmp_path, CommitLog.next_run(tmp_path))
    assert {r.sample_name: r.prompt for r in log.rows()} == {"x": "second", "y": "first"}
    assert list(log.failures()) == [Failure("z", "why")]
    assert CommitLog.next_run(tmp_path) == 3


def test_commits_of_earlier_releases_have_no_number_and_count_first(tmp_path):
    CommitLog(tmp_path, 1).write(Commit("aa", (row("x", "new"),), ()))
    old = {"rows": [row("x", "old").to_dict(), row("y", "old").to_dict()], "failures": []}
    (tmp_path / "bb.json").write_text(json.dumps(old))
    log = CommitLog(tmp_path, 2)
    assert {r.sample_name: r.prompt for r in log.rows()} == {"x": "new", "y": "old"}
    assert [r.prompt for r in log.rows_of(["bb", "aa"])] == ["old", "old", "new"]
    with pytest.raises(KeyError):
        log.rows_of(["cc"])


def test_resume_of_a_run_that_an_earlier_release_began(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    whole, cache = tmp_path / "whole", tmp_path / "cache"
    prepare(SMALL, image_dir=photos, output_dir=whole)
    with pytest.raises(KeyboardInterrupt):
        prepare(SMALL, image_dir=photos, output_dir=cache, on_progress=stopped_after(5))
    commits = list((cache / ".latentry" / "commits").iterdir())
    assert commits
    for path in commits:
        path.rename(path.with_name(path.name.partition("-")[2]))
    result = prepare(SMALL, image_dir=photos, output_dir=cache)
    assert result.num_already_done >= 2
    assert_same_cache(cache, whole)


def test_resumed_twice_with_changes_in_between_the_last_encoding_counts(photos, tmp_path, monkeypatch):
    """Three runs commit the same sample; copying the folder makes all file times equal."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "TASK_SIZE", 2)
    cache = tmp_path / "cache"
    caption = photos / "space" / "astronaut.json"
    for text in ("one", "two", "three"):
        edit_json(caption, lambda content, text=text: content.update(caption=text))
        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "finish", interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare(SMALL, image_dir=photos, output_dir=cache)
        copied = shutil.copytree(cache, tmp_path / text, copy_function=shutil.copy)
        for path in copied.rglob("*.json"):
            os.utime(path, (1_000_000, 1_000_000))
        cache = copied
    runs = {path.name[:6] for path in (cache / ".latentry" / "commits").iterdir()}
    assert runs == {"000001", "000002", "000003"}
    assert prepare(SMALL, image_dir=photos, output_dir=cache).num_encoded == 0
    prompts = [r["prompt"] for r in rows_of(cache) if r["source_name"] == "space/astronaut.jpg"]
    assert prompts == ["three"]


def test_a_packed_cache_whose_index_has_the_old_name_is_read_and_added_to(photos, tmp_path):
    recipe = Recipe(max_pixels=128 * 128, output_format="packed")
    cache = tmp_path / "cache"
    prepare(recipe, image_dir=photos, output_dir=cache, max_files=9)
    (cache / "packed_index.arrow").rename(cache / "index.arrow")
    edit_json(cache / "metadata.json", lambda metadata: metadata["packed"].update(index="index.arrow"))
    assert len(list(TextToImageDataset(cache))) == 9
    result = prepare(recipe, image_dir=photos, output_dir=cache)
    assert (result.num_already_done, result.num_encoded) == (9, 3)
    assert len(list(TextToImageDataset(cache))) == 12
    assert not (cache / "index.arrow").exists(), "a packed index has a name that says what it is"
