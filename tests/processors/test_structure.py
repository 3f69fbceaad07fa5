"""``supports()`` goes by structure: class names do not matter, every layer does."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from helpers import FUSED_ENCODERS
from torch import nn

from latentry.processors.fused.clip import ClipEncoder
from latentry.processors.fused.image_vae import ImageEncoder
from latentry.processors.fused.wan_vae import WanEncoder


@pytest.mark.parametrize("name", FUSED_ENCODERS)
def test_renamed_classes_are_supported(name, load_model):
    model = load_model(name)
    assert FUSED_ENCODERS[name].supports(model)
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            module.__class__ = type("Renamed", (type(module),), {})
    assert FUSED_ENCODERS[name].supports(model)


def is_free(path: str) -> bool:
    """Whether the structure of a module does not matter: CLIP's MLP is called, T5's configuration names the activation."""
    return "mlp" in path or path.endswith(".act")


@pytest.mark.parametrize("name", FUSED_ENCODERS)
def test_an_extra_layer_is_not_supported(name, load_model):
    """Anywhere in the encoder, with or without weights. A lone parameter or buffer is not supported either."""
    model = load_model(name)
    inner = [module for path, module in model.encoder.named_modules() if not is_free(path)]
    assert len(inner) > 10
    for module in inner:
        for extra in (nn.Linear(2, 2), nn.Tanh()):
            module.add_module("extra", extra)
            assert not FUSED_ENCODERS[name].supports(model), type(module).__name__
            del module._modules["extra"]
        module.register_parameter("extra", nn.Parameter(torch.ones(1)))
        assert not FUSED_ENCODERS[name].supports(model), type(module).__name__
        del module._parameters["extra"]
        module.register_buffer("extra", torch.ones(1))
        assert not FUSED_ENCODERS[name].supports(model), type(module).__name__
        del module._buffers["extra"]
    assert FUSED_ENCODERS[name].supports(model)


@pytest.mark.parametrize("name", FUSED_ENCODERS)
def test_a_missing_layer_is_not_supported(name, load_model):
    model = load_model(name)
    optional = ("embed_tokens", "relative_attention_bias", "downsamplers", "time_conv")
    removed = 0
    for path, parent in list(model.encoder.named_modules()):
        for child, module in list(parent.named_children()):
            if isinstance(parent, nn.ModuleList) or child in optional or is_free(f"{path}.{child}"):
                continue
            if child == "conv_shortcut" and name != "wan_vae":
                continue  # blocks that keep their number of channels have none
            del parent._modules[child]
            assert not FUSED_ENCODERS[name].supports(model), f"{path}.{child}"
            parent._modules[child] = module
            removed += 1
    assert removed >= 10


def set_attribute(path: str, name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def set_config(**values: object) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        if hasattr(model.config, "to_dict"):
            for name, value in values.items():
                setattr(model.config, name, value)
        else:
            model.register_to_config(**values)

    return change


class _OtherNorm(nn.Module):
    """An RMS norm of the same name as before, with a bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1, 1))
        self.channel_first, self.scale = True, channels**0.5


IMAGE_RESNET = "encoder.down_blocks.0.resnets.0"
HUNYUAN_RESNET = "encoder.down_blocks.0.resnets.0"
DIFFERENT = {
    "image_vae": {
        "activation": set_attribute(IMAGE_RESNET, "nonlinearity", nn.GELU()),
        "output activation": set_attribute("encoder", "conv_act", nn.ReLU()),
        "norm": set_attribute(IMAGE_RESNET, "norm1", nn.LayerNorm(8)),
        "norm without weights": set_attribute(IMAGE_RESNET, "norm1", nn.GroupNorm(4, 8, affine=False)),
        "kernel size": set_attribute(IMAGE_RESNET, "conv1", nn.Conv2d(8, 8, 5, padding=2)),
        "stride": set_attribute(IMAGE_RESNET, "conv1", nn.Conv2d(8, 8, 3, padding=1, stride=2)),
        "dilation": set_attribute(IMAGE_RESNET, "conv1", nn.Conv2d(8, 8, 3, padding=1, dilation=2)),
        "padding mode": set_attribute(
            IMAGE_RESNET, "conv1", nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        ),
        "no bias": set_attribute(IMAGE_RESNET, "conv1", nn.Conv2d(8, 8, 3, padding=1, bias=False)),
        "residual scale": set_attribute(IMAGE_RESNET, "output_scale_factor", 2.0),
        "resampling": set_attribute(IMAGE_RESNET, "downsample", nn.functional.avg_pool2d),
        "padded downsampler": set_attribute("encoder.down_blocks.0.downsamplers.0", "padding", 1),
        "heads": set_attribute("encoder.mid_block.attentions.0", "heads", 2),
        "attention scale": set_attribute("encoder.mid_block.attentions.0", "scale_qk", False),
        "attention output": set_attribute("encoder.mid_block.attentions.0", "rescale_output_factor", 2.0),
        "no residual": set_attribute("encoder.mid_block.attentions.0", "residual_connection", False),
    },
    "wan_vae": {
        "activation": set_attribute("encoder.down_blocks.0", "nonlinearity", nn.GELU()),
        "output activation": set_attribute("encoder", "nonlinearity", nn.ReLU()),
        "norm": set_attribute("encoder.down_blocks.0", "norm1", nn.GroupNorm(4, 8)),
        "norm with bias": set_attribute("encoder.down_blocks.0", "norm1", _OtherNorm(8)),
        "norm dimension": set_attribute("encoder.down_blocks.0.norm1", "channel_first", False),
        "stride": set_attribute("encoder.down_blocks.0.conv1", "stride", (2, 1, 1)),
        "downsampler padding": set_attribute("encoder.down_blocks.1.resample.0", "padding", (1, 1, 1, 1)),
        "kernel size": set_attribute("encoder.down_blocks.3", "time_conv", nn.Conv3d(8, 8, (5, 1, 1))),
        "patches": set_config(patch_size=2),
    },
    "hunyuan_vae": {
        "activation": set_attribute(HUNYUAN_RESNET, "nonlinearity", nn.GELU()),
        "output activation": set_attribute("encoder", "conv_act", nn.ReLU()),
        "norm": set_attribute(HUNYUAN_RESNET, "norm1", nn.GroupNorm(4, 16)),
        "norm with bias": set_attribute(HUNYUAN_RESNET, "norm1", _OtherNorm(16)),
        "padding mode": set_attribute(f"{HUNYUAN_RESNET}.conv1", "pad_mode", "constant"),
        "padding": set_attribute(f"{HUNYUAN_RESNET}.conv1", "time_causal_padding", (1, 1, 1, 1, 1, 1)),
        "groups": set_attribute("encoder.down_blocks.0.downsamplers.0", "group_size", 3),
        "output groups": set_attribute("encoder", "group_size", 2),
        "a quantising convolution": set_attribute("", "quant_conv", nn.Conv3d(64, 64, 1)),
    },
    "t5": {
        "activation": set_config(dense_act_fn="relu"),
        "no gate": set_config(is_gated_act=False),
        "norm": set_attribute("encoder.block.0.layer.0", "layer_norm", nn.LayerNorm(32)),
        "norm without bias": set_attribute(
            "encoder.block.0.layer.0", "layer_norm", nn.LayerNorm(32, bias=False)
        ),
        "bias": set_attribute("encoder.block.0.layer.0.SelfAttention", "q", nn.Linear(32, 32)),
        "attention scale": set_attribute("encoder.block.1.layer.0.SelfAttention", "scaling", 0.5),
        "decoder": set_attribute("encoder.block.1.layer.0.SelfAttention", "is_decoder", True),
    },
    "clip": {
        "norm": set_attribute("encoder.layers.0", "layer_norm1", nn.RMSNorm(32)),
        "final norm": set_attribute("", "final_layer_norm", nn.RMSNorm(32)),
        "attention scale": set_attribute("encoder.layers.1.self_attn", "scale", 1.0),
        "no bias": set_attribute("encoder.layers.0.self_attn", "q_proj", nn.Linear(32, 32, bias=False)),
    },
}
DIFFERENT["umt5"] = DIFFERENT["t5"]


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in FUSED_ENCODERS for what in DIFFERENT[name]]
)
def test_a_different_layer_is_not_supported(name, what, load_model):
    model = load_model(name)
    DIFFERENT[name][what](model)
    assert not FUSED_ENCODERS[name].supports(model)


def test_clip_takes_any_activation(load_model):
    """The fused encoder calls the model's own MLP."""
    model = load_model("clip")
    model.encoder.layers[0].mlp.activation_fn = nn.ReLU()
    assert ClipEncoder.supports(model)
    tokens = ClipEncoder.check_inputs(model)[0]
    with torch.inference_mode():
        torch.testing.assert_close(ClipEncoder(model)(*tokens), ClipEncoder.reference(model, *tokens))


def test_wan_2_2_is_not_supported():
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    assert not WanEncoder.supports(vae)


def test_the_first_difference_is_logged(load_model, caplog):
    model = load_model("image_vae")
    DIFFERENT["image_vae"]["activation"](model)
    with caplog.at_level(logging.DEBUG, logger="latentry"):
        ImageEncoder.supports(model)
    assert f"model.{IMAGE_RESNET}.nonlinearity is a GELU, not a SiLU" in caplog.text
