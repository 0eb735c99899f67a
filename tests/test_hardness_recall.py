"""Hardness of captions and R@1 by hardness against loops; expected R@1 of smaller galleries against every subset, and by drawing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.metrics.bootstrap import mean_interval
from gradscope.metrics.gallery_curve import gallery_curve, gallery_sizes, hit_chance
from gradscope.metrics.hardness_recall import caption_hardness, hardness_recall, query_hardness
from gradscope.metrics.ranks import ranks
from gradscope.metrics.recall import hit_probability


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def owners(n_images: int, n_texts: int) -> Tensor:
    return torch.cat([torch.arange(n_images), torch.randint(n_images, (n_texts - n_images,))])[torch.randperm(n_texts)]


def grid(n_images: int, n_texts: int, dim: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(-1, 2, (n_images, dim)).float(), torch.randint(-1, 2, (n_texts, dim)).float(), owners(n_images, n_texts)


# ---- hardness


@pytest.mark.parametrize("block", [1, 8, 100])
def test_hardness_is_the_closest_caption_of_another_image(block: int) -> None:
    texts, owner = unit(37, 5), owners(12, 37)
    found = caption_hardness(texts, owner, block=block)
    cosine = (texts.double() @ texts.double().T).tolist()
    for j, own in enumerate(owner.tolist()):
        expected = max(cosine[j][k] for k, other in enumerate(owner.tolist()) if other != own)
        assert found[j] == pytest.approx(expected, abs=1e-12)
    i2t, t2i = ranks(unit(12, 5), texts, owner)
    assert query_hardness(t2i, found, owner) is found
    expected = [max(h for h, o in zip(found, owner.tolist(), strict=True) if o == i) for i in range(12)]
    assert query_hardness(i2t, found, owner).tolist() == expected


def test_captions_of_one_image_are_not_hard_for_each_other() -> None:
    texts = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0.6, 0.8]])
    assert caption_hardness(texts, torch.tensor([0, 0, 1, 2])).tolist() == pytest.approx([0.6, 0.6, 0.8, 0.8])


def test_what_has_no_hardness_belongs_to_no_bin() -> None:
    texts, owner = unit(9, 4), torch.arange(9)
    texts[4] = torch.nan
    hardness = caption_hardness(texts, owner)
    assert np.flatnonzero(np.isnan(hardness)).tolist() == [4]
    counts = ranks(unit(9, 4), texts, owner)[1]
    assert sum(b.n_queries for b in hardness_recall(counts, hardness, resamples=5)) == 8
    assert np.isnan(caption_hardness(unit(3, 4), torch.zeros(3, dtype=torch.int64))).all(), "one image alone"
    alone = ranks(unit(1, 4), unit(3, 4), torch.zeros(3, dtype=torch.int64))[1]
    assert hardness_recall(alone, np.full(3, np.nan)) == []


def test_bins_equal_a_loop_over_sorted_queries() -> None:
    images, texts, owner = unit(50, 3), unit(130, 3), owners(50, 130)
    hardness = caption_hardness(texts, owner)
    for counts in ranks(images, texts, owner):
        own = query_hardness(counts, hardness, owner)
        hits, image = hit_probability(counts, 1), counts.image.numpy()
        edges = [-math.inf, *(np.quantile(own, q) for q in (0.25, 0.5, 0.75)), math.inf]
        for found, (low, high) in zip(hardness_recall(counts, own, bins=4, resamples=30), itertools.pairwise(edges), strict=True):
            members = [q for q, h in enumerate(own) if low < h <= high]
            assert found.n_queries == len(members)
            assert abs(len(members) - len(own) / 4) <= 4
            assert found.value == pytest.approx(np.mean([hits[q] for q in members]))
            assert (found.low_cosine, found.high_cosine) == (min(own[members]), max(own[members]))
            assert found.mean_cosine == pytest.approx(np.mean(own[members]))
            low_edge, high_edge = mean_interval(hits[members], image[members], resamples=30)
            assert (found.low, found.high) == (low_edge[0], high_edge[0])
            assert found.direction == counts.direction


def test_equal_hardness_stays_in_one_bin() -> None:
    counts = ranks(unit(40, 3), unit(40, 3), torch.arange(40))[1]
    hardness = np.repeat([0.5, 0.9], [30, 10])
    assert [b.n_queries for b in hardness_recall(counts, hardness, bins=5, resamples=5)] == [30, 10]
    (one,) = hardness_recall(counts, np.full(40, 0.7), bins=5, resamples=5)
    assert one.n_queries == 40
    assert one.value == pytest.approx(hit_probability(counts, 1).mean())
    with pytest.raises(ValueError, match="one value per query"):
        hardness_recall(counts, hardness[:7])
    with pytest.raises(ValueError, match="at least one bin"):
        hardness_recall(counts, hardness, bins=0)


# ---- smaller galleries


def hit_by_listing(scores: list[float], positive: list[bool], size: int) -> float:
    """Every subset of size - 1 negatives, and in each the share of the top ties that are positives."""
    best = max(s for s, p in zip(scores, positive, strict=True) if p)
    tied = sum(s == best for s, p in zip(scores, positive, strict=True) if p)
    negatives = [s for s, p in zip(scores, positive, strict=True) if not p]
    hits = []
    for drawn in itertools.combinations(negatives, size - 1):
        hits.append(0.0 if max(drawn, default=-math.inf) > best else tied / (tied + sum(s == best for s in drawn)))
    return float(np.mean(hits))


@pytest.mark.parametrize(("n_images", "n_texts"), [(7, 7), (4, 9), (6, 11)])
def test_the_curve_equals_every_subset(n_images: int, n_texts: int) -> None:
    for _ in range(4):
        images, texts, owner = grid(n_images, n_texts, dim=3)
        scores = images.double() @ texts.double().T
        mine = owner == torch.arange(n_images)[:, None]
        for counts, matrix, positive in zip(ranks(images, texts, owner), (scores, scores.T), (mine, mine.T), strict=True):
            for size in range(1, int(counts.negatives.min()) + 2):
                expected = [hit_by_listing(*query, size) for query in zip(matrix.tolist(), positive.tolist(), strict=True)]
                np.testing.assert_allclose(hit_chance(counts, size), expected, atol=1e-12)


def test_the_curve_equals_drawing() -> None:
    """Within 6 standard errors (1 draw of 5e8 is further away) of 3,000 random galleries of 30 out of 400."""
    images = unit(400, 8)
    texts = torch.nn.functional.normalize(images + 0.5 * torch.randn(400, 8), dim=-1)
    counts = ranks(images, texts, torch.arange(400))[1]
    (point,) = gallery_curve(counts, (30,), resamples=200)
    scores = (texts.double() @ images.double().T).numpy()
    generator = np.random.default_rng()
    hits = []
    for _ in range(3000):
        drawn = generator.choice(400, 30, replace=False)
        part = scores[np.ix_(drawn, drawn)]
        hits.append((part.argmax(1) == np.arange(30)).mean())
    assert point.value == pytest.approx(np.mean(hits), abs=6 * np.std(hits) / np.sqrt(3000))
    assert point.low <= point.value <= point.high


def test_the_curve_ends_at_the_recall_itself_and_falls() -> None:
    images, texts, owner = grid(60, 60)
    for counts in ranks(images, texts, owner):
        points = gallery_curve(counts, resamples=20)
        assert [p.size for p in points] == [10, 20, 50, 60] == list(gallery_sizes(counts))
        assert points[-1].value == pytest.approx(hit_probability(counts, 1).mean(), abs=1e-12)
        assert all(a.value >= b.value - 1e-12 for a, b in itertools.pairwise(points))
        low, high = mean_interval(hit_chance(counts, 20), counts.image.numpy(), resamples=20)
        assert (points[1].low, points[1].high) == pytest.approx((low[0], high[0]), rel=1e-12)
        for size in (0, 61):
            with pytest.raises(ValueError, match="sizes from 1 to 60"):
                gallery_curve(counts, (size,))


def test_large_galleries_do_not_lose_digits() -> None:
    """Against exact integers: 60,000 candidates, 1,000 drawn, rank 50."""
    counts = ranks(unit(3, 2), unit(3, 2), torch.arange(3))[1]
    large = type(counts)(
        direction="t2i", greater=torch.tensor([50]), ties=torch.tensor([0]), positives=torch.tensor([1]), image=torch.tensor([0]),
        negatives=torch.tensor([59_999]), n_candidates=60_000, non_finite=0,
    )  # fmt: skip
    exact = math.comb(59_999 - 50, 999) / math.comb(59_999, 999)
    assert hit_chance(large, 1000)[0] == pytest.approx(exact, rel=1e-11)
