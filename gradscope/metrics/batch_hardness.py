"""What a batch of a given width would show: expected hardest in-batch caption cosine, and the chance of a near neighbour.

An anchor's batch holds w - 1 of the M = N - 1 other captions, drawn without replacement, all draws equally likely. With the
anchor's similarities sorted ascending, s_1 <= ... <= s_M, and F(r) = C(r, w-1) / C(M, w-1) the chance that all drawn ranks
are <= r:
    E[hardest]            = sum_r s_r (F(r) - F(r - 1))
    P(neighbour >= 0.9)   = 1 - F(M - k),   k = the anchor's number of neighbours >= 0.9
both averaged over anchors. Nothing is simulated. Source: order statistics of sampling without replacement; the question is
the softmax width's (16 x 8 accumulation is a 16-way softmax).

How it can mislead: it is about CAPTIONS under one encoder, not about logits or losses; real batches that are not drawn
uniformly (sorted files, grouped near-duplicates) differ; a width beyond N cannot be drawn and is reported as not available,
never extrapolated. How to read it: where the chance of a near neighbour is small, most steps at that width see easy
negatives only, whatever the objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WIDTHS = tuple(2**k for k in range(4, 16))  # 16 ... 32768
_BUDGET = 1 << 26  # similarities that are sorted in all; beyond it a sample of anchors is taken
_CHUNK = 1 << 20  # similarities sorted at a time (4 MB, and 8 MB in float64), and never less than one anchor


@dataclass(frozen=True, kw_only=True)
class BatchHardness:
    """Expectations per width; None where the width exceeds N."""

    widths: tuple[int, ...]
    expected_hardest: tuple[float | None, ...]
    standard_error: tuple[float | None, ...]  # of expected_hardest, from sampling anchors; 0 when all were used
    near_chance: tuple[float | None, ...]  # exact over all anchors
    anchors: int  # anchors whose similarities were sorted
    seed: int  # of the choice of anchors


def batch_hardness(
    rows: Tensor, near_counts: np.ndarray, *, widths: tuple[int, ...] = WIDTHS, seed: int = 0, budget: int = _BUDGET
) -> BatchHardness:
    """Expected hardest cosine and near-neighbour chance of a batch of each width.

    Args:
        rows: unit rows [N, D], all finite.
        near_counts: int [N], each row's number of near neighbours (`Geometry.near_counts`).
        budget: similarities to sort in all; all N anchors when N * N fits, else a random sample of budget / N (at least 256).

    Raises:
        ValueError: a width below 2, or counts that do not belong to the rows.
    """
    n = len(rows)
    if min(widths) < 2:
        raise ValueError(f"a batch has at least two captions, got width {min(widths)}; give widths >= 2.")
    if len(near_counts) != n:
        raise ValueError(f"got {len(near_counts)} neighbour counts for {n} rows; give one count per row.")
    tables = {w: _log_chance_below(n - 1, w - 1) for w in widths if w <= n}
    anchors = _anchors(n, seed=seed, budget=budget)
    hardest = _expected_hardest(rows, anchors, tables)  # [anchors, len(tables)]
    mean = dict(zip(tables, hardest.mean(0).tolist(), strict=True))
    spread = dict(zip(tables, _standard_error(hardest, n).tolist(), strict=True))
    near = {w: float(-np.expm1(table[n - 1 - near_counts]).mean()) for w, table in tables.items()}
    return BatchHardness(
        widths=widths,
        expected_hardest=tuple(mean.get(w) for w in widths),
        standard_error=tuple(spread.get(w) for w in widths),
        near_chance=tuple(near.get(w) for w in widths),
        anchors=len(anchors),
        seed=seed,
    )


def _log_chance_below(m: int, drawn: int) -> np.ndarray:
    """log F(r) for r = 0 ... m: float64 [m + 1]; -inf where r < drawn.

    F(r) = prod_{t = r+1}^{m} (1 - drawn/t), so a cumulative sum of log1p replaces binomials that would overflow.
    """
    factors = np.full(m + 1, -math.inf)
    rank = np.arange(drawn + 1, m + 1)
    factors[drawn + 1 :] = np.log1p(-drawn / rank)
    log_f = np.zeros(m + 1)
    log_f[:m] = np.cumsum(factors[:0:-1])[::-1]
    return log_f


def _anchors(n: int, *, seed: int, budget: int) -> Tensor:
    """Sorted indices of the anchors: all, or a seeded sample without replacement."""
    count = min(n, max(256, budget // n))
    if count == n:
        return torch.arange(n)
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(n, size=count, replace=False)))


def _expected_hardest(rows: Tensor, anchors: Tensor, tables: dict[int, np.ndarray]) -> np.ndarray:
    """E[hardest] of each anchor at each width: float64 [anchors, widths]."""
    weights = np.array([np.diff(np.exp(table)) for table in tables.values()]).reshape(len(tables), len(rows) - 1).T
    weight = torch.from_numpy(weights.copy())  # [N - 1, widths]: chance that this rank is the hardest
    found = []
    for part in anchors.to(rows.device).split(max(1, _CHUNK // len(rows))):
        cosine = rows[part].float() @ rows.float().T
        cosine.scatter_(1, part[:, None], -math.inf)  # self sorts first and is cut off
        ranked = cosine.cpu().numpy()
        ranked.sort(axis=1)  # no indices are needed, and numpy's sort of bare values is many times faster than torch's
        found.append(torch.from_numpy(ranked)[:, 1:].double() @ weight)
    return torch.cat(found).numpy()


def _standard_error(hardest: np.ndarray, n: int) -> np.ndarray:
    """Of the mean over sampled anchors, with the finite-population correction: 0 when every anchor was used."""
    count = len(hardest)
    if count < 2:
        return np.zeros(hardest.shape[1])
    return hardest.std(axis=0, ddof=1) * np.sqrt((1 - count / n) / count)
