"""``latentry demo``: every step works, and a second run keeps what the first one made."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import EXAMPLES, run_main
from PIL import Image

from latentry.demo.contact_sheet import draw_contact_sheet


@pytest.mark.slow
def test_demo(capsys, tmp_path):
    status, out, _ = run_main(capsys, "demo", "--output_dir", tmp_path / "out")
    assert status == 0
    assert "12 encoded, 0 already done, 0 failed" in out
    assert "320x192x9" in out
    assert "1 sample, 0 problems" in out
    assert "12 samples, 0 problems" in out
    assert "epoch 0: received 7 of 7 batches" in out
    sheet = tmp_path / "out" / "contact_sheet.png"
    assert f"{sheet}  14 pairs" in out
    assert_pairs_look_alike(sheet)
    status, out, _ = run_main(capsys, "demo", "--output_dir", tmp_path / "out")
    assert status == 0
    assert "0 encoded, 12 already done, 0 failed" in out


def assert_pairs_look_alike(sheet) -> None:
    """In every pair but the last, whose frames differ, the decoded tile is close to the original."""
    pixels = np.asarray(Image.open(sheet), dtype=np.float64)
    tile, gap, width, height = 220, 8, 2 * 220 + 3 * 8, 220 + 18 + 2 * 8
    differences = []
    for number in range(14):
        top, left = number // 3 * height + gap, number % 3 * width + gap
        first = pixels[top : top + tile, left : left + tile]
        second = pixels[top : top + tile, left + tile + gap : left + 2 * tile + gap]
        assert first.std() > 5, "a tile shows something"
        differences.append(np.abs(first - second).mean())
    assert max(differences[:-1]) < 6
    assert differences[-1] > 6


def test_failing_step_stops_the_demo(capsys, tmp_path):
    (tmp_path / "out" / "cache").mkdir(parents=True)
    (tmp_path / "out" / "cache" / "metadata.json").write_text('{"shards": ["metadata_shard_0000.json"]}')
    status, out, err = run_main(capsys, "demo", "--output_dir", tmp_path / "out")
    assert status == 1
    assert f"{tmp_path / 'out' / 'cache'} holds a cache of another tool" in err
    assert "Train for an epoch" not in out


def test_contact_sheet_of_images_only(tmp_path, capsys):
    run_main(capsys, "image", "--image_dir", EXAMPLES / "home", "--output_dir", tmp_path / "cache")
    assert draw_contact_sheet(tmp_path / "sheet.png", tmp_path / "cache") == 4
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 464, 2 * 254)
