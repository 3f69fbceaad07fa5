"""The loader and its sampler under the loaders of PyTorch, torchdata and Accelerate: exact state, exact resume.

Each test stops somewhere in the second epoch or at the end of the first, makes everything anew, resumes, and compares
with an undisturbed run of three epochs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

import latentry
from latentry.serve.collate import collate_fn_text_to_image
from latentry.serve.dataset import TextToImageDataset
from latentry.serve.sampler import SequentialBucketSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]
EPOCHS = 3
BATCHES = 16
STOPS = [5, 16, 21, 32]


def build(cache, **options):
    options = {"batch_size": 2, "drop_last": False, "num_workers": 2} | options
    return latentry.build_text_to_image_multiresolution_dataloader(cache_dir=cache, **options)


def prompts(batch) -> tuple[str, ...]:
    return tuple(batch["metadata"]["prompts"])


@pytest.fixture(scope="module")
def undisturbed(image_cache) -> list[tuple[int, tuple[str, ...]]]:
    """Epoch and prompts of every batch of three epochs."""
    loader, sampler = build(image_cache)
    seen = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen += [(epoch, prompts(batch)) for batch in loader]
    epochs = [[batch for e, batch in seen if e == epoch] for epoch in range(EPOCHS)]
    assert [len(batches) for batches in epochs] == [BATCHES] * EPOCHS
    for batches in epochs:
        assert sorted(p for batch in batches for p in batch) == sorted(f"sample {i}" for i in range(29))
    assert epochs[0] != epochs[1] != epochs[2], "every epoch is shuffled differently"
    return seen


def train(loader, sampler, first_epoch: int = 0) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The training loop: epoch after epoch."""
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield epoch, prompts(batch)


def through_json(state):
    return json.loads(json.dumps(state))


# ---- PyTorch's DataLoader -------------------------------------------------------------------


def plain_loader(cache, workers: int, from_builder: bool):
    if from_builder:
        loader, sampler = build(cache)
        dataset, collate_fn = loader.dataset, loader.collate_fn
    else:
        dataset, collate_fn = TextToImageDataset(cache), collate_fn_text_to_image
        sampler = SequentialBucketSampler(dataset, base_batch_size=2, drop_last=False)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=workers), sampler


@pytest.mark.parametrize("from_builder", [False, True])
@pytest.mark.parametrize("stop", STOPS)
def test_plain_dataloader(image_cache, undisturbed, stop, from_builder):
    loader, sampler = plain_loader(image_cache, 0, from_builder)
    running = train(loader, sampler)
    seen = [next(running) for _ in range(stop)]
    state = through_json(sampler.state_dict())
    loader, sampler = plain_loader(image_cache, 0, from_builder)
    sampler.load_state_dict(state)
    assert seen + list(train(loader, sampler, sampler.epoch)) == undisturbed


@pytest.mark.parametrize("stop", [5, 16, 21])
def test_plain_dataloader_with_worker_processes(image_cache, undisturbed, stop):
    """Worker processes draw ahead of the trainer, so the training loop counts."""
    loader, sampler = plain_loader(image_cache, 2, from_builder=True)
    running = train(loader, sampler)
    seen = [next(running) for _ in range(stop)]
    received = stop - BATCHES * seen[-1][0]
    if received < BATCHES:
        assert sampler.state_dict()["batches_yielded"] > received, "drawn ahead"
    state = through_json(sampler.state_dict(batches_received=received))
    running.close()
    loader, sampler = plain_loader(image_cache, 2, from_builder=True)
    sampler.load_state_dict(state)
    assert seen + list(train(loader, sampler, sampler.epoch)) == undisturbed


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_after_a_resume_are_whole(image_cache, workers):
    """Even if the training loop never sets the epoch."""
    loader, sampler = plain_loader(image_cache, workers, from_builder=True)
    sampler.load_state_dict({"epoch": 0, "batches_yielded": 5})
    assert [len(list(loader)) for _ in range(3)] == [BATCHES - 5, BATCHES, BATCHES]


# ---- torchdata ------------------------------------------------------------------------------


def stateful_loader(cache, workers: int):
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader, sampler = build(cache)
    return (
        StatefulDataLoader(
            loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn, num_workers=workers
        ),
        sampler,
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", STOPS)
def test_torchdata(image_cache, undisturbed, stop, workers):
    loader, sampler = stateful_loader(image_cache, workers)
    running = train(loader, sampler)
    seen = [next(running) for _ in range(stop)]
    checkpoint = through_json({"epoch": seen[-1][0], "loader": loader.state_dict()})
    running.close()
    loader, sampler = stateful_loader(image_cache, workers)
    loader.load_state_dict(checkpoint["loader"])
    assert seen + list(train(loader, sampler, checkpoint["epoch"])) == undisturbed


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_state_between_epochs(image_cache, undisturbed, workers):
    """Saved after the loop over the batches of epoch 0, for epoch 1; torchdata loads it after set_epoch(1)."""
    loader, sampler = stateful_loader(image_cache, workers)
    assert len(list(loader)) == BATCHES
    state = through_json(loader.state_dict())
    loader, sampler = stateful_loader(image_cache, workers)
    loader.load_state_dict(state)
    assert list(train(loader, sampler, 1)) == undisturbed[BATCHES:]


# ---- Accelerate -----------------------------------------------------------------------------


@pytest.fixture
def new_accelerator():
    """A function that makes an Accelerator as a new process would."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    def make(**options) -> Accelerator:
        reset()
        return Accelerator(cpu=True, **options)

    yield make
    reset()


def prepared(accelerator, cache):
    loader, sampler = build(cache, device=accelerator.device)
    model = torch.nn.Linear(1, 1)
    model, optimizer, prepared_loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), loader
    )
    assert prepared_loader is loader
    return loader, sampler, model, optimizer


@pytest.mark.parametrize("stop", STOPS)
def test_accelerate(image_cache, undisturbed, stop, new_accelerator, tmp_path):
    accelerator = new_accelerator()
    loader, sampler, *_ = prepared(accelerator, image_cache)
    running = train(loader, sampler)
    seen = [next(running) for _ in range(stop)]
    assert loader.state_dict()["batches_yielded"] == stop - BATCHES * seen[-1][0]
    accelerator.save_state(tmp_path / "checkpoint")

    accelerator = new_accelerator()
    loader, sampler, *_ = prepared(accelerator, image_cache)
    accelerator.load_state(tmp_path / "checkpoint")
    assert sampler.epoch == seen[-1][0]
    assert seen + list(train(loader, sampler, sampler.epoch)) == undisturbed


@pytest.mark.parametrize("start", [0, 5])
def test_accelerate_accumulates_gradients_to_the_end_of_an_epoch(image_cache, new_accelerator, start):
    accelerator = new_accelerator(gradient_accumulation_steps=3)
    loader, sampler, model, optimizer = prepared(accelerator, image_cache)
    sampler.load_state_dict({"epoch": 0, "batches_yielded": start})
    for num_batches in (BATCHES - start, BATCHES):
        synchronized = []
        for step, _ in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    synchronized.append(step)
        expected = [step for step in range(1, num_batches + 1) if step % 3 == 0 or step == num_batches]
        assert synchronized == expected
    assert not accelerator.gradient_state.in_dataloader


def test_accelerate_with_a_loader_inside_the_loop_of_another(image_cache, new_accelerator):
    accelerator = new_accelerator()
    loader, *_ = prepared(accelerator, image_cache)
    validation, _ = build(image_cache, num_workers=0)
    state = accelerator.gradient_state
    for step, _ in enumerate(loader):
        assert state.active_dataloader is loader
        for _ in validation:
            assert state.active_dataloader is validation
        assert state.end_of_dataloader == (step == BATCHES - 1)
        if step == 1:
            break
    del _
    next(iter(loader))
    assert not state.in_dataloader, "a loop that was left ends like one that was finished"
