"""Real processes in a real process group: two ranks are killed in the middle of an epoch, three resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from latentry.testing import make_image_cache

WORKER = """
import json, sys, time
import torch, torch.distributed as dist
import latentry

rank, world, port, cache, folder, pause = sys.argv[1:]
rank, world = int(rank), int(world)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
loader, sampler = latentry.build_text_to_image_multiresolution_dataloader(
    cache_dir=cache, batch_size=2, dp_rank=dist.get_rank(), dp_world_size=dist.get_world_size(),
    num_workers=1, drop_last=False,
)
try:
    loader.load_state_dict(torch.load(f"{folder}/state.pt", weights_only=True))
except FileNotFoundError:
    pass
log = open(f"{folder}/world{world}_rank{rank}.jsonl", "w")
for batch in loader:
    # Every rank must be at the same bucket, or this collective would mix shapes.
    resolution = batch["metadata"]["crop_resolution"][0]
    shared = resolution.clone()
    dist.broadcast(shared, src=0)
    assert shared.equal(resolution), (shared, resolution)
    log.write(json.dumps({"bucket": resolution.tolist(), "prompts": batch["metadata"]["prompts"]}) + "\\n")
    log.flush()
    dist.barrier()
    if rank == 0:
        torch.save(loader.state_dict(), f"{folder}/state.tmp")
        import os; os.replace(f"{folder}/state.tmp", f"{folder}/state.pt")
    dist.barrier()
    time.sleep(float(pause))
print("finished", len(loader))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(world: int, cache: Path, folder: Path, pause: float) -> list[subprocess.Popen[str]]:
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (rank, world, port, cache, folder, pause))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        for rank in range(world)
    ]


def records(folder: Path, world: int) -> list[list[dict]]:
    return [
        [json.loads(line) for line in (folder / f"world{world}_rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(world)
    ]


@pytest.mark.slow
def test_resume_on_three_ranks_after_two_were_killed(tmp_path):
    cache = make_image_cache(tmp_path / "cache", {(256, 256): 48, (320, 192): 24, (192, 320): 36})
    ranks = start(2, cache, tmp_path, pause=0.05)
    log = tmp_path / "world2_rank1.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 9):
        assert time.monotonic() < deadline, [p.poll() for p in ranks]
        time.sleep(0.02)
    for process in ranks:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    received = state["batches_yielded"]
    first = [rank[:received] for rank in records(tmp_path, 2)]
    ranks = start(3, cache, tmp_path, pause=0)
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    second = records(tmp_path, 3)

    for run in (first, second):
        assert len({len(rank) for rank in run}) == 1, "the same number of batches on all ranks"
        for step in zip(*run, strict=True):
            assert len({tuple(record["bucket"]) for record in step}) == 1, "one bucket at a step"
            prompts = [prompt for record in step for prompt in record["prompts"]]
            assert len(prompts) == len(set(prompts)), "no sample twice at a step"
    before, after = (
        Counter(prompt for rank in run for record in rank for prompt in record["prompts"])
        for run in (first, second)
    )
    remaining = {f"sample {i}" for i in range(108)} - set(before)
    assert set(before.values()) == {1}
    assert {after[prompt] for prompt in remaining} == {1}, "every remaining sample exactly once"
    padding = [prompt for prompt in after if prompt not in remaining]
    assert len(padding) < 3, "only to pad the interrupted bucket to a multiple of three ranks"
