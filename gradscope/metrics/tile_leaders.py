"""Which scores of an fp32 tile may be the largest of their row or column, and larger than what is known of it.

These are all within twice the error of the tile's largest (``gallery_scores``): few, which are formed again in float64.
How it can mislead: where scores are all alike they are many (``few``), and the tile is to be float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.metrics.gallery_scores import CROWDED

#: int64 [K] each, row and column in a tile
Cells = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A tile, and what was known of its rows and columns when it was handed out: less than now is safe, and changes the last digit
    at most."""

    i: int
    j: int
    known: tuple[Tensor, Tensor]  # float64, of the rows and of the columns


def jobs(places: Iterable[tuple[int, int]], block: int, by_row: Tensor, by_column: Tensor) -> Iterator[Job]:
    """The tiles that start at (row, column), each with what is known when it is asked for."""
    for i, j in places:
        yield Job(i=i, j=j, known=(by_row[i : i + block].clone(), by_column[j : j + block].clone()))


def leaders(tile: Tensor, known: Tensor, error: Tensor, dim: int, *, tie: float = 0.0) -> Cells:
    """The cells that may be the largest of their row (``dim`` 1) or column, or within ``tie`` of it, where it may be above ``known``.

    ``known`` and ``error``: float64, of each row or column; the scores are right to within ``error``.
    """
    top = tile.amax(dim).double()
    some = torch.nonzero((top + error > known) & torch.isfinite(top))[:, 0]
    floor = top[some] - 2.0 * error[some] - tie - top[some].abs() * 2.0**-22  # for its rounding to fp32
    part, bound = tile.index_select(1 - dim, some), floor.float()
    place = torch.nonzero(part >= (bound[:, None] if dim else bound), as_tuple=True)
    return (some[place[0]], place[1]) if dim else (place[0], some[place[1]])


def few(cells: Sequence[Cells], tile: Tensor) -> bool:
    """Whether it is quicker to form these scores again than the tile."""
    return sum(len(row) for row, _ in cells) <= CROWDED * tile.numel()
