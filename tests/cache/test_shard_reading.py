"""Reading rows of packed shards: any tensors, damaged files, paths outside the cache."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from helpers import damage, shards_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from latentry import verify_cache
from latentry.cache.read.batch_buffers import BatchBuffers
from latentry.cache.read.buffer_pool import BufferPool
from latentry.cache.read.shard_files import OpenShards, row_buffers
from latentry.cache.write.shards import ShardRow, write_shard
from latentry.errors import CacheError, CacheFileError, CacheNotFoundError
from latentry.serve.dataset import TextToImageDataset

TENSORS = st.sampled_from(
    [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.int16]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcd"),
            st.tuples(TENSORS, st.lists(st.integers(0, 5), max_size=4), st.integers(0, 3)),
            min_size=1,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_of_any_tensors_can_be_read(tmp_path, described):
    rows, expected = [], []
    for number, tensors in enumerate(described):
        made = {}
        for name, (dtype, shape, num_zeros) in tensors.items():
            value = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(number)).to(dtype)
            if value.ndim > 1 and num_zeros:
                value[..., -num_zeros:, :] = 0
            made[name] = value
        rows.append(ShardRow(made))
        expected.append(made)
    write_shard(tmp_path, (f"{number}.safetensors" for number in range(1000)), rows)
    opened = OpenShards(tmp_path)
    assert rows[0].location is not None
    with safe_open(tmp_path / rows[0].location.file, framework="pt") as container:
        for number, (row, tensors) in enumerate(zip(rows, expected, strict=True)):
            assert row.location is not None
            opened.check(row.location)
            buffers = BatchBuffers(1, BufferPool())
            opened.fill(row.location, row_buffers(0, row.location, (), buffers))
            found = buffers.columns()
            for name, value in tensors.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name][0], value)
                stored = container.get_tensor(f"{number}.{name}")
                assert torch.equal(stored, value[..., : stored.shape[-2], :] if stored.ndim > 1 else value)


def test_bad_checksum_names_shard_and_row(both):
    dataset = TextToImageDataset(both[1])
    place = dataset.index.location(5, "text")
    path = both[1] / place.file
    damage(path, place.offset + 3)
    dataset[4]
    with pytest.raises(CacheFileError) as error:
        dataset[5]
    assert f"{path}, row {place.row}: the checksum differs" in str(error.value)
    with pytest.raises(CacheFileError, match=f"row {place.row}: the checksum differs"):
        dataset.__getitems__([4, 5])
    result = verify_cache(both[1])
    assert [problem.what for problem in result.problems] != []
    assert result.exit_status == 2


def test_truncated_and_missing_shards(both):
    dataset = TextToImageDataset(both[1])
    place = dataset.index.location(12, "latents")
    path = both[1] / place.file
    path.write_bytes(path.read_bytes()[: place.offset + 10])
    with pytest.raises(CacheFileError, match=f"row {place.row}: the file ends before the row does"):
        dataset[12]
    path.unlink()
    with pytest.raises(CacheNotFoundError, match="is missing, but the cache's index lists it"):
        TextToImageDataset(both[1])[12]


def test_links_out_of_the_cache_are_refused(both, tmp_path):
    secret = shutil.copy(shards_of(both[1], "latents")[0], tmp_path / "secret.safetensors")
    path = shards_of(both[1], "latents")[0]
    path.unlink()
    path.symlink_to(secret)
    dataset = TextToImageDataset(both[1])
    with pytest.raises(CacheError, match="leads outside"):
        [dataset[i] for i in range(len(dataset))]


def test_pipes_and_folders_are_refused(both):
    files, cache = both
    target = TextToImageDataset(files).index.relative_file(0)
    (files / target).unlink()
    os.mkfifo(files / target)
    with pytest.raises(CacheFileError, match="is not a regular file"):
        TextToImageDataset(files).__getitems__([0])
    path = shards_of(cache, "latents")[0]
    path.unlink()
    path.mkdir()
    dataset = TextToImageDataset(cache)
    with pytest.raises(CacheFileError, match="is not a regular file"):
        [dataset[i] for i in range(len(dataset))]
