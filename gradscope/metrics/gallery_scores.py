"""The scores of a gallery, tile by tile: fast in fp32 with a bound of the error, exact in float64 where that does not decide.

A score is the inner product of an image row x and a caption row y, and its true value is the float64 one. For a sum of D products in
fp32, in whatever order and with or without fused additions,

    |fp32 score - score| <= gamma |x| |y|,    gamma = n u / (1 - n u),  n = D + 4,  u = 2^-24

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1, with Cauchy and Schwarz; four roundings are for rows
that were float64). Summed in c parts of D / c products each, n is only D / c + c + 4. So a comparison with a threshold is
decided by fp32 unless the fp32 score lies within that of it, and the few scores that do are formed again: from fp32 products that
are summed in float64, where n is 4 and hardly one in a hundred stays open, and those in float64 throughout. n of a tile is 64 or
more, which leaves room for kernels that build an fp32 product of several coarser ones.

How it can mislead: the bound holds for fp32 products; where a trial (`gradscope.products`) finds none, every tile is float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from gradscope.products import Products, Shape, fast_fp32
from gradscope.tile_threads import in_order, workers

Item = TypeVar("Item")
Found = TypeVar("Found")

#: Scores closer than this are tied.
TIE_TOLERANCE = 1e-12
#: Share of a tile's scores to form again, from which on a float64 tile is as fast.
CROWDED = 1 / 64
#: Scores that are counted together.
GROUP = 64

_STRIP = 4096  # rows looked at together, where a copy of all would be large
_DEPTH = 384  # products of an fp32 sum: fewer take longer, more leave more scores to form again (2026-11-30)
_PAIRS = 64  # pairs of rows multiplied at a time on a CPU: they stay in cache
_MANY_PAIRS = 8192  # and on a GPU, which needs more work at a time
_ROUNDINGS = 4  # of `nearly`: each factor, the product, and one to spare
_LARGE = 1e30  # products of norms beyond this may overflow in fp32
_SMALL = 1 << 14  # a gallery with so few scores is float64 at once: it is done before a trial is

UNIT = 2.0**-24  # rounding of fp32


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
        parts = torch.arange(len(self.texts), device=self.owner.device).split(_STRIP)
        with each_tile(lambda part: self.exact(self.owner[part], part), parts, len(parts), self.owner.device) as found:
            scores = torch.cat(list(found))
        return scores.masked_fill_(~(self.good_text & self.good_image[self.owner]), -torch.inf)

    def exact(self, images: Tensor, texts: Tensor) -> Tensor:
        """float64 [K]: the scores of paired row numbers [K] and [K], both int64; nan or infinite where a row is."""
        return self._scores(images, texts, torch.float64)

    def nearly(self, images: Tensor, texts: Tensor) -> Tensor:
        """The same from fp32 products summed in float64, in about half the time: off by ``Tiles.close`` of a tile's error at most."""
        return self._scores(images, texts, torch.float32)

    def _scores(self, images: Tensor, texts: Tensor, dtype: torch.dtype) -> Tensor:
        """float64 [K], the products in ``dtype``."""
        factors = self._room.factors(dtype)
        sides = [(self.images.detach(), images, factors[0]), (self.texts.detach(), texts, factors[1])]
        scores = torch.empty(len(images), dtype=torch.float64, device=images.device)
        for start in range(0, len(images), len(factors[0])):
            part = slice(start, start + len(factors[0]))
            n = len(images[part])
            for rows, numbers, factor in sides:
                if rows.dtype == dtype:
                    torch.index_select(rows, 0, numbers[part], out=factor[:n])
                else:
                    factor[:n] = torch.index_select(rows, 0, numbers[part], out=self._room.given(rows.dtype)[:n])
            torch.sum(factors[0, :n].mul_(factors[1, :n]), 1, dtype=torch.float64, out=scores[part])
        return scores

    @cached_property
    def _room(self) -> _Pairs:
        return _Pairs(_PAIRS if self.images.device.type == "cpu" else _MANY_PAIRS, self.images.shape[1], self.images.device)

    def shapes(self, block: int) -> tuple[Shape, ...]:
        """Of whole tiles and of those at the edges, for a trial."""
        rows, columns = (_sizes(len(x), block) for x in (self.images, self.texts))
        return tuple((a, b, self.depth) for a in rows for b in columns)


class _Pairs(threading.local):
    """Room for pairs of rows in each thread that asks, made once: fresh memory costs more than the sums."""

    def __init__(self, pairs: int, width: int, device: torch.device) -> None:
        self._shape, self._device = (pairs, width), device
        self._factors: dict[torch.dtype, Tensor] = {}
        self._given: dict[torch.dtype, Tensor] = {}

    def factors(self, dtype: torch.dtype) -> Tensor:
        """[2, pairs, D]."""
        return self._kept(self._factors, dtype, 2)

    def given(self, dtype: torch.dtype) -> Tensor:
        """[pairs, D]."""
        return self._kept(self._given, dtype, 1)[0]

    def _kept(self, where: dict[torch.dtype, Tensor], dtype: torch.dtype, number: int) -> Tensor:
        if dtype not in where:
            where[dtype] = torch.empty(number, *self._shape, dtype=dtype, device=self._device)
        return where[dtype]


class _Memory(threading.local):
    """Room for a tile and for what is beside it, in each thread that asks."""

    def __init__(self, room: int, device: torch.device) -> None:
        self.numbers = torch.empty(2, room, dtype=torch.float32, device=device)  # pages that nobody writes to take no memory


class Tiles:
    """Makes tiles [R, C] of a gallery, in which own captions and rows that are not finite score minus infinity. May be used by
    several threads, each of which has a tile of its own.

    Attributes:
        fp32: whether tiles may be fp32 at all.
        errors: float64 [N] and [M], how far an fp32 score of an image, and of a caption, may be from the true one.
        close: by which to multiply them for scores that are ``Gallery.nearly``.
    """

    def __init__(self, gallery: Gallery, block: int, products: Products | None, *, positives: bool = False) -> None:
        """``products``: those in use, if fp32 is to be used. ``positives``: own captions are scored as all others."""
        self.gallery = gallery
        self.block = block
        norms = _norms(gallery.images, gallery.good_image), _norms(gallery.texts, gallery.good_text)
        largest = norms[0].max(), norms[1].max()
        self.fp32 = products is not None and products.exact and bool(largest[0] * largest[1] < _LARGE)
        n = max(gallery.depth + gallery.parts + 4, 64)
        gamma = 1.01 * n * UNIT / (1.0 - n * UNIT)
        self.errors = gamma * norms[0] * largest[1], gamma * norms[1] * largest[0]
        self.close = _ROUNDINGS / n
        self._whole = bool(gallery.good_image.all()), bool(gallery.good_text.all())
        self._left_out_of = _tiles_with_positives(gallery, block) & (not positives)
        rows, columns = (_whole_groups(min(block, len(x))) for x in (gallery.images, gallery.texts))
        self._memory = _Memory(rows * columns if self.fp32 else 0, gallery.images.device)

    def single(self, i: int, j: int) -> Tensor:
        """float32, images from row i and captions from row j; gone when the next is made."""
        rows, columns = (len(x[start : start + self.block]) for x, start in ((self.gallery.images, i), (self.gallery.texts, j)))
        return self.padded(i, j)[:rows, :columns]

    def padded(self, i: int, j: int) -> Tensor:
        """``single`` in memory of its own, and filled up with minus infinity to whole multiples of ``GROUP``."""
        rows, columns = slice(i, i + self.block), slice(j, j + self.block)
        left, right = self._plain(0, rows), self._plain(1, columns)
        total, part = (self._room(which, len(left), len(right)) for which in (0, 1))
        pairs = zip(left.split(self.gallery.depth, dim=1), right.split(self.gallery.depth, dim=1), strict=True)
        for k, (some, others) in enumerate(pairs):
            torch.mm(some, others.T, out=part if k else total)
            if k:
                total += part
        total[len(self.gallery.images[rows]) :] = -torch.inf
        total[:, len(self.gallery.texts[columns]) :] = -torch.inf
        return self._left_out(total, rows, columns)

    def double(self, i: int, j: int) -> Tensor:
        """``single`` in float64."""
        rows, columns = slice(i, i + self.block), slice(j, j + self.block)
        return self._left_out(finite(self.gallery.images[rows]) @ finite(self.gallery.texts[columns]).T, rows, columns)

    def scratch(self, rows: int, columns: int) -> Tensor:
        """float32 memory [R, C], no larger than a tile; gone when the next tile is made."""
        return self._room(1, rows, columns)

    def _room(self, which: int, rows: int, columns: int) -> Tensor:
        return self._memory.numbers[which, : rows * columns].view(rows, columns)

    def _plain(self, side: int, part: slice) -> Tensor:
        """fp32 rows, those that are not finite zeroed, and more zeros to a multiple of ``GROUP``."""
        rows = (self.gallery.images, self.gallery.texts)[side][part].float()
        rows = rows if self._whole[side] else torch.where(finite_rows(rows)[:, None], rows, 0.0)
        more = _whole_groups(len(rows)) - len(rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, more)) if more else rows

    def _left_out(self, scores: Tensor, rows: slice, columns: slice) -> Tensor:
        if not self._whole[0]:
            scores[torch.nonzero(~self.gallery.good_image[rows])[:, 0]] = -torch.inf
        if not self._whole[1]:
            scores[:, torch.nonzero(~self.gallery.good_text[columns])[:, 0]] = -torch.inf
        if bool(self._left_out_of[rows.start // self.block, columns.start // self.block]):
            leave_out_positives(scores, self.gallery.owner[columns] - rows.start)
        return scores


@contextmanager
def open_tiles(gallery: Gallery, block: int, *, positives: bool = False) -> Iterator[Tiles]:
    """Tiles of a gallery while the products they are made with are in force."""
    if gallery.small:
        yield Tiles(gallery, block, None, positives=positives)
    else:
        with fast_fp32(gallery.images.device, *gallery.shapes(block)) as products:
            yield Tiles(gallery, block, products, positives=positives)


def each_tile(
    work: Callable[[Item], Found], items: Iterable[Item], number: int, device: torch.device
) -> AbstractContextManager[Iterator[Found]]:
    """``work`` of every item, one for each of so many tiles, in order, in several threads where there are enough tiles for them."""
    if number < workers(device):
        return nullcontext(map(work, items))
    return in_order(work, items, device)


def _tiles_with_positives(gallery: Gallery, block: int) -> Tensor:
    """bool on the CPU, one for each tile [rows of tiles, columns of tiles]."""
    rows, columns = (math.ceil(len(x) / block) for x in (gallery.images, gallery.texts))
    holds = torch.zeros(rows, columns, dtype=torch.bool)
    holds[gallery.owner.cpu() // block, torch.arange(len(gallery.texts)) // block] = True
    return holds


def _whole_groups(n: int) -> int:
    return math.ceil(n / GROUP) * GROUP


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
