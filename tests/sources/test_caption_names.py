"""Which file a caption belongs to: endings, Unicode, absolute names, lists that name no file."""

from __future__ import annotations

import unicodedata

import pytest

from latentry.sources.captions import CaptionFinder
from latentry.types import Caption

COMPOSED = unicodedata.normalize("NFC", "café")
DECOMPOSED = unicodedata.normalize("NFD", "café")


def captions_of(folder, *names, **options):
    finder = CaptionFinder(folder.root, **options)
    found = [finder.find(name) for name in names]
    finder.note_problems_of_lists()
    return found, finder


@pytest.mark.parametrize(
    ("ending", "content", "source"),
    [
        ("cat.TXT", "a cat", "txt"),
        ("cat.Json", {"caption": "a cat"}, "sidecar"),
        ("cat.Caption", "a cat", "txt"),
        ("LIST.JSONL", [{"file_name": "cat.jpg", "internvl": "a cat"}], "jsonl"),
        ("metadata.CSV", "file_name,text\ncat.jpg,a cat\n", "csv"),
        ("meta.JSON", [{"file_name": "cat.jpg", "caption": "a cat"}], "meta_json"),
    ],
)
def test_endings_match_in_any_case(folder, ending, content, source):
    folder(ending, content)
    assert captions_of(folder, "cat.jpg")[0] == [Caption("a cat", source)]


def test_the_exact_ending_comes_first(folder):
    folder("cat.TXT", "upper case")
    folder("cat.txt", "lower case")
    assert captions_of(folder, "cat.jpg")[0] == [Caption("lower case", "txt")]


@pytest.mark.parametrize(("in_list", "on_disk"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_unicode_is_matched_in_either_composition(folder, in_list, on_disk):
    (folder.root / f"{on_disk}.jpg").touch()
    folder("list.jsonl", [{"file_name": f"{in_list}.jpg", "internvl": "from the list"}])
    found, finder = captions_of(folder, f"{on_disk}.jpg")
    assert found == [Caption("from the list", "jsonl")]
    assert not finder.problems
    folder(f"{in_list}.txt", "from the text file")
    assert captions_of(folder, f"{on_disk}.jpg")[0] == [Caption("from the text file", "txt")]


def test_absolute_names_in_the_folder_are_matched(folder):
    (folder.root / "trips").mkdir()
    for name in ("cat.jpg", "trips/car.jpg"):
        (folder.root / name).touch()
    entries = [
        {"file_name": str(folder.root / "cat.jpg"), "internvl": "a cat"},
        {"file_name": str(folder.root / "trips/../trips/car.jpg"), "internvl": "a car"},
    ]
    folder("list.jsonl", entries)
    found, finder = captions_of(folder, "cat.jpg", "trips/car.jpg")
    assert [caption.text for caption in found] == ["a cat", "a car"]
    assert not finder.problems


def test_absolute_names_through_a_link(folder, tmp_path_factory):
    (folder.root / "cat.jpg").touch()
    link = tmp_path_factory.mktemp("links") / "photos"
    link.symlink_to(folder.root)
    folder("list.jsonl", [{"file_name": f"{link}/cat.jpg", "internvl": "a cat"}])
    assert captions_of(folder, "cat.jpg")[0] == [Caption("a cat", "jsonl")]
    folder("list.jsonl", [{"file_name": f"{folder.root}/cat.jpg", "internvl": "a cat"}])
    assert CaptionFinder(link).find("cat.jpg") == Caption("a cat", "jsonl")


@pytest.mark.parametrize(
    ("list_name", "content"),
    [
        (
            "list.jsonl",
            [
                {"file_name": "cat.jpg", "internvl": "a cat"},
                {"file_name": "dog.jpg", "internvl": "a dog"},
                {"file_name": "/elsewhere/cow.jpg", "internvl": "a cow"},
                {"file_name": "../cow.jpg", "internvl": "a cow"},
            ],
        ),
        ("metadata.csv", "file_name,text\ncat.jpg,a cat\ndog.jpg,a\n/elsewhere/cow.jpg,b\nC:\\cow.jpg,c\n"),
        (
            "meta.json",
            [
                {"file_name": name, "caption": name}
                for name in ("cat.jpg", "dog.jpg", "/x/cow.jpg", "sub/a.jpg")
            ],
        ),
    ],
)
def test_entries_that_match_no_file_are_reported_once_per_list(folder, list_name, content):
    (folder.root / "cat.jpg").touch()
    folder(list_name, content)
    _, finder = captions_of(folder, "cat.jpg")
    assert finder.problems == {
        str(folder.root / list_name): "has 3 entries for which there is no file, such as 'dog.jpg'"
    }


KEYLESS = [{"file_name": f"{number}.jpg", "caption": "x"} for number in range(1, 41)]


@pytest.mark.parametrize(
    ("name", "content", "position"),
    [
        ("meta.json", KEYLESS, "entry 1"),
        ("list.jsonl", KEYLESS, "line 1"),
        ("metadata.csv", "file_name,caption\n" + "".join(f"{n}.jpg,x\n" for n in range(1, 41)), "line 2"),
    ],
)
def test_a_wrong_key_is_one_problem_of_a_list(folder, name, content, position):
    for number in range(1, 40):
        (folder.root / f"{number}.jpg").touch()
    folder(name, content)
    _, finder = captions_of(folder, "1.jpg", field="usr")
    assert finder.problems == {
        f"{folder.root / name}, {position} and 38 more": "have no text under 'usr', only under 'caption'",
        str(folder.root / name): "has 1 entry for which there is no file, such as '40.jpg'",
    }, "of the entry without a file, nothing else is said"


def test_each_reason_is_one_problem_of_a_list(folder):
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (folder.root / name).touch()
    lines = ["not JSON", '{"file_name": "a.jpg"}', "nor this", '{"file_name": "b.jpg"}', "{}", "[1]"]
    folder("list.jsonl", lines)
    _, finder = captions_of(folder, "c.jpg")
    listed = folder.root / "list.jsonl"
    assert finder.problems == {
        f"{listed}, line 1 and 1 more": "are not valid JSON: Expecting value",
        f"{listed}, line 2 and 1 more": "have no text under 'internvl', 'caption' or 'text'",
        f"{listed}, line 5 and 1 more": "have neither file_name nor filename",
    }


def test_entries_of_files_that_were_not_asked_for_are_no_problem(folder):
    """With ``--max_images``, or if a sidecar comes first, a file's entry is never looked up."""
    for name in ("cat.jpg", "sub/dog.jpg"):
        (folder.root / name).parent.mkdir(exist_ok=True)
        (folder.root / name).touch()
    folder("list.jsonl", [{"file_name": name, "internvl": "x"} for name in ("cat.jpg", "sub/dog.jpg")])
    _, finder = captions_of(folder, "cat.jpg")
    assert not finder.problems


@pytest.mark.parametrize(
    "content",
    [
        '{"internvl": "a cat"}',
        '{\n  "internvl": "a cat"\n}',
        '{"file_name": "cat.jpg", "internvl": "a cat"}\n{"file_name": "dog.jpg", "internvl": "a dog"}',
        '[{"file_name": "cat.jpg", "internvl": "a cat"}]',
    ],
)
def test_internvl_file_beside_an_image(folder, content):
    folder("cat_internvl.json", content)
    found, _ = captions_of(folder, "cat.jpg", "cats.jpg")
    assert found == [Caption("a cat", "jsonl"), Caption("cats", "file name")]


def test_internvl_file_of_many_images_needs_names(folder):
    folder("dog_internvl.json", {"internvl": "a dog"})
    assert captions_of(folder, "dog_sample_1.jpg")[0] == [Caption("dog sample 1", "file name")]
