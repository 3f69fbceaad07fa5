"""The sampler's state: resuming, other ranks, refused states."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers import bucketed, sized
from hypothesis import given, settings
from hypothesis import strategies as st

from latentry.errors import ConfigError, StateError
from latentry.serve.sampler import SequentialBucketSampler

ORDERS = ("sequential", "interleaved")


def samplers(dataset, world, **options):
    return [
        SequentialBucketSampler(dataset, num_replicas=world, rank=rank, **options) for rank in range(world)
    ]


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


def test_resume_at_the_end_of_an_epoch():
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


def test_discarding_a_loaded_position_is_logged(caplog):
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    sampler.load_state_dict({"epoch": 3, "batches_yielded": 2})
    sampler.set_epoch(0)
    assert "discards the loaded position, batch 2 of epoch 3" in caplog.text


def test_assigning_epoch_sets_it():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    first = list(sampler)
    sampler.epoch = 1
    assert list(sampler) != first
    assert sampler.state_dict()["epoch"] == 1


def test_older_iterator_no_longer_counts():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    old = iter(sampler)
    next(old)
    sampler.set_epoch(1)
    next(old)
    assert sampler.state_dict()["batches_yielded"] == 0


def test_state_of_an_epoch_without_batches():
    dataset = sized(6)
    empty = SequentialBucketSampler(dataset, base_batch_size=32)
    smaller = SequentialBucketSampler(dataset, base_batch_size=2)
    smaller.load_state_dict(empty.state_dict())
    assert len(list(smaller)) == 3


def test_states_of_older_checkpoints_load():
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
def test_resume_on_other_ranks_serves_each_remaining_sample_once(sizes, worlds, batches, share, order):
    dataset = sized(*sizes)
    members = [set(group["indices"]) for group in dataset.bucket_groups.values()]
    seen = Counter()
    state = None
    for segment, world in enumerate(worlds):
        last = segment == len(worlds) - 1
        ranks = samplers(
            dataset, world, base_batch_size=batches[segment], drop_last=False, bucket_order=order
        )
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


def test_resume_on_other_ranks_without_padding_is_exact():
    dataset = sized(48, 24)
    first = samplers(dataset, 2, base_batch_size=3)
    seen = [i for sampler in first for batch in take(sampler, 5) for i in batch]
    state = saved(first[0])
    second = samplers(dataset, 3, base_batch_size=2)
    for sampler in second:
        sampler.load_state_dict(state)
        assert len(sampler) == 5 + (72 - 30) // 6
    seen += [i for sampler in second for batch in sampler for i in batch]
    assert sorted(seen) == list(range(72))
    assert len({len(list(s)) for s in second}) == 1


def test_state_of_another_dataset_is_refused():
    ours = SequentialBucketSampler(sized(40), base_batch_size=4)
    theirs = SequentialBucketSampler(sized(41), base_batch_size=4)
    with pytest.raises(StateError) as error:
        ours.load_state_dict(theirs.state_dict())
    assert ours.fingerprint in str(error.value)
    assert theirs.fingerprint in str(error.value)
    assert ours.state_dict()["batches_yielded"] == 0


def test_fingerprint_of_the_dataset_counts():
    first, second = (SimpleNamespace(**vars(sized(4)), fingerprint=own) for own in ("abc", "abd"))
    state = SequentialBucketSampler(first, base_batch_size=2).state_dict()
    SequentialBucketSampler(first, base_batch_size=2).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint"):
        SequentialBucketSampler(second, base_batch_size=2).load_state_dict(state)


def test_parts_of_one_dataset_have_different_fingerprints():
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
def test_wrong_states_are_refused(change, says):
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


# ---- counting -------------------------------------------------------------------------------


def test_iteration_computes_without_counting():
    sampler = SequentialBucketSampler(sized(20, 9), base_batch_size=4)
    expected = [sampler.get_batch(step) for step in range(len(sampler))]
    iteration = sampler.begin_iteration()
    assert [iteration.indices(step) for step in iteration.steps] == expected
    assert sampler.state_dict()["batches_yielded"] == 0
    iteration.mark_received(2)
    assert sampler.state_dict()["batches_yielded"] == 3
    newer = sampler.begin_iteration()
    assert (iteration.is_current, newer.is_current) == (False, True)
    iteration.mark_received(5)
    assert sampler.state_dict()["batches_yielded"] == 0


def test_iteration_keeps_its_epoch():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    iteration = sampler.begin_iteration()
    first = iteration.indices(0)
    sampler.set_epoch(1)
    assert not iteration.is_current
    assert iteration.indices(0) == first != sampler.get_batch(0)


def test_state_after_a_given_number_of_batches():
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    expected = list(sampler)
    state = sampler.state_dict(batches_received=6)
    assert sampler.state_dict()["batches_yielded"] == 10, "asking does not move the sampler"
    resumed = SequentialBucketSampler(sized(40), base_batch_size=4)
    resumed.load_state_dict(state)
    assert list(resumed) == expected[6:]
    for wrong in (-1, 11):
        with pytest.raises(ConfigError, match=f"batches_received is {wrong}; in epoch 0 it must be 0 to 10"):
            sampler.state_dict(batches_received=wrong)


def test_end_of_an_epoch_is_the_beginning_of_the_next():
    """torchdata loads a state after the training loop has set the epoch."""
    sampler = SequentialBucketSampler(sized(40), base_batch_size=4)
    list(sampler)
    state = saved(sampler)
    resumed = SequentialBucketSampler(sized(40), base_batch_size=4)
    resumed.set_epoch(1)
    expected = list(resumed)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert list(resumed) == expected
    resumed.set_epoch(2)
    resumed.load_state_dict(state)
    assert resumed.epoch == 0, "any other epoch is replaced by the state's"


def test_ranks_that_appear_later_are_refused(tmp_path):
    """A loader built before the process group exists would serve every rank the same samples."""
    early = SequentialBucketSampler(sized(40), base_batch_size=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert list(early) == list(SequentialBucketSampler(sized(40), base_batch_size=4))
        early.num_replicas = 2
        with pytest.raises(
            ConfigError, match=r"built for 2 ranks, but torch\.distributed now has 1; build it after"
        ):
            next(iter(early))
    finally:
        dist.destroy_process_group()
