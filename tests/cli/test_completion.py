"""``latentry completion``: scripts that real shells accept."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_main


@pytest.fixture
def script(tmp_path, capsys) -> Path:
    status, out, err = run_main(capsys, "completion", "bash")
    assert (status, err) == (0, "")
    path = tmp_path / "latentry.bash"
    path.write_text(out)
    return path


def completed(script: Path, *words: str, folder: Path | None = None) -> set[str]:
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"""
source {script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
function=$(complete -p latentry | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function latentry '{words[-1]}' '{words[-2]}' 2> /dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def test_bash_completes_commands_flags_and_values(script, tmp_path):
    assert completed(script, "latentry", "v") == {"video", "verify"}
    flags = completed(script, "latentry", "image", "--max")
    assert {"--max_images", "--max-images", "--max_failures", "--max-failures"} <= flags
    assert completed(script, "latentry", "image", "--crop_mode", "") == {"center", "random", "smart", "none"}
    assert completed(script, "latentry", "image", "--processor", "") == {"tiny", "flux"}
    assert completed(script, "latentry", "video", "--processor", "h") == {"hunyuan"}
    assert completed(script, "latentry", "completion", "") >= {"bash", "zsh", "fish"}


def test_bash_completes_folders(script, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "phone.txt").touch()
    found = completed(script, "latentry", "image", "--image_dir", "ph", folder=tmp_path)
    assert found == {"photos"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(capsys, tmp_path, shell):
    status, out, _ = run_main(capsys, "completion", shell)
    assert status == 0
    for word in ("image", "convert", "max_failures", "smart", "hunyuan"):
        assert word in out, word
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_other_commands_do_not_load_the_generator():
    code = "import sys; from latentry.cli import main; main(['processors']); print('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
