"""Finding the tensors inside a cache file without loading it."""

from __future__ import annotations

import os
import random

import pytest
import torch

from latentry.cache.read.file_contents import read_contents
from latentry.cache.read.pickle_reader import TensorLocation
from latentry.cache.write import file_writer as writer
from latentry.testing import make_image_cache

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_contents_equal_what_the_libraries_load(tmp_path, name):
    data = {
        "latent": torch.randn(3, 4).half(), "mask": torch.ones(2, dtype=torch.bool), "prompt": "a cät" * 50, "none": None,
        "size": (1, 2), "list": [1, -70000, 2**40], "ratio": 0.5, "yes": True, "empty": torch.empty(0, 3),
    }  # fmt: skip
    path = tmp_path / name
    path.write_bytes(b"".join(writer.cache_file_parts(data, path.suffix[1:])))
    with open(path, "rb") as file:
        found = read_contents(file.fileno(), path.suffix)
        assert found is not None
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                content = os.pread(file.fileno(), found[key].num_bytes, found[key].offset)
                assert (found[key].dtype, found[key].shape) == (value.dtype, tuple(value.shape))
                assert content == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            else:
                assert found[key] == (
                    list(value) if path.suffix == ".safetensors" and key == "size" else value
                )


class _Calls:
    def __init__(self, what):
        self.what = what

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize(
    "odd",
    [
        {"x": _Calls((os.system, ("true",)))},
        {"x": os.system},
        {"x": torch._neg_view(torch.randn(3))},
        {"x": torch.arange(6.0).view(2, 3).T},
        {"x": torch.eye(2).to_sparse()},
        {"x": {"nested": torch.ones(2)}},
        {"x": [[1]]},
        {3: 4},
        [torch.ones(1)],
    ],
)
def test_unknown_contents_are_left_to_torch(tmp_path, odd):
    torch.save(odd, tmp_path / "x.pt")
    with open(tmp_path / "x.pt", "rb") as file:
        assert read_contents(file.fileno(), ".pt") is None


def test_files_that_the_libraries_refuse_have_no_contents(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.zeros(300)}, path)
    count, wrong = (b"M" + number.to_bytes(2, "little") + b"t" for number in (300, 301))
    content = path.read_bytes()
    assert content.count(count) == 1
    path.write_bytes(content.replace(count, wrong))
    with open(path, "rb") as file:
        assert read_contents(file.fileno(), ".pt") is None
    path = tmp_path / "x.safetensors"
    whole = b"".join(writer.cache_file_parts({"x": torch.zeros(3)}, "safetensors"))
    for content, known in ((whole, True), (whole + b"more", False), (whole[:-1], False)):
        path.write_bytes(content)
        with open(path, "rb") as file:
            assert (read_contents(file.fileno(), ".safetensors") is not None) is known


def test_damaged_files_have_no_contents_or_harmless_ones(tmp_path):
    cache = make_image_cache(tmp_path / "files", {(64, 64): 1})
    path = next(cache.glob("*x*/*"))
    content = path.read_bytes()
    rng = random.Random(1)
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with open(path, "rb") as file:
            found = read_contents(file.fileno(), ".pt")
        for value in (found or {}).values():
            assert not isinstance(value, TensorLocation) or value.offset + value.num_bytes <= len(content)
