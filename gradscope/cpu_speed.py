"""fp32 on the CPU, fast where that is still fp32. CUDA is left alone: TF32 stays off.

Products: the fastest setting that agrees with float64 (`gradscope.products`).
Attention: over short sequences the plain form is faster than torch's fused CPU kernel (2026-11-30, torch 2.14.1, two cores, 16 records:
1.20 -> 0.67 s for 8 forward and backward passes of tiny, 1.22 -> 1.03 s for one of ViT-B-32 at 8 records); over long ones the fused
kernel saves memory and is kept. What was chosen is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.products import fast_setting

#: Up to so many tokens the plain form is used: it keeps tokens^2 numbers per head and record for the backward pass.
SHORT = 160


@contextmanager
def cpu_speed(device: torch.device, tokens: int) -> Iterator[str]:
    """Sets the faster kernels for the block and puts the old ones back. Yields words for the provenance.

    Args:
        device: where the model is; anything but the CPU is left as it is.
        tokens: the longest sequence either tower attends over.
    """
    if device.type != "cpu":
        yield f"torch {torch.get_float32_matmul_precision()}"
        return
    short = tokens <= SHORT
    with fast_setting(device) as products, sdpa_kernel(SDPBackend.MATH) if short else nullcontext():
        yield f"{products.words}, {'plain' if short else 'fused'} attention"
