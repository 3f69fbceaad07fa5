"""Listing folders: names, what is taken, and what is not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentry.errors import ConfigError
from latentry.sources.folder import SourceFolders, list_folders

SUFFIXES = {".jpg", ".png"}
PARTS = st.text("ab.", min_size=1, max_size=3).filter(lambda part: part.strip("."))


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def names(listing):
    return [file.name for file in listing.files]


def test_everything_that_is_not_taken_is_listed(tmp_path):
    touch(tmp_path, "a.jpg", "sub/b.JPG", "c.heic", "sub/d.HEIC", "notes", "a.txt", ".DS_Store", ".git/x.jpg")
    listing = list_folders(SourceFolders.of([tmp_path]), SUFFIXES)
    assert names(listing) == ["a.jpg", "sub/b.JPG"]
    taken = {"a.jpg", "sub/b.JPG", "a.txt"}
    assert listing.ignored(taken) == {".heic": 2, "(hidden)": 2, "(none)": 1}
    assert listing.ignored({"a.jpg"}) == {".heic": 2, "(hidden)": 2, "(none)": 1, ".jpg": 1, ".txt": 1}


def test_names_that_are_not_unicode_are_counted(tmp_path):
    touch(tmp_path, "a.jpg")
    with open(os.fsencode(tmp_path) + b"/x.caf\xe9", "wb"):
        pass
    (ending,) = list_folders(SourceFolders.of([tmp_path]), SUFFIXES).ignored({"a.jpg"})
    assert ending.encode()


def test_folder_without_media_says_what_it_holds(tmp_path):
    touch(tmp_path, *(f"{i}.heic" for i in range(299)), "one.txt", "Makefile")
    with pytest.raises(ConfigError, match=r"holds no images; .*, and files ending in jpg, png are read$"):
        list_folders(SourceFolders.of([tmp_path]), SUFFIXES)
    with pytest.raises(ConfigError, match=r"have 299 \.heic files, 1 file without ending, 1 \.txt file, and"):
        list_folders(SourceFolders.of([tmp_path]), SUFFIXES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no videos; it and its subfolders have no files, and"):
        list_folders(SourceFolders.of([tmp_path / "empty"]), SUFFIXES, media="video")
    many = touch(tmp_path / "many", *(f"x.e{i:02d}" for i in range(12)))
    with pytest.raises(ConfigError, match=r"1 \.e07 file, 4 other files, and"):
        list_folders(SourceFolders.of([many]), SUFFIXES)


def test_second_folder_is_named_relative_to_the_first(tmp_path):
    first = touch(tmp_path / "A", "a.jpg", "sub/b.jpg")
    second = touch(tmp_path / "B", "a.jpg", "sub/.hidden", "c.gif")
    third = touch(tmp_path / "A2" / "deep", "a.jpg")
    source = SourceFolders.of([first, second, third])
    listing = list_folders(source, SUFFIXES)
    assert names(listing) == ["a.jpg", "sub/b.jpg", "../B/a.jpg", "../A2/deep/a.jpg"]
    assert listing.ignored(set(names(listing))) == {"(hidden)": 1, ".gif": 1}
    assert [source.path(name) for name in names(listing)] == [
        first / "a.jpg", first / "sub" / "b.jpg", second / "a.jpg", third / "a.jpg",
    ]  # fmt: skip
    assert [source.locate(name) for name in names(listing)] == [
        (0, "a.jpg"), (0, "sub/b.jpg"), (1, "a.jpg"), (2, "a.jpg"),
    ]  # fmt: skip
    assert source.locate("../C/a.jpg") is None
    assert source.locate("../B2/a.jpg") is None
    assert names(list_folders(SourceFolders.of([first]), SUFFIXES)) == ["a.jpg", "sub/b.jpg"], (
        "as with others"
    )


@given(roots=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=4), name=PARTS)
def test_every_name_leads_back_to_its_file(roots, name):
    folders = tuple(Path("/data", *parts) for parts in roots)
    pairs = [(a, b) for i, a in enumerate(folders) for b in folders[i + 1 :]]
    if any(a.is_relative_to(b) or b.is_relative_to(a) for a, b in pairs):
        return  # refused by SourceFolders.of
    source = SourceFolders(folders)
    for number, (root, prefix) in enumerate(zip(folders, source.prefixes, strict=True)):
        assert source.path(prefix + name) == root / name
        assert source.locate(prefix + name) == (number, name)


def test_folders_that_overlap_are_refused(tmp_path):
    folder = touch(tmp_path / "A", "sub/a.jpg")
    (tmp_path / "link").symlink_to(folder / "sub")
    (folder / "inside").symlink_to(touch(tmp_path / "B", "b.jpg"))
    for others, message in [
        ([folder], "are the same folder"),
        ([tmp_path / "A" / ".." / "A"], "are the same folder"),
        ([folder / "sub"], f"{folder} contains {folder / 'sub'}; give only one of them"),
        ([tmp_path], f"{tmp_path} contains {folder};"),
        ([tmp_path / "link"], f"{folder} contains {tmp_path / 'link'};"),
        ([folder / "inside"], f"{folder} contains {folder / 'inside'};"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            SourceFolders.of([folder, *others])
    with pytest.raises(ConfigError, match="missing does not exist"):
        SourceFolders.of([folder, tmp_path / "missing"])
    both = list_folders(SourceFolders.of([folder, tmp_path / "B"]), SUFFIXES)
    assert names(both) == ["sub/a.jpg", "../B/b.jpg"], "the link into the other folder is not followed"


def test_dots_after_a_link_mean_what_the_system_says(tmp_path):
    real = touch(tmp_path / "far" / "deep", "a.jpg").parent
    touch(real, "b.jpg")
    (tmp_path / "link").symlink_to(real / "deep")
    source = SourceFolders.of([tmp_path / "link" / ".."])
    assert [source.path(name).is_file() for name in names(list_folders(source, SUFFIXES))] == [True, True]
