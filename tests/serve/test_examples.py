"""The training examples: each one is stopped, started again, and must continue where it stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import latentry
from latentry.testing import make_image_cache

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 2
SIZES = {(256, 256): 7, (320, 192): 5}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return make_image_cache(tmp_path_factory.mktemp("cache"), SIZES)


def run(name: str, *arguments: object, ranks: int = 1, cwd: Path | None = None) -> str:
    """What an example prints."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(EXAMPLES / name), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "1",
    }
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def batches(output: str) -> list[tuple[int, tuple[str, ...]]]:
    """Epoch and prompts of each batch that was printed; lines of several ranks may run into each other."""
    found = re.findall(r"epoch (\d+)[^:\n]*: (sample \d+(?:, sample \d+)*)", output)
    return [(int(epoch), tuple(prompts.split(", "))) for epoch, prompts in found]


def expected(cache: Path) -> list[tuple[int, tuple[str, ...]]]:
    loader, sampler = latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=cache, batch_size=2, drop_last=False, num_workers=0
    )
    seen = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen += [(epoch, tuple(batch["metadata"]["prompts"])) for batch in loader]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stop"),
    [("plain_pytorch", 3), ("with_torchdata", 3), ("with_accelerate", 9), ("with_lightning", 3)],
)
def test_stop_and_resume(name, stop, cache, tmp_path):
    arguments = (cache, "--state", tmp_path / "run" / "state.ckpt", "--epochs", EPOCHS)
    (tmp_path / "run").mkdir()
    first = batches(run(f"{name}.py", *arguments, "--stop_after", stop))
    assert len(first) == stop
    assert first + batches(run(f"{name}.py", *arguments)) == expected(cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_torchrun", "with_accelerate"])
def test_stop_and_resume_on_two_ranks(name, cache, tmp_path):
    arguments = (cache, "--state", tmp_path / "state.ckpt", "--epochs", EPOCHS)
    first = batches(run(f"{name}.py", *arguments, "--stop_after", 2, ranks=2))
    assert len(first) == 4, "two batches on each rank"
    second = batches(run(f"{name}.py", *arguments, ranks=2))
    for epoch in range(EPOCHS):
        seen = Counter(prompt for e, prompts in first + second if e == epoch for prompt in prompts)
        assert set(seen) == {f"sample {i}" for i in range(12)}
        assert seen.total() == 14, "one repeated sample pads each bucket to an even number"


def test_yaml_example(tmp_path):
    make_image_cache(tmp_path / "demo_output" / "cache", SIZES)
    output = run("train.py", EXAMPLES / "train.yaml", cwd=tmp_path)
    assert output.splitlines()[-1] == "epoch 0: 7 of 7 batches received"
