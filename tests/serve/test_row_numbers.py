"""The indices of a bucket behave as a list."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from latentry.cache.convert import convert_cache
from latentry.errors import ConfigError
from latentry.serve.dataset import TextToImageDataset
from latentry.serve.row_numbers import RowNumbers
from latentry.serve.sampler import SequentialBucketSampler
from latentry.testing import make_image_cache

VALUES = [3, 5, 8, 13]
FORMS = {
    "array": lambda: RowNumbers(np.array(VALUES)),
    "list": lambda: RowNumbers(list(VALUES)),
    "range": lambda: RowNumbers(range(3, 7)),
}


@pytest.mark.parametrize("form", FORMS)
def test_they_behave_as_a_list(form):
    numbers, same = FORMS[form](), list(FORMS[form]())
    assert all(type(number) is int for number in numbers)
    assert (len(numbers), bool(numbers), bool(RowNumbers(np.array([], np.int64)))) == (4, True, False)
    assert numbers == same
    assert same == numbers
    assert numbers == FORMS[form]()
    assert numbers != same[1:]
    assert numbers != "text"
    assert [numbers[0], numbers[-1], type(numbers[0])] == [same[0], same[-1], int]
    for part in (slice(1, 3), slice(None, None, -1), slice(-2, None)):
        assert numbers[part] == same[part]
        assert type(numbers[part]) is list
    with pytest.raises(IndexError):
        numbers[4]
    assert numbers + [1] == [*same, 1]  # noqa: RUF005 - the operator is tested
    assert [1] + numbers == [1, *same]  # noqa: RUF005
    assert numbers + numbers == same * 2 == numbers * 2
    total = [0]
    total += numbers
    assert total == [0, *same]
    with pytest.raises(TypeError):
        _ = numbers + (1,)  # noqa: RUF005
    assert same[1] in numbers
    assert 99 not in numbers
    assert "a" not in numbers
    assert (numbers.index(same[2]), numbers.count(same[2])) == (2, 1)
    assert (sorted(numbers), list(reversed(numbers)), sum(numbers)) == (same, same[::-1], sum(same))
    assert (numbers.copy(), numbers.tolist(), repr(numbers)) == (same, same, repr(same))
    assert np.asarray(numbers).tolist() == same
    assert (np.array(numbers) + 1).tolist() == [number + 1 for number in same]
    assert pickle.loads(pickle.dumps(numbers)) == same
    with pytest.raises(TypeError):
        hash(numbers)


@pytest.mark.parametrize("form", FORMS)
def test_they_can_be_changed(form):
    numbers, same = FORMS[form](), list(FORMS[form]())
    for changed in (numbers, same):
        changed.append(1)
        changed.extend([4, 2])
        changed[0] = 7
        del changed[1]
        changed.remove(4)
        changed += [9]
        changed.sort(reverse=True)
        random.Random(0).shuffle(changed)
    assert numbers == same
    assert numbers.pop() == same.pop()


@pytest.mark.parametrize("packed", [False, True])
def test_indices_of_a_dataset(tmp_path, packed):
    cache = make_image_cache(tmp_path / "files", {(256, 256): 3, (320, 192): 2})
    if packed:
        convert_cache(cache, tmp_path / "packed")
        cache = tmp_path / "packed"
    groups = TextToImageDataset(cache).bucket_groups
    everything = []
    for group in groups.values():
        if group["indices"]:
            everything = everything + group["indices"]
    assert sorted(everything) == [0, 1, 2, 3, 4]


def test_a_sampler_of_shortened_indices(image_cache):
    dataset = TextToImageDataset(image_cache)
    for group in dataset.bucket_groups.values():
        del group["indices"][2:]
    sampler = SequentialBucketSampler(dataset, base_batch_size=2)
    kept = [index for group in dataset.bucket_groups.values() for index in group["indices"]]
    assert sorted(index for batch in sampler for index in batch) == sorted(kept)


def test_a_bucket_id_that_does_not_exist(image_cache):
    calculator = TextToImageDataset(image_cache).calculator
    for error in (IndexError, ConfigError, ValueError):
        with pytest.raises(error, match="no bucket 99"):
            calculator.get_bucket_by_id(99)
