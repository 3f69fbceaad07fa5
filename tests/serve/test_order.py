from __future__ import annotations

import numpy as np
import pytest

from latentry.serve.order import FeistelPermutation, InterleavedSchedule, Segment

EDGES = sorted({n for k in range(1, 21) for n in range(2**k - 1, 2**k + 3)})


def test_every_small_size_is_permuted():
    for size in range(1, 5001):
        values = FeistelPermutation(size, key=size)(np.arange(size))
        assert np.array_equal(np.sort(values), np.arange(size)), size


@pytest.mark.parametrize("size", EDGES)
def test_sizes_around_powers_of_two_are_permuted(size):
    seen = np.zeros(size, dtype=bool)
    seen[FeistelPermutation(size, key=1)(np.arange(size))] = True
    assert seen.all()


def test_entries_do_not_depend_on_each_other():
    permutation = FeistelPermutation(1_000_003, key=5)
    whole = permutation(np.arange(1_000_003))
    asked = np.random.default_rng(0).integers(0, 1_000_003, 1000)
    assert np.array_equal(permutation(asked), whole[asked])


def test_keys_give_unrelated_permutations():
    first, second = (FeistelPermutation(1 << 20, key=k)(np.arange(1 << 20)) for k in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.005
    assert (first == second).sum() < 20


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 3_000_000])
def test_neighbours_are_unrelated_and_evenly_spread(size):
    values = FeistelPermutation(size, key=9)(np.arange(size)).astype(float)
    for lag in (1, 2, 3, 7, 64):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.006, lag
    # Where the first 2^16 positions land: 256 cells, a chi-square of 255 ± 6 standard deviations.
    counts, _ = np.histogram(values[: 1 << 16], bins=256, range=(0, size))
    chi_square = ((counts - 256) ** 2 / 256).sum()
    assert 255 - 6 * 22.6 < chi_square < 255 + 6 * 22.6


def test_ends_of_a_large_permutation():
    size = 33_333_333_333
    values = FeistelPermutation(size, key=1)(np.array([0, 1, size - 2, size - 1]))
    assert len(set(values.tolist())) == 4
    assert values.min() >= 0
    assert values.max() < size


def interleaved(*sizes: int, seed: int = 0) -> InterleavedSchedule:
    segment = Segment(sizes=sizes, batch_sizes=(1,) * len(sizes), num_replicas=1, drop_last=False)
    return InterleavedSchedule(segment, seed=seed, epoch=0)


@pytest.mark.parametrize("sizes", [(1,), (3, 0, 5), (1000, 10, 1), (30_000, 7_001, 13)])
def test_interleaving_has_every_batch_once_and_each_bucket_in_order(sizes):
    schedule = interleaved(*sizes)
    next_batch = [0] * len(sizes)
    for step in range(sum(sizes)):
        assert schedule.batches_done(step) == next_batch if step % 997 == 0 else True
        bucket, batch = schedule.locate(step)
        assert batch == next_batch[bucket]
        next_batch[bucket] += 1
    assert next_batch == list(sizes) == schedule.batches_done(sum(sizes))


def test_interleaving_draws_in_proportion_to_the_batches_left():
    # The first draw from (30, 10): bucket 0 three times in four, over many seeds.
    firsts = [interleaved(30, 10, seed=seed).locate(0)[0] for seed in range(1000)]
    assert 0.70 < firsts.count(0) / 1000 < 0.80
    # Halfway through 40,000 steps about half of each bucket has come.
    done = interleaved(30_000, 10_000).batches_done(20_000)
    assert abs(done[0] - 15_000) < 200
