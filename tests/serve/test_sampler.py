from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import bucketed, golden, sized
from hypothesis import given, settings
from hypothesis import strategies as st

from latentry.errors import ConfigError, StateError
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


# ---- order ----------------------------------------------------------------------------------


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
def test_all_ranks_agree_and_every_sample_comes(sizes, world, batch_size, drop_last, order, epoch):
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


def test_large_buckets_use_the_keyed_order_and_cover_everything():
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


def test_subclasses_can_set_their_own_batch_sizes():
    class OneAtATime(SequentialBucketSampler):
        def _get_batch_size(self, resolution):
            return 1 if resolution == (64, 64) else super()._get_batch_size(resolution)

    sampler = OneAtATime(sized(3, 8), base_batch_size=4, shuffle_buckets=False)
    assert [len(batch) for batch in sampler] == [1, 1, 1, 4, 4]
    assert sampler._calculate_total_batches() == 5


def test_interleaving_mixes_the_buckets():
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


def test_what_drop_last_leaves_out_is_said_once_by_bucket(caplog):
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
def test_bad_options_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        SequentialBucketSampler(sized(4), **options)


# ---- state ----------------------------------------------------------------------------------


def saved(sampler):
    """A state as it comes back from a file."""
    return json.loads(json.dumps(sampler.state_dict()))


def take(sampler, count):
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    drop_last=st.booleans(),
    order=st.sampled_from(ORDERS),
)
def test_any_number_of_resumes_equals_an_undisturbed_epoch(sizes, stops, drop_last, order):
    def make():
        return SequentialBucketSampler(
            sized(*sizes), base_batch_size=3, drop_last=drop_last, bucket_order=order, num_replicas=2, rank=1
        )

    undisturbed = make()
    undisturbed.set_epoch(2)
    expected = list(undisturbed)
    sampler = make()
    sampler.set_epoch(2)
    seen = []
    for stop in stops:
        seen += take(sampler, min(stop, len(expected) - len(seen)))
        state = saved(sampler)
        assert state["epoch"] == 2
        assert state["batches_yielded"] == len(seen)
        sampler = make()
        sampler.load_state_dict(state)
        assert saved(sampler) == state, "a state loaded and saved again is unchanged"
    assert seen + list(sampler) == expected


def test_a_resume_at_the_very_end_yields_nothing_and_then_the_next_epoch():
    sampler = SequentialBucketSampler(sized(20, 9), base_batch_size=4)
    list(sampler)
    state = saved(sampler)
    assert state["batches_yielded"] == len(sampler)
    for world in (1, 2, 3):
        resumed = SequentialBucketSampler(sized(20, 9), base_batch_size=4, num_replicas=world, rank=0)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert list(resumed) == []
        resumed.set_epoch(1)
        fresh = SequentialBucketSampler(sized(20, 9), base_batch_size=4, num_replicas=world, rank=0)
        fresh.set_epoch(1)
        assert list(resumed) == list(fresh)


def test_set_epoch_after_loading():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    sampler.set_epoch(3)
    expected = list(sampler)
    take(sampler, 4)
    state = saved(sampler)

    same = SequentialBucketSampler(sized(40), base_batch_size=4)
    same.load_state_dict(state)
    same.set_epoch(3)
    assert list(same) == expected[4:], "naming the state's epoch keeps the position"
    assert list(same) == expected, "only the next iteration skips"

    other = SequentialBucketSampler(sized(40), base_batch_size=4)
    other.load_state_dict(state)
    other.set_epoch(4)
    assert len(list(other)) == len(expected), "another epoch starts at its beginning"
    assert saved(other)["batches_yielded"] == len(expected)


def test_giving_up_a_loaded_position_is_said(caplog):
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    sampler.load_state_dict({"epoch": 3, "batches_yielded": 2})
    sampler.set_epoch(0)
    assert "gives up the loaded position, batch 2 of epoch 3" in caplog.text


def test_assigning_the_epoch_is_setting_it():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    first = list(sampler)
    sampler.epoch = 1
    assert list(sampler) != first
    assert sampler.state_dict()["epoch"] == 1


def test_an_iterator_left_behind_no_longer_counts():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    old = iter(sampler)
    next(old)
    sampler.set_epoch(1)
    next(old)
    assert sampler.state_dict()["batches_yielded"] == 0


def test_an_epoch_without_batches_is_not_used_up():
    dataset = sized(6)
    empty = SequentialBucketSampler(dataset, base_batch_size=32)
    smaller = SequentialBucketSampler(dataset, base_batch_size=2)
    smaller.load_state_dict(empty.state_dict())
    assert len(list(smaller)) == 3


def test_states_of_existing_checkpoints_load():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    sampler.set_epoch(5)
    expected = list(sampler)
    resumed = SequentialBucketSampler(sized(40), base_batch_size=4)
    resumed.load_state_dict({"epoch": 5, "batches_yielded": 7})
    assert list(resumed) == expected[7:]


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    worlds=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    batches=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    share=st.floats(0, 1),
    order=st.sampled_from(ORDERS),
)
def test_resuming_on_other_ranks_brings_each_remaining_sample_once(sizes, worlds, batches, share, order):
    dataset = sized(*sizes)
    members = [set(group["indices"]) for group in dataset.bucket_groups.values()]
    seen = Counter()
    state = None
    for leg, world in enumerate(worlds):
        last = leg == len(worlds) - 1
        ranks = samplers(dataset, world, base_batch_size=batches[leg], drop_last=False, bucket_order=order)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        remaining = len(ranks[0]) - (state["batches_yielded"] if state else 0)
        count = remaining if last else int(share * remaining)
        before = set(seen)
        now = Counter()
        for batches_of_step in zip(*[take(sampler, count) for sampler in ranks], strict=True):
            in_step = [index for batch in batches_of_step for index in batch]
            assert sum(not m.isdisjoint(in_step) for m in members) == 1, "one bucket a step"
            now.update(in_step)
        new = {index: times for index, times in now.items() if index not in before}
        # All that is not padding is new; padding fills up the ranks of a bucket's last step only.
        for bucket in members:
            padding = sum(now[i] for i in bucket) - len(bucket & set(new))
            assert padding < world
        seen.update(now)
        states = [saved(sampler) for sampler in ranks]
        assert all(s == states[0] for s in states), "the state is the same on all ranks"
        state = states[0]
    assert set(seen) == set(range(sum(sizes)))


def test_resuming_on_other_ranks_without_padding_is_exact():
    dataset = sized(48, 24)
    first = samplers(dataset, 2, base_batch_size=3)
    seen = [i for sampler in first for batch in take(sampler, 5) for i in batch]
    state = saved(first[0])
    second = samplers(dataset, 3, base_batch_size=2)
    for sampler in second:
        sampler.load_state_dict(state)
        assert len(sampler) == 5 + (72 - 30) // 6
    seen += [i for step in steps(second) for batch in step for i in batch]
    assert sorted(seen) == list(range(72))
    assert len({len(list(s)) for s in second}) == 1


def test_a_state_of_another_dataset_is_refused_with_both_fingerprints():
    ours = SequentialBucketSampler(sized(40), base_batch_size=4)
    theirs = SequentialBucketSampler(sized(41), base_batch_size=4)
    with pytest.raises(StateError) as error:
        ours.load_state_dict(theirs.state_dict())
    assert ours.fingerprint in str(error.value)
    assert theirs.fingerprint in str(error.value)
    assert ours.state_dict()["batches_yielded"] == 0


def test_a_dataset_can_bring_its_own_fingerprint():
    first, second = (SimpleNamespace(**vars(sized(4)), fingerprint=own) for own in ("abc", "abd"))
    state = SequentialBucketSampler(first, base_batch_size=2).state_dict()
    SequentialBucketSampler(first, base_batch_size=2).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint"):
        SequentialBucketSampler(second, base_batch_size=2).load_state_dict(state)


def test_parts_of_one_dataset_are_told_apart():
    even, odd = (bucketed([((64, 64), range(start, 40, 2))]) for start in (0, 1))
    even.fingerprint = odd.fingerprint = "whole"
    with pytest.raises(StateError, match="fingerprint"):
        SequentialBucketSampler(odd).load_state_dict(SequentialBucketSampler(even).state_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 7}, "seed is 7.*is 42"),
        ({"order_version": 0}, "order_version is 0"),
        ({"version": 99}, "version is 99"),
        ({"shuffle_within_bucket": False}, "shuffle_within_bucket is False"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": "3"}, "epoch is '3'"),
        ({"batches_yielded": 11}, "damaged"),
        ({"batch_sizes": [1, 1]}, "damaged"),
        ({"batch_sizes": None}, "damaged"),
        ({"num_replicas": 0}, "damaged"),
        ({"bucket_order": "foo"}, "damaged"),
        ({"drop_last": "no"}, "damaged"),
        ({"leg_consumed": [-5]}, "damaged"),
        ({"leg_consumed": [0, 0]}, "damaged"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, says):
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    good = sampler.state_dict()
    with pytest.raises(StateError, match=says):
        sampler.load_state_dict({**good, **change})
    assert sampler.state_dict() == good, "a refused state changes nothing"


@pytest.mark.parametrize(
    ("state", "says"),
    [({"epoch": 1}, "batches_yielded"), ({}, "epoch"), ({"epoch": 0, "batches_yielded": 11}, "only 10")],
)
def test_incomplete_states_are_refused(state, says):
    with pytest.raises(StateError, match=says):
        SequentialBucketSampler(sized(40), base_batch_size=4).load_state_dict(state)
