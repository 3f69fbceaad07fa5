"""Tell whether a model has the layers that a fused encoder was written for.

A fused encoder reads a model's weights and repeats its arithmetic, so it must know every layer. Class names do not
tell: a library can rename a class without changing it, and change a class without renaming it. This module compares
the tree of modules instead: the names of children, the kinds of ``torch.nn`` layers, the names and shapes of
parameters, and the attributes that parameters do not show (strides, heads, scale factors). Every module, parameter and
buffer must be in the description, and everything in the description must be in the model.

The comparison cannot see what a custom ``forward`` does. ``self_check`` covers that by comparing numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

logger = logging.getLogger(__name__)

Shape = tuple[int | None, ...]
"""The shape of a parameter; None stands for any size."""


class Description(Protocol):
    """Describes which modules are allowed at one path of the tree."""

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        """Say how the module differs, or return None if it matches. ``module`` is None if the path has no module."""


class Described:
    """A module with exactly these parameters and children.

    ``Described(nn.Conv2d, {"weight": (None, None, 3, 3), "bias": (None,)}, stride=(1, 1))`` is a 3x3 convolution.

    Args:
        kind: The class, or a base class of it. Layers of ``torch.nn`` name theirs; other modules leave it at
            ``nn.Module``, because their class names do not matter.
        parameters: The shapes of the parameters that the module itself holds.
        children: Descriptions of the direct children.
        attributes: Values that attributes of the module must have.
    """

    def __init__(
        self,
        kind: type[nn.Module] = nn.Module,
        parameters: Mapping[str, Shape] | None = None,
        children: Mapping[str, Description] | None = None,
        **attributes: Any,
    ) -> None:
        self._kind = kind
        self._parameters = parameters or {}
        self._children = children or {}
        self._attributes = attributes

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        if module is None:
            return f"{path} is missing"
        if not isinstance(module, self._kind):
            return f"{path} is a {type(module).__name__}, not a {self._kind.__name__}"
        if any(True for _ in module.buffers(recurse=False)):
            return f"{path} has buffers"
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}
        if shapes.keys() != self._parameters.keys():
            return f"{path} has the parameters {sorted(shapes)}, not {sorted(self._parameters)}"
        for name, shape in self._parameters.items():
            if not _fits(shapes[name], shape):
                return f"{path}.{name} has the shape {shapes[name]}, not {shape}"
        for name, expected in self._attributes.items():
            found = getattr(module, name, "missing")
            if found != expected:
                return f"{path}.{name} is {found!r}, not {expected!r}"
        children = dict(module.named_children())
        for name in sorted(children.keys() | self._children.keys()):
            if name not in self._children:
                return f"{path}.{name} is unknown"
            reason = self._children[name].mismatch(children.get(name), f"{path}.{name}")
            if reason is not None:
                return reason
        return None


class Each:
    """A list of at least one module, all of which match the description."""

    def __init__(self, description: Description) -> None:
        self._description = description

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        names = [name for name, _ in module.named_children()] if module is not None else []
        if not names:
            return f"{path} has no modules"
        return Described(children=dict.fromkeys(names, self._description)).mismatch(module, path)


class OneOf:
    """A module that matches at least one of the descriptions."""

    def __init__(self, *descriptions: Description) -> None:
        self._descriptions = descriptions

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        reasons = [description.mismatch(module, path) for description in self._descriptions]
        return None if None in reasons else " and ".join(str(reason) for reason in reasons)


class Absent:
    """No module: ``OneOf(Absent(), description)`` is an optional one."""

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        return None if module is None else f"{path} is a {type(module).__name__}, not None"


class Anything:
    """Any module, or none. The fused encoder calls it as it is, or does not use it."""

    def mismatch(self, module: nn.Module | None, path: str) -> str | None:
        return None


def matches(model: nn.Module, description: Description) -> bool:
    """Whether the model has the described structure. The first difference is logged at debug level."""
    reason = description.mismatch(model, "model")
    if reason is not None:
        logger.debug("no fused encoder for %s: %s", type(model).__name__, reason)
    return reason is None


def conv(dimensions: int, size: int | tuple[int, ...], **attributes: Any) -> Described:
    """A convolution over 2 or 3 dimensions with a bias: ``conv(2, 3, stride=(1, 1))``."""
    kernel = (size,) * dimensions if isinstance(size, int) else size
    kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
    shapes: dict[str, Shape] = {"weight": (None, None, *kernel), "bias": (None,)}
    return Described(kind, shapes, groups=1, dilation=(1,) * dimensions, padding_mode="zeros", **attributes)


def linear(*, bias: bool) -> Described:
    shapes: dict[str, Shape] = {"weight": (None, None)}
    return Described(nn.Linear, {**shapes, "bias": (None,)} if bias else shapes)


SILU = Described(nn.SiLU)
DROPOUT = Described(nn.Dropout)
EMBEDDING = Described(nn.Embedding, {"weight": (None, None)})
GROUP_NORM = Described(nn.GroupNorm, {"weight": (None,), "bias": (None,)})
LAYER_NORM = Described(nn.LayerNorm, {"weight": (None,), "bias": (None,)})


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    )
