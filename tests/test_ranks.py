"""Ranks and recall against brute force: full float64 matrices, and enumeration of every order of the ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.metrics.gallery_scores import TIE_TOLERANCE
from gradscope.metrics.ranks import Ranks, ranks
from gradscope.metrics.recall import (
    DEPTHS,
    expected_rank,
    expected_reciprocal_rank,
    hit_probability,
    metric_rows,
    retrieval,
)
from gradscope.metrics.true_recall import caption_places, true_recall_rows
from gradscope.metrics.winners import winners


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
    result = retrieval(images, texts, torch.arange(80), resamples=200)  # of 20, one draw in a thousand has an interval beside the value
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


def chance_by_sorting(scores: np.ndarray, positive: np.ndarray, k: int) -> float:
    """Sort, find the run of equal scores that holds the first positive, and count orders of that run with binomials."""
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], positive[order]
    first = int(np.argmax(right))
    run = np.flatnonzero(ranked == ranked[first])
    start, size, good = run[0], len(run), int(right[run].sum())
    places = min(max(k - int(start), 0), size)
    return 1 - math.comb(size - good, places) / math.comb(size, places)


def test_a_thousand_random_galleries_equal_sorting_in_float64() -> None:
    """Random sizes, one to several captions, grids on which exact ties are common and normal rows where they are not."""
    generator = np.random.default_rng()
    for case in range(1000):
        n = int(generator.integers(1, 9))
        m = n + int(generator.integers(0, 12)) * (case % 3 > 0)
        dim = int(generator.integers(1, 5))
        parts = [generator.integers(-1, 2, (rows, dim)) if case % 2 else generator.normal(size=(rows, dim)) for rows in (n, m)]
        images, texts = (torch.from_numpy(part).double() for part in parts)
        owner = torch.from_numpy(generator.permutation(np.concatenate([np.arange(n), generator.integers(0, n, m - n)])))
        both = ranks(images, texts, owner, block=int(generator.integers(1, 12)))
        scores = np.array([[sum(a * b for a, b in zip(x, y, strict=True)) for y in texts.tolist()] for x in images.tolist()])
        mine = owner.numpy() == np.arange(n)[:, None]
        for counts, matrix, positive in zip(both, (scores, scores.T), (mine, mine.T), strict=True):
            for k in DEPTHS:
                expected = [chance_by_sorting(*query, k) for query in zip(matrix, positive, strict=True)]
                np.testing.assert_allclose(hit_probability(counts, k), expected, atol=1e-12)
        assert torch.equal(both[0].negatives, m - torch.bincount(owner, minlength=n))
        assert torch.equal(both[1].negatives, torch.full((m,), n - 1))


def test_all_equal_scores_give_one_in_ten_in_any_order() -> None:
    for _ in range(5):
        order = torch.randperm(10)
        result = retrieval(torch.ones(10, 1), torch.ones(10, 1), order, resamples=5)
        assert [result.value(d, "R@1") for d in ("i2t", "t2i")] == pytest.approx([0.1, 0.1], abs=1e-15)
        assert result.i2t.tied_share == result.t2i.tied_share == 1


def test_two_thousand_rows_in_any_tile_and_in_one_piece() -> None:
    images, texts = unit(2000, 64), unit(2000, 64)
    owner = torch.arange(2000)
    whole = images.double() @ texts.double().T
    truth = whole.diagonal()
    for block in (311, 1024, 2000):
        i2t, t2i = ranks(images, texts, owner, block=block)
        assert torch.equal(i2t.greater, (whole > truth[:, None] + TIE_TOLERANCE).sum(1))
        assert torch.equal(t2i.greater, (whole > truth + TIE_TOLERANCE).sum(0))


# ---- all captions of an image


def test_true_recall_equals_every_order_of_the_ties() -> None:
    for _ in range(12):
        images, texts, owner = gallery(2, 5, dim=2)
        scores = images.double() @ texts.double().T
        rows = true_recall_rows(images, texts, owner, resamples=5, block=1)
        for row, k in zip(rows, (1, 5, 10), strict=True):
            shares = []
            for i in range(2):
                orders = [sorted(o, key=lambda j: -scores[i, j]) for o in itertools.permutations(range(5))]
                own = (owner == i).tolist()
                shares.append(np.mean([sum(own[j] for j in order[:k]) / sum(own) for order in orders]))
            assert row.metric == f"true R@{k}"
            assert row.value == pytest.approx(np.mean(shares), abs=1e-12)
            assert (row.n_queries, row.n_candidates) == (2, 5)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_places_of_all_captions_equal_the_full_matrix(block: int) -> None:
    images, texts, owner = gallery(23, 61, dim=4)
    scores = images.double() @ texts.double().T
    greater, ties = caption_places(images, texts, owner, block=block)
    for j, i in enumerate(owner.tolist()):
        assert greater[j] == (scores[i] > scores[i, j]).sum()
        assert ties[j] == (scores[i] == scores[i, j]).sum() - 1


def test_a_broken_caption_is_in_the_last_place() -> None:
    texts = torch.eye(3)[[0, 1, 2, 0]]
    texts[3] = torch.nan
    greater, ties = caption_places(torch.eye(3), texts, torch.tensor([0, 1, 2, 0]))
    assert greater.tolist() == [0, 0, 0, 3]
    assert ties.tolist() == [0, 0, 0, 0]


def test_with_one_caption_each_both_recalls_agree() -> None:
    images, texts, owner = gallery(40, 40)
    rows = true_recall_rows(images, texts, owner, resamples=5)
    result = retrieval(images, texts, owner, resamples=5)
    for row in rows:
        assert row.value == pytest.approx(result.value("i2t", row.metric.removeprefix("true ")), abs=1e-12)


# ---- who won


@pytest.mark.parametrize(("n_images", "n_texts", "block"), [(17, 40, 5), (12, 12, 64), (1, 3, 2)])
def test_winners_equal_the_full_matrix(n_images: int, n_texts: int, block: int) -> None:
    images, texts, owner = gallery(n_images, n_texts)
    for won, counts in zip(winners(images, texts, owner, block=block), ranks(images, texts, owner), strict=True):
        for q, (scores, positive) in enumerate(queries(images, texts, owner)[won.direction]):
            for found, value, kind in (
                (won.truth[q], won.truth_score[q], True),
                (won.rival[q], won.rival_score[q], False),
            ):
                candidates = [
                    (score, -j) for j, (score, is_positive) in enumerate(zip(scores, positive, strict=True)) if is_positive is kind
                ]
                if candidates:
                    assert (value, -found) == max(candidates)
                else:
                    assert (value, found) == (-np.inf, -1)
            best = max(scores)
            assert scores[won.winner[q]] == best == won.winner_score[q]
            assert positive[won.winner[q]] == (counts.greater[q] == 0)
            assert won.tied[q] == (counts.ties[q] > 0 and counts.greater[q] == 0)


def test_a_query_that_is_not_finite_names_its_truth_and_loses() -> None:
    texts = torch.eye(3)[[0, 1, 2, 0]]
    texts[1] = torch.nan
    i2t, t2i = winners(torch.eye(3), texts, torch.tensor([0, 1, 2, 0]))
    assert (i2t.truth[1], t2i.truth[1]) == (1, 1)
    assert i2t.winner[1] != 1
    assert not t2i.tied[1]
    assert t2i.winner[1] == -1, "nobody won: no score is finite"
