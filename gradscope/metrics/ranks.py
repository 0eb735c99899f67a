"""Ranks of the truth in both retrieval directions, by counting, in tiles.

For a query with best positive score s+ and the scores s_j of all candidates that are not its positives:

    greater = #{j : s_j > s+ + t}      ties = #{j : |s_j - s+| <= t}      positives = #{its positives within t of s+}

with t = ``TIE_TOLERANCE``. Image -> text: the positives of an image are all its captions, and the best-placed one counts; its
other captions never count against it. Text -> image: the positive of a caption is its one image.

Scores are inner products formed in float64 from the embeddings as given. Rounding then stays near 1e-16 whatever the tile or
the order of the gallery, far below t, so that equal embeddings tie and nothing else does, and the counts do not depend on block
size, thread count or permutation. (In float32 the last digit of a product depends on its place in the tile: a positive formed
elsewhere can even be beaten by itself.)

How to read it: ``greater`` is the best rank minus one; the ties are what chance decides, and recall.py takes the expectation.
How it can mislead: rows are used as given, so they must be unit rows if the score is to be a cosine. A row that is not finite
scores below everything; if it is the query, or the query's only positive, the query gets the worst rank and is counted in
``non_finite``. Two files with one picture are two images here, and each is a negative of the other's captions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Scores closer than this are tied.
TIE_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The counts of Q queries of one direction, on the CPU, in the order of the queries' rows."""

    direction: str
    greater: Tensor  # int64 [Q]
    ties: Tensor  # int64 [Q]
    positives: Tensor  # int64 [Q], at least 1
    image: Tensor  # int64 [Q], the image a query is, or belongs to
    negatives: Tensor  # int64 [Q], candidates that are not positives of the query
    n_candidates: int
    non_finite: int

    @property
    def n_queries(self) -> int:
        return len(self.greater)

    @property
    def tied_share(self) -> float:
        """Share of queries whose best positive ties with a negative."""
        return float((self.ties > 0).double().mean())


@torch.no_grad()
def ranks(images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int = 1024) -> tuple[Ranks, Ranks]:
    """Both directions, (image -> text, text -> image), in one pass over the scores.

    Args:
        images: [N, D], any float dtype.
        texts: [M, D].
        image_of_text: int64 [M], the row of the image that each caption describes.
        block: tile edge; memory is O(block * (block + D)), beside a few integers per row.

    Raises:
        ValueError: if the shapes do not fit, or an image has no caption.
    """
    check_gallery(images, texts, image_of_text)
    if images.device.type == "mps":  # has no float64
        images, texts = images.cpu(), texts.cpu()
    image_of_text = image_of_text.to(images.device)
    good_image, good_text = finite_rows(images), finite_rows(texts)
    positive = positive_scores(images, texts, image_of_text, block)  # [M]
    positive[~(good_text & good_image[image_of_text])] = -torch.inf
    best = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=images.device)
    best.scatter_reduce_(0, image_of_text, positive, "amax")  # [N]

    by_image = torch.zeros(2, len(images), dtype=torch.int64, device=images.device)  # greater, greater or tied
    by_text = torch.zeros(2, len(texts), dtype=torch.int64, device=images.device)
    for i in range(0, len(images), block):
        for j in range(0, len(texts), block):
            rows, columns = slice(i, i + block), slice(j, j + block)
            tile = finite(images[rows]) @ finite(texts[columns]).T  # [rows, columns]
            tile.masked_fill_(~good_image[rows, None], -torch.inf)
            tile.masked_fill_(~good_text[columns], -torch.inf)
            leave_out_positives(tile, image_of_text[columns] - i)
            by_image[:, rows] += _counts(tile, best[rows, None], dim=1)
            by_text[:, columns] += _counts(tile, positive[columns], dim=0)

    own = torch.bincount(image_of_text, minlength=len(images))
    tied_own = torch.bincount(image_of_text[positive >= best[image_of_text] - TIE_TOLERANCE], minlength=len(images))
    everyone = torch.arange(len(images), device=images.device)
    one = torch.ones_like(image_of_text)
    return (
        _result("i2t", by_image, best, tied_own, everyone, len(texts) - own, len(texts)),
        _result("t2i", by_text, positive, one, image_of_text, len(images) - one, len(images)),
    )


def check_gallery(images: Tensor, texts: Tensor, image_of_text: Tensor) -> None:
    """Raises ValueError unless images [N, D], texts [M, D] and image_of_text int64 [M] belong together."""
    if images.ndim != 2 or texts.ndim != 2 or images.shape[1] != texts.shape[1] or not len(images) or not len(texts):
        shapes = f"{list(images.shape)} and {list(texts.shape)}"
        raise ValueError(f"image and text rows have shapes {shapes}; give [N, D] and [M, D] with N, M > 0 and one D.")
    if image_of_text.shape != (len(texts),) or image_of_text.dtype != torch.int64:
        raise ValueError(f"image_of_text must be int64 of shape [{len(texts)}], one image row per caption.")
    low, high = int(image_of_text.min()), int(image_of_text.max())
    if low < 0 or high >= len(images):
        raise ValueError(f"image_of_text must hold image rows, 0 to {len(images) - 1}; it goes from {low} to {high}.")
    lonely = len(images) - len(image_of_text.unique())
    if lonely:
        raise ValueError(f"{lonely} of {len(images)} images have no caption; leave them out, or give each at least one.")


def finite_rows(rows: Tensor) -> Tensor:
    """bool [N]: rows whose squared norm is finite, so that no product of two such rows can overflow."""
    return torch.isfinite(torch.linalg.vector_norm(rows.float(), dim=1).square())


def finite(rows: Tensor) -> Tensor:
    """Rows in float64 with non-finite rows zeroed, which keeps NaN out of their neighbours' products."""
    return torch.where(finite_rows(rows)[:, None], rows.double(), 0.0)


def positive_scores(images: Tensor, texts: Tensor, image_of_text: Tensor, block: int) -> Tensor:
    """float64 [M]: each caption's inner product with its own image; 0 where a row is not finite."""
    parts = [
        (finite(images[own]) * finite(rows)).sum(1) for rows, own in zip(texts.split(block), image_of_text.split(block), strict=True)
    ]
    return torch.cat(parts)  # float64 [M]


def leave_out_positives(tile: Tensor, row_of_column: Tensor) -> None:
    """Set the score of every positive pair in the tile to minus infinity."""
    columns = torch.nonzero((row_of_column >= 0) & (row_of_column < len(tile)))[:, 0]
    tile[row_of_column[columns], columns] = -torch.inf


def _counts(tile: Tensor, positive: Tensor, dim: int) -> Tensor:
    """int64 [2, Q]: how many scores lie above the tie band, and how many above its lower edge."""
    above = (tile > positive + TIE_TOLERANCE).sum(dim)
    return torch.stack([above, (tile >= positive - TIE_TOLERANCE).sum(dim)])


def _result(
    direction: str, counts: Tensor, score: Tensor, positives: Tensor, image: Tensor, negatives: Tensor, n_candidates: int
) -> Ranks:
    lost = torch.isneginf(score)
    greater, reached = counts
    return Ranks(
        direction=direction,
        greater=torch.where(lost, negatives, greater).cpu(),
        ties=torch.where(lost, 0, reached - greater).cpu(),
        positives=torch.where(lost, 1, positives).cpu(),
        image=image.cpu(),
        negatives=negatives.cpu(),
        n_candidates=n_candidates,
        non_finite=int(lost.sum()),
    )
