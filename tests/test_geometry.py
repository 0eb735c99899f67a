"""Caption geometry against a loop over all pairs in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradscope.metrics.geometry import BIN_WIDTH, QUANTILES, THRESHOLDS, Course, caption_geometry, mean_cosine


def unit_rows(n: int, d: int, shift: float, seed: int) -> torch.Tensor:
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift
    return torch.nn.functional.normalize(rows, dim=1)


def all_pairs(rows: torch.Tensor) -> np.ndarray:
    wide = rows.double().numpy()
    return np.array([wide[i] @ wide[j] for i in range(len(rows)) for j in range(i + 1, len(rows))])


def full_matrix(rows: torch.Tensor) -> np.ndarray:
    cosine = (rows.double() @ rows.double().T).numpy()
    np.fill_diagonal(cosine, -2)
    return cosine


@pytest.mark.parametrize(("n", "block"), [(2, 1024), (3, 2), (37, 8), (150, 64), (150, 150), (129, 128)])
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_equals_the_loop(n: int, block: int, shift: float) -> None:
    rows = unit_rows(n, 16, shift, seed=n + block)
    found = caption_geometry(rows, block=block, top=5)
    pairs, cosine = all_pairs(rows), full_matrix(rows)
    assert found.n == n
    assert found.pairs == len(pairs) == found.counts.sum()
    assert found.counts.dtype == np.int64
    assert found.mean == pytest.approx(pairs.mean(), abs=1e-12)
    assert found.hardest == pytest.approx(cosine.max(1), abs=1e-6)
    assert found.hardest_mean == pytest.approx(cosine.max(1).mean(), abs=1e-6)
    rank = cosine[np.arange(n), found.hardest_index]
    assert rank == pytest.approx(cosine.max(1), abs=1e-6)
    assert (found.hardest_index != np.arange(n)).all()
    # An edge may move a pair to the next bin only if it lies within rounding of that edge.
    cumulative = np.cumsum(found.counts)
    for k, edge in enumerate(found.edges[1:-1]):
        assert (pairs < edge - 1e-6).sum() <= cumulative[k] <= (pairs < edge + 1e-6).sum()
    for t in THRESHOLDS:
        assert found.pair_shares[t] == pytest.approx((pairs >= t).mean(), abs=1e-12)
        assert found.hardest_shares[t] == pytest.approx((cosine.max(1) >= t).mean(), abs=1e-12)
    assert (found.near_counts == (cosine >= 0.9).sum(1)).all()
    top = np.sort(pairs)[::-1][:5]
    assert [c for _, _, c in found.top_pairs] == pytest.approx(top.tolist(), abs=1e-6)
    assert all(i < j and cosine[i, j] == pytest.approx(c, abs=1e-12) for i, j, c in found.top_pairs)


@pytest.mark.parametrize("shift", [0.0, 0.4, 1.5])
def test_quantiles_binned_and_exact(shift: float) -> None:
    rows = unit_rows(211, 12, shift, seed=int(10 * shift))
    pairs = np.sort(all_pairs(rows))
    binned = caption_geometry(rows, block=50)
    exact = caption_geometry(rows, block=50, exact_quantiles=True)
    assert (binned.quantile_width, exact.quantile_width) == (BIN_WIDTH, 0.0)
    for q in QUANTILES:
        truth = pairs[max(1, math.ceil(q * len(pairs))) - 1]
        assert abs(binned.quantiles[q] - truth) <= BIN_WIDTH
        assert exact.quantiles[q] == pytest.approx(truth, abs=3e-7)


def test_exact_quantile_is_a_cosine_of_the_blocks_even_around_zero() -> None:
    rows = unit_rows(90, 64, 0.0, seed=4)
    cosine = (rows @ rows.T)[torch.ones(90, 90, dtype=torch.bool).triu(1)].numpy()
    found = caption_geometry(rows, exact_quantiles=True)
    assert found.quantiles[0.5] == pytest.approx(np.sort(cosine)[math.ceil(len(cosine) / 2) - 1], abs=2e-7)


def test_exact_duplicates_stay_in_the_last_bin_and_do_not_count_self() -> None:
    rows = unit_rows(1, 32, 0.0, seed=0).repeat(50, 1)
    found = caption_geometry(rows, block=16, exact_quantiles=True)
    assert found.counts[-1] == 50 * 49 // 2 == found.counts.sum()
    assert found.mean == pytest.approx(1.0, abs=1e-6)
    assert found.hardest == pytest.approx(np.ones(50), abs=1e-6)
    assert (found.near_counts == 49).all()
    assert found.quantiles[0.5] == pytest.approx(1.0, abs=1e-6)
    assert len(found.top_pairs) == 20


def test_opposite_rows_fill_the_first_bin() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = caption_geometry(rows, exact_quantiles=True)
    assert found.counts[0] == 1
    assert found.mean == -1.0
    assert found.quantiles[0.5] == -1.0


def test_non_finite_rows_are_counted_and_left_out() -> None:
    rows = unit_rows(60, 8, 0.5, seed=9)
    broken = rows.clone()
    broken[7, 3] = math.nan
    broken[20, 0] = math.inf
    keep = [i for i in range(60) if i not in (7, 20)]
    found, clean = caption_geometry(broken, block=16), caption_geometry(rows[keep], block=16)
    assert found.excluded == (7, 20)
    assert (found.n, found.mean, found.hardest_mean) == (58, clean.mean, clean.hardest_mean)
    assert (found.counts == clean.counts).all()
    assert math.isnan(found.hardest[7])
    assert found.hardest_index[20] == -1
    assert [keep[i] for i in clean.hardest_index] == found.hardest_index[keep].tolist()
    assert [(keep[i], keep[j]) for i, j, _ in clean.top_pairs] == [(i, j) for i, j, _ in found.top_pairs]


def test_any_block_size_gives_the_same_numbers() -> None:
    rows = unit_rows(333, 24, 0.5, seed=5)
    one, other = caption_geometry(rows, block=64), caption_geometry(rows, block=333)
    assert one.mean == pytest.approx(other.mean, abs=1e-14)
    assert one.hardest_mean == pytest.approx(other.hardest_mean, abs=1e-7)
    assert np.abs(one.counts - other.counts).sum() <= 20
    assert one.top_pairs == other.top_pairs


def test_mean_of_a_narrow_cone_keeps_its_digits() -> None:
    rows = unit_rows(400, 16, 30.0, seed=6)
    assert mean_cosine(rows) == pytest.approx(all_pairs(rows).mean(), abs=1e-13)


def test_matmul_setting_comes_back_and_progress_ends_full() -> None:
    before = torch.get_float32_matmul_precision()
    seen: list[tuple[int, int]] = []
    found = caption_geometry(unit_rows(100, 8, 0.3, seed=1), block=30, course=Course(progress=lambda *at: seen.append(at)))
    assert torch.get_float32_matmul_precision() == before
    assert seen[-1] == (10, 10)
    assert found.matmul_error < 1e-6


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least two"):
        caption_geometry(unit_rows(1, 4, 0.0, seed=0))
    with pytest.raises(ValueError, match="at least two"):
        caption_geometry(torch.full((3, 4), math.nan))
    with pytest.raises(ValueError, match="unit rows"):
        caption_geometry(2 * unit_rows(5, 4, 0.0, seed=0))
    with pytest.raises(ValueError, match=r"\[N, D\]"):
        caption_geometry(torch.zeros(5))
