"""The two passes of ``strip`` by Triton, on NVIDIA GPUs: same arguments, same answers.

    forward   for each run of rows: every tile of the logits leaves its largest and its sum of exp, by row and by column, merged in
              float64
    backward  the tiles again, into a block of rows of A, which the library multiplies by t and, transposed, by v

So the backward takes three products, where gradients summed inside the tiles take four; rows may be of any width; and nothing is added
by atomics: equal inputs on one device give equal bits. Memory beside the gradients: ``CELLS`` cells, or one row of tiles.

``precision`` says how fp32 rows are multiplied; the caller's TF32 switches do not count:
    ieee        IEEE fp32 by the library, whose block the kernels read: tensor cores have no fp32, so nothing is lost by that
    ieee-tiles  IEEE fp32 inside the tiles: no block in the forward pass
    tf32x3      three TF32 products on tensor cores, inside the tiles: about fp32
    tf32        factors of 11 bits: cosines are off by some 1e-4, logits at scale 100 by .01; for training, not for reports
bf16 and fp16 rows are multiplied as they are, inside the tiles, and summed in fp32; their A is rounded to bf16.
How it can mislead: a cell of A below about 1e-38 is 0, as in any fp32 loss; ``zeros`` counts those. Kernels were compiled for sm_80 and
sm_90 and run by Triton's interpreter; what they cost on a GPU, ``benchmarks/gpu.py`` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.kernels.cells import Cells
from gradscope.kernels.library import library_products
from gradscope.kernels.strip import Products, Sums, Weights
from gradscope.kernels.triton_found import DTYPES
from gradscope.kernels.triton_tiles import cells_kernel, sums_kernel

PRECISIONS = {
    "ieee": "IEEE fp32 products by the library",
    "ieee-tiles": "IEEE fp32 products",
    "tf32x3": "three-fold TF32 products",
    "tf32": "TF32 products",
}
#: Cells that are stored at a time: 128 MB in fp32.
CELLS = 2**25
#: Cells whose tiles leave sums at a time, where the cells themselves are not stored: some 25 MB of sums.
SUMMED_CELLS = 2**27


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The shape of a tile and how it is compiled; these spill no registers for sm_80 and sm_90 (triton 3.8, 2026-11-30)."""

    rows: int = 128
    columns: int = 64
    inner: int = 32
    walk: int = 8  # row blocks walked together
    warps: int = 8
    stages: int = 3

    def count(self, rows: int, columns: int) -> tuple[int, int]:
        """Row blocks and column blocks."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def runs(self, strip: slice, columns: int, cells: int) -> Iterator[slice]:
        """Runs of rows of at most ``cells`` cells, or of one row of tiles."""
        step = max(1, cells // (columns * self.rows)) * self.rows
        return (slice(start, min(start + step, strip.stop)) for start in range(strip.start, strip.stop, step))


def tiles_for(dtype: torch.dtype) -> Tiles:
    """Numbers of two bytes leave room for larger tiles."""
    return Tiles() if dtype == torch.float32 else Tiles(columns=128, inner=64)


def words(precision: str = "ieee") -> str:
    """How the loss is formed, for the provenance."""
    return f"Triton tiles, {PRECISIONS[precision]}, two exp per cell"


def forward_strip(
    cells: Cells, scale: Tensor, strip: slice, *, top: int = 0, precision: str = "ieee", tiles: Tiles | None = None
) -> Sums:
    """As ``strip.forward_strip``; ``top`` > 0 reads the library's block, another product unless ``precision`` is "ieee".

    Args:
        scale: [] positive, on the rows' device.
        precision: one of ``PRECISIONS``.

    Raises:
        ValueError: a dtype or a precision that the kernels do not have.
    """
    launch = _Launch.of(cells, scale, precision, tiles)
    rows, columns, best = [], _Running(len(cells), scale.device), []
    stored = launch.by_library or top > 0
    with library_products(scale.device, precision):
        for part in launch.tiles.runs(strip, len(cells), CELLS if stored else SUMMED_CELLS):
            block = _product(cells.queries(part), launch.keys.T) if stored else None
            row, column = launch.sums(part, block if launch.by_library else None)
            rows.append(_merged(*row))
            columns.add(*column)
            if block is not None and top:
                best.append(launch.largest(part, block, min(top, len(cells))))
    row_max, row_sum = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return Sums(
        rows=_log(row_max, row_sum),
        columns=_log(columns.largest, columns.total),
        hardest_rows=row_max.double() / scale.double(),
        hardest_columns=columns.largest.double() / scale.double(),
        top=torch.cat(best).double() if top else None,
        shared=torch.zeros((), device=scale.device),
    )


def backward_strip(
    cells: Cells,
    scale: Tensor,
    strip: slice,
    weights: Weights,
    *,
    rows: bool = True,
    columns: bool = True,
    precision: str = "ieee",
    tiles: Tiles | None = None,
) -> Products:
    """As ``strip.backward_strip``; gradients are fp32."""
    scale = scale.detach()
    launch = _Launch.of(cells, scale, precision, tiles)
    shares = _shares(weights)
    across = cells.image.new_empty((strip.stop - strip.start, cells.image.shape[1]), dtype=torch.float32)
    down = torch.zeros_like(cells.text, dtype=torch.float32)
    image, text = cells.image.to(launch.factors), cells.text.to(launch.factors)
    along, zeros = [], []
    with library_products(scale.device, precision):
        for part in launch.tiles.runs(strip, len(cells), CELLS):
            own = slice(part.start - strip.start, part.stop - strip.start)
            block, of_along, of_zeros = launch.cells_of(part, own, shares)
            if rows:
                across[own] = _product(block, text)
            if columns:
                _add_product(down, block.T, image[part])
            along.append(of_along)
            zeros.append(of_zeros)
    return Products(
        rows=across if rows else None,
        columns=down if columns else None,
        along=torch.stack(along).sum() / scale.double(),
        zeros=torch.stack(zeros).sum(),
    )


# ---- the launches


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What all launches of a pass share."""

    cells: Cells
    keys: Tensor
    scale: Tensor  # [] fp32
    precision: str
    tiles: Tiles

    @classmethod
    def of(cls, cells: Cells, scale: Tensor, precision: str, tiles: Tiles | None) -> _Launch:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is unknown; give one of {', '.join(PRECISIONS)}")
        dtype = cells.image.dtype
        if dtype not in DTYPES:
            raise ValueError(f"rows of {dtype} were given; the Triton kernels take float32, bfloat16 or float16")
        keys, scale = cells.keys.contiguous(), scale.detach().float()
        return cls(cells=cells, keys=keys, scale=scale, precision=precision, tiles=tiles or tiles_for(dtype))

    @property
    def factors(self) -> torch.dtype:
        """Of the library's products."""
        return torch.float32 if self.keys.dtype == torch.float32 else torch.bfloat16

    @property
    def by_library(self) -> bool:
        """Whether the products are the library's."""
        return self.precision == "ieee" and self.keys.dtype == torch.float32

    def sums(self, part: slice, given: Tensor | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(largest, sum) by column block [blocks, n] and by row block [blocks, N] of the rows ``part``."""
        queries, n = self.cells.queries(part).contiguous(), len(self.keys)
        row_blocks, column_blocks = self.tiles.count(len(queries), n)
        row = tuple(self._new((column_blocks, len(queries))) for _ in range(2))
        column = tuple(self._new((row_blocks, n)) for _ in range(2))
        with _on(self.scale.device):
            sums_kernel[(row_blocks * column_blocks,)](
                queries, self.keys, given, self.scale, self.cells.groups, *row, *column,
                len(queries), n, queries.shape[1], part.start, **self._compiled(),
            )  # fmt: skip
        return (row[0], row[1]), (column[0], column[1])

    def cells_of(self, part: slice, own: slice, shares: _Shares) -> tuple[Tensor, Tensor, Tensor]:
        """A of the rows ``part`` [n, N], <A, logits> [] float64, and how many negatives of it are exactly 0, [] int64."""
        queries, n = self.cells.queries(part).contiguous(), len(self.keys)
        row_blocks, column_blocks = self.tiles.count(len(queries), n)
        block = torch.mm(queries, self.keys.T) if self.by_library else self._new((len(queries), n), self.factors)
        along, zeros = self._new(row_blocks * column_blocks), self._new(row_blocks * column_blocks, torch.int32)
        with _on(self.scale.device):
            cells_kernel[(row_blocks * column_blocks,)](
                queries, self.keys, block if self.by_library else None, self.scale, self.cells.groups,
                *(t[own] for t in shares.rows), *shares.columns, block, along, zeros,
                len(queries), n, queries.shape[1], part.start, **self._compiled(),
            )  # fmt: skip
        return block, along.sum(dtype=torch.float64), zeros.sum()

    def largest(self, part: slice, block: Tensor, top: int) -> Tensor:
        """The largest logits of each row in falling order, [n, top], -inf past the last negative. Overwrites the block of products."""
        groups = self.cells.groups
        number = torch.arange(block.shape[1], device=block.device) if groups is None else groups
        return block.mul_(self.scale).masked_fill_(number[part, None] == number, -math.inf).topk(top, dim=1).values

    def _new(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.scale.device)

    def _compiled(self) -> dict[str, object]:
        """The arguments that the kernels are compiled for."""
        return {
            "GIVEN": self.by_library,
            "HAS_GROUPS": self.cells.groups is not None,
            "PRECISION": self.precision.partition("-")[0],
            "BLOCK_M": self.tiles.rows,
            "BLOCK_N": self.tiles.columns,
            "BLOCK_K": self.tiles.inner,
            "GROUP": self.tiles.walk,
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
        }


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, which need not be the rows'."""
    if device.type != "cuda":
        yield  # the interpreter
        return
    with torch.cuda.device(device):
        yield


# ---- sums of tiles, and shares from them


def _merged(largest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [blocks, n] relative to each block's largest -> [n] relative to the largest of all, summed in float64."""
    of_all = largest.amax(dim=0)
    shift = of_all.masked_fill(of_all == -math.inf, 0.0)
    merged = (total.double() * torch.exp(largest.double() - shift.double())).sum(dim=0)
    return of_all.masked_fill(merged.isnan(), math.nan), merged  # Triton's maximum passes over nan, its sum does not


def _log(largest: Tensor, total: Tensor) -> Tensor:
    return largest.double() + total.log()  # both -inf over nothing


class _Running:
    """Column sums over the runs of rows."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.largest = torch.full((columns,), -math.inf, device=device)
        self.total = torch.zeros(columns, dtype=torch.float64, device=device)

    def add(self, largest: Tensor, total: Tensor) -> None:
        largest, total = _merged(largest, total)
        self.largest, self.total = _merged(torch.stack([self.largest, largest]), torch.stack([self.total, total]))


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """(shift, weight) in fp32, so that weight * exp(X - shift) is the anchor's part of A."""

    rows: tuple[Tensor, Tensor]
    columns: tuple[Tensor, Tensor]


def _shares(weights: Weights) -> _Shares:
    return _Shares(rows=_rounded(weights.row_logs, weights.rows), columns=_rounded(weights.column_logs, weights.columns))


def _rounded(logs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What rounding the log to fp32 takes off goes into the weight."""
    shift = logs.float()
    return shift, (weights * torch.exp(shift.double() - logs)).float()


# ---- the library's products


def _product(a: Tensor, b: Tensor) -> Tensor:
    """fp32, also of narrower factors."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += _product(a, b)
