"""Caption geometry and retrieval ranks against bare products of the run.

    products, fp32 symmetric   the blocks i <= j of T T^t in IEEE fp32: what geometry cannot do without
    caption_geometry           histogram, mean, hardest neighbours with index, near counts, top pairs, repeats
    products, fp32             V T^t in blocks, IEEE fp32: what ranks by counting cannot do without
    products, fp64             the same in float64
    ranks                      both directions

How it can mislead: a GPU for consumers multiplies in float64 at 1/64 of its fp32 rate; the table of peaks says what this one does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradscope.metrics.geometry import caption_geometry
from gradscope.metrics.pair_sweep import block_pairs, default_block
from gradscope.metrics.ranks import ranks

from .correctness import pairs as noisy_pairs
from .peaks import fp32_products
from .setting import Row, Setting, compare

WIDTH = 768
SIZES = (20_000, 50_000, 200_000)


def pairs(setting: Setting) -> Iterator[Row]:
    """Rows of ``compare``; geometry and ranks have a reference each."""
    for count in (300,) if setting.tiny else SIZES:
        if setting.clock.allows(f"geometry: N {count}"):
            yield from _geometry(setting, count)
        if setting.clock.allows(f"ranks: N {count}"):
            yield from _ranks(setting, count)


def _geometry(setting: Setting, count: int) -> Iterator[Row]:
    rows = noisy_pairs(setting, count, WIDTH, 1.5)[1]
    arms = {
        "products, fp32 symmetric": lambda: _products(setting, rows, rows, symmetric=True),
        "caption_geometry": lambda: caption_geometry(rows),
    }
    return compare(setting, f"geometry, N {count}, d {WIDTH}", arms, "products, fp32 symmetric", ours=("caption_geometry",))


def _ranks(setting: Setting, count: int) -> Iterator[Row]:
    image, text = noisy_pairs(setting, count, WIDTH, 3.0)
    wide = image.double(), text.double()
    own = torch.arange(count, device=setting.device)
    arms = {
        "products, fp32": lambda: _products(setting, image, text),
        "products, fp64": lambda: _products(setting, *wide),
        "ranks": lambda: ranks(image, text, own),
    }
    return compare(setting, f"ranks, N {count}, d {WIDTH}", arms, "products, fp32", ours=("ranks",))


def _products(setting: Setting, left: Tensor, right: Tensor, *, symmetric: bool = False) -> None:
    block = default_block(setting.device)
    places = (
        block_pairs(len(left), block)
        if symmetric
        else ((i, j) for i in range(0, len(left), block) for j in range(0, len(right), block))
    )
    out = torch.empty(block * block, dtype=left.dtype, device=left.device)
    with fp32_products(setting, "ieee"):
        for i, j in places:
            a, b = left[i : i + block], right[j : j + block]
            torch.mm(a, b.T, out=out[: len(a) * len(b)].view(len(a), len(b)))
