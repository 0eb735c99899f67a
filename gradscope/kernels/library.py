"""fp32 products by CUDA's library in the precision that is asked for, whatever the caller's TF32 switches say.

On the CPU nothing is set: there the products follow torch.set_float32_matmul_precision, whose "medium" rounds to bf16 on some
processors (``gradscope.products`` looks before it takes it).
How it can mislead: the switch is one for the whole process; another thread that multiplies meanwhile has it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def library_products(device: torch.device, precision: str = "ieee") -> Iterator[None]:
    """Inside, cuBLAS multiplies fp32 in TF32 for "tf32" and in fp32 for anything else; the old setting comes back."""
    if device.type != "cuda":
        yield
        return
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before
