"""Names from before 0.2 work for one release, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import latentry
from latentry import _old_names

OLD = {
    "latentry.captions": ["CAPTION_FORMATS", "CaptionFinder"],
    "latentry.conversion": ["ConvertResult", "convert_cache"],
    "latentry.datasets": ["BaseMultiresolutionDataset", "TextToImageDataset", "TextToVideoDataset"],
    "latentry.loader": ["LatentDataLoader", "LoaderConfig", "collate_fn_production", "collate_fn_text_to_image",
                        "collate_fn_video", "build_text_to_image_multiresolution_dataloader",
                        "build_video_multiresolution_dataloader", "from_config"],
    "latentry.machine": ["num_cores", "num_ranks"],
    "latentry.order": ["FeistelPermutation", "InterleavedSchedule", "Leg", "SequentialSchedule", "derived_key"],
    "latentry.plan": ["DTYPES", "OUTPUT_FORMATS", "Plan", "Recipe", "ResolvedRecipe", "make_plan",
                      "recipe_fingerprint"],
    "latentry.preparation": ["Progress", "prepare"],
    "latentry.records": ["Bucket", "Caption", "Commit", "Failure", "PlannedSample", "ProcessorInfo",
                         "SourceFile", "Task"],
    "latentry.sampler": ["SequentialBucketSampler"],
    "latentry.verification": ["Problem", "VerifyResult", "verify_cache"],
    "latentry.cache.files": ["load_cache_file"],
    "latentry.media.headers": ["JpegHeader", "jpeg_header"],
    "latentry.media.kinds": ["Cut", "Extent", "Images", "Medium", "VideoChoices", "Videos"],
    "latentry.processors.gpu": [],
    "latentry.processors.gpu.causal": ["FirstConv", "Memory", "Stretches", "conv2d", "conv3d"],
    "latentry.processors.gpu.fused": ["attend", "group_norm", "norm_rows"],
    "latentry.processors.gpu.replay": ["Replayed"],
    "latentry.processors.gpu.t5": ["TextEncoder"],
}  # fmt: skip
"""Old module to names that people may import from it."""


@pytest.fixture(autouse=True)
def fresh():
    """Forget the old modules, so that each import warns."""
    for name in OLD:
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, latentry)).pop(child, None)


def test_every_old_module_is_listed():
    assert OLD.keys() == _old_names.MOVED_MODULES.keys()


@pytest.mark.parametrize("module", OLD)
def test_old_module(module):
    if (parent := module.rpartition(".")[0]) in OLD:
        with pytest.warns(DeprecationWarning, match=parent):
            importlib.import_module(parent)
    with pytest.warns(DeprecationWarning, match=f"{module} has moved to latentry"):
        old = importlib.import_module(module)
    new = [importlib.import_module(name) for name in _old_names.MOVED_MODULES[module]]
    for name in OLD[module]:
        new_name = _old_names.RENAMED.get(module, {}).get(name, name)
        assert any(getattr(old, name) is vars(part).get(new_name, new) for part in new), name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = old.nothing


def test_import_statements():
    with pytest.warns(DeprecationWarning, match="latentry.datasets has moved") as warned:
        from latentry.datasets import TextToImageDataset
    assert warned[0].filename == __file__
    assert TextToImageDataset is latentry.TextToImageDataset
    with pytest.warns(DeprecationWarning, match="latentry.plan has moved"):
        from latentry import plan
    assert plan.Recipe is latentry.Recipe
    with pytest.warns(DeprecationWarning, match="latentry.sampler has moved"):
        assert latentry.sampler.SequentialBucketSampler is latentry.SequentialBucketSampler


def test_renamed_export():
    with pytest.warns(DeprecationWarning, match="VideoChoices is now latentry.VideoOptions") as warned:
        old = latentry.VideoChoices
    assert warned[0].filename == __file__
    assert old is latentry.VideoOptions
    with pytest.warns(DeprecationWarning, match="VideoChoices is now"):
        from latentry import VideoChoices
    assert VideoChoices is latentry.VideoOptions


def test_unknown_names_stay_unknown():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("latentry.nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = latentry.nothing


def test_new_names_do_not_warn():
    code = "import latentry, latentry.serve.loader, latentry.encode.prepare; latentry.VideoOptions; dir(latentry)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_old_name_of_stacked_fields():
    from latentry import processors

    with pytest.warns(DeprecationWarning, match="now StackedFields"):
        assert processors.Columns is processors.StackedFields
