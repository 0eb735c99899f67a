"""Ranks and recall against brute force: full float64 matrices, and enumeration of every order of the ties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.metrics.ranks import Ranks, ranks
from gradscope.metrics.recall import (
    DEPTHS,
    expected_rank,
    expected_reciprocal_rank,
    hit_probability,
    metric_rows,
    retrieval,
)


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def gallery(n_images: int, n_texts: int, dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows on a coarse grid, so that exact ties are common; every image has a caption, in random order."""
    owner = torch.cat([torch.arange(n_images), torch.randint(n_images, (n_texts - n_images,))])[torch.randperm(n_texts)]
    return torch.randint(-1, 2, (n_images, dim)).float(), torch.randint(-1, 2, (n_texts, dim)).float(), owner


def places(scores: list[float], positive: list[bool]) -> list[int]:
    """The place of the first positive in every order of the ties: all permutations, sorted stably by score."""
    found = []
    for order in itertools.permutations(range(len(scores))):
        ranking = sorted(order, key=lambda j: -scores[j])
        found.append(1 + next(i for i, j in enumerate(ranking) if positive[j]))
    return found


def queries(images: Tensor, texts: Tensor, owner: Tensor) -> dict[str, list[tuple[list[float], list[bool]]]]:
    scores = images.double() @ texts.double().T
    i2t = [(scores[i].tolist(), (owner == i).tolist()) for i in range(len(images))]
    t2i = [(scores[:, j].tolist(), [i == int(owner[j]) for i in range(len(images))]) for j in range(len(texts))]
    return {"i2t": i2t, "t2i": t2i}


@pytest.mark.parametrize("trial", range(6))
def test_every_order_of_the_ties_is_averaged(trial: int) -> None:
    """At most 6 candidates, so that all 720 orders can be listed."""
    images, texts, owner = gallery(2 + trial % 3, 6, dim=2 + trial % 2)
    for counts in ranks(images, texts, owner, block=4):
        found = [places(*query) for query in queries(images, texts, owner)[counts.direction]]
        for k in (1, 2, 3, 5):
            expected = [np.mean(np.array(orders) <= k) for orders in found]
            np.testing.assert_allclose(hit_probability(counts, k), expected, atol=1e-12)
        np.testing.assert_allclose(expected_rank(counts), [np.mean(orders) for orders in found], atol=1e-12)
        reciprocal = [np.mean(1 / np.array(orders)) for orders in found]
        np.testing.assert_allclose(expected_reciprocal_rank(counts), reciprocal, atol=1e-12)


@pytest.mark.parametrize(("n_images", "n_texts"), [(1, 1), (1, 4), (7, 7), (30, 100)])
@pytest.mark.parametrize("block", [1, 3, 8, 1024])
def test_counts_equal_the_full_matrix(n_images: int, n_texts: int, block: int) -> None:
    images, texts, owner = gallery(n_images, n_texts)
    for counts in ranks(images, texts, owner, block=block):
        for q, (scores, positive) in enumerate(queries(images, texts, owner)[counts.direction]):
            best = max(s for s, is_positive in zip(scores, positive, strict=True) if is_positive)
            negatives = [s for s, is_positive in zip(scores, positive, strict=True) if not is_positive]
            assert counts.greater[q] == sum(s > best for s in negatives)
            assert counts.ties[q] == sum(s == best for s in negatives)
            tied = sum(s == best for s, is_positive in zip(scores, positive, strict=True) if is_positive)
            assert counts.positives[q] == tied


def test_several_captions_of_one_image_are_all_right() -> None:
    """Two images, three captions each: 1.0 both ways, where scoring repeated images on the diagonal gives 1/3."""
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.95, 0.6, 0.5]])
    result = retrieval(torch.eye(2), scores.T, torch.tensor([0, 0, 0, 1, 1, 1]), resamples=10)
    assert result.value("i2t", "R@1") == 1.0
    assert result.value("t2i", "R@1") == 1.0
    assert (result.i2t.n_queries, result.i2t.n_candidates, result.t2i.n_queries, result.t2i.n_candidates) == (2, 6, 6, 2)


@pytest.mark.parametrize("captions", [1, 5])
def test_collapsed_embeddings_score_at_chance(captions: int) -> None:
    owner = torch.arange(10).repeat_interleave(captions)
    result = retrieval(torch.ones(10, 10), torch.ones(len(owner), 10), owner, resamples=10)
    for direction in ("i2t", "t2i"):
        assert result.value(direction, "R@1") == pytest.approx(0.1, abs=1e-12)
        assert result.value(direction, "R@50") == pytest.approx(1.0) or captions == 5
    assert result.i2t.tied_share == result.t2i.tied_share == 1.0
    assert result.value("t2i", "median_rank") == 5.5


def test_nothing_depends_on_the_order_of_the_gallery_or_on_the_block() -> None:
    """Near-twins and exact duplicates in a narrow cone, in float32, where the last digit of a product is easily lost."""
    centre = unit(1, 96)
    images = torch.nn.functional.normalize(centre + 0.05 * torch.randn(70, 96) / 96**0.5, dim=-1)
    texts = images[torch.arange(70).repeat(3) // 2 * 2].clone()  # even and odd images share their captions exactly
    owner = torch.arange(70).repeat(3)
    reference = ranks(images, texts, owner)
    for block in (1, 7, 64, 210):
        rows, columns = torch.randperm(70), torch.randperm(210)
        moved = ranks(images[rows], texts[columns], torch.argsort(rows)[owner[columns]], block=block)
        for one, other, order in zip(reference, moved, (rows, columns), strict=True):
            for name in ("greater", "ties", "positives"):
                assert torch.equal(getattr(one, name)[order], getattr(other, name))
    assert reference[0].tied_share > 0.4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_scored_in_float64(dtype: torch.dtype) -> None:
    images, texts = unit(40, 16).to(dtype), unit(40, 16).to(dtype)
    for counts, double in zip(
        ranks(images, texts, torch.arange(40)), ranks(images.double(), texts.double(), torch.arange(40)), strict=True
    ):
        assert torch.equal(counts.greater, double.greater)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_non_finite_rows_rank_last_and_are_counted(bad: float) -> None:
    images, texts, owner = unit(6, 6), unit(12, 6), torch.arange(6).repeat(2)
    clean = ranks(images, texts, owner, block=4)
    broken = images.clone()
    broken[2, 3] = bad
    i2t, t2i = ranks(broken, texts, owner, block=4)
    assert (i2t.non_finite, t2i.non_finite) == (1, 2)
    assert i2t.greater[2] == 10
    assert i2t.ties[2] == 0
    assert t2i.greater[[2, 8]].tolist() == [5, 5]
    keep = torch.arange(6) != 2
    assert torch.equal(i2t.greater[keep], clean[0].greater[keep])
    assert (t2i.greater <= clean[1].greater)[owner != 2].all()
    assert all(np.isfinite(row.value) for row in metric_rows(i2t, resamples=5))


def test_an_image_with_one_broken_caption_is_found_by_the_other() -> None:
    images, owner = torch.eye(3), torch.tensor([0, 1, 2, 0])
    texts = torch.eye(3)[owner]
    texts[0] = torch.nan
    i2t, t2i = ranks(images, texts, owner)
    assert i2t.greater.tolist() == [0, 0, 0]
    assert (i2t.non_finite, t2i.non_finite) == (0, 1)
    assert t2i.greater.tolist() == [2, 0, 0, 0]


def test_everything_non_finite_is_worst_not_perfect() -> None:
    i2t, t2i = ranks(torch.full((4, 2), torch.nan), torch.full((4, 2), torch.nan), torch.arange(4))
    assert i2t.greater.tolist() == t2i.greater.tolist() == [3] * 4
    assert hit_probability(i2t, 1).tolist() == [0.0] * 4


def test_recall_and_median_equal_sorting_when_nothing_ties() -> None:
    images = unit(80, 12)
    texts = torch.nn.functional.normalize(images + 0.4 * torch.randn(80, 12), dim=-1)
    result = retrieval(images, texts, torch.arange(80), resamples=20)
    scores = images.double() @ texts.double().T
    for direction, matrix in (("i2t", scores), ("t2i", scores.T)):
        place = 1 + (torch.argsort(matrix, dim=1, descending=True) == torch.arange(80)[:, None]).int().argmax(1).numpy()
        for k in DEPTHS:
            assert result.value(direction, f"R@{k}") == np.mean(place <= k)
        assert result.value(direction, "median_rank") == np.median(place)
        assert result.value(direction, "MRR") == pytest.approx(np.mean(1 / place), rel=1e-12)
    for row in result.rows:
        assert row.low <= row.value <= row.high
        assert row.n_queries == row.n_candidates == 80


def test_many_ties_are_quick_and_exact() -> None:
    """A harmonic sum over 5000 tied places, the same for all queries."""
    counts = Ranks(
        direction="t2i",
        greater=torch.full((5000,), 3),
        ties=torch.full((5000,), 4996),
        positives=torch.ones(5000, dtype=torch.int64),
        image=torch.arange(5000),
        negatives=torch.full((5000,), 4999),
        n_candidates=5000,
        non_finite=0,
    )
    expected = np.mean([1 / (3 + m) for m in range(1, 4998)])
    np.testing.assert_allclose(expected_reciprocal_rank(counts), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("images", "texts", "owner", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), torch.arange(2), "shapes"),
        (torch.ones(0, 3), torch.ones(0, 3), torch.arange(0), "shapes"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.arange(3), "int64"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0.0, 1.0]), "int64"),
        (torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0, 2]), "0 to 1"),
        (torch.ones(3, 3), torch.ones(2, 3), torch.arange(2), "1 of 3 images have no caption"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(images: Tensor, texts: Tensor, owner: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranks(images, texts, owner)
