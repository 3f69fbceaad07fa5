"""Flat folders of .meta files, and mock data."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from helpers import assert_same_items

import latentry
from latentry.errors import CacheFileError, CacheNotFoundError, ConfigError
from latentry.serve.loader import LatentDataLoader
from latentry.serve.meta_files import MetaFilesDataset, build_dataloader
from latentry.serve.mock import MockWanDataset, build_mock_dataloader
from latentry.serve.yaml_config import from_config
from latentry.testing import assert_resumes


def write_meta(path: Path, number: int, width: int = 10, **more) -> Path:
    torch.save(
        {
            "video_latents": torch.full((1, 16, 3, 6, width), float(number)).half(),
            "text_embeddings": torch.full((1, 8, 4), float(number)),
            "first_frame": torch.zeros(48, 8 * width, 3, dtype=torch.uint8),
            "bucket_resolution": (8 * width, 48),
            "prompt": f"clip {number}",
            "num_frames": 9,
            **more,
        },
        path,
    )
    return path


@pytest.fixture
def meta_folder(tmp_path) -> Path:
    """Five wide clips and three narrow ones; one more in a subfolder, and files of other kinds."""
    folder = tmp_path / "meta"
    (folder / "sub").mkdir(parents=True)
    for number in range(8):
        write_meta(folder / f"clip_{number}.meta", number, width=10 if number < 5 else 4)
    write_meta(folder / "sub" / "hidden.meta", 99)
    (folder / "notes.txt").write_text("not a sample")
    return folder


def test_tensors_of_any_name_arrive_in_the_batch(tmp_path):
    for number, length in enumerate((3, 5)):
        more = {"audio_latents": torch.ones(1, 8, 6, 16), "pose": torch.full((1, 2), number)}
        write_meta(
            tmp_path / f"{number}.meta", number, text_embeddings=torch.full((1, length, 4), 1.0), **more
        )
    loader, _ = build_dataloader(meta_folder=tmp_path, batch_size=2, shuffle=False)
    (batch,) = loader
    assert batch["audio_latents"].shape == (2, 8, 6, 16)
    assert batch["pose"].tolist() == [[0, 0], [1, 1]]
    assert batch["text_mask"].sum(1).tolist() == [3, 5]
    assert "first_frame" not in batch


def test_samples(meta_folder):
    dataset = MetaFilesDataset(meta_folder)
    assert [path.name for path in dataset.meta_files] == [f"clip_{n}.meta" for n in range(8)]
    item = dataset[2]
    assert list(item) == ["text_embeddings", "video_latents", "metadata", "file_info"]
    assert item["video_latents"].shape == (1, 16, 3, 6, 10)
    assert item["metadata"]["prompt"] == "clip 2"
    assert item["file_info"] == {
        "meta_filename": "clip_2.meta",
        "meta_path": str(meta_folder / "clip_2.meta"),
    }


def test_optional_tensors_transforms_and_filter(meta_folder):
    write_meta(meta_folder / "clip_0.meta", 0, text_mask=torch.ones(1, 8, dtype=torch.int64))
    dataset = MetaFilesDataset(
        meta_folder,
        transform_text=lambda text: text + 1,
        transform_video=lambda latents: latents * 2,
        filter_fn=lambda metadata: metadata["prompt"] != "clip 1",
    )
    assert len(dataset) == 7
    assert dataset[0]["text_mask"].dtype == torch.int64
    assert dataset[1]["metadata"]["prompt"] == "clip 2"
    assert dataset[1]["text_embeddings"].unique().tolist() == [3.0]
    assert dataset[1]["video_latents"].unique().tolist() == [4.0]


def test_the_number_of_files_is_limited(meta_folder, monkeypatch):
    assert len(MetaFilesDataset(meta_folder, max_files=3)) == 3
    monkeypatch.setenv("MAX_META_FILES", "2")
    assert [
        item["metadata"]["prompt"] for item in map(MetaFilesDataset(meta_folder).__getitem__, (0, 1))
    ] == [
        "clip 0",
        "clip 1",
    ]
    assert len(MetaFilesDataset(meta_folder, max_files=3)) == 3, "the argument wins"
    monkeypatch.setenv("MAX_META_FILES", "many")
    with pytest.raises(ConfigError, match="MAX_META_FILES is 'many'"):
        MetaFilesDataset(meta_folder)
    with pytest.raises(ConfigError, match="max_files is 0"):
        MetaFilesDataset(meta_folder, max_files=0)


def test_batches_have_one_shape_and_every_sample_comes_once(meta_folder):
    loader, sampler = build_dataloader(
        meta_folder=str(meta_folder), batch_size=2, dp_rank=0, dp_world_size=1, num_workers=1
    )
    assert isinstance(loader, LatentDataLoader)
    batches = list(loader)
    assert sorted(tuple(batch["video_latents"].shape) for batch in batches) == [
        (1, 16, 3, 6, 4), (1, 16, 3, 6, 10), (2, 16, 3, 6, 4), (2, 16, 3, 6, 10), (2, 16, 3, 6, 10),
    ]  # fmt: skip
    names = [info["meta_filename"] for batch in batches for info in batch["file_info"]]
    assert sorted(names) == [f"clip_{n}.meta" for n in range(8)]
    for batch in batches:
        assert batch["data_type"] == "video"
        for i, info in enumerate(batch["file_info"]):
            number = float(info["meta_filename"][5])
            assert batch["video_latents"][i].unique().tolist() == [number]
            assert batch["metadata"][i]["prompt"] == f"clip {number:.0f}"
    sampler.set_epoch(1)
    assert [info["meta_filename"] for batch in loader for info in batch["file_info"]] != names


def test_ranks_share_the_samples_and_resume(meta_folder):
    config = latentry.MetaFilesDataloaderConfig(str(meta_folder), num_workers=0)
    names = [
        info["meta_filename"]
        for rank in range(2)
        for batch in config.build(dp_rank=rank, dp_world_size=2, batch_size=1).dataloader
        for info in batch["file_info"]
    ]
    assert set(names) == {f"clip_{n}.meta" for n in range(8)}
    assert_resumes(lambda: config.build(dp_rank=0, dp_world_size=1, batch_size=1).dataloader, stop_after=3)


def test_configurations_and_yaml(meta_folder):
    assert len(latentry.MetaFilesDatasetConfig(str(meta_folder), max_files=2).build()) == 2
    for target in (
        "latentry.MetaFilesDataloaderConfig",
        "nemo_automodel.components.datasets.diffusion.build_dataloader",
    ):
        loader, _ = from_config({"_target_": target, "meta_folder": str(meta_folder)})
        assert len(loader) == 8
        with pytest.raises(ConfigError, match=r"meta_folder is missing; it must be a folder of \.meta files"):
            from_config({"_target_": target})


def test_early_files_without_a_leading_dimension(tmp_path):
    torch.save(
        {
            "video_latents": torch.ones(16, 3, 6, 10),
            "text_embeddings": torch.ones(8, 4),
            "metadata": {"prompt": "early", "fps": 16},
        },
        tmp_path / "a.meta",
    )
    dataset = MetaFilesDataset(tmp_path, filter_fn=lambda metadata: metadata["fps"] == 16)
    assert dataset[0]["video_latents"].shape == (1, 16, 3, 6, 10)
    assert dataset[0]["text_embeddings"].shape == (1, 8, 4)
    assert dataset[0]["metadata"] == {"prompt": "early", "fps": 16}


class Harmful:
    def __reduce__(self):
        return (pytest.fail, ("code of the file was executed",))


def test_nothing_in_a_file_is_executed(meta_folder):
    (meta_folder / "clip_3.meta").write_bytes(pickle.dumps({"video_latents": Harmful()}))
    with pytest.raises(CacheFileError, match=r"clip_3\.meta"):
        MetaFilesDataset(meta_folder)
    write_meta(meta_folder / "clip_3.meta", 3, prompt=Harmful())
    with pytest.raises(CacheFileError, match=r"clip_3\.meta holds more than tensors and plain values"):
        MetaFilesDataset(meta_folder)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"text_embeddings": torch.ones(1, 2, 3)}, "has no video_latents"),
        ({"video_latents": torch.ones(1, 2, 3, 4, 5)}, "has no text_embeddings"),
        ({"video_latents": torch.ones(3), "text_embeddings": torch.ones(1, 2, 3)}, r"shape \[3\]"),
    ],
)
def test_files_that_are_no_samples(tmp_path, data, says):
    torch.save(data, tmp_path / "a.meta")
    with pytest.raises(CacheFileError, match=says):
        MetaFilesDataset(tmp_path)


def test_folders_without_samples(tmp_path, meta_folder):
    with pytest.raises(CacheNotFoundError, match="there is no folder"):
        MetaFilesDataset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CacheNotFoundError, match=r"has no \.meta files"):
        MetaFilesDataset(tmp_path / "empty")
    with pytest.raises(CacheNotFoundError, match=r"none of its 8 \.meta files passes filter_fn"):
        MetaFilesDataset(meta_folder, filter_fn=lambda metadata: False)


# ---- mock data ------------------------------------------------------------------------------


def test_mock_samples_are_random_but_fixed():
    dataset = MockWanDataset()
    assert len(dataset) == 1024
    item = dataset[7]
    assert item["video_latents"].shape == (1, 16, 16, 30, 52)
    assert item["text_embeddings"].shape == (1, 77, 4096)
    assert item["video_latents"].dtype == item["text_embeddings"].dtype == torch.float32
    assert abs(item["video_latents"].mean().item()) < 0.05
    assert abs(item["video_latents"].std().item() - 1) < 0.05
    assert_same_items(item, MockWanDataset()[7])
    assert not torch.equal(item["video_latents"], dataset[8]["video_latents"])
    with pytest.raises(IndexError):
        dataset[1024]
    with pytest.raises(ConfigError, match="size of the mock data is 0"):
        MockWanDataset(length=0)


def test_mock_loader_resumes():
    small = {"length": 9, "num_channels": 2, "spatial_h": 2, "spatial_w": 3, "text_embed_dim": 4}
    loader, sampler = build_mock_dataloader(dp_rank=0, dp_world_size=1, batch_size=2, **small)
    batches = list(loader)
    assert [len(batch["video_latents"]) for batch in batches] == [2, 2, 2, 2, 1]
    assert batches[0]["text_embeddings"].shape == (2, 77, 4)
    names = {info["meta_filename"] for batch in batches for info in batch["file_info"]}
    assert len(names) == 9
    assert sampler is loader.batch_sampler
    config = latentry.MockWanDataloaderConfig(**small)
    assert_resumes(lambda: config.build(dp_rank=0, dp_world_size=1, batch_size=2).dataloader, stop_after=2)
