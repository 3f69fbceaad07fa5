"""The Triton kernels against the torch code in ``ops``, wherever Triton is installed: on every machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

KERNELS = """
import sys
import torch
from latentry.processors.fused import ops, triton_kernels as kernels
torch.manual_seed(0)
device = sys.argv[1]
def run(kernel, *arguments, **options):
    moved = (a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments)
    return kernel(*moved, **options).cpu()
def close(mine, reference):
    assert mine.shape == reference.shape
    assert (mine - reference).abs().max() < 2e-5 * max(1, reference.abs().max())
def poisoned(like):
    return torch.full_like(like, float("nan"))
for channels in (3, 8, 96):
    x, y = torch.randn(2, 5, 6, channels), torch.randn(2, 5, 6, channels)
    gamma, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    for pad in (0, 1):
        for g in (gamma, None):
            for b in (bias, None):
                expected = ops.norm_rows(x, g, b, pad=pad)
                out = poisoned(expected)
                close(run(kernels.norm_rows, x, g, b, out, silu=True, pad=pad, fold=False), expected)
    close(run(kernels.add_rows, x, y, bias, poisoned(x)), x + y + bias)
    rows = x.view(2, 30, channels)
    close(run(kernels.channel_sums, rows), torch.stack([rows.sum(1), rows.square().sum(1)], 1))
    scale, shift = torch.randn(2, channels), torch.randn(2, channels)
    scaled = torch.nn.functional.silu(rows * scale[:, None] + shift[:, None])
    close(run(kernels.scale_rows, rows, scale, shift, poisoned(rows), silu=True), scaled)
for frames in (1, 2, 5):
    x, gamma = torch.randn(frames, 3, 4, 8), torch.rand(8)
    out, expected = torch.zeros(frames, 3, 4, 24), torch.zeros(frames, 3, 4, 24)
    ops.norm_rows(x, gamma, fold=True, out=expected)
    close(run(kernels.norm_rows, x, gamma, None, out, silu=True, pad=0, fold=True), expected)
h, x, bias = torch.randn(7, 3, 8), torch.randn(7, 3, 32), torch.randn(8)
close(run(kernels.add_group_mean, h, bias, x, poisoned(h), 4), ops.add_group_mean(h, bias, x))
scores = torch.randn(5, 77)
close(run(kernels.softmax_rows, scores, 0.3, poisoned(scores)), torch.softmax(scores * 0.3, -1))
a, b = torch.randn(3, 1000) * 5, torch.randn(3, 1000)
gated = torch.nn.functional.gelu(a, approximate="tanh") * b
close(run(kernels.gelu_gate, a, b, poisoned(a)), gated)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_kernels_match_the_torch_code():
    """On a GPU if there is one, else in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment = {**os.environ, "TRITON_INTERPRET": str(int(device == "cpu"))}
    subprocess.run([sys.executable, "-c", KERNELS, device], check=True, env=environment, timeout=300)
