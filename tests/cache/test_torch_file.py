"""Writing files that equal those of torch.save."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import assert_same_items

from latentry.cache.read.file_contents import read_contents
from latentry.cache.torch_zip import UnknownArchive, content_offset, read_entries
from latentry.cache.write import torch_file
from latentry.cache.write.torch_file import torch_file_parts
from latentry.serve.dataset import TextToImageDataset
from latentry.testing import make_image_cache

pytestmark = pytest.mark.torch_versions


def test_files_equal_those_of_torch_save(tmp_path):
    batch = torch.randn(3, 1, 40, 50).bfloat16()
    data = {
        "latent": torch.randn(4, 8, 8).half(),
        "prompt_embeds": batch[1],
        "tokens": torch.arange(7)[None],
        "empty": torch.empty(0, 3),
        "mask": torch.ones(1, 5, dtype=torch.bool),
        "turned": torch.arange(12).view(3, 4).T,
        "number": torch.tensor(3.5),
        "size": (1, 2),
        "prompt": "a cät",
        "nothing": None,
    }
    content = b"".join(torch_file_parts(data))
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert list(loaded) == list(data)
        for key, value in data.items():
            same = (
                torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
            )
            assert same, key
    assert zipfile.ZipFile(path).testzip() is None, "its checksums are right"
    plain = io.BytesIO()
    own = {
        k: v.clone(memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else v
        for k, v in data.items()
    }
    torch.save(own, plain)
    expected = plain.getvalue()
    assert len(content) == len(expected)
    differing = [i for i, (a, b) in enumerate(zip(content, expected, strict=True)) if a != b]
    assert len(differing) <= 28, "torch's own name for the content, and its checksum twice"
    assert all(i > len(expected) - 2000 for i in differing)


# ---- layouts of torch.save that are not known -----------------------------------------------

SAMPLE = {
    "latent": torch.randn(4, 8, 8).half(),
    "tokens": torch.arange(7)[None],
    "prompt": "a cät",
    "size": (1, 2),
}
SAVE = torch.save


def rezipped(
    data, compression: int = zipfile.ZIP_STORED, comment: bytes = b"", folder: str = "data"
) -> bytes:
    """A ``torch.save`` file written anew by another ZIP library."""
    saved, output = io.BytesIO(), io.BytesIO()
    SAVE(data, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(output, "w", compression) as target:
        target.comment = comment
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return output.getvalue()


def save_compressed(data, file) -> None:
    file.write(rezipped(data, zipfile.ZIP_DEFLATED))


def save_without_gaps(data, file) -> None:
    file.write(rezipped(data))


def save_with_seek(data, file) -> None:
    file.write(b"PK")
    file.seek(0, io.SEEK_SET)


def save_with_other_gaps(data, file) -> None:
    SAVE(data, file)
    file.seek(64, io.SEEK_CUR)


def save_other_tensors(data, file) -> None:
    SAVE({key: value for key, value in data.items() if key != "latent"}, file)


def save_no_archive(data, file) -> None:
    file.write(b"something new")


@pytest.mark.parametrize(
    "unknown",
    [
        save_compressed, save_without_gaps, save_with_seek, save_with_other_gaps, save_other_tensors, save_no_archive,
    ],
)  # fmt: skip
def test_unknown_layout_is_written_by_torch_itself(unknown, monkeypatch, caplog):
    def save(data, file) -> None:
        (SAVE if isinstance(file, io.BytesIO) else unknown)(data, file)

    monkeypatch.setattr(torch, "save", save)
    torch_file._warn_once.cache_clear()
    for _ in range(3):
        content = b"".join(torch_file_parts(SAMPLE))
    assert [record.message for record in caplog.records if "unknown layout" in record.message], "said"
    assert len(caplog.records) == 1, "and only once"
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert list(loaded) == list(SAMPLE)
    assert_same_items(loaded, SAMPLE)


def test_torch_without_skip_data(monkeypatch):
    monkeypatch.delattr(torch.serialization, "skip_data")
    torch_file._warn_once.cache_clear()
    loaded = torch.load(io.BytesIO(b"".join(torch_file_parts(SAMPLE))), weights_only=True)
    assert_same_items(loaded, SAMPLE)


def test_values_that_cannot_be_saved_raise():
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        torch_file_parts({"bad": lambda: None})


@pytest.mark.parametrize("layout", ["legacy", "compressed", "comment", "other records"])
def test_unknown_layout_is_read_by_torch_itself(layout, tmp_path):
    cache = make_image_cache(tmp_path, {(256, 256): 3})
    expected = TextToImageDataset(cache).__getitems__([0, 1, 2])
    path = Path(expected[1]["cache_file"])
    data = torch.load(path, weights_only=True)
    if layout == "legacy":
        torch.save(data, path, _use_new_zipfile_serialization=False)
    elif layout == "compressed":
        path.write_bytes(rezipped(data, zipfile.ZIP_DEFLATED))
    elif layout == "comment":
        path.write_bytes(rezipped(data, comment=b"made by somebody else"))
    else:
        path.write_bytes(b"".join(torch_file_parts(data | {"nested": {"more": [1, 2]}})))
    with open(path, "rb") as file:
        assert read_contents(file.fileno(), ".pt") is None
    items = TextToImageDataset(cache).__getitems__([0, 1, 2])
    if layout == "other records":
        assert [item.pop("nested") for item in items] == [None, {"more": [1, 2]}, None]
    for found, reference in zip(items, expected, strict=True):
        assert_same_items(found, reference)


def test_zip_directory(tmp_path):
    content = b"".join(torch_file_parts(SAMPLE))

    def read(count: int, offset: int) -> bytes:
        return content[offset : offset + count]

    entries = read_entries(read, len(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert list(entries) == [name.partition("/")[2] for name in archive.namelist()]
        for entry, info in zip(entries.values(), archive.infolist(), strict=True):
            assert (entry.header_offset, entry.num_bytes, entry.compression) == (
                info.header_offset, info.file_size, info.compress_type,
            )  # fmt: skip
            assert read(4, entry.entry_offset) == b"PK\x01\x02"
            assert read(entry.num_bytes, content_offset(read, entry)) == archive.read(info)
    for broken in (b"", b"PK\x05\x06", content[:-1], content + b"x", rezipped(SAMPLE, zipfile.ZIP_DEFLATED)):
        with pytest.raises(UnknownArchive):
            read_entries(lambda count, offset, c=broken: c[max(0, offset) :][:count], len(broken))
