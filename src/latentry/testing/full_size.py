"""Processors for models of real size with random weights, for benchmarks and for tests of device memory.

Nothing is downloaded. The weights start in main memory, as ``from_pretrained`` leaves them, so a processor loads, moves
and offloads them as it does those of a checkpoint. They are drawn once per process, on the GPU if there is one, which
takes seconds, and every processor of the process shares them. In exchange they stay in main memory (10 to 16 GB for each
family in bfloat16) until ``forget_weights()``. The numbers have the scale of fresh models, so latents and embeddings
are finite, but they mean nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch

from latentry.processors.flux import FluxProcessor
from latentry.processors.hunyuan import HunyuanProcessor
from latentry.processors.wan import WanProcessor
from latentry.seeds import derived_seed
from latentry.testing.pipelines import clip_tokenizer, qwen_tokenizer, t5_tokenizer

Sizes = Mapping[str, Any]
"""The arguments of a model's configuration."""
Weights = dict[str, torch.Tensor]

XXL: Sizes = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
}  # fmt: skip

_VALUES_PER_DRAW = 1 << 26  # 128 MiB of device memory in bfloat16
_EMBEDDING_STD = 0.02

_drawn: dict[str, Weights] = {}
"""The weights that were drawn in this process. Processors share them, and write none of them."""


class RandomWeights(ABC):
    """Mixed into a processor: it gets models of the given sizes, with random weights.

    A subclass may have other sizes, for tests that need small models.
    """

    sizes: ClassVar[Mapping[str, Sizes]]
    """The configuration of each model, by its name in ``constructors``."""
    seed: ClassVar[int] = 0
    """Decides the weights."""
    _dtype: torch.dtype

    @staticmethod
    @abstractmethod
    def constructors() -> dict[str, Callable[..., Any]]:
        """What builds each model from its configuration."""

    @classmethod
    def skeletons(cls, dtype: torch.dtype) -> dict[str, Any]:
        """The models without weights: their parameters are on the meta device, their buffers in main memory."""
        found = {}
        for name, constructor in cls.constructors().items():
            with _without_weights(dtype):
                model = constructor(**cls.sizes[name])
            if hasattr(model, "shared"):
                # Some releases of transformers 5 do not tie these two, which would be a second copy of 2 GB.
                model.encoder.embed_tokens.weight = model.shared.weight
            found[name] = model.eval()
        return found

    @classmethod
    def weights_identity(cls, model_name: str, *, download: bool = True) -> str:
        return f"random {cls.seed}"

    def _models(self) -> list[Any]:
        """The models with their weights, in the order of ``constructors``."""
        models = self.skeletons(self._dtype)
        for name, model in models.items():
            key = repr((type(model).__name__, dict(self.sizes[name]), self._dtype, self.seed))
            if key not in _drawn:
                _drawn[key] = _draw_weights(model, self.seed)
            _set_weights(model, _drawn[key])
        return list(models.values())


class RandomFlux(RandomWeights, FluxProcessor):
    sizes: ClassVar[Mapping[str, Sizes]] = {
        "vae": {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
            "latent_channels": 16,
            "norm_num_groups": 32,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "shift_factor": 0.1159,
            "scaling_factor": 0.3611,
        },
        "clip": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "projection_dim": 768,
        },
        "t5": {**XXL, "vocab_size": 32128},
    }

    @staticmethod
    def constructors() -> dict[str, Callable[..., Any]]:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

        return {
            "vae": AutoencoderKL,
            "clip": lambda **sizes: CLIPTextModel(CLIPTextConfig(**sizes)),
            "t5": lambda **sizes: T5EncoderModel(T5Config(**sizes)),
        }

    def _load(self, model_name: str) -> tuple[Any, ...]:
        return (*self._models(), clip_tokenizer(), t5_tokenizer())


class RandomWan(RandomWeights, WanProcessor):
    sizes: ClassVar[Mapping[str, Sizes]] = {"vae": {}, "umt5": {**XXL, "vocab_size": 256384}}

    @staticmethod
    def constructors() -> dict[str, Callable[..., Any]]:
        from diffusers import AutoencoderKLWan
        from transformers import UMT5Config, UMT5EncoderModel

        return {"vae": AutoencoderKLWan, "umt5": lambda **sizes: UMT5EncoderModel(UMT5Config(**sizes))}

    def _load(self, model_name: str) -> tuple[Any, ...]:
        return (*self._models(), t5_tokenizer())


class RandomHunyuan(RandomWeights, HunyuanProcessor):
    sizes: ClassVar[Mapping[str, Sizes]] = {
        "vae": {},
        "qwen": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        },
        "byt5": {
            "vocab_size": 384,
            "d_model": 1472,
            "d_kv": 64,
            "d_ff": 3584,
            "num_layers": 12,
            "num_heads": 6,
            "feed_forward_proj": "gated-gelu",
        },
        "siglip": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 378,
            "patch_size": 14,
        },
    }

    @staticmethod
    def constructors() -> dict[str, Callable[..., Any]]:
        from diffusers import AutoencoderKLHunyuanVideo15
        from transformers import (
            Qwen2_5_VLTextConfig,
            Qwen2_5_VLTextModel,
            SiglipVisionConfig,
            SiglipVisionModel,
            T5Config,
            T5EncoderModel,
        )

        return {
            "vae": AutoencoderKLHunyuanVideo15,
            "qwen": lambda **sizes: Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**sizes)),
            "byt5": lambda **sizes: T5EncoderModel(T5Config(**sizes)),
            "siglip": lambda **sizes: SiglipVisionModel(SiglipVisionConfig(**sizes)),
        }

    def _load(self, model_name: str) -> tuple[Any, ...]:
        from transformers import ByT5Tokenizer, SiglipImageProcessorPil

        vae, qwen, byt5, siglip = self._models()
        side = self.sizes["siglip"]["image_size"]
        images = SiglipImageProcessorPil(size={"height": side, "width": side})
        return vae, qwen, byt5, qwen_tokenizer(), ByT5Tokenizer(), siglip, images


def forget_weights() -> None:
    """Free the weights that were drawn in this process, once no processor uses them."""
    _drawn.clear()


# ---- weights --------------------------------------------------------------------------------


@contextmanager
def _without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Put the parameters of new modules on the meta device, where initialising them costs nothing.

    Buffers are computed as usual: unlike parameters, they have values that only the module knows.
    """
    register, default_dtype = torch.nn.Module.register_parameter, torch.get_default_dtype()

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.set_default_dtype(dtype)
    try:
        with mock.patch.object(torch.nn.Module, "register_parameter", register_on_meta):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


def _draw_weights(model: torch.nn.Module, seed: int) -> Weights:
    """Numbers for each parameter of a model, in main memory."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    weights = {}
    for name, parameter in model.named_parameters():
        own_name = name.rpartition(".")[2]
        weight = weights[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
        if "bias" in own_name:
            weight.zero_()
        elif parameter.ndim == 1 or own_name == "gamma":
            weight.fill_(1)
        elif id(parameter) in embeddings:
            _draw(weight, _EMBEDDING_STD, derived_seed(seed, name))
        else:
            std = 1 / math.sqrt(3 * parameter.numel() / len(parameter))
            if name.endswith("SelfAttention.q.weight"):
                std /= 8  # T5 does not divide attention scores by the root of the head's 64 channels
            _draw(weight, std, derived_seed(seed, name))
    return weights


def _draw(weight: torch.Tensor, std: float, seed: int) -> None:
    """Fill a tensor in main memory with normal numbers."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    flat = weight.view(-1)
    num_values = min(len(flat), _VALUES_PER_DRAW)
    values = torch.empty(num_values, dtype=weight.dtype, device=device)
    # A copy from pinned memory uses all cores for the pages that are touched for the first time.
    pinned = torch.empty(num_values, dtype=weight.dtype, pin_memory=True) if on_gpu else values
    for part in torch.split(flat, num_values):
        values.normal_(0, std, generator=generator)
        if on_gpu:
            pinned.copy_(values)
        part.copy_(pinned[: len(part)])


def _set_weights(model: torch.nn.Module, weights: Weights) -> None:
    """Replace a model's parameters by new ones that share the memory of these weights. Tied parameters stay tied."""
    new = {
        id(parameter): torch.nn.Parameter(weights[name], requires_grad=False)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = new[id(parameter)]
