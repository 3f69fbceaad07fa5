"""Writing files that equal those of torch.save."""

from __future__ import annotations

import io
import zipfile

import torch

from latentry.cache.write.torch_file import torch_file_parts


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
