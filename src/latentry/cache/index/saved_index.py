"""The index of a cache with one file per sample, saved as ``index.arrow``.

It is opened by memory map, so all processes of a machine share its memory. The first reader of a large cache writes it,
if the folder is writable; publishing new metadata deletes it. It is derived: it is ignored if ``metadata.json``, or the
size or time of a metadata shard, has changed, and deleting it loses nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from latentry.cache.format import METADATA_NAME, CacheMetadata
from latentry.cache.index.file_index import CacheIndex
from latentry.cache.locator import FileLocator
from latentry.storage import path_inside, publish
from latentry.types import BucketKey

logger = logging.getLogger(__name__)

INDEX_NAME = "index.arrow"
INDEX_VERSION = 2
SAVE_FROM_ROWS = 100_000
"""Smaller caches are read from their metadata shards every time."""
_SCHEMA_KEY = b"latentry"


class _Header(msgspec.Struct, kw_only=True):
    version: int
    signature: str
    fingerprint: str
    shapes: list[dict[str, Any]]
    shard_lengths: list[int]
    folders: list[str] = []
    folders_digest: str = ""


def signature_of(cache_dir: Path, shards: Sequence[str]) -> str:
    """Changes with ``metadata.json`` and with any metadata shard's size or time; costs one ``stat`` per shard."""
    digest = hashlib.blake2b((cache_dir / METADATA_NAME).read_bytes(), digest_size=16)
    for shard in shards:
        path = path_inside(cache_dir, shard)
        status = path.stat() if path.is_file() else None
        digest.update(f"{shard} {status and (status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


def save(cache_dir: Path, index: CacheIndex, signature: str) -> None:
    """Save an index that is large enough; a folder that is not writable is not an error."""
    if len(index) < SAVE_FROM_ROWS:
        return
    keys = [asdict(key) for key in index.bucket_keys]
    header = _Header(
        version=INDEX_VERSION,
        signature=signature,
        fingerprint=index.fingerprint,
        shapes=keys,
        folders=list(index.folders),
        folders_digest=_folders_digest(index),
        shard_lengths=list(index.shard_lengths),
    )
    table = pa.table({"name": index.names, "shape": index.bucket_of_row, "folder": index.folder_of_row})
    table = table.replace_schema_metadata({_SCHEMA_KEY: msgspec.json.encode(header)})
    try:
        with publish(cache_dir / INDEX_NAME) as draft, pa.ipc.new_file(str(draft), table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        logger.info(
            "cannot save the index of %s (%s); it will be read from the shards again", cache_dir, error
        )


def load(cache_dir: Path, metadata: CacheMetadata, signature: str) -> CacheIndex | None:
    """The saved index; None if there is none with this version and signature, or if it is damaged."""
    path = path_inside(cache_dir, INDEX_NAME)
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        header = msgspec.json.decode(reader.schema.metadata[_SCHEMA_KEY], type=_Header)
        if (header.version, header.signature) != (INDEX_VERSION, signature):
            return None
        batch = reader.get_batch(0)
        # Arrow trusts offsets. Unchecked, a flipped bit in them would crash the process.
        batch.validate(full=True)
        index = CacheIndex(
            metadata=metadata,
            bucket_keys=tuple(msgspec.convert(header.shapes, list[BucketKey])),
            shard_lengths=tuple(header.shard_lengths),
            names=batch.column("name"),
            bucket_of_row=batch.column("shape").to_numpy(),
            folders=tuple(header.folders),
            folder_of_row=batch.column("folder").to_numpy(),
            locator=FileLocator(cache_dir),
        )
        if not (
            index.names.type == pa.large_string()
            and index.names.null_count == 0
            and index.bucket_of_row.dtype in (np.uint16, np.uint32)
            and index.folder_of_row.dtype in (np.uint16, np.uint32)
            and len(index) == len(index.names) == sum(index.shard_lengths)
            and int(index.bucket_of_row.max(initial=0)) < len(index.bucket_keys)
            and int(index.folder_of_row.max(initial=0)) < len(index.folders)
            and index.fingerprint == header.fingerprint
            and _folders_digest(index) == header.folders_digest
        ):
            raise ValueError("its columns do not fit together")
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s is damaged (%s); reading the metadata shards instead", path, error)
        return None
    return index


def _folders_digest(index: CacheIndex) -> str:
    """Finds damage in the folders, which the index's fingerprint does not cover: a cache may be moved."""
    digest = hashlib.blake2b("\n".join(index.folders).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(index.folder_of_row).data)
    return digest.hexdigest()
