"""The fastest products of the run, TFLOP/s: what shares of a peak refer to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .setting import Row, Setting, seconds_of

#: name -> dtype, and cuBLAS's setting for fp32.
KINDS = {
    "bf16": (torch.bfloat16, "ieee"),
    "TF32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "ieee"),
    "fp64": (torch.float64, "ieee"),
}


def peaks(setting: Setting) -> Iterator[Row]:
    """Rows (case, arm, tflops): square products of random numbers; zeros would be faster than real data."""
    side = 256 if setting.tiny else 8192
    for name in KINDS:
        yield {"case": f"{side}^3", "arm": name, "tflops": _tflops(setting, side, *KINDS[name])}


def _tflops(setting: Setting, side: int, dtype: torch.dtype, precision: str) -> float:
    a, b = (torch.randn(side, side, device=setting.device).to(dtype) for _ in range(2))
    with fp32_products(setting, precision):
        torch.mm(a, b)
        seconds = statistics.median(seconds_of(setting, lambda: torch.mm(a, b), 3) for _ in range(setting.rounds))
    return 2 * side**3 / seconds / 1e12


@contextmanager
def fp32_products(setting: Setting, precision: str) -> Iterator[None]:
    """cuBLAS with this setting for fp32; on a CPU nothing."""
    if not setting.cuda:
        yield
        return
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, precision
    try:
        yield
    finally:
        switch.fp32_precision = before
