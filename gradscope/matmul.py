"""fp32 matrix products on the CPU, fast where that is still fp32.

torch's "medium" setting hands fp32 products to oneDNN, which on many CPUs is twice as fast and as accurate as the default, and on
others rounds to bf16. So it is used only if a trial product of unit rows agrees with float64 to 1e-6; what was chosen is recorded.
CUDA is left alone: TF32 stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

LARGEST_ERROR = 1e-6


@contextmanager
def fp32_products(device: torch.device) -> Iterator[str]:
    """Sets the faster exact-enough setting for the block and puts the old one back. Yields a word for the provenance."""
    before = torch.get_float32_matmul_precision()
    try:
        yield _choose() if device.type == "cpu" else f"torch {before}"
    finally:
        torch.set_float32_matmul_precision(before)


def _choose() -> str:
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(96, 768, generator=generator), dim=1)
    exact = rows.double() @ rows.double().T
    torch.set_float32_matmul_precision("medium")
    error = float((rows @ rows.T - exact).abs().max())
    if error <= LARGEST_ERROR:
        return "oneDNN fp32 (checked against float64)"
    torch.set_float32_matmul_precision("highest")
    return "torch fp32"
