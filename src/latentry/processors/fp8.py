"""Text encoders with 8-bit weights, for ``--text_dtype fp8``: half the memory, and other numbers.

The weights of linear layers are stored as ``float8_e4m3fn``, with one float32 scale for each output channel. Each call
converts them back to the dtype of the layer they replace, so the arithmetic is that of the model and only the weights
are rounded: by at most 1/16 of a weight, or 1/458,752 of the largest weight in its row. Norms, biases and embeddings stay
as they are.

This trades accuracy for memory, so it happens only if the user asks for it. It also takes time: a layer is converted in
every call, which counts in small batches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from latentry.errors import ConfigError

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""The largest value of the format: 448."""


class Fp8Linear(nn.Module):
    """A linear layer with 8-bit weights. It takes and returns the dtype of the layer that it replaces.

    All its tensors are parameters, so it moves between devices like any module. It must not be cast to another dtype:
    ``.to(torch.bfloat16)`` would convert the 8-bit weights as well, and double their size.

    Args:
        linear: The layer to replace. The new layer is where it was, and shares its bias.
        device: Where to compute the 8-bit weights.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        quantized, scale = (part.to(weight.device) for part in quantized_rows(weight.to(device)))
        self.quantized = nn.Parameter(quantized, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The shape and dtype of the weights, without content. T5 converts its input to this dtype."""
        return torch.empty(self.quantized.shape, dtype=self.dtype, device="meta")

    def rounded_weight(self) -> torch.Tensor:
        """The weights, in the dtype of the layer that this one replaces."""
        # In place, so that there is one temporary tensor. The product is computed in float32 and then rounded.
        return self.quantized.to(self.dtype).mul_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.rounded_weight(), self.bias)


def quantized_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a matrix in 8 bits, and the scale [rows,1] of each, on the matrix's device.

    Args:
        weight: [rows,columns], in any floating-point dtype.
    """
    # Multiplied, because a GPU divides by a constant in this way: the scales are the same on every device. The limit is
    # for rows of zeros and of numbers so small that their scale would be 0.
    largest = weight.abs().amax(dim=1, keepdim=True).to(torch.float32)
    scale = largest.mul(1 / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.to(torch.float32) / scale).to(torch.float8_e4m3fn), scale


def quantize(module: nn.Module, device: torch.device) -> int:
    """Replace every ``nn.Linear`` inside a module, one after the other. Return their number.

    Only one layer at a time exists in both forms, and only one at a time is on ``device`` if the module is elsewhere.

    Args:
        module: A layer of a transformer or a list of them.
        device: Where to compute the 8-bit weights. They are the same on every device, and a GPU is faster.
    """
    num_replaced = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Fp8Linear(child, device))
            num_replaced += 1
        else:
            num_replaced += quantize(child, device)
    return num_replaced


def working_bytes(module: nn.Module) -> int:
    """The memory that the largest 8-bit layer inside a module takes for its weights in 16 or 32 bits while it computes.

    Args:
        module: Any module.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, Fp8Linear)]
    return max((layer.quantized.numel() * layer.dtype.itemsize for layer in layers), default=0)


def require_support(device: torch.device) -> None:
    """Raise an error if the device cannot hold or convert 8-bit floating-point numbers.

    Args:
        device: Where the weights will be.
    """
    try:
        torch.zeros(1, device=device).to(torch.float8_e4m3fn).to(torch.float32)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the device {device} has no 8-bit floating-point numbers ({reason}); leave out text_dtype"
        ) from None
