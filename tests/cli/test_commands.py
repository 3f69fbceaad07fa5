"""The commands as people type them: output, exit statuses, no traces left in the calling process."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from helpers import EXAMPLES, run_main

from latentry import Recipe, prepare
from latentry.cli import main

NEMO = [sys.executable, "-m", "tools.diffusion.preprocessing_multiprocess"]


def image(cache: Path, *more: object) -> list[object]:
    return ["image", "--image_dir", EXAMPLES, "--output_dir", cache, "--max_pixels", 128 * 128, *more]


def test_run_prints_table(capsys, tmp_path):
    status, out, err = run_main(capsys, *image(tmp_path / "cache"))
    assert status == 0
    assert "12 encoded, 0 already done, 0 failed" in out
    assert "128x128" in out
    assert "3 from jsonl" in out
    assert "no GPU in use: encoding on the CPU" in err
    assert err.count("encoding with tiny, the embedded model") == 1
    assert "to train, choose --processor flux" in err
    assert "encode: 12/12, 0 failed" in err
    assert (tmp_path / "cache" / "metadata.json").exists()


def test_dry_run_writes_nothing(capsys, tmp_path):
    status, out, err = run_main(capsys, *image(tmp_path / "cache", "--dry_run", "--max_images", 3))
    assert status == 0
    assert "no GPU" not in err, "nothing is encoded"
    assert "3 would be encoded" in out
    assert not (tmp_path / "cache").exists()


def test_chosen_processor_is_not_explained(capsys, tmp_path):
    _, _, err = run_main(capsys, *image(tmp_path / "cache", "--processor", "tiny", "--dry_run"))
    assert "embedded" not in err


@pytest.mark.parametrize("shown", ["--dry_run", "--json"])
def test_dry_run_needs_no_weights(capsys, tmp_path, flux_folder, shown):
    """Not even those of a cache that is there already."""
    missing = ["--processor", "flux", "--model_name", "nobody/nothing", "--dry_run"]
    status, out, err = run_main(capsys, *image(tmp_path / "cache", *missing, shown))
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "the weights of nobody/nothing are not on this machine" in words
    assert "12 would be encoded" in words or json.loads(out)["encoded"] == 12
    prepare(Recipe(max_pixels=128 * 128, processor="flux", model_name=str(flux_folder)), image_dir=EXAMPLES,
            output_dir=tmp_path / "cache", max_files=2)  # fmt: skip
    status, out, _ = run_main(capsys, *image(tmp_path / "cache", *missing, shown))
    words = " ".join(out.split())
    assert "it assumes that the cache was made with them" in words
    assert "10 would be encoded, 2 already done" in words or json.loads(out)["already_done"] == 2


def test_planning_counts_failures(capsys, tmp_path):
    photos = shutil.copytree(EXAMPLES, tmp_path / "photos")
    (photos / "bad.jpg").write_text("no")
    (photos / "dangling.jpg").symlink_to("nowhere")
    command = ["image", "--image_dir", photos, "--output_dir", tmp_path / "cache", "--max_pixels", 128 * 128]
    _, _, err = run_main(capsys, *command)
    assert "plan: 14/14, 2 failed" in err
    _, _, err = run_main(capsys, *command)
    assert "plan: 14/14, 2 failed" in err, "what is already done counts as planned"


def test_json_and_quiet(capsys, tmp_path):
    status, out, _ = run_main(capsys, *image(tmp_path / "cache", "--json", "--verify"))
    result = json.loads(out)
    assert (status, result["encoded"], result["exit_status"]) == (0, 12, 0)
    assert len(result["psnr_db"]) == 12
    assert run_main(capsys, *image(tmp_path / "cache", "--quiet")) == (0, "", "")


def test_failed_inputs_are_exit_status_2(capsys, tmp_path):
    photos = shutil.copytree(EXAMPLES, tmp_path / "photos")
    (photos / "bad.jpg").write_text("no")
    folders = ["--image_dir", photos, "--output_dir"]
    status, out, _ = run_main(capsys, "image", *folders, tmp_path / "cache", "--max_images", 3)
    assert status == 2
    assert "is not an image" in out
    assert "failures.jsonl" in out
    status, out, _ = run_main(capsys, "image", *folders, tmp_path / "other", "--dry_run")
    assert status == 2
    assert "bad.jpg is not an image" in out


def test_processors_are_listed(capsys):
    status, out, _ = run_main(capsys, "processors")
    assert status == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "tiny", "flux", "wan", "wan2.2", "hunyuan"]
    assert "black-forest-labs/FLUX.1-dev" in out
    assert run_main(capsys, "--list_processors")[1] == out


def test_main_restores_signal_handler_and_warning_filters(capsys):
    handler, filters = signal.getsignal(signal.SIGTERM), list(warnings.filters)
    assert main(["processors"]) == 0
    assert main(["verify", "missing"]) == 1
    with pytest.raises(SystemExit):
        main(["images"])
    assert signal.getsignal(signal.SIGTERM) == handler
    assert warnings.filters == filters


def test_main_works_in_other_threads(capsys):
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(main(["processors"])))
    thread.start()
    thread.join()
    assert statuses == [0]


@pytest.mark.slow
def test_nemo_command(tmp_path):
    listed = subprocess.run([*NEMO, "--list_processors"], capture_output=True, text=True, check=True)
    assert "flux" in listed.stdout
    command = [*NEMO, "image", "--image_dir", EXAMPLES, "--output_dir", tmp_path / "cache"]
    done = subprocess.run(
        [*map(str, command), "--processor", "tiny", "--resolution_preset", "256p"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "12 encoded" in done.stdout


def shown_in_terminal(command: list[str]) -> bytes:
    """What a command writes to its terminal, on standard error."""
    main_end, terminal = pty.openpty()
    process = subprocess.Popen(command, stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(main_end, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(main_end)
    assert process.wait() == 0, shown
    return shown


@pytest.mark.slow
def test_terminal_shows_bars(tmp_path):
    command = [sys.executable, "-m", "latentry", *map(str, image(tmp_path / "cache"))]
    shown = shown_in_terminal(command)
    assert "━".encode() in shown
    assert b"12/12" in shown


def test_terminal_shows_lines_without_rich(image_cache):
    code = (
        "import sys; sys.modules['rich'] = None; from latentry.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    shown = shown_in_terminal([sys.executable, "-c", code, "verify", str(image_cache)])
    assert b"verify: 29/29, 0 failed" in shown
