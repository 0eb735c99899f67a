"""fp32 matrix products by the fastest setting that IS fp32 where it runs: a trial product decides, checked against float64.

Why: torch's "medium" setting hands fp32 products on the CPU to oneDNN, which on many processors is twice as fast as the default and as
accurate, and on others rounds to bf16. "highest" is true fp32 everywhere; on CUDA it keeps TF32 off, and nothing else is tried there.
What is checked: unit rows drawn from a fixed seed, in the shapes that will be used (kernels are chosen by shape). The error of a
trial is the largest difference of 64 of its rows from float64; fp32 sums of unit rows stay below 1e-6, TF32 and bf16 are off by 1e-4
and more.

How it can mislead: shapes that were not tried may run on another kernel; the rounding mode is a setting of the library and not of the
kernel, so that is a remote case, but give the shapes that matter. A trial is made once per process, device and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_ERROR = 1e-6
#: (rows, columns, inner width)
Shape = tuple[int, int, int]
#: What training and the usual tiles use.
SHAPES: tuple[Shape, ...] = ((96, 96, 768), (1024, 512, 128), (1024, 1024, 768))

_CHECKED_ROWS = 64
_LONGEST = 8192  # a trial with more rows or columns would only take longer


@dataclass(frozen=True, kw_only=True)
class Products:
    """The setting that was chosen, and what its trials gave."""

    setting: str  # "highest" or "medium", as torch calls them
    error: float  # largest error of the trial products of unit rows against float64
    words: str  # for the provenance

    @property
    def exact(self) -> bool:
        """Whether the products are true fp32."""
        return self.error <= LARGEST_ERROR


@contextmanager
def fast_fp32(device: torch.device, *shapes: Shape) -> Iterator[Products]:
    """True fp32 products for the block, as fast as they come; yields what was chosen. The old setting comes back, and autocast too.

    Args:
        device: where the rows are.
        shapes: (rows, columns, inner width) of the products to come; ``SHAPES`` without any.
    """
    with torch.autocast(device.type, enabled=False), fast_setting(device, *shapes) as products:
        yield products


@contextmanager
def fast_setting(device: torch.device, *shapes: Shape) -> Iterator[Products]:
    """As ``fast_fp32`` for blocks that use autocast themselves, as training does. Autocast forgets the weights it has cast when the
    outermost one ends: inside another, even one that is off, every step would compute with the weights of the first."""
    with _settings_kept():
        products = choose(device, *shapes)
        torch.set_float32_matmul_precision(products.setting)
        yield products


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Puts torch's setting back. It has two interfaces, and the older one refuses to answer once the newer was used."""
    backends: Any = torch.backends
    cuda, cpu = backends.cuda.matmul, backends.mkldnn.matmul
    before = cuda.fp32_precision, cpu.fp32_precision
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        whole = None
    try:
        yield
    finally:
        if whole is not None:
            torch.set_float32_matmul_precision(whole)
        else:
            cuda.fp32_precision, cpu.fp32_precision = before


def choose(device: torch.device, *shapes: Shape) -> Products:
    """What ``fast_fp32`` would use. Trials are made under each setting in turn, and the old one comes back."""
    with _settings_kept(), torch.autocast(device.type, enabled=False), torch.no_grad():
        wanted = shapes or SHAPES
        if device.type == "cpu":
            error = max(_trial("medium", device, shape) for shape in wanted)
            if error <= LARGEST_ERROR:
                return Products(setting="medium", error=error, words="oneDNN fp32 products (checked against float64)")
        error = max(_trial("highest", device, shape) for shape in wanted)
    name = "torch" if device.type == "cpu" else device.type
    words = f"{name} fp32 products" if error <= LARGEST_ERROR else f"{name} products, off by {error:.0e}: NOT fp32"
    return Products(setting="highest", error=error, words=words)


@lru_cache(maxsize=256)
def _trial(setting: str, device: torch.device, shape: Shape) -> float:
    """Largest error of a product of random unit rows against float64. Leaves ``setting`` behind."""
    torch.set_float32_matmul_precision(setting)
    a, b = (_unit_rows(min(n, _LONGEST), shape[2]).to(device) for n in shape[:2])
    some = torch.linspace(0, len(a) - 1, min(_CHECKED_ROWS, len(a))).long().to(device)
    product = a @ b.T
    wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    return float((product[some].to(wide) - a[some].to(wide) @ b.to(wide).T).abs().max())


def _unit_rows(n: int, width: int) -> Tensor:
    return F.normalize(torch.randn(n, width, generator=torch.Generator().manual_seed(n)), dim=1)
