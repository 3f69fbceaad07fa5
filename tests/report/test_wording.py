"""Counts in sentences agree with their nouns."""

from __future__ import annotations

from pathlib import Path

import pytest

from latentry.cache.convert import ConvertResult
from latentry.cache.verify import Problem, VerifyResult
from latentry.report.summary import PrepareResult
from latentry.types import Failure


def result(num_reasons: int = 0, **more: object) -> PrepareResult:
    return PrepareResult(
        output_dir=Path("cache"),
        dry_run=True,
        num_encoded=0,
        num_already_done=0,
        num_removed=0,
        failures=tuple(Failure(f"{i}.jpg", f"is odd in way {i}") for i in range(num_reasons)),
        buckets={},
        devices=("cpu",),
        duration_s=1.0,
        size_bytes=0,
        **{"captions": {}, "caption_problems": {}, **more},
    )


@pytest.mark.parametrize(("count", "says"), [(11, "and 1 more reason "), (12, "and 2 more reasons")])
def test_failures_that_are_not_shown(count, says):
    assert says in str(result(num_reasons=count))


@pytest.mark.parametrize(
    ("count", "says", "hidden"),
    [
        (1, "1 caption problem:", None),
        (2, "2 caption problems:", None),
        (11, "11 caption problems:", "and 1 more"),
    ],
)
def test_caption_problems(count, says, hidden):
    text = str(result(caption_problems={f"{i}.json": f"is odd in way {i}" for i in range(count)}))
    assert says in text
    assert ("more" in text) == (hidden is not None)
    assert hidden is None or hidden in text


def test_equal_caption_problems_are_one_line():
    problems = {f"{i}.json": "has no text under 'usr'" for i in range(40)} | {"a.txt": "is not UTF-8 text"}
    assert str(result(caption_problems=problems)).splitlines()[-3:] == [
        "41 caption problems:",
        "  0.json has no text under 'usr' (and 39 more like it)",
        "  a.txt is not UTF-8 text",
    ]


def test_where_captions_are_from():
    text = str(result(captions={"txt": 2, "file name": 4, "empty": 3}))
    assert "captions: 2 from txt, 4 from file name, 3 left empty" in text


def test_one_sample_and_one_problem():
    one = VerifyResult(cache_dir=Path("cache"), num_samples=1, problems=(Problem("a.pt", "is odd"),))
    assert str(one).endswith("1 sample, 1 problem in cache")
    none = VerifyResult(cache_dir=Path("cache"), num_samples=2, problems=())
    assert str(none) == "2 samples, 0 problems in cache"
    converted = ConvertResult(
        output_dir=Path("packed"), output_format="packed", num_samples=1, size_bytes=10**6
    )
    assert str(converted) == "1 sample in packed (packed, 1.0 MB)"


def test_what_a_dry_run_cannot_know_is_shown():
    planned = result(unknown=("the weights of x are not on this machine",))
    assert "the weights of x are not on this machine" in str(planned)
    assert planned.to_dict()["unknown"] == ["the weights of x are not on this machine"]
