"""Files: finding them without leaving a folder, and publishing them so that none is ever half there."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from latentry.errors import CacheError

_WHOLE_BYTES = 1 << 26
_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 16
_MOST_AT_ONCE = 1024


def inside(root: Path, relative: str) -> Path:
    """The file ``relative`` under ``root``; an error if the name, or a link on the way, leads out of it.

    >>> inside(Path("cache"), "512x512/0a1b.meta")
    PosixPath('cache/512x512/0a1b.meta')
    """
    path = root / relative
    real_root = os.path.realpath(root)
    if len(relative) > 4096:
        raise CacheError(f"{relative[:40]!r}… is no file name: it has {len(relative)} characters")
    if "\0" in relative or os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        raise CacheError(f"{relative!r} leads outside {root}; nothing outside a cache is ever opened")
    return path


class KnownFolders:
    """``inside`` for many files of few folders: what is known of a folder is not asked again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prefix = f"{root}{os.sep}"
        self._known: set[str] = set()

    def inside(self, relative: str) -> str:
        """The path of the file ``relative``; an error if it leads out of the root."""
        folder, _, name = relative.rpartition("/")
        path = self._prefix + relative
        if folder not in self._known or name in ("", ".", "..") or "\0" in relative or os.path.islink(path):
            inside(self._root, relative)
            inside(self._root, folder)
            self._known.add(folder)
        return path


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which becomes ``path`` in one step if the block succeeds.

    >>> with publish(folder / "metadata.json") as draft:
    ...     draft.write_text("{}")
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
    """A new file of these buffers, one after the other; none is copied on the way."""
    waiting = deque(memoryview(part) for part in parts if len(part))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        while waiting:
            written = os.writev(descriptor, list(islice(waiting, _MOST_AT_ONCE)))
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.popleft())
            if written:
                waiting[0] = waiting[0][written:]
    finally:
        os.close(descriptor)


def holds(path: Path, parts: Sequence[Any]) -> bool:
    """Whether the file at this path has exactly these bytes."""
    if not path.is_file() or path.stat().st_size != sum(len(part) for part in parts):
        return False
    with open(path, "rb") as file:
        return all(file.read(len(part)) == memoryview(part) for part in parts)


def open_regular(path: str | Path) -> int:
    """A descriptor of the file; an ``OSError`` for folders, pipes and devices, which would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def parts_digest(parts: Sequence[Any]) -> str:
    """What ``content_digest`` says of a file that holds these buffers."""
    if sum(len(part) for part in parts) <= _WHOLE_BYTES:
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        return digest.hexdigest()
    content = b"".join(parts)
    return _sampled(len(content), lambda start: content[start : start + _BLOCK_BYTES])


def _sampled(size: int, block_at: Callable[[int], bytes]) -> str:
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    for i in range(_SAMPLED_BLOCKS):
        digest.update(block_at((size - _BLOCK_BYTES) * i // (_SAMPLED_BLOCKS - 1)))
    return digest.hexdigest()


def content_digest(path: Path) -> str:
    """Tells two files apart: by all their bytes, or beyond 64 MB by size and sixty-four samples of them.

    Reading some megabytes of a film or of a model's weights does as well as reading all their gigabytes.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _WHOLE_BYTES:
            return parts_digest([file.read()])

        def block_at(start: int) -> bytes:
            file.seek(start)
            return file.read(_BLOCK_BYTES)

        return _sampled(size, block_at)
