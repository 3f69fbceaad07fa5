"""The sampler at a billion samples, and against a list-and-randperm sampler where that still fits.

    python benchmarks/order.py

Each measurement runs in a process of its own; memory is the growth of its peak beyond the imports.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from types import SimpleNamespace

import torch

from latentry.buckets import MultiTierBucketCalculator
from latentry.serve.sampler import SequentialBucketSampler

NUM_BUCKETS = 30


def dataset(num_samples: int, as_lists: bool) -> SimpleNamespace:
    """Thirty buckets of equal size over consecutive indices."""
    size = num_samples // NUM_BUCKETS
    groups = {}
    for i in range(NUM_BUCKETS):
        indices = range(i * size, (i + 1) * size)
        resolution = (512 + 64 * i, 512)
        groups["any", resolution] = {
            "indices": list(indices) if as_lists else indices,
            "resolution": resolution,
            "pixels": resolution[0] * resolution[1],
            "aspect_name": "any",
        }
    return SimpleNamespace(
        sorted_bucket_keys=list(groups), bucket_groups=groups, calculator=MultiTierBucketCalculator()
    )


class PlainSampler:
    """What people write: lists, one randperm per bucket, and a resume that iterates up to its place."""

    def __init__(self, data: SimpleNamespace, batch_size: int = 32, seed: int = 42) -> None:
        self.data, self.batch_size, self.seed = data, batch_size, seed

    def batch(self, wanted: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed)
        keys = self.data.sorted_bucket_keys
        count = 0
        for i in torch.randperm(len(keys), generator=generator).tolist():
            indices = self.data.bucket_groups[keys[i]]["indices"]
            indices = [indices[j] for j in torch.randperm(len(indices), generator=generator).tolist()]
            for start in range(0, len(indices) - self.batch_size + 1, self.batch_size):
                if count == wanted:
                    return indices[start : start + self.batch_size]
                count += 1
        raise IndexError(wanted)


def peak_mb() -> float:
    """This process's own peak; what getrusage reports would include its parent's."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measure(kind: str, num_samples: int, order: str, queue: multiprocessing.Queue) -> None:
    logging.disable(logging.WARNING)  # what drop_last leaves out is not the question here
    torch.randperm(10)
    before = peak_mb()
    start = time.perf_counter()
    if kind == "plain":
        sampler = PlainSampler(dataset(num_samples, as_lists=True))
        get, num_batches = sampler.batch, num_samples // 32 - NUM_BUCKETS
    else:
        sampler = SequentialBucketSampler(dataset(num_samples, as_lists=False), bucket_order=order)
        get, num_batches = sampler.get_batch, len(sampler)
    get(0)
    first_s = time.perf_counter() - start

    steps = [num_batches // 2] if kind == "plain" else random.Random(0).sample(range(num_batches), 200)
    times = []
    for step in steps:
        start = time.perf_counter()
        get(step)
        times.append(time.perf_counter() - start)
    result = {"first_s": first_s, "any_s": max(times), "mean_s": sum(times) / len(times)}
    if kind != "plain":
        resumes = []
        for step in steps[:20]:
            for replicas in (1, 3):
                fresh = SequentialBucketSampler(
                    sampler.dataset, bucket_order=order, num_replicas=replicas, rank=0
                )
                state = {**sampler.state_dict(), "batches_yielded": step}
                fresh.fingerprint  # noqa: B018 - a dataset brings its own
                start = time.perf_counter()
                fresh.load_state_dict(state)
                next(iter(fresh))
                resumes.append(time.perf_counter() - start)
        result["resume_s"] = max(resumes)
    result["memory_mb"] = peak_mb() - before
    queue.put(result)


def run(kind: str, num_samples: int, order: str = "sequential") -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(kind, num_samples, order, queue))
    process.start()
    result = queue.get()
    process.join()
    print(f"{kind + ' ' + order:24s} {num_samples:>13,d} samples", end="")
    print(f"  build + first batch {result['first_s'] * 1e3:9.1f} ms", end="")
    print(f"  any batch at worst {result['any_s'] * 1e3:9.2f} ms (mean {result['mean_s'] * 1e3:.2f})", end="")
    if "resume_s" in result:
        print(f"  resume at worst {result['resume_s'] * 1e3:6.2f} ms", end="")
    print(f"  memory {result['memory_mb']:7.1f} MB", flush=True)
    return result


def main() -> None:
    for order in ("sequential", "interleaved"):
        run("latentry", 1_000_000_000, order)
    ours = run("latentry", 36_000_000)
    plain = run("plain", 36_000_000)
    print("ratios at 36 million: ", end="")
    print(f"first batch {plain['first_s'] / ours['first_s']:,.0f}x, ", end="")
    print(f"a batch in the middle {plain['any_s'] / ours['any_s']:,.0f}x, ", end="")
    print(f"memory {plain['memory_mb'] / max(1.0, ours['memory_mb']):,.0f}x")


if __name__ == "__main__":
    main()
