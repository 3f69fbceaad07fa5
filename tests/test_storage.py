from __future__ import annotations

import hashlib
import os

import pytest

from latentry.errors import CacheError
from latentry.storage import (
    KnownFolders,
    content_digest,
    file_has_content,
    open_regular,
    parts_digest,
    path_inside,
    publish,
    write_parts,
)

OUTSIDE = ["../other", "a/../../other", "/etc/passwd", "link/file", "a\0b", "x" * 5000]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    return tmp_path / "root"


@pytest.mark.parametrize("relative", OUTSIDE)
def test_paths_outside_are_refused(root, relative):
    with pytest.raises(CacheError, match=r"leads outside|is not a file name"):
        path_inside(root, relative)
    with pytest.raises(CacheError, match=r"leads outside|is not a file name"):
        KnownFolders(root).path_inside(relative)


def test_paths_inside(root):
    folders = KnownFolders(root)
    for relative in ("a/file", "a/other", "file", "a/../file"):
        assert path_inside(root, relative) == root / relative
        assert folders.path_inside(relative) == f"{root}/{relative}"


def test_link_in_a_known_folder_is_refused(root):
    folders = KnownFolders(root)
    folders.path_inside("a/file")
    (root / "a" / "escape").symlink_to(root.parent / "file")
    with pytest.raises(CacheError, match="leads outside"):
        folders.path_inside("a/escape")


def test_publish_is_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way() -> None:
        with publish(path) as draft:
            draft.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    with publish(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_write_parts_writes_more_buffers_than_one_call_takes(tmp_path):
    parts = [bytes([i % 256]) * (i % 5) for i in range(5000)]
    write_parts(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert file_has_content(tmp_path / "file", parts)
    assert not file_has_content(tmp_path / "file", parts[:-1])
    assert not file_has_content(tmp_path / "file", [*parts[:-1], b"\0" * len(parts[-1])])
    assert not file_has_content(tmp_path / "absent", parts)


def test_digest_of_small_content_covers_every_byte(tmp_path):
    content = os.urandom(100_000)
    (tmp_path / "file").write_bytes(content)
    expected = hashlib.blake2b(content, digest_size=16).hexdigest()
    assert content_digest(tmp_path / "file") == expected
    assert parts_digest([content[:10], content[10:]]) == expected


def test_digest_of_large_content_covers_samples(tmp_path):
    """The values are part of existing caches and must not change."""
    path = tmp_path / "file"
    size = (1 << 26) + 12345
    with open(path, "wb") as file:
        for i in range(0, size, 1 << 20):
            file.write(i.to_bytes(8, "little") * ((min(1 << 20, size - i) + 7) // 8))
        file.truncate(size)
    digest = content_digest(path)
    assert digest == parts_digest([path.read_bytes()]) == "48a5dc654e7c461bc4680559cca3856c"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert content_digest(path) != digest


def test_open_regular_refuses_folders_and_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / name)
