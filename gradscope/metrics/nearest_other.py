"""The largest score of each caption with a caption of another image, each pair of tiles once, exact in float64.

    best_j = max over l with image(l) != image(j) of <t_j, t_l>

A tile of the upper triangle serves its rows and its columns. In an fp32 tile all that may be the largest of a row, and larger than
what is known of it, is within twice the error of the tile's largest (``gallery_scores``); these few scores are formed again in float64.

How it can mislead: where more than ``CROWDED`` of a tile may be the largest (captions that are all alike), the tile is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.metrics.gallery_scores import Gallery, Tiles, each_tile, open_tiles
from gradscope.metrics.pair_sweep import block_pairs, default_block, number_of_pairs
from gradscope.metrics.tile_leaders import Job, few, jobs, leaders


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scores:
    """float64 scores [K] of some rows int64 [K], among them the largest of the tile where it is larger than what was known."""

    row: Tensor
    score: Tensor


@torch.no_grad()
def nearest_other(texts: Tensor, image_of_text: Tensor, *, block: int | None = None) -> Tensor:
    """float64 [M]; minus infinity where there is no other image, or the row is not finite.

    Args:
        texts: [M, D], any float dtype. image_of_text: int64 [M].
        block: tile edge (default: as in ``ranks``); memory is O(block * (block + D)) for each thread.
    """
    gallery = Gallery.of(texts, texts, torch.arange(len(texts), device=texts.device))
    device = gallery.images.device
    image, block = image_of_text.to(device), block or default_block(device)
    best = torch.full((len(texts),), -torch.inf, dtype=torch.float64, device=device)
    with open_tiles(gallery, block) as tiles:
        todo, number = jobs(block_pairs(len(texts), block), block, best, best), number_of_pairs(len(texts), block)
        with each_tile(lambda job: _look(tiles, image, job), todo, number, device) as found:
            for both in found:
                for one in both:
                    best.scatter_reduce_(0, one.row, one.score, "amax")
    return best


@torch.no_grad()
def _look(tiles: Tiles, image: Tensor, job: Job) -> list[_Scores]:
    """What one tile says of its rows, and off the diagonal of its columns: from fp32 unless that leaves too much open."""
    i, j = job.i, job.j
    dims = (1,) if i == j else (1, 0)
    if tiles.fp32:
        tile = _of_others(tiles.single(i, j), image[i:], image[j:])
        errors = tiles.errors[0][i:], tiles.errors[0][j:]
        cells = [leaders(tile, job.known[1 - dim], errors[1 - dim][: tile.shape[1 - dim]], dim) for dim in dims]
        if few(cells, tile):
            return [
                _Scores(row=(i + row, j + column)[1 - dim], score=tiles.gallery.exact(i + row, j + column))
                for dim, (row, column) in zip(dims, cells, strict=True)
            ]
    wide = _of_others(tiles.double(i, j), image[i:], image[j:])
    return [_Scores(row=(i, j)[1 - dim] + torch.arange(wide.shape[1 - dim], device=wide.device), score=wide.amax(dim)) for dim in dims]


def _of_others(tile: Tensor, image_of_row: Tensor, image_of_column: Tensor) -> Tensor:
    """The tile with minus infinity for captions of one image; few rows have such columns, unless images are mixed."""
    rows, columns = image_of_row[: tile.shape[0]], image_of_column[: tile.shape[1]]
    some = torch.nonzero(torch.isin(rows, columns))[:, 0]
    at, column = torch.nonzero(rows[some, None] == columns, as_tuple=True)
    tile[some[at], column] = -torch.inf
    return tile
