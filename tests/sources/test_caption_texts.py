"""What the captions are: keys, several texts, fallbacks, prefix and suffix."""

from __future__ import annotations

import pytest

from latentry.errors import ConfigError
from latentry.sources.captions import CaptionFinder
from latentry.types import Caption


def find(folder, name="cat.jpg", **options):
    finder = CaptionFinder(folder.root, **options)
    return finder.find(name), finder


def test_the_order_of_auto(folder):
    """Each source is taken if those before it have no caption."""
    layers = [
        ("meta.json", [{"file_name": "cat.jpg", "caption": "meta.json"}], "meta_json"),
        ("metadata.csv", "file_name,text\ncat.jpg,metadata.csv\n", "csv"),
        ("cat_internvl.json", {"internvl": "cat_internvl.json"}, "jsonl"),
        ("metadata.jsonl", [{"file_name": "cat.jpg", "text": "metadata.jsonl"}], "jsonl"),
        ("list.jsonl", [{"file_name": "cat.jpg", "internvl": "list.jsonl"}], "jsonl"),
        ("cat.caption", "cat.caption", "txt"),
        ("cat.txt", "cat.txt", "txt"),
        ("cat.json", {"caption": "cat.json"}, "sidecar"),
    ]
    assert find(folder)[0] == Caption("cat", "file name")
    for name, content, source in layers:
        folder(name, content)
        assert find(folder)[0] == Caption(name, source)


def test_hugging_face_layouts(folder):
    folder("train/metadata.jsonl", [{"file_name": "a/cat.jpg", "text": "a cat"}])
    assert find(folder, "train/a/cat.jpg")[0] == Caption("a cat", "jsonl")
    table = 'file_name,text,other\ndog.jpg,"a dog, with a\nline break",1\n'
    folder("test/metadata.csv", table)
    assert find(folder, "test/dog.jpg")[0] == Caption("a dog, with a\nline break", "csv")
    assert find(folder, "test/dog.jpg", caption_format="csv", field="other")[0] == Caption("1", "csv")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("name,text\ncat.jpg,a cat\n", "has no column file_name or filename in its first line"),
        *(
            (
                f"file_name{mark}text\ncat.jpg{mark}a cat\n",
                "has no column file_name or filename in its first line; separate the columns with commas",
            )
            for mark in ";\t"
        ),
        ("", "has no column file_name or filename in its first line"),
        ("file_name,text\ncat.jpg\n", "has no text under 'internvl', 'caption' or 'text'"),
        ("file_name,text\n,a cat\n", "has neither file_name nor filename"),
    ],
)
def test_unusable_tables(folder, content, problem):
    (folder.root / "cat.jpg").touch()
    folder("metadata.csv", content)
    caption, finder = find(folder)
    finder.note_problems_of_lists()
    assert caption.source == "file name"
    assert next(iter(finder.problems.values())) == problem


def test_another_meta_json_is_no_problem_in_auto(folder):
    folder("meta.json", {"caption": "the sidecar of meta.jpg"})
    caption, finder = find(folder)
    assert caption.source == "file name"
    assert not finder.problems
    _, finder = find(folder, caption_format="meta_json")
    assert "has no list of entries" in next(iter(finder.problems.values()))


# ---- keys -----------------------------------------------------------------------------------


def test_a_named_key_does_not_hide_the_caption_of_a_sidecar(folder):
    folder("cat.json", {"caption": "plain"})
    caption, finder = find(folder, field="internvl")
    assert caption == Caption("plain", "sidecar")
    assert list(finder.problems.values()) == ["has no text under 'internvl', only under 'caption'"]


def test_a_named_key_comes_first_wherever_it_is(folder):
    """As before: a caption under the named key is taken from a later source."""
    folder("cat.json", {"caption": "plain"})
    folder("list.jsonl", [{"file_name": "cat.jpg", "usr": "named"}])
    assert find(folder, field="usr")[0] == Caption("named", "jsonl")
    folder("cat.txt", "text")
    assert find(folder, field="usr")[0] == Caption("text", "txt")


def test_several_named_keys(folder):
    folder("cat.json", {"short": "cat", "caption": "no", "long": ["a cat", "a red cat"], "usr": "cat"})
    caption, finder = find(folder, field="long, short,usr,missing")
    assert caption == Caption("a cat", "sidecar", ("a red cat", "cat"))
    assert caption.texts == ("a cat", "a red cat", "cat")
    assert not finder.problems
    folder("metadata.csv", "file_name,short,long\ndog.jpg,dog,a dog\n")
    assert find(folder, "dog.jpg", field="long,short")[0].texts == ("a dog", "dog")


# ---- several texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cat.json", {"caption": ["a", " b ", "", "a", 5]}),
        ("list.jsonl", [{"file_name": "cat.jpg", "internvl": ["a", "b"]}]),
        ("meta.json", [{"file_name": "cat.jpg", "caption": ["a", "b"]}]),
    ],
)
def test_a_list_of_captions(folder, name, content):
    folder(name, content)
    assert find(folder)[0].texts == ("a", "b")


def test_lines_of_a_text_file(folder):
    folder("cat.txt", "\nfirst\r\n\n  second \nfirst\n")
    assert find(folder)[0].texts == ("first\n\n  second \nfirst",)
    assert find(folder, lines=True)[0].texts == ("first", "second")


# ---- no text --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["txt", "caption"])
@pytest.mark.parametrize("content", ["", "  \n", "\ufeff"])
@pytest.mark.parametrize("lines", [False, True])
def test_an_empty_text_file_is_an_empty_caption(folder, ending, content, lines):
    folder(f"cat.{ending}", content)
    caption, finder = find(folder, lines=lines)
    assert caption == Caption("", "txt")
    assert not finder.problems


def test_fallbacks(folder):
    assert find(folder, "red_car.jpg")[0] == Caption("red car", "file name")
    assert find(folder, fallback="empty")[0] == Caption("", "empty")
    caption, finder = find(folder, fallback="skip")
    assert caption is None
    assert not finder.required
    assert not finder.counts
    caption, finder = find(folder, required=True)
    assert caption is None
    assert finder.required
    folder("cat.txt", "")
    assert find(folder, required=True)[0] == Caption("", "txt")
    with pytest.raises(
        ConfigError, match="unknown caption_fallback 'none'; choose one of filename, empty, skip"
    ):
        find(folder, fallback="none")


def test_prefix_and_suffix_are_taken_literally(folder):
    options = {"prefix": "photo of ", "suffix": "!"}
    assert find(folder, "red_car.jpg", **options)[0].text == "photo of red car!"
    assert find(folder, fallback="empty", **options)[0].text == "photo of !"
    folder("cat.json", {"caption": ["a", "b"]})
    assert find(folder, **options)[0].texts == ("photo of a!", "photo of b!")
    assert find(folder, prefix="x")[0].text == "xa"
