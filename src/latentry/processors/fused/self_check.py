"""Compare a fused encoder with the model's own modules before it is used.

Fused encoders repeat the arithmetic of diffusers and transformers. A new release of these libraries, of torch or of a
driver may change a number without an error, and wrong latents look like any others. So each fused encoder encodes a
small fixed input when its model is loaded, on the device and in the dtype of the run, and the model's own modules encode
the same input. If the results differ by more than rounding explains, the model's own modules are used instead, with a
warning. They are slower, and correct by definition.

The price is a fraction of a second per model. A first run on a GPU also compiles the Triton kernels here, most of which
the run needs anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from latentry.hardware import is_out_of_memory

logger = logging.getLogger(__name__)

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.08}
"""The largest allowed relative RMS error. Intact encoders of full depth measure up to 6e-6 in float32 and 0.024 in
bfloat16 (``docs/how-to/add-a-processor.md``). Encoders that leave out biases, a gate or a mask measure 0.1 to 1."""
TF32_TOLERANCE = TOLERANCE[torch.float16]
"""For float32 on a GPU: there convolutions run in TF32 by default, which has as many mantissa bits as float16."""
MAXIMUM_FACTOR = 2
"""The relative maximum error may be this many times the tolerance, because a single value varies more than the RMS."""


class FusedEncoder(Protocol):
    """A faster encoder with the numbers of a model's own, up to rounding."""

    name: ClassVar[str]
    """What the log calls it."""

    def __init__(self, model: Any) -> None: ...

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether the model has the structure that this encoder knows."""

    @classmethod
    def check_inputs(cls, model: Any) -> list[tuple[Any, ...]]:
        """Arguments for the check: small, the same every time, and chosen to reach every branch of the encoder."""

    @staticmethod
    def reference(model: Any, *inputs: Any) -> torch.Tensor:
        """What the model's own modules compute from these arguments."""

    def __call__(self, *inputs: Any) -> torch.Tensor: ...


Encoder = TypeVar("Encoder", bound=FusedEncoder)


def checked_encoder(family: type[Encoder], model: Any) -> Encoder | None:
    """The fused encoder for this model, or None if the model's own modules are to be used.

    None means that the fused encoder does not know the model's structure, that its numbers differ, or that the check
    failed for another reason. A run never uses an encoder that was not checked, and a failed check never stops a run.
    Only running out of memory is raised: the caller then makes a smaller plan.

    Args:
        family: The class of the fused encoder.
        model: The loaded model, on the device and in the dtype of the run.
    """
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    try:
        if not family.supports(model):
            logger.info(
                "there is no fused encoder for this %s; its own modules encode, more slowly", family.name
            )
            return None
        inputs = family.check_inputs(model)
        references = _references(family, model, inputs)
        # Not in inference mode: the encoder may replace weights by copies in another memory layout.
        encoder = family(model)
        difference = _difference(encoder, inputs, references)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # a smaller plan is better than the model's own modules, which need more memory
        reason = str(error).strip().partition("\n")[0]
        difference = f"could not be checked ({type(error).__name__}: {reason})"
    if difference is None:
        return encoder
    # Outside the except block: while an exception is handled, its traceback keeps the tensors alive.
    encoder = references = None  # type: ignore[assignment]
    _restore_layout(model, strides)
    torch.cuda.empty_cache()
    logger.warning(
        "the fused %s encoder %s, with %s; the model's own modules encode instead, more slowly",
        family.name,
        difference,
        ", ".join(f"{package} {_version(package)}" for package in ("torch", "diffusers", "transformers")),
    )
    return None


def relative_errors(found: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Two measures of the difference: RMS of the difference over RMS of the reference, and maximum over maximum.

    The first sees small errors everywhere, the second a large one in a few places, such as a wrong edge.
    """
    reference = reference.double()
    difference = found.double() - reference
    rms = difference.square().mean().sqrt() / reference.square().mean().sqrt()
    largest = difference.abs().max() / reference.abs().max()
    return rms.item(), largest.item()


def tolerance_for(reference: torch.Tensor) -> float:
    if reference.dtype == torch.float32 and reference.is_cuda:
        return TF32_TOLERANCE
    return TOLERANCE[reference.dtype]


def fixed_noise(shape: tuple[int, ...], model: Any) -> torch.Tensor:
    """Pixels in -1 … 1, the same every time, on the device and in the dtype of the model."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return noise.to(model.device, model.dtype)


def fixed_tokens(shape: tuple[int, ...], vocabulary_size: int, model: Any) -> torch.Tensor:
    """Token ids, the same every time, on the device of the model."""
    ids = torch.randint(0, vocabulary_size, shape, generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def vae_moments(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Means and log variances, one after the other along the channels, from the VAE's own encoder."""
    found: torch.Tensor = vae.encode(pixels).latent_dist.parameters
    return found


@torch.inference_mode()
def _references(family: type[FusedEncoder], model: Any, inputs: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    return [family.reference(model, *arguments) for arguments in inputs]


@torch.inference_mode()
def _difference(
    encoder: FusedEncoder, inputs: list[tuple[Any, ...]], references: list[torch.Tensor]
) -> str | None:
    """Describe how the encoder differs from the references, or return None if it does not."""
    for arguments, reference in zip(inputs, references, strict=True):
        found = encoder(*arguments)
        if (found.shape, found.dtype) != (reference.shape, reference.dtype):
            return (
                f"gives {found.dtype} {tuple(found.shape)} where the model's own modules give "
                f"{reference.dtype} {tuple(reference.shape)}"
            )
        tolerance = tolerance_for(reference)
        # A VAE's mean and log variance are halves of one tensor and may differ in scale, so each half is compared.
        for part, own in zip(found.chunk(2, dim=1), reference.chunk(2, dim=1), strict=True):
            rms, largest = relative_errors(part, own)
            # Negated, so that NaN counts as a difference.
            if not (rms <= tolerance and largest <= MAXIMUM_FACTOR * tolerance):
                return (
                    f"differs from the model's own modules: relative RMS error {rms:.2g} (tolerance {tolerance:g}), "
                    f"relative maximum error {largest:.2g} (tolerance {MAXIMUM_FACTOR * tolerance:g}), "
                    f"in {str(reference.dtype).removeprefix('torch.')} on {reference.device}"
                )
            logger.debug(
                "%s: relative RMS error %.2g, relative maximum error %.2g", encoder.name, rms, largest
            )
    return None


def _restore_layout(model: torch.nn.Module, strides: Mapping[str, tuple[int, ...]]) -> None:
    """Give the weights the memory layout they had: other layouts select other kernels, whose last bits differ."""
    for name, parameter in model.named_parameters():
        if parameter.stride() != strides[name]:
            before = torch.empty_strided(
                parameter.shape, strides[name], dtype=parameter.dtype, device=parameter.device
            )
            parameter.data = before.copy_(parameter.data)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
