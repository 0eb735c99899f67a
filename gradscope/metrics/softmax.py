"""True values of a contrastive softmax, from its logits, in float64.

With x_i = logsumexp of the negatives of row i minus its positive logit:
    residual      1 - p_ii = sigmoid(x_i)            formed from the negatives, never as 1 - p
    row loss      -log p_ii = softplus(x_i)
    log row loss  log softplus(x_i), finite wherever x_i is

``dense_anchors`` forms x, once for all readers, in strips of rows that stay in the processor's cache:
    m = max, e_j = exp(l_ij - m), S = sum e, T = sum e (l_ij - m), all over j != i
    x_i = m + log S - l_ii                           effective number of negatives = exp(entropy of e / S) = S exp(-T / S)

Source: the identity p_ii = 1 / (1 + exp(x_i)); the residual is the coupling factor of DCL (Yeh et al., 2022).
How to read: a residual of 1e-6 says that the row's pull and push are both a millionth of their largest size.
Logits of -inf are no negatives: they have no share. An anchor without any has x = -inf, so loss and residual 0, and undefined shares.
How it can mislead: the values are exact FOR THE LOGITS GIVEN. If those were rounded (bf16, or fp32 cosines at scale 100), so is
the answer; and two tensors are needed to know whether the objective still teaches: a large loss is not a useful gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics import counting
from gradscope.types import DIRECTIONS, Anchors, Scores

#: Cells of a strip: 2 MiB in float64.
STRIP = 1 << 18

#: exp of this is 0 in float64: stands for the logits of -inf, whose product with their weight of 0 would be nan.
_GONE = -800.0

#: For exp by exp2, which takes a third of the time in float64.
LOG2_E = math.log2(math.e)

#: exp of minus this is 1e-261, far from where float64 ends, so that cells 100 below it still have all their digits.
_RANGE = 600.0

#: Below this, log softplus(x) and x agree to the last bit of float64.
_LINEAR_BELOW = -40.0


def per_direction(matrix: Tensor, directions: Sequence[str] = DIRECTIONS) -> dict[str, Tensor]:
    """The readings of a square matrix [N, N] whose row is an image and whose column is a caption: anchors first."""
    return {direction: matrix if direction == "i2t" else matrix.T for direction in directions}


def negatives(matrix: Tensor, excluded: Tensor | None = None) -> Tensor:
    """[N, N] -> float64 [N, N] with -inf on the diagonal, and in the ``excluded`` cells [N, N] that are no negatives."""
    eye = torch.eye(matrix.shape[0], dtype=torch.bool, device=matrix.device)
    return matrix.double().masked_fill(eye if excluded is None else eye | excluded, -math.inf)


def log_odds(logits: Tensor) -> Tensor:
    """x [N]: log of (probability of all negatives / probability of the positive), anchors in rows. Float64."""
    return torch.logsumexp(negatives(logits), dim=1) - logits.diagonal().double()


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Which rows of a matrix make strips of about ``STRIP`` cells each."""
    step = max(1, STRIP // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def dense_anchors(scores: Scores, directions: Sequence[str] = DIRECTIONS) -> Anchors:
    """The softmaxes of dense scores [N, N], each reduced over its negatives; float64 from the logits given.

    Shares by hardness are not among them: with the cells at hand ``residual`` ranks as it likes.
    """
    raised = scores.cosine if scores.margin is None else scores.cosine + scores.margin
    hardest = dict(zip(DIRECTIONS, _hardest(raised, scores.excluded), strict=True))
    shift = _shift(scores.scale, hardest) if len(directions) == 2 else None
    if shift is None:
        found = {d: _reduced(matrix) for d, matrix in per_direction(scores.logits, directions).items()}
    else:
        found = dict(zip(DIRECTIONS, _both_reduced(scores.logits, shift), strict=True))
    return Anchors(
        positive=scores.cosine.diagonal().double(),
        log_odds={direction: x for direction, (x, _) in found.items()},
        hardest={direction: hardest[direction] for direction in directions},
        effective={direction: number for direction, (_, number) in found.items()},
    )


def _reduced(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log odds and effective number of negatives of each row of [N, N]: [N] float64 twice."""
    found = [torch.stack(_row_sums(logits, rows)[:3]) for rows in row_slices(*logits.shape)]
    top, total, moment = torch.cat(found, dim=1)
    return _from_sums(logits, top, total, moment)


def _both_reduced(logits: Tensor, shift: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``_reduced`` of the rows and of the columns from one exp per cell. ``shift``: see ``_shift``."""
    found, columns = [], logits.new_zeros(2, logits.shape[1], dtype=torch.float64)
    for rows in row_slices(*logits.shape):
        *sums, weights, moments = _row_sums(logits, rows)
        lead = (sums[0] - shift).masked_fill(sums[0] == -math.inf, 0.0)
        raised = lead.exp()
        columns[0] += raised @ weights
        columns[1] += raised @ moments + (raised * lead) @ weights
        found.append(torch.stack(sums))
    by_row, by_column = torch.cat(found, dim=1), torch.cat([torch.full_like(columns[:1], shift), columns])
    return _from_sums(logits, *by_row), _from_sums(logits, *by_column)


def _row_sums(logits: Tensor, rows: slice) -> list[Tensor]:
    """m, S and T of some rows, [n] float64 each, and what S and T are the sums of, [n, N] each."""
    cells = logits[rows].to(torch.float64, copy=True)
    cells.diagonal(rows.start).fill_(-math.inf)
    top = cells.amax(dim=1, keepdim=True)
    cells -= top.masked_fill(top.isinf(), 0.0)  # no negatives: their sum is 0, not nan; an infinite one: infinite
    weights = (cells * LOG2_E).exp2_()  # the exponent's rounding weighs as little as the cells it is large in
    moments = cells.clamp_(min=_GONE).mul_(weights)
    return [top[:, 0], weights.sum(dim=1), moments.sum(dim=1), weights, moments]


def _from_sums(logits: Tensor, top: Tensor, total: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    return top + total.log() - logits.diagonal().double(), total * torch.exp(-moment / total)


def _shift(scale: Tensor, hardest: Mapping[str, Tensor]) -> float | None:
    """About the largest logit of a negative, where one shift for all columns loses nothing in float64; else None.

    That is so where every column's own largest lies at most ``_RANGE`` below it. Only the host can ask, so a GPU has a pass for each
    direction.
    """
    if not counting.waits_for_nothing(scale):
        return None
    rows, columns = (scale.double() * hardest[direction] for direction in DIRECTIONS)
    top, lowest = float(rows.max()), float(columns.masked_fill(columns == -math.inf, math.inf).min())
    return top if math.isfinite(top) and scale > 0 and lowest >= top - _RANGE else None


def _hardest(matrix: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest negative of each row and of each column of [N, N]: [N] float64, -inf where there is none."""
    found, columns = [], matrix.new_full((matrix.shape[1],), -math.inf)
    for rows in row_slices(*matrix.shape):
        cells = matrix[rows].clone() if excluded is None else matrix[rows].masked_fill(excluded[rows], -math.inf)
        cells.diagonal(rows.start).fill_(-math.inf)
        found.append(cells.amax(dim=1))
        columns = torch.maximum(columns, cells.amax(dim=0))
    return torch.cat(found).double(), columns.double()


def log10_mean_loss(anchors: Anchors) -> Tensor:
    """log10 of the mean loss over anchors and directions, [] float64; never meets a floor."""
    x = torch.cat(list(anchors.log_odds.values()))  # [N] or [2N]
    return (torch.logsumexp(log_softplus(x), dim=0) - math.log(len(x))) / math.log(10.0)


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + exp(x))) without underflow, for float64 x."""
    return torch.where(x < _LINEAR_BELOW, x, F.softplus(x.clamp_min(_LINEAR_BELOW), threshold=40.0).log())


def residual(logits: Tensor) -> Tensor:
    """1 - p_ii per anchor [N], float64, relative error about 1e-15 for the logits given."""
    return torch.sigmoid(log_odds(logits))


def log10_batch_loss(logits: Tensor, directions: Sequence[str] = DIRECTIONS) -> Tensor:
    """log10 of the batch-mean loss over anchors and directions, [] float64; never meets a floor."""
    x = torch.cat([log_odds(m) for m in per_direction(logits, directions).values()])  # [2N]
    return (torch.logsumexp(log_softplus(x), dim=0) - math.log(len(x))) / math.log(10.0)


def negative_log_shares(logits: Tensor) -> Tensor:
    """log of each negative's share of its row's residual mass, [N, N] float64, -inf on the diagonal; rows sum to 1 in exp."""
    masked = negatives(logits)
    return masked - torch.logsumexp(masked, dim=1, keepdim=True)


def effective_number(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 of non-negative weights [N], float64; nan when all are zero.

    Formed on w / max w, so that weights of 1e-200 count as well as weights of 1.
    """
    w = weights.double()
    w = w / w.max()
    return w.sum() ** 2 / (w**2).sum()
