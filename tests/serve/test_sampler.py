"""The order of batches: golden files, ranks, buckets, options."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from helpers import bucketed, golden, sized
from hypothesis import given, settings
from hypothesis import strategies as st

from latentry.errors import ConfigError
from latentry.serve.order import RANDPERM_LIMIT
from latentry.serve.sampler import SequentialBucketSampler

ORDERS = ("sequential", "interleaved")


def samplers(dataset, world, **options):
    return [
        SequentialBucketSampler(dataset, num_replicas=world, rank=rank, **options) for rank in range(world)
    ]


def steps(sampler_list):
    """For each step, the batches of all ranks."""
    return list(zip(*[list(sampler) for sampler in sampler_list], strict=True))


@pytest.mark.parametrize("case", golden("sampler.json"))
@pytest.mark.parametrize("container", [list, np.array])
def test_golden(case, container):
    dataset = bucketed([(resolution, container(indices)) for resolution, indices in case["bucket_indices"]])
    names = ("base_batch_size", "drop_last", "shuffle_buckets", "shuffle_within_bucket", "dynamic_batch_size")
    options = {name: case[name] for name in (*names, "seed", "num_replicas")}
    for rank, expected in enumerate(case["batches_by_rank"]):
        sampler = SequentialBucketSampler(
            dataset, base_resolution=tuple(case["base_resolution"]), rank=rank, **options
        )
        sampler.set_epoch(case["epoch"])
        assert list(sampler) == expected
        assert len(sampler) == len(expected)
        assert [sampler.get_batch(k) for k in reversed(range(len(sampler)))] == expected[::-1]
        assert all(type(index) is int for batch in sampler for index in batch)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    world=st.integers(1, 64),
    batch_size=st.integers(1, 40),
    drop_last=st.booleans(),
    order=st.sampled_from(ORDERS),
    epoch=st.integers(0, 3),
)
def test_ranks_agree_and_every_sample_is_served(sizes, world, batch_size, drop_last, order, epoch):
    dataset = sized(*sizes)
    ranks = samplers(dataset, world, base_batch_size=batch_size, drop_last=drop_last, bucket_order=order)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    seen = Counter()
    all_steps = steps(ranks)
    for k, batches in enumerate(all_steps):
        info = ranks[-1].get_batch_info(k)
        members = dataset.bucket_groups[info["bucket_key"]]["indices"]
        assert {len(batch) for batch in batches} == {info["batch_size"]}
        assert all(index in members for batch in batches for index in batch)
        assert info["resolution"] == dataset.bucket_groups[info["bucket_key"]]["resolution"]
        seen.update(index for batch in batches for index in batch)
    assert len(all_steps) == len(ranks[0])
    if drop_last:
        assert sum(sizes) - len(seen) == sum(ranks[0].left_out.values())
    else:
        assert len(seen) == sum(sizes)
    # Padding repeats at most enough to fill up the ranks.
    for size, group in zip(sizes, dataset.bucket_groups.values(), strict=True):
        extra = sum(seen[i] for i in group["indices"]) - sum(1 for i in group["indices"] if seen[i])
        assert extra <= -size % world


def test_epochs_differ_and_repeat():
    sampler = SequentialBucketSampler(sized(50, 30), base_batch_size=4)
    first = list(sampler)
    assert list(sampler) == first, "an epoch iterated again is the same"
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize("container", [list, np.array, lambda r: r])
def test_indices_may_be_any_sequence(container):
    indices = range(10, 70, 3)
    dataset = bucketed([((64, 64), container(indices))])
    plain = SequentialBucketSampler(
        dataset, base_batch_size=5, shuffle_within_bucket=False, shuffle_buckets=False
    )
    assert [i for batch in plain for i in batch] == list(indices)
    shuffled = SequentialBucketSampler(dataset, base_batch_size=5)
    assert sorted(i for batch in shuffled for i in batch) == list(indices)


def test_large_buckets_use_the_keyed_permutation():
    size = RANDPERM_LIMIT + 3
    dataset = sized(size, 100)
    ranks = samplers(dataset, 2, base_batch_size=4096, drop_last=False)
    values = np.concatenate([np.array(batch) for sampler in ranks for batch in sampler])
    assert np.array_equal(np.unique(values), np.arange(size + 100))
    assert len(values) == size + 100 + 1
    shifted = [
        SequentialBucketSampler(dataset, seed=seed, shuffle_buckets=False).get_batch(0) for seed in (1, 2)
    ]
    assert shifted[0] != shifted[1]


def test_subclass_may_set_batch_sizes():
    class OneAtATime(SequentialBucketSampler):
        def _get_batch_size(self, resolution):
            return 1 if resolution == (64, 64) else super()._get_batch_size(resolution)

    sampler = OneAtATime(sized(3, 8), base_batch_size=4, shuffle_buckets=False)
    assert [len(batch) for batch in sampler] == [1, 1, 1, 4, 4]
    assert sampler._calculate_total_batches() == 5


def test_interleaving_mixes_buckets():
    dataset = sized(400, 400)
    sampler = SequentialBucketSampler(dataset, base_batch_size=4, bucket_order="interleaved")
    buckets = [sampler.get_batch_info(k)["bucket_key"] for k in range(len(sampler))]
    changes = sum(a != b for a, b in pairwise(buckets))
    assert changes > 60, "sequential would change once"


def test_batches_outside_the_epoch():
    sampler = SequentialBucketSampler(sized(10), base_batch_size=4)
    assert sampler.get_batch_info(2) == sampler.get_batch_info(-1) == {}
    with pytest.raises(IndexError, match="batches 0 to 1"):
        sampler.get_batch(2)


def test_drop_last_is_logged_once_by_bucket(caplog):
    with caplog.at_level(logging.WARNING):
        ranks = samplers(sized(10, 8, 1), 2, base_batch_size=2)
        for _ in range(2):
            steps(ranks)
    (record,) = caplog.records
    assert "3 of 19 samples" in record.message
    assert "any 64x64: 2" in record.message
    assert "any 192x64: 1" in record.message
    assert "128x64" not in record.message
    caplog.clear()
    SequentialBucketSampler(sized(10, 8, 1), base_batch_size=2, drop_last=False)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_batch_size": 0}, "base_batch_size is 0"),
        ({"num_replicas": 2, "rank": 2}, "rank 2 of 2"),
        ({"num_replicas": 0}, "of 0 ranks"),
        ({"base_batch_size": 4.0}, "base_batch_size is 4.0"),
        ({"seed": None}, "seed is None"),
        ({"bucket_order": "zigzag"}, "'zigzag'.*sequential, interleaved"),
    ],
)
def test_wrong_options_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        SequentialBucketSampler(sized(4), **options)
