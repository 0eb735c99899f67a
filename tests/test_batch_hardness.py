"""The width curve against enumeration of every batch, and against a simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gradscope.metrics.batch_hardness import WIDTHS, batch_hardness


def unit_rows(n: int, d: int, shift: float, seed: int) -> torch.Tensor:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift
    return torch.nn.functional.normalize(rows, dim=1)


def near_counts(rows: torch.Tensor, threshold: float) -> np.ndarray:
    cosine = (rows.double() @ rows.double().T).numpy()
    np.fill_diagonal(cosine, -2)
    return (cosine >= threshold).sum(1)


def enumerate_batches(rows: torch.Tensor, width: int, threshold: float) -> tuple[float, float]:
    cosine = (rows.double() @ rows.double().T).numpy()
    n = len(rows)
    hardest, near = [], []
    for anchor in range(n):
        others = [j for j in range(n) if j != anchor]
        for drawn in itertools.combinations(others, width - 1):
            values = cosine[anchor, list(drawn)]
            hardest.append(values.max())
            near.append(values.max() >= threshold)
    return float(np.mean(hardest)), float(np.mean(near))


@pytest.mark.parametrize("n", [2, 3, 7, 9])
def test_equals_the_enumeration_of_every_batch(n: int) -> None:
    rows = unit_rows(n, 5, 0.8, seed=n)
    widths = tuple(range(2, n + 1))
    found = batch_hardness(rows, near_counts(rows, 0.7), widths=widths)
    for k, width in enumerate(widths):
        hardest, near = enumerate_batches(rows, width, 0.7)
        assert found.expected_hardest[k] == pytest.approx(hardest, abs=1e-6)
        assert found.near_chance[k] == pytest.approx(near, abs=1e-12)


def test_equals_a_simulation_on_a_larger_set() -> None:
    rows = unit_rows(300, 8, 0.6, seed=3)
    found = batch_hardness(rows, near_counts(rows, 0.9), widths=(16, 64))
    cosine = (rows.double() @ rows.double().T).numpy()
    rng = np.random.default_rng(0)
    for k, width in enumerate(found.widths):
        draws = []
        for _ in range(4_000):
            batch = rng.choice(300, size=width, replace=False)
            draws.append(cosine[batch[0], batch[1:]].max())
        error = np.std(draws) / math.sqrt(len(draws))
        assert abs(found.expected_hardest[k] - np.mean(draws)) < 5 * error
        assert abs(found.near_chance[k] - np.mean(np.array(draws) >= 0.9)) < 5 * 0.5 / math.sqrt(len(draws))


def test_whole_set_as_one_batch_is_the_hardest_mean_and_wider_is_not_available() -> None:
    rows = unit_rows(64, 6, 0.5, seed=1)
    found = batch_hardness(rows, near_counts(rows, 0.9))
    cosine = rows.double() @ rows.double().T
    cosine.fill_diagonal_(-2)
    assert found.widths == WIDTHS
    assert found.widths[2] == 64
    assert found.expected_hardest[2] == pytest.approx(float(cosine.amax(1).mean()), abs=1e-6)
    assert found.near_chance[2] == pytest.approx(float((cosine.amax(1) >= 0.9).double().mean()), abs=1e-12)
    assert set(found.expected_hardest[3:]) == {None}
    assert set(found.near_chance[3:]) == {None}


def test_a_sample_of_anchors_says_so_and_stays_within_its_error() -> None:
    rows = unit_rows(1500, 8, 0.6, seed=2)
    counts = near_counts(rows, 0.9)
    full = batch_hardness(rows, counts, widths=(16, 256))
    part = batch_hardness(rows, counts, widths=(16, 256), budget=1500 * 300, seed=5)
    assert (full.anchors, part.anchors) == (1500, 300)
    assert full.standard_error == (0.0, 0.0)
    assert part.near_chance == full.near_chance
    for a, b, error in zip(full.expected_hardest, part.expected_hardest, part.standard_error, strict=True):
        assert 0 < abs(a - b) < 5 * error
    assert batch_hardness(rows, counts, widths=(16, 256), budget=1500 * 300, seed=5) == part


def test_a_rare_neighbour_keeps_its_small_chance() -> None:
    rows = torch.eye(2000)  # all cosines 0
    counts = np.zeros(2000, dtype=np.int64)
    counts[:2] = 1
    found = batch_hardness(rows, counts, widths=(16,))
    assert found.near_chance[0] == pytest.approx(2 / 2000 * 15 / 1999, rel=1e-12)
    assert found.expected_hardest[0] == 0.0


def test_refusals() -> None:
    rows = unit_rows(4, 3, 0.0, seed=0)
    with pytest.raises(ValueError, match="at least two"):
        batch_hardness(rows, np.zeros(4, dtype=np.int64), widths=(1,))
    with pytest.raises(ValueError, match="one count per row"):
        batch_hardness(rows, np.zeros(3, dtype=np.int64))
