"""Reads shared between threads: all are done, errors are the same as with one thread, nothing hangs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
from torch.utils.data import DataLoader, Dataset

from latentry.cache.read.read_threads import ReadThreads

LARGE = 1 << 30


def test_several_threads_do_all_reads():
    names, done = set(), []
    meeting = threading.Barrier(3, timeout=30)

    def read(number: int) -> None:
        if number < 3:
            meeting.wait()  # passes only if three threads are here at once
        names.add(threading.current_thread().name)
        done.append(number)

    ReadThreads(3).run([lambda i=i: read(i) for i in range(20)], LARGE)
    assert sorted(done) == list(range(20))
    assert len(names) == 3


@pytest.mark.parametrize(
    ("reads", "num_reads", "num_bytes"),
    [(ReadThreads(1), 9, LARGE), (ReadThreads(4), 1, LARGE), (ReadThreads(4), 9, 1000)],
)
def test_small_batches_stay_on_the_calling_thread(reads, num_reads, num_bytes):
    names = []
    reads.run([lambda: names.append(threading.current_thread().name)] * num_reads, num_bytes)
    assert names == [threading.current_thread().name] * num_reads


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "expected"), [(16, "", 8), (16, "4", 2), (4, "1", 2), (2, "8", 1)]
)
def test_a_rank_uses_half_of_its_cores(num_cores, num_ranks, expected, monkeypatch):
    monkeypatch.setattr("latentry.cache.read.read_threads.num_cores", lambda: num_cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    meeting, names = threading.Barrier(expected, timeout=30), set()

    def read(number: int) -> None:
        if number < expected:
            meeting.wait()
        time.sleep(0.01)  # so that every thread gets a read
        names.add(threading.current_thread().name)

    ReadThreads().run([lambda i=i: read(i) for i in range(50)], LARGE)
    assert len(names) == expected


def test_only_cores_that_the_process_may_use_count():
    bound = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    code = f"{bound}; from latentry.hardware import num_cores; print(num_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_first_error_is_raised_after_all_reads_have_ended():
    ended = []

    def read(number: int) -> None:
        if number in (2, 5):
            time.sleep(0.05 if number == 2 else 0)
            raise ValueError(number)
        ended.append(number)

    for reads in (ReadThreads(1), ReadThreads(4)):
        ended.clear()
        with pytest.raises(ValueError, match="2"):
            reads.run([lambda i=i: read(i) for i in range(8)], LARGE)
        assert sorted(ended) == [0, 1, 3, 4, 6, 7]


def test_interrupt_leaves_no_read_running():
    running = threading.Semaphore(0)
    still = []

    def read(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            running.acquire(timeout=30)
            raise KeyboardInterrupt
        running.release()
        time.sleep(0.05)
        still.append(number)

    with pytest.raises(KeyboardInterrupt):
        ReadThreads(2).run([lambda i=i: read(i) for i in range(1000)], LARGE)
    count = len(still)
    assert count < 100, "reads that had not started are dropped"
    time.sleep(0.2)
    assert len(still) == count


def test_several_threads_may_call():
    reads, done = ReadThreads(3), []

    def batch(number: int) -> None:
        mine: list[int] = []
        reads.run([lambda i=i: mine.append(i) for i in range(50)], LARGE)
        assert sorted(mine) == list(range(50))
        done.append(number)

    threads = [threading.Thread(target=batch, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(12))


class ReadsInWorker(Dataset):
    def __init__(self, reads: ReadThreads) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return 2

    def __getitem__(self, idx: int) -> int:
        names: set[str] = set()
        self.reads.run([lambda: names.add(threading.current_thread().name)] * 50, LARGE)
        return len(names)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_worker_processes_use_one_thread_and_forks_start_new_ones():
    reads = ReadThreads(3)
    reads.run([lambda: None] * 50, LARGE)  # starts threads, which a fork does not have
    assert list(DataLoader(ReadsInWorker(reads), batch_size=None, num_workers=1)) == [1, 1]
    child = os.fork()
    if not child:
        meeting = threading.Barrier(3, timeout=10)
        try:
            reads.run([meeting.wait] * 3, LARGE)
        finally:
            os._exit(meeting.broken)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = pickle.loads(pickle.dumps(reads))
    assert again.num_threads == 3
