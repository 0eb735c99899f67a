"""Caption-similarity margins: what is added to the cosine of a negative.

With G = T T^t of caption rows, detached, and its diagonal set to zero:
    live      gamma * G                 of the captions as the encoder sees them now (HN-CLIP, section 2)
    frozen    gamma * G0                of the INITIAL encoder's captions (the paper's ablation)
    external  gamma * Gx                of another encoder's captions, fixed too (a sentence encoder, say)
    fixed     gamma * mean(G)           one constant off the diagonal: the control without any ranking of the negatives
    centred   gamma * (G - mean(G))     the ranking without the constant; live = fixed + centred
mean(G) is over the off-diagonal cells of the batch, from the live encoder. Excluded cells (``--duplicates exclude``) have no margin
and no part in the mean.

How it can mislead: with mean(G) = .84, scale 100 and gamma .5 the constant alone is 42 logits; a loss kept up by that constant
is active, which is not yet learning. Exact-duplicate captions are false negatives and get the largest margin of all. An external
encoder's cone is its own, so one gamma means two things under two of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MARGINS = ("live", "frozen", "external", "fixed", "centred")


def caption_cosines(rows: Tensor) -> Tensor:
    """G with a zero diagonal: [N, D] unit rows -> [N, N], no gradient."""
    rows = rows.detach()
    return (rows @ rows.T).fill_diagonal_(0.0)


def remembered_cosines(rows: Tensor, memo: dict[Any, Any]) -> Tensor:
    """``caption_cosines`` of rows that ``memo`` may know already; not to be written to. The memo keeps the rows, and so their id."""
    key = ("cosines", id(rows), rows._version)
    if key not in memo:
        memo[key] = (rows, caption_cosines(rows))
    cosines: Tensor = memo[key][1]
    return cosines


def off_diagonal_mean(cosines: Tensor, excluded: Tensor | None = None) -> Tensor:
    """Mean over the N(N-1) off-diagonal cells, less the excluded ones, of a matrix that is zero elsewhere: []; 0 over none."""
    cells = cosines.shape[0] * (cosines.shape[0] - 1)
    mean = cosines.sum() / cells
    # A factor of exactly 1 where nothing is excluded.
    return mean if excluded is None else mean * (cells / (cells - excluded.sum()).clamp(min=1).to(mean.dtype))


def margin_matrix(kind: str, gamma: float, text: Tensor, margin_text: Tensor | None, excluded: Tensor | None = None) -> Tensor:
    """The margin [N, N] of one batch, zero on the diagonal, no gradient.

    Args:
        kind: one of ``MARGINS``.
        text: live caption rows [N, D].
        margin_text: rows [N, D0] of the same captions by the initial or the external encoder; needed by "frozen" and "external".
        excluded: bool [N, N], cells without a margin; or None.
    """
    if kind in ("frozen", "external"):
        assert margin_text is not None
        return gamma * _without(caption_cosines(margin_text), excluded)
    cosines = _without(caption_cosines(text), excluded)
    if kind == "live":
        return gamma * cosines
    mean = off_diagonal_mean(cosines, excluded)
    constant = _without(torch.full_like(cosines, 1.0).mul_(mean).fill_diagonal_(0.0), excluded)
    return gamma * (constant if kind == "fixed" else cosines - constant)


def _without(cosines: Tensor, excluded: Tensor | None) -> Tensor:
    return cosines if excluded is None else cosines.masked_fill(excluded, 0.0)
