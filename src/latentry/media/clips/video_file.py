"""Opening a video, with errors in one line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latentry.errors import MediaError
from latentry.media.clips.indexed_file import IndexedFile
from latentry.media.content import MediaFile

VideoSource = Path | MediaFile | IndexedFile

_READ_BYTES = 1 << 20
"""What FFmpeg reads from memory at a time. Each read needs the GIL, so there should be few."""
_INDEXED_READ_BYTES = 1 << 16
_OPTIONS = {"protocol_whitelist": "file"}
"""A playlist must not make FFmpeg connect to another machine."""


class _NamedBytes(io.BytesIO):
    """Bytes with a file name, whose extension helps FFmpeg to recognise the format."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


@contextmanager
def open_video(source: VideoSource) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream. Errors inside the block become a ``MediaError``.

    Args:
        source: A path, a file that was read before, or a file whose packets are listed only.
    """
    import av

    file: str | _NamedBytes | IndexedFile
    options, read_bytes = _OPTIONS, _READ_BYTES
    if isinstance(source, Path):
        file = str(source)
    elif isinstance(source, IndexedFile):
        # Parsers would look for headers in packets that read as zeros.
        file, options, read_bytes = source, {**_OPTIONS, "fflags": "+noparse"}, _INDEXED_READ_BYTES
    elif source.content is None:
        file = str(source.path)
    else:
        file = _NamedBytes(source.content, str(source.path))
    try:
        # Tags are not used. In many files they are not UTF-8.
        with av.open(file, options=options, buffer_size=read_bytes, metadata_errors="replace") as container:
            streams = [s for s in container.streams.video if not _is_cover(s)]
            if not streams:
                raise MediaError("has no video stream")
            streams[0].thread_type = "AUTO"
            yield container, streams[0]
    except MediaError:
        raise
    except (av.error.FFmpegError, OSError, ValueError, EOFError) as error:
        raise MediaError(f"cannot be decoded: {error_text(error)}") from None


def error_text(error: Exception) -> str:
    """The reason of an error, in one line."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(reason).replace("\n", " ")


def _is_cover(stream: Any) -> bool:
    """Whether the stream is a still image, such as a film's cover."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)
