"""fp32 on the CPU, fast where that is still fp32. CUDA is left alone: TF32 stays off.

Products: torch's "medium" setting hands fp32 products to oneDNN, which on many CPUs is twice as fast and as accurate as the default,
and on others rounds to bf16. So it is used only if trial products of unit rows agree with float64 to 1e-6.
Attention: over short sequences the plain form is faster than torch's fused CPU kernel (2026-11-30, torch 2.14.1, two cores, 16 records:
1.20 -> 0.67 s for 8 forward and backward passes of tiny, 1.22 -> 1.03 s for one of ViT-B-32 at 8 records); over long ones the fused
kernel saves memory and is kept. What was chosen is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LARGEST_ERROR = 1e-6
#: rows, columns and inner width of the trial products: the kernel is chosen by shape.
TRIALS = ((96, 96, 768), (1024, 512, 128))
#: Up to so many tokens the plain form is used: it keeps tokens^2 numbers per head and record for the backward pass.
SHORT = 160


@contextmanager
def cpu_speed(device: torch.device, tokens: int) -> Iterator[str]:
    """Sets the faster kernels for the block and puts the old ones back. Yields words for the provenance.

    Args:
        device: where the model is; anything but the CPU is left as it is.
        tokens: the longest sequence either tower attends over.
    """
    before = torch.get_float32_matmul_precision()
    if device.type != "cpu":
        yield f"torch {before}"
        return
    short = tokens <= SHORT
    try:
        with sdpa_kernel(SDPBackend.MATH) if short else nullcontext():
            yield f"{_products()}, {'plain' if short else 'fused'} attention"
    finally:
        torch.set_float32_matmul_precision(before)


def _products() -> str:
    torch.set_float32_matmul_precision("medium")
    if max(_error(*shape) for shape in TRIALS) <= LARGEST_ERROR:
        return "oneDNN fp32 products (checked against float64)"
    torch.set_float32_matmul_precision("highest")
    return "torch fp32 products"


def _error(rows: int, columns: int, width: int) -> float:
    """Largest error of a product of random unit rows against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (F.normalize(torch.randn(n, width, generator=generator), dim=1) for n in (rows, columns))
    return float((a @ b.T - a.double() @ b.double().T).abs().max())
