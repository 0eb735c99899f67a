"""The scores of a gallery, tile by tile: fast in fp32 with a bound of the error, exact in float64 where that does not decide.

A score is the inner product of an image row x and a caption row y, and its true value is the float64 one. For a sum of D products in
fp32, in whatever order and with or without fused additions,

    |fp32 score - score| <= gamma |x| |y|,    gamma = n u / (1 - n u),  n = D + 4,  u = 2^-24

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1, with Cauchy and Schwarz; four roundings are for rows
that were float64). Summed in c parts of D / c products each, n is only D / c + c + 4. So a comparison with a threshold is
decided by fp32 unless the fp32 score lies within that of it, and the few scores that do are formed again. n is 64 or more, which
leaves room for kernels that build an fp32 product of several coarser ones.

How it can mislead: the bound holds for fp32 products; where a trial (`gradscope.products`) finds none, every tile is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.products import Products, Shape, fast_fp32

#: Scores closer than this are tied.
TIE_TOLERANCE = 1e-12
#: Share of a tile's scores to form again, from which on a float64 tile is as fast.
CROWDED = 1 / 64

_STRIP = 4096  # rows looked at together, where a copy of all would be large
_DEPTH = 256  # products of an fp32 sum; as fast as more (2026-11-30), with fewer scores to form again
_PAIRS = 64  # pairs of rows taken to float64 at a time: they stay in cache
_LARGE = 1e30  # products of norms beyond this may overflow in fp32
_SMALL = 1 << 14  # a gallery with so few scores is float64 at once: it is done before a trial is

_UNIT = 2.0**-24


@dataclass(frozen=True, kw_only=True, eq=False)
class Gallery:
    """Embeddings as given and what is known of each row.

    Attributes:
        images, texts: [N, D] and [M, D], any float dtype.
        owner: int64 [M], the image row of each caption, on the same device.
        good_image, good_text: bool, rows that are finite; the others score minus infinity.
    """

    images: Tensor
    texts: Tensor
    owner: Tensor
    good_image: Tensor
    good_text: Tensor

    @classmethod
    def of(cls, images: Tensor, texts: Tensor, image_of_text: Tensor) -> Gallery:
        """Raises ValueError as ``check_gallery`` does."""
        check_gallery(images, texts, image_of_text)
        if images.device.type == "mps":  # has no float64
            images, texts = images.cpu(), texts.cpu()
        owner = image_of_text.to(images.device)
        return cls(images=images, texts=texts, owner=owner, good_image=finite_rows(images), good_text=finite_rows(texts))

    @property
    def small(self) -> bool:
        return len(self.images) * len(self.texts) <= _SMALL

    @property
    def parts(self) -> int:
        """How many sums an fp32 score is made of, ``depth`` products in each or fewer."""
        return math.ceil(self.images.shape[1] / _DEPTH)

    @property
    def depth(self) -> int:
        return math.ceil(self.images.shape[1] / self.parts)

    def positive_scores(self) -> Tensor:
        """float64 [M]: each caption's score with its own image; minus infinity where one of the two is not finite."""
        scores = self.exact(self.owner, torch.arange(len(self.texts), device=self.owner.device))
        return scores.masked_fill_(~(self.good_text & self.good_image[self.owner]), -torch.inf)

    def exact(self, images: Tensor, texts: Tensor) -> Tensor:
        """float64 [K]: the scores of paired row numbers [K] and [K], both int64; nan or infinite where a row is."""
        sides = (self.images.detach(), images), (self.texts.detach(), texts)
        wide = torch.empty(2, min(_PAIRS, len(images)), self.images.shape[1], dtype=torch.float64, device=images.device)
        narrow = [torch.empty_like(wide[0], dtype=rows.dtype) for rows, _ in sides]  # made once: fresh memory costs more than the sums
        scores = torch.empty(len(images), dtype=torch.float64, device=images.device)
        for start in range(0, len(images), _PAIRS):
            part = slice(start, start + _PAIRS)
            n = len(images[part])
            for (rows, numbers), some, double in zip(sides, narrow, wide, strict=True):
                double[:n] = torch.index_select(rows, 0, numbers[part], out=some[:n])
            torch.sum(wide[0, :n].mul_(wide[1, :n]), 1, out=scores[part])
        return scores

    def shapes(self, block: int) -> tuple[Shape, ...]:
        """Of whole tiles and of those at the edges, for a trial."""
        rows, columns = (_sizes(len(x), block) for x in (self.images, self.texts))
        return tuple((a, b, self.depth) for a in rows for b in columns)


class Tiles:
    """Makes tiles [R, C] of a gallery, in which own captions and rows that are not finite score minus infinity.

    Attributes:
        fp32: whether tiles may be fp32 at all.
        errors: float64 [N] and [M], how far an fp32 score of an image, and of a caption, may be from the true one.
    """

    def __init__(self, gallery: Gallery, block: int, products: Products | None) -> None:
        """``products``: those in use, if fp32 is to be used."""
        self.gallery = gallery
        self.block = block
        norms = _norms(gallery.images, gallery.good_image), _norms(gallery.texts, gallery.good_text)
        largest = norms[0].max(), norms[1].max()
        self.fp32 = products is not None and products.exact and bool(largest[0] * largest[1] < _LARGE)
        n = max(gallery.depth + gallery.parts + 4, 64)
        gamma = 1.01 * n * _UNIT / (1.0 - n * _UNIT)
        self.errors = gamma * norms[0] * largest[1], gamma * norms[1] * largest[0]
        self._whole = bool(gallery.good_image.all()), bool(gallery.good_text.all())
        room = min(block, len(gallery.images)) * min(block, len(gallery.texts))
        self._memory = torch.empty(3, room if self.fp32 else 0, device=gallery.images.device)

    def single(self, i: int, j: int) -> Tensor:
        """float32, images from row i and captions from row j; gone when the next is made."""
        rows, columns = slice(i, i + self.block), slice(j, j + self.block)
        left, right = self._plain(0, rows), self._plain(1, columns)
        total, part = (self._room(which, len(left), len(right)) for which in (0, 1))
        pairs = zip(left.split(self.gallery.depth, dim=1), right.split(self.gallery.depth, dim=1), strict=True)
        for k, (some, others) in enumerate(pairs):
            torch.mm(some, others.T, out=part if k else total)
            if k:
                total += part
        return self._left_out(total, rows, columns)

    def double(self, i: int, j: int) -> Tensor:
        """The same in float64."""
        rows, columns = slice(i, i + self.block), slice(j, j + self.block)
        return self._left_out(finite(self.gallery.images[rows]) @ finite(self.gallery.texts[columns]).T, rows, columns)

    def scratch(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """float32 memory in the shape of an fp32 tile [R, C], twice."""
        return self._room(1, *tile.shape), self._room(2, *tile.shape)

    def _room(self, which: int, rows: int, columns: int) -> Tensor:
        return self._memory[which, : rows * columns].view(rows, columns)

    def _plain(self, side: int, part: slice) -> Tensor:
        rows = (self.gallery.images, self.gallery.texts)[side][part].float()
        return rows if self._whole[side] else torch.where(finite_rows(rows)[:, None], rows, 0.0)

    def _left_out(self, scores: Tensor, rows: slice, columns: slice) -> Tensor:
        if not self._whole[0]:
            scores.masked_fill_(~self.gallery.good_image[rows, None], -torch.inf)
        if not self._whole[1]:
            scores.masked_fill_(~self.gallery.good_text[columns], -torch.inf)
        leave_out_positives(scores, self.gallery.owner[columns] - rows.start)
        return scores


@contextmanager
def open_tiles(gallery: Gallery, block: int) -> Iterator[Tiles]:
    """Tiles of a gallery while the products they are made with are in force."""
    if gallery.small:
        yield Tiles(gallery, block, None)
    else:
        with fast_fp32(gallery.images.device, *gallery.shapes(block)) as products:
            yield Tiles(gallery, block, products)


def _norms(rows: Tensor, good: Tensor) -> Tensor:
    """float64 [N], a little too large rather than too small; 0 for rows that are not finite."""
    parts = [torch.linalg.vector_norm(part.float(), dim=1).double() for part in rows.split(_STRIP)]
    return torch.where(good, torch.cat(parts) * 1.001, 0.0)


def _sizes(n: int, block: int) -> list[int]:
    whole = min(n, block)
    return sorted({whole, n % whole or whole})


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
    return torch.cat([torch.isfinite(torch.linalg.vector_norm(part.float(), dim=1).square()) for part in rows.split(_STRIP)])


def finite(rows: Tensor) -> Tensor:
    """Rows in float64 with non-finite rows zeroed, which keeps NaN out of their neighbours' products."""
    return torch.where(finite_rows(rows)[:, None], rows.double(), 0.0)


def leave_out_positives(tile: Tensor, row_of_column: Tensor) -> None:
    """Set the score of every positive pair in the tile to minus infinity."""
    columns = torch.nonzero((row_of_column >= 0) & (row_of_column < len(tile)))[:, 0]
    tile[row_of_column[columns], columns] = -torch.inf
