"""The operations of ``ops`` as Triton kernels. Imported only if there is a GPU.

All tensors are contiguous rows of channels. Arithmetic is in float32, and each value is rounded once, at the end.
"""

from __future__ import annotations

# mypy: ignore-errors
import torch
import triton
import triton.language as tl

_TILE = 4096


def _tile(channels: int) -> tuple[int, int]:
    """Rows and channels of a tile. The channels are rounded up to a power of two."""
    width = triton.next_power_of_2(channels)
    return max(1, _TILE // width), width


@triton.jit
def _norm_rows(
    x, bias, gamma, out, num_rows, num_frames, height, width,
    C: tl.constexpr, PAD: tl.constexpr, FOLD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    source = row
    if PAD > 0:
        padded_width = width + 2 * PAD
        padded_height = height + 2 * PAD
        across = row % padded_width
        down = (row // padded_width) % padded_height
        frame = row // (padded_width * padded_height)
        across = tl.minimum(tl.maximum(across - PAD, 0), width - 1)
        down = tl.minimum(tl.maximum(down - PAD, 0), height - 1)
        source = (frame * height + down) * width + across
    mask = (row < num_rows)[:, None] & (column < C)[None, :]
    value = tl.load(x + source[:, None] * C + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    if NORM:
        length = tl.sqrt(tl.sum(tl.where(mask, value * value, 0.0), axis=1))
        scale = tl.load(gamma + column, mask=column < C, other=0.0).to(tl.float32)
        value = value / tl.maximum(length, 1e-12)[:, None] * scale[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    rounded = value.to(out.dtype.element_ty)
    if FOLD:
        size = height * width
        frame = row // size
        for tap in tl.static_range(3):
            later = row + tap * size
            in_clip = mask & (frame + tap < num_frames)[:, None]
            tl.store(out + later[:, None] * (3 * C) + (2 - tap) * C + column[None, :], rounded, mask=in_clip)
    else:
        tl.store(out + row[:, None] * C + column[None, :], rounded, mask=mask)


def norm_rows(x, gamma, bias, out, *, silu, pad, fold):
    num_frames, height, width, channels = x.shape
    num_rows = out.numel() // channels if not fold else x.numel() // channels
    rows, tile_width = _tile(channels)
    _norm_rows[(triton.cdiv(num_rows, rows),)](
        x, x if bias is None else bias, x if gamma is None else gamma, out, num_rows, num_frames, height, width,
        C=channels, PAD=pad, FOLD=fold, NORM=gamma is not None, BIAS=bias is not None, SILU=silu,
        ROWS=rows, WIDTH=tile_width,
    )  # fmt: skip
    return out


@triton.jit
def _add_rows(x, y, bias, out, num_rows, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < C)[None, :]
    position = row[:, None] * C + column[None, :]
    value = tl.load(x + position, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(y + position, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    tl.store(out + position, value.to(out.dtype.element_ty), mask=mask)


def add_rows(x, y, bias, out):
    channels = x.shape[-1]
    num_rows = x.numel() // channels
    rows, width = _tile(channels)
    _add_rows[(triton.cdiv(num_rows, rows),)](x, y, bias, out, num_rows, C=channels, ROWS=rows, WIDTH=width)
    return out


@triton.jit
def _channel_sums(
    x, sums, num_rows, rows_per_part, num_parts, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    squares = tl.zeros([ROWS, WIDTH], tl.float32)
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, num_rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < C)[None, :]
        position = (sample * num_rows + row)[:, None] * C + column[None, :]
        value = tl.load(x + position, mask=mask, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    position = (sample * num_parts + part) * 2 * C + column
    tl.store(sums + position, tl.sum(total, axis=0), mask=column < C)
    tl.store(sums + position + C, tl.sum(squares, axis=0), mask=column < C)


def channel_sums(x):
    batch, channels = x.shape[0], x.shape[-1]
    num_rows = x.numel() // (batch * channels)
    rows, width = _tile(channels)
    rows_per_part = triton.cdiv(triton.cdiv(num_rows, 256), rows) * rows
    num_parts = triton.cdiv(num_rows, rows_per_part)
    sums = torch.empty(batch, num_parts, 2, channels, device=x.device)
    _channel_sums[(num_parts, batch)](
        x, sums, num_rows, rows_per_part, num_parts, C=channels, ROWS=rows, WIDTH=width
    )
    return sums.sum(1)


@triton.jit
def _scale_rows(
    x,
    scale,
    shift,
    out,
    num_rows,
    C: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < num_rows)[:, None] & (column < C)[None, :]
    position = (sample * num_rows + row)[:, None] * C + column[None, :]
    value = tl.load(x + position, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.load(scale + sample * C + column, mask=column < C, other=0.0)[None, :]
    value += tl.load(shift + sample * C + column, mask=column < C, other=0.0)[None, :]
    if SILU:
        value = value * tl.sigmoid(value)
    tl.store(out + position, value.to(out.dtype.element_ty), mask=mask)


def scale_rows(x, scale, shift, out, *, silu):
    batch, channels = x.shape[0], x.shape[-1]
    num_rows = x.numel() // (batch * channels)
    rows, width = _tile(channels)
    _scale_rows[(triton.cdiv(num_rows, rows), batch)](
        x, scale, shift, out, num_rows, C=channels, SILU=silu, ROWS=rows, WIDTH=width
    )
    return out


@triton.jit
def _add_group_mean(h, bias, x, out, num_values, C: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = position < num_values
    members = tl.arange(0, GROUP)
    group = tl.load(x + position[:, None] * GROUP + members[None, :], mask=mask[:, None], other=0.0)
    value = tl.sum(group.to(tl.float32), axis=1) / GROUP
    value += tl.load(h + position, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + position % C, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + position, value.to(out.dtype.element_ty), mask=mask)


def add_group_mean(h, bias, x, out, group):
    num_values = h.numel()
    _add_group_mean[(triton.cdiv(num_values, 1024),)](
        h, bias, x, out, num_values, C=h.shape[-1], GROUP=group, TILE=1024
    )
    return out


@triton.jit
def _softmax_rows(x, out, length, scale, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    value = tl.load(x + row * length + column, mask=column < length, other=float("-inf")) * scale
    value = tl.exp(value - tl.max(value, axis=0))
    value = value / tl.sum(value, axis=0)
    tl.store(out + row * length + column, value.to(out.dtype.element_ty), mask=column < length)


def softmax_rows(x, scale, out):
    length = x.shape[-1]
    width = triton.next_power_of_2(length)
    _softmax_rows[(x.numel() // length,)](
        x, out, length, scale, WIDTH=width, num_warps=min(32, max(4, width // 1024))
    )
    return out


@triton.jit
def _gelu_gate(a, b, out, num_values, TILE: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = position < num_values
    x = tl.load(a + position, mask=mask, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tanh = 1 - 2 / (tl.exp(2 * inner) + 1)
    value = 0.5 * x * (1 + tanh) * tl.load(b + position, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + position, value.to(out.dtype.element_ty), mask=mask)


def gelu_gate(a, b, out):
    _gelu_gate[(triton.cdiv(a.numel(), 2048),)](a, b, out, a.numel(), TILE=2048)
    return out
