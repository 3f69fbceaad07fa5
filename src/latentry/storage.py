"""Files: paths that stay inside a folder, atomic writes, and digests of file contents.

Digests of up to 64 MB cover every byte. Larger files are told apart by their size and 64 samples of 64 KB: reading
4 MB of a film or of a model's weights takes milliseconds, reading all of it would take minutes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from latentry.errors import CacheError

WHOLE_DIGEST_BYTES = 1 << 26
"""The digest of a file up to this size covers every byte; beyond it, samples."""
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 16
_MAX_BUFFERS_PER_WRITE = 1024
"""The limit of ``writev`` on Linux."""
_MAX_NAME_LENGTH = 4096
_MAX_OPEN_FILES = 256
_MAX_READ_BYTES = 1 << 28


# ---- paths ----------------------------------------------------------------------------------


def path_inside(root: Path, relative: str) -> Path:
    """The path of the file ``relative`` under ``root``. The file need not exist.

    >>> path_inside(Path("cache"), "512x512/0a1b.meta")
    PosixPath('cache/512x512/0a1b.meta')

    Raises:
        CacheError: The name, or a symbolic link in its path, leads outside ``root``.
    """
    path = root / relative
    real_root = os.path.realpath(root)
    if len(relative) > _MAX_NAME_LENGTH:
        raise CacheError(f"{relative[:40]!r}… is not a file name: it has {len(relative)} characters")
    if "\0" in relative or os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        raise CacheError(f"{relative!r} leads outside {root}; Latentry opens no file outside a cache")
    return path


class KnownFolders:
    """``path_inside`` for many files in few folders: each folder is checked once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prefix = f"{root}{os.sep}"
        self._known: set[str] = set()

    def path_inside(self, relative: str) -> str:
        """The path of the file ``relative``; a ``CacheError`` if it leads outside the root."""
        folder, _, name = relative.rpartition("/")
        path = self._prefix + relative
        if folder not in self._known or name in ("", ".", "..") or "\0" in relative or os.path.islink(path):
            path_inside(self._root, relative)
            path_inside(self._root, folder)
            self._known.add(folder)
        return path


def open_regular(path: str | Path) -> int:
    """A file descriptor for reading. An ``OSError`` for folders, pipes and devices, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


class OpenFile:
    """An open regular file that is closed when the last reference to it is gone."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        self.size_bytes = os.fstat(self.descriptor).st_size

    def read(self) -> bytes:
        """The whole content. Other threads may read the file at the same time."""
        parts = []
        position = 0
        while part := os.pread(self.descriptor, _MAX_READ_BYTES, position):
            parts.append(part)
            position += len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class OpenFiles:
    """Files of a folder that are opened on first use. The most recently used ones stay open. Threads may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, relative: str) -> OpenFile:
        """The file of this name. A ``CacheError`` if it leads outside the folder, an ``OSError`` if it cannot be read."""
        with self._lock:
            file = self._files.get(relative)
            if file is None:
                file = self._files[relative] = OpenFile(path_inside(self._root, relative))
                if len(self._files) > _MAX_OPEN_FILES:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(relative)
            return file


# ---- writing --------------------------------------------------------------------------------


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It is renamed to ``path`` if the block succeeds, and deleted if it fails.

    >>> with publish(folder / "metadata.json") as draft:
    ...     draft.write_text("{}")

    The content is flushed to disk before the rename, so readers see either no file or a complete one.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_parts(path: Path, parts: Iterable[Any]) -> None:
    """Write these buffers to a new file, one after the other, without copying them."""
    remaining = deque(memoryview(part) for part in parts if len(part))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        while remaining:
            written = os.writev(descriptor, list(islice(remaining, _MAX_BUFFERS_PER_WRITE)))
            while remaining and written >= len(remaining[0]):
                written -= len(remaining.popleft())
            if written:
                remaining[0] = remaining[0][written:]
    finally:
        os.close(descriptor)


def file_has_content(path: Path, parts: Sequence[Any]) -> bool:
    """Whether a file exists at this path and contains exactly these buffers, one after the other."""
    if not path.is_file() or path.stat().st_size != sum(len(part) for part in parts):
        return False
    with open(path, "rb") as file:
        return all(file.read(len(part)) == memoryview(part) for part in parts)


# ---- digests --------------------------------------------------------------------------------


def content_digest(path: Path) -> str:
    """The digest of a file's content: of all its bytes up to 64 MB, beyond that of its size and samples."""
    with open(path, "rb") as file:
        return open_file_digest(file)


def open_file_digest(file: BinaryIO) -> str:
    """``content_digest`` of a file that is already open. Moves its position."""
    size = os.fstat(file.fileno()).st_size
    if size <= WHOLE_DIGEST_BYTES:
        file.seek(0)
        return parts_digest([file.read()])

    def block_at(start: int) -> bytes:
        file.seek(start)
        return file.read(_BLOCK_BYTES)

    return _sampled_digest(size, block_at)


def parts_digest(parts: Sequence[Any]) -> str:
    """The ``content_digest`` of a file that consists of these buffers."""
    if sum(len(part) for part in parts) <= WHOLE_DIGEST_BYTES:
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        return digest.hexdigest()
    content = b"".join(parts)
    return _sampled_digest(len(content), lambda start: content[start : start + _BLOCK_BYTES])


def _sampled_digest(size: int, block_at: Callable[[int], bytes]) -> str:
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for i in range(_SAMPLED_BLOCKS):
        digest.update(block_at((size - _BLOCK_BYTES) * i // (_SAMPLED_BLOCKS - 1)))
    return digest.hexdigest()
