from __future__ import annotations

import json

import pytest

from latentry.errors import ConfigError
from latentry.sources.captions import CaptionFinder
from latentry.types import Caption


def find(folder, name, **options):
    finder = CaptionFinder(folder.root, **options)
    return finder.find(name), finder


def test_auto_takes_the_first_source_with_a_caption(folder):
    folder("list.jsonl", [{"file_name": "a.jpg", "internvl": "from the list"}])
    assert find(folder, "a.jpg")[0] == Caption("from the list", "jsonl")
    folder("a.txt", " from the text file \n")
    assert find(folder, "a.jpg")[0] == Caption("from the text file", "txt")
    folder("a.json", {"caption": "from the sidecar"})
    assert find(folder, "a.jpg")[0] == Caption("from the sidecar", "sidecar")
    assert find(folder, "red_old_car.jpg")[0] == Caption("red old car", "file name")


@pytest.mark.parametrize(
    ("caption_format", "expected"),
    [("sidecar", "s"), ("txt", "t"), ("jsonl", "l"), ("meta_json", "m")],
)
def test_single_format(folder, caption_format, expected):
    folder("a.json", {"caption": "s"})
    folder("a.txt", "t")
    folder("list.jsonl", [{"file_name": "a.jpg", "internvl": "l"}])
    folder("meta.json", [{"file_name": "a.jpg", "caption": "m"}])
    assert find(folder, "a.jpg", caption_format=caption_format)[0] == Caption(expected, caption_format)
    assert find(folder, "b.jpg", caption_format=caption_format)[0].source == "file name"


def test_caption_field_applies_to_all_files(folder):
    folder("a.json", {"caption": "no", "usr": "yes"})
    folder("list.jsonl", [{"file_name": "b.jpg", "internvl": "no", "usr": "yes"}])
    for name in ("a.jpg", "b.jpg"):
        assert find(folder, name, field="usr")[0].text == "yes"


def test_captions_belong_to_paths(folder):
    folder("one/list.jsonl", [{"file_name": "cat.jpg", "internvl": "first cat"}])
    folder("two/list.jsonl", [{"file_name": "cat.jpg", "internvl": "second cat"}])
    folder("all.jsonl", [{"file_name": "three/cat.jpg", "internvl": "third cat"}])
    finder = CaptionFinder(folder.root)
    texts = [finder.find(f"{name}/cat.jpg").text for name in ("one", "two", "three", "four")]
    assert texts == ["first cat", "second cat", "third cat", "cat"]
    assert finder.counts == {"jsonl": 3, "file name": 1}


def test_internvl_file_of_sampled_images(folder):
    rows = [
        {"file_name": "dog_sample_1.jpg", "internvl": "a dog"},
        {"file_name": "dog_sample_2.jpg", "usr": "x"},
    ]
    folder("dog_internvl.json", "\n".join(map(json.dumps, rows)))
    assert find(folder, "dog_sample_1.jpg")[0] == Caption("a dog", "jsonl")
    assert find(folder, "dog_sample_2.jpg")[0].source == "file name"
    assert find(folder, "dog_other.jpg")[0].source == "file name"


@pytest.mark.parametrize(
    "wrap", [lambda rows: rows, lambda rows: {"items": rows}, lambda rows: {"data": rows}]
)
@pytest.mark.parametrize("key", ["file_name", "filename"])
def test_meta_json(folder, wrap, key):
    folder("meta.json", wrap([{key: "sub/a.jpg", "caption": "found"}]))
    assert find(folder, "sub/a.jpg", caption_format="meta_json")[0].text == "found"
    assert find(folder, "a.jpg", caption_format="meta_json")[0].source == "file name"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", "{broken", "is not valid JSON"),
        ("a.json", {"text": "x"}, "has no text under 'caption'"),
        ("a.json", {"caption": 5}, "has no text under 'caption'"),
        ("a.json", [1, 2], "has no text under 'caption'"),
        ("a.json", "null", "has no text under 'caption'"),
        ("a.json", "[" * 100_000, "is not valid JSON"),
        ("a.json", '{"caption": "\\ud83d"}', "has an incomplete character"),
        (
            "list.jsonl",
            ["{broken", {"file_name": "b.jpg", "internvl": "b"}],
            "is not valid JSON: Expecting property name",
        ),
        ("list.jsonl", [{"internvl": "b"}], "has neither file_name nor filename"),
        ("list.jsonl", [{"file_name": "a.jpg"}], "has no text under 'internvl'"),
    ],
)
def test_unusable_captions_are_problems_and_the_next_source_is_tried(folder, name, content, problem):
    for media in ("a.jpg", "b.jpg"):
        (folder.root / media).touch()
    folder(name, content)
    caption, finder = find(folder, "a.jpg")
    finder.note_problems_of_lists()
    assert caption == Caption("a", "file name")
    (where, noted), *rest = finder.problems.items()
    assert not rest
    assert name in where
    assert problem in noted


def test_unicode_line_separators_are_kept(folder):
    text = "one\u2028two\u0085three"
    (folder.root / "list.jsonl").write_text(
        json.dumps({"file_name": "a.jpg", "internvl": text}, ensure_ascii=False), "utf-8"
    )
    caption, finder = find(folder, "a.jpg")
    assert caption.text == text
    assert not finder.problems


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("name", ["a.txt", "a.json", "list.jsonl", "metadata.csv"])
def test_text_that_is_not_utf8(folder, name, encoding):
    (folder.root / name).write_bytes("café".encode(encoding))
    caption, finder = find(folder, "a.jpg")
    assert caption.source == "file name"
    assert finder.problems == {str(folder.root / name): "is not UTF-8 text; save it as UTF-8"}


def test_unknown_format(tmp_path):
    with pytest.raises(ConfigError, match="'xml'; choose one of auto, sidecar, txt, jsonl, csv, meta_json"):
        CaptionFinder(tmp_path, "xml")
