"""On which negatives the margin puts the gradient: log(p_ij / p_ik) measured, against scale * gamma * (G_ij - G_ik) predicted.

Under HN, for an anchor i and two of its negatives j and k,
    log(p_ij / p_ik) = scale (S_ij - S_ik) + scale gamma (G_ij - G_ik)
so at equal cosine S the slope of the left side on x = scale * margin is 1, whatever the batch. All slopes are least squares within
anchors: values are taken against their anchor's mean over its negatives instead of over all pairs of negatives. That is the same
number, since sum_jk (x_j - x_k)(y_j - y_k) = 2 n sum_j (x_j - mean)(y_j - mean), and the factor 2 n cancels (where duplicates are
excluded n differs, and an anchor counts by its negatives instead of by their pairs).

    slope.<direction>                    of log p_ij on x, by objective, from the logits in float64. HN's is InfoNCE's plus 1: what is
                                         beyond 1 is cosine and caption similarity rising together
    explained.<direction>                r^2 of that: the share of the spread of log p_ij over an anchor's negatives
    slope_at_equal_cosine.<direction>    hn: of log |dL/dlogit_ij| - scale S_ij, from the gradient of the loss itself: must be 1
    worst_at_equal_cosine.<direction>    hn: the largest error of a single negative, nat: about 1e-5 in fp32, about .25 where logits
                                         near 100 were rounded to bf16
    lost.<direction>                     hn: share of negatives whose gradient is 0 or below the smallest normal number; left out of
                                         the two above
    correlation.<direction>              of S and G over an anchor's negatives (Pearson, pooled within anchors)
    log10_amplification                  hn: log10 exp(x_hardest - x_median), median over anchors: by how much the margin favours the
                                         nearest caption over the middle one; one number, since G is symmetric
    share_gain_topK.<direction>          pair: HN's share of residual mass on the K captions nearest to the anchor's, minus
                                         InfoNCE's; K = 1, 5 (the shares themselves: residual:share_topK_by_caption)
    binned_predicted, binned_log_ratio.<direction>, binned_at_equal_cosine.<direction>
                                         means in 20 equally filled bins of x: points for the figure "concentration"

Source: HN-CLIP, section 2 and appendix B. x holds whatever margin HN is read with (frozen and external ones have another G); captions
excluded as duplicates are no negatives.
How to read: slope_at_equal_cosine away from 1 means that the loss path does not compute what it says. InfoNCE's slope near 0 says that
its gradient does not know which captions are alike; near 1, that it already does without a margin.
How it can mislead: a fixed margin, gamma 0 or a width of 2 ranks nothing, and slopes are nan. A large slope moves gradient from
negative to negative, not its size: a saturated row stays saturated. The identity holds for any G, so it is no evidence that G is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.order_statistics import nan_median
from gradscope.metrics.softmax import negative_log_shares, negatives, per_direction
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Scores, Step

#: Deviations of a margin under this share of its size are fp32 rounding: such a margin ranks nothing.
_ROUNDING = 1e-6


@quantities.register("concentration")
@dataclass(frozen=True, kw_only=True)
class Concentration:
    top: tuple[int, ...] = (1, 5)
    bins: int = 20
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("cells", "direction_grads")

    def __call__(self, step: Step) -> list[Reading]:
        if len(step.embeddings.text) < 2:
            return []  # no negatives
        hn, captions = step.heads["hn"], step.embeddings.text.double() @ step.embeddings.text.double().T
        x, counted = _predicted(_cells(hn))
        dx = deviations(x, counted)
        readings = [
            _reading("log10_amplification", _amplification(x, counted), "log10", "hn"),
            _reading("binned_predicted", self._binned(dx, dx, counted), "nat"),
        ]
        for direction, cosine in per_direction(_cells(hn).cosine, hn.directions).items():
            together = _correlation(off_diagonal(captions), off_diagonal(cosine).double(), counted)
            readings.append(_reading(f"correlation.{direction}", together, ""))
            readings += self._raw(step, direction, x, counted) + self._at_equal_cosine(hn, direction, x, counted)
            readings += self._gains(step, direction, captions)
        return readings

    def _raw(self, step: Step, direction: str, x: Tensor, counted: Tensor) -> list[Reading]:
        readings, dx = [], deviations(x, counted)
        for name, head in step.heads.items():
            y = off_diagonal(per_direction(_cells(head).logits)[direction]).double()  # log p_ij up to a constant of its row
            readings += [
                _reading(f"slope.{direction}", slope(x, y, counted), "", name),
                _reading(f"explained.{direction}", _correlation(x, y, counted).square(), "share", name),
                _reading(f"binned_log_ratio.{direction}", self._binned(dx, deviations(y, counted), counted), "nat", name),
            ]
        return readings

    def _at_equal_cosine(self, hn: Head, direction: str, x: Tensor, counted: Tensor) -> list[Reading]:
        push = off_diagonal(hn.direction_grads[direction])  # p_ij by a constant
        lost = counted & (push < torch.finfo(push.dtype).tiny)  # false for nan, which is to be seen
        seen = counted & ~lost
        scores = _cells(hn)
        y = push.double().log() - scores.scale.double() * off_diagonal(per_direction(scores.cosine)[direction]).double()
        dx, error = deviations(x, counted), deviations(y, seen) - deviations(x, seen)
        values = {
            "slope_at_equal_cosine": (slope(x, y, seen), ""),
            "worst_at_equal_cosine": (torch.where(seen.any(), error.abs().amax(), math.nan), "nat"),
            "binned_at_equal_cosine": (self._binned(dx, dx + error, counted, seen), "nat"),
            "lost": (lost.double().sum() / counted.sum() + 0.0 * push.double().sum(), "share"),
        }
        return [_reading(f"{key}.{direction}", value, unit, "hn") for key, (value, unit) in values.items()]

    def _gains(self, step: Step, direction: str, captions: Tensor) -> list[Reading]:
        excluded = _cells(step.heads["hn"]).excluded
        order = negatives(captions, excluded).argsort(dim=1, descending=True)[:, :-1]  # without the anchor itself, which is last
        share = {}
        for name, head in step.heads.items():
            share[name] = negative_log_shares(per_direction(_cells(head).logits)[direction]).exp().gather(1, order)
        gain = (share["hn"] - share["infonce"]).mean(dim=0).cumsum(0)  # of the K nearest, K = 1 ... N - 1
        return [_reading(f"share_gain_top{k}.{direction}", gain[min(k, len(gain)) - 1], "share", "pair") for k in self.top]

    def _binned(self, dx: Tensor, dy: Tensor, counted: Tensor, seen: Tensor | None = None) -> Tensor:
        """Means of dy (over ``seen`` cells) in equally filled bins of dx, both against their row's mean: [bins] float64."""
        seen = counted if seen is None else seen
        order = dx.masked_fill(~counted, math.inf).flatten().argsort()  # what is no negative comes last
        bins = min(self.bins, len(order))
        place = torch.arange(len(order), device=dx.device) * bins // counted.sum().clamp(min=1)
        total, weight = (dx.new_zeros(bins) for _ in range(2))
        for into, values in ((total, torch.where(seen, dy, 0.0)), (weight, seen.to(dx.dtype))):
            into.scatter_add_(0, place.clamp(max=bins - 1), values.flatten()[order])
        return total / weight


def _cells(head: Head) -> Scores:
    assert head.scores is not None
    return head.scores


def off_diagonal(matrix: Tensor) -> Tensor:
    """[N, N] -> [N, N - 1]: each anchor's other cells, in order."""
    n = len(matrix)
    return matrix.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)


def deviations(values: Tensor, counted: Tensor) -> Tensor:
    """[N, K] minus each row's mean over its ``counted`` cells; 0 where a cell does not count."""
    kept = torch.where(counted, values, 0.0)
    return torch.where(counted, kept - kept.sum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True), 0.0)


def slope(x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """Least-squares slope of y on x within rows [N, K], pooled over rows: []; nan where x does not vary beyond rounding."""
    dx, dy = deviations(x, counted), deviations(y, counted)
    varies = dx.abs().amax() > _ROUNDING * x.abs().amax()
    return torch.where(varies, (dx * dy).sum() / dx.square().sum(), math.nan)


def _correlation(x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """Pearson's within rows, pooled: []; nan where either does not vary."""
    dx, dy = deviations(x, counted), deviations(y, counted)
    found = (dx * dy).sum() / (dx.square().sum() * dy.square().sum()).sqrt()
    return found + 0.0 * slope(x, y, counted)  # nan where x is constant up to rounding


def _predicted(scores: Scores) -> tuple[Tensor, Tensor]:
    """scale * margin [N, N - 1] float64, symmetric and so the same in both directions; and which cells are negatives."""
    assert scores.margin is not None
    x = off_diagonal(scores.scale.double() * scores.margin.double())
    return x, torch.ones_like(x, dtype=torch.bool) if scores.excluded is None else ~off_diagonal(scores.excluded)


def _amplification(x: Tensor, counted: Tensor) -> Tensor:
    """log10 of exp(largest - middle) of an anchor's negatives, median over anchors that have any: []."""
    middle = nan_median(x.masked_fill(~counted, math.nan))  # [N]
    lead = x.masked_fill(~counted, -math.inf).amax(dim=1) - middle
    return nan_median(lead) / math.log(10.0) + 0.0 * x.sum()


def _reading(key: str, value: Tensor, unit: str, term: str = "") -> Reading:
    return Reading(quantity="concentration", key=key, term=term, value=value, unit=unit)
