"""Ranks, places of all captions and nearest captions from fp32 tiles, in several threads, against sorting and full float64 matrices."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.metrics.gallery_scores import TIE_TOLERANCE, Gallery, open_tiles
from gradscope.metrics.hardness_recall import caption_hardness
from gradscope.metrics.nearest_other import nearest_other
from gradscope.metrics.ranks import ranks
from gradscope.metrics.tile_counts import TileQueries
from gradscope.metrics.true_recall import caption_places
from gradscope.metrics.winners import winners

EDGE = 1e-14  # two float64 sums of unit rows differ by less


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    torch.manual_seed(secrets.randbits(32))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def owners(n_images: int, n_texts: int) -> Tensor:
    return torch.cat([torch.arange(n_images), torch.randint(n_images, (n_texts - n_images,))])[torch.randperm(n_texts)]


def gallery(n_images: int, n_texts: int, width: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows in a cone; a quarter of the captions are nearly others, by 1e-15 to 1e-5."""
    images, owner = unit(torch.randn(n_images, width) + torch.randn(width)), owners(n_images, n_texts)
    texts = unit(images[owner] + noise * torch.randn(n_texts, width) / width**0.5)
    copies = torch.randperm(n_texts)[: n_texts // 2].view(2, -1) if n_texts % 4 == 0 else torch.randint(n_texts, (2, n_texts // 4))
    step = 10.0 ** torch.empty(copies.shape[1], 1).uniform_(-15, -5)
    texts[copies[0]] = texts[copies[1]] + step * torch.randn(copies.shape[1], width)
    return images, texts, owner


def by_sorting(scores: np.ndarray, mine: np.ndarray) -> tuple[list[int], list[int], list[bool]]:
    """(greater, ties, clear) of each row: the places of the tie band's edges among the sorted negatives."""
    greater, ties, clear = [], [], []
    for row, own in zip(scores, mine, strict=True):
        best, others = row[own].max(), np.sort(row[~own])
        above, below = np.searchsorted(others, best + TIE_TOLERANCE, "right"), np.searchsorted(others, best - TIE_TOLERANCE, "left")
        greater.append(len(others) - above)
        ties.append(above - below)
        clear.append(bool((np.abs(np.abs(row - best) - TIE_TOLERANCE) > EDGE).all()))
    return greater, ties, clear


@pytest.mark.parametrize("noise", [0.05, 1.0, 4.0, 100.0])
def test_thirty_random_galleries_equal_sorting_in_float64(noise: float, threads: int) -> None:
    """Easy ones, in which few queries are reached in a tile, to those in which half of all scores are above."""
    for _ in range(8):
        n = int(torch.randint(130, 300, ()))
        images, texts, owner = gallery(n, n + int(torch.randint(0, 300, ())), int(torch.randint(2, 500, ())), noise)
        block = int(torch.randint(30, 400, ()))
        scores, mine = (images.double() @ texts.double().T).numpy(), owner.numpy() == np.arange(n)[:, None]
        for counts, s, own in zip(ranks(images, texts, owner, block=block), (scores, scores.T), (mine, mine.T), strict=True):
            greater, ties, clear = by_sorting(s, own)
            assert sum(clear) > 0.9 * len(clear)
            assert (counts.greater.numpy() == greater)[clear].all()
            assert (counts.ties.numpy() == ties)[clear].all()


def test_a_crowded_tile_is_refused() -> None:
    rows = unit(torch.randn(1, 30)).repeat(200, 1)
    known = Gallery.of(rows, rows, torch.arange(200))
    with open_tiles(known, 64) as tiles:
        side = TileQueries(tiles, known.positive_scores(), tiles.errors[0], dim=1)
        assert side.single(tiles.padded(64, 0), 64, 0) is None
        counted = side.double(tiles.double(64, 0), 64, 0)
    assert torch.equal(counted.counts, torch.tensor([[0], [64]]).expand(2, 64))


# ---- all captions of an image


@pytest.mark.parametrize("noise", [0.3, 4.0])
@pytest.mark.parametrize("block", [70, 1024])
def test_places_of_all_captions_are_those_of_float64(noise: float, block: int, threads: int) -> None:
    images, texts, owner = gallery(140, 420, 96, noise)
    images[3], texts[5] = torch.nan, torch.inf
    greater, ties = caption_places(images, texts, owner, block=block)
    images[3], texts[5] = 0.0, 0.0
    scores = images.double() @ texts.double().T
    scores[:, 5] = -torch.inf
    level = scores[owner, torch.arange(420)][:, None]
    away = scores[owner] - level
    lost = (owner == 3) | (torch.arange(420) == 5)
    clear = ((away.abs() - TIE_TOLERANCE).abs() > EDGE).all(1) & ~lost
    assert clear.sum() > 0.9 * (~lost).sum()
    assert torch.equal(torch.from_numpy(greater)[clear], (away > TIE_TOLERANCE).sum(1)[clear])
    assert torch.equal(torch.from_numpy(ties)[clear], ((away.abs() <= TIE_TOLERANCE).sum(1) - 1)[clear])
    assert (greater[lost] == 419).all()
    assert (ties[lost] == 0).all()


def test_places_among_captions_that_are_all_alike() -> None:
    rows, owner = unit(torch.randn(1, 40)).repeat(300, 1), owners(100, 300)
    greater, ties = caption_places(rows[:100], rows, owner, block=64)
    assert (greater == 0).all()
    assert (ties == 299).all()


# ---- the nearest caption of another image


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("block", [70, 1024])
def test_the_nearest_of_another_image_is_that_of_float64(mixed: bool, block: int, threads: int) -> None:
    """Captions of one image lie close together; near-twins belong to other images."""
    _, texts, owner = gallery(120, 400, 96, 0.3)
    owner = owner if mixed else owner.sort().values
    texts[7] = torch.nan
    found = caption_hardness(texts, owner, block=block)
    texts[7] = 0.0
    cosine = (texts.double() @ texts.double().T).masked_fill(owner[:, None] == owner, -torch.inf)
    cosine[:, 7] = -torch.inf
    expected = cosine.amax(1)
    expected[7] = torch.nan
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_nearest_of_captions_that_are_all_alike_or_of_any_length(dtype: torch.dtype) -> None:
    same = unit(torch.randn(1, 40)).repeat(200, 1).to(dtype)
    cosine = float((same[0].double() ** 2).sum())
    assert nearest_other(same, torch.arange(200), block=64).tolist() == pytest.approx([cosine] * 200, abs=1e-13)
    rows, owner = (torch.randn(200, 40) * 10.0 ** torch.empty(200, 1).uniform_(-2, 2)).to(dtype), owners(80, 200)
    scores = (rows.double() @ rows.double().T).masked_fill(owner[:, None] == owner, -torch.inf)
    assert torch.allclose(nearest_other(rows, owner, block=64), scores.amax(1), rtol=1e-12, atol=1e-12)
    assert torch.isneginf(nearest_other(rows, torch.zeros(200, dtype=torch.int64), block=64)).all()


# ---- who won


@pytest.mark.parametrize("alike", [False, True])
def test_rivals_are_those_of_float64(alike: bool, threads: int) -> None:
    """Beside a row that is not finite; where all are alike every tile is float64, and the first of another image is named."""
    images, texts, owner = unit(torch.randn(90, 96)), unit(torch.randn(300, 96)), owners(90, 300)
    if alike:
        images, texts = images[:1].repeat(90, 1), texts[:1].repeat(300, 1)
    texts[7] = torch.nan
    found = winners(images, texts, owner, block=50)
    texts[7] = 0.0
    scores = (images.double() @ texts.double().T).masked_fill(owner == torch.arange(90)[:, None], -torch.inf)
    scores[:, 7] = -torch.inf
    for won, s in zip(found, (scores, scores.T), strict=True):
        best = s.amax(1)
        first = (s >= best[:, None] - TIE_TOLERANCE).byte().argmax(1).where(best.isfinite(), -1)
        assert torch.allclose(torch.from_numpy(won.rival_score), best, rtol=0, atol=EDGE)
        assert torch.equal(torch.from_numpy(won.rival), first)
