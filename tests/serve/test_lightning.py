"""The loader under Lightning: epochs advance, checkpoints hold its state, a run resumes in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

import latentry

BATCHES = 16
EPOCHS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Model(L.LightningModule):
    """Notes epoch and prompts of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, tuple[str, ...]]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, tuple(batch["metadata"]["prompts"])))
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(L.LightningDataModule):
    """Builds the loader inside ``train_dataloader``."""

    def __init__(self, cache: Path) -> None:
        super().__init__()
        self.cache = cache

    def train_dataloader(self):
        return build(self.cache)


def build(cache: Path):
    return latentry.build_text_to_image_multiresolution_dataloader(
        cache_dir=cache, batch_size=2, drop_last=False, num_workers=2
    )[0]


def fit(cache: Path, folder: Path, inside: bool, *, checkpoint=None, **options) -> tuple[Model, L.Trainer]:
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options},
    )
    data = {"datamodule": Data(cache)} if inside else {"train_dataloaders": build(cache)}
    trainer.fit(model, ckpt_path=checkpoint, **data)
    return model, trainer


@pytest.fixture(scope="module")
def undisturbed(image_cache) -> list[tuple[int, tuple[str, ...]]]:
    """Epoch and prompts of every batch, as our own training loop sees them."""
    loader = build(image_cache)
    seen = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen += [(epoch, tuple(batch["metadata"]["prompts"])) for batch in loader]
    return seen


@pytest.mark.parametrize("inside", [False, True])
def test_epochs_advance(image_cache, undisturbed, tmp_path, inside):
    model, _ = fit(image_cache, tmp_path, inside)
    assert model.seen == undisturbed


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("stop", "more"), [(5, 1), (16, 1), (21, 0), (21, 1), (32, 1)])
def test_resume_from_a_checkpoint(image_cache, undisturbed, tmp_path, stop, more, inside):
    """Saved after any batch, such as the last one of an epoch or the last one of the run."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, filename="state", every_n_train_steps=stop, save_top_k=1)
    options = {"enable_checkpointing": True, "callbacks": [saving]}
    first, _ = fit(image_cache, tmp_path, inside, max_steps=stop + more, **options)
    assert len(first.seen) == stop + more
    second, _ = fit(image_cache, tmp_path, inside, checkpoint=tmp_path / "state.ckpt")
    assert first.seen[:stop] + second.seen == undisturbed


def test_resume_after_an_epoch(image_cache, undisturbed, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, filename="state", every_n_epochs=1)
    first, _ = fit(image_cache, tmp_path, True, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    second, _ = fit(image_cache, tmp_path, True, checkpoint=tmp_path / "state.ckpt")
    assert len(first.seen) == BATCHES
    assert first.seen + second.seen == undisturbed


def test_epochs_that_lightning_cuts_short_start_at_the_beginning(image_cache, undisturbed, tmp_path):
    model, _ = fit(image_cache, tmp_path, False, limit_train_batches=6)
    expected = [undisturbed[BATCHES * epoch + step] for epoch in range(EPOCHS) for step in range(6)]
    assert model.seen == expected
