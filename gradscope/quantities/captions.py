"""The captions of the measured batch: how alike they are, and what that makes of the margin.

    mean, hardest_mean, hardest_max    cosine over all pairs; mean and largest over captions of the nearest other caption
    histogram                          counts of the N(N-1)/2 pair cosines in 60 bins from -0.2 to 1.0 (outliers in the end bins;
                                       a pair that is nan is in none, so the counts then sum to less)
    near_duplicates                    share of captions with another at cosine >= .95
    exact_duplicates, truncated        number of captions that repeat an earlier string; that were cut at the context (no reading
                                       where the loop does not tell the probe its captions and their lengths)
    margin_logits                      scale * mean of HN's margin off the diagonal: how many of its logits are a constant
                                       (live and fixed: scale * gamma * mean; frozen: of the initial captions; centred: 0)
    drift                              mean |G_ij - G0_ij| against the initial encoder's captions

Source: paper facts, sections 1, 2 and 7.8. How it can mislead: a batch of 16 shows few near neighbours of a data set that is full of
them; see ``gradscope caption-geometry`` for the set and for the width effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.counting import counts_of
from gradscope.metrics.softmax import row_slices
from gradscope.objectives.margin import off_diagonal_mean, remembered_cosines
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Step

NEAR = 0.95
BINS, LOW, HIGH = 60, -0.2, 1.0


@quantities.register("captions")
@dataclass(frozen=True, kw_only=True)
class Captions:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "default"

    def __call__(self, step: Step) -> list[Reading]:
        seen = _look(step)
        hn, n = step.heads["hn"], len(step.embeddings.text)
        values: dict[str, tuple[Tensor | float, str]] = {
            "mean": (seen.mean, "cosine"),
            "hardest_mean": (seen.hardest.mean(), "cosine"),
            "hardest_max": (seen.hardest.max(), "cosine"),
            "histogram": (seen.counts, "pairs"),
            "near_duplicates": ((seen.hardest >= NEAR).double().mean() + 0.0 * seen.hardest.mean(), "share"),  # nan stays nan
            "margin_logits": (step.embeddings.scale * _mean_margin(hn), "logits"),
        }
        if step.captions is not None:
            values["exact_duplicates"] = (float(n - len(set(step.captions))), "captions")
        if step.lengths is not None and step.token_ids is not None:
            values["truncated"] = ((step.lengths > step.token_ids.shape[1]).sum(), "captions")
        if seen.drift is not None:
            values["drift"] = (seen.drift, "cosine")
        return [Reading(quantity="captions", key=key, term="", value=v, unit=unit) for key, (v, unit) in values.items()]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    mean: Tensor  # []
    hardest: Tensor  # [N]
    counts: Tensor  # int64 [BINS]
    drift: Tensor | None  # []


def _look(step: Step) -> _Seen:
    """All pairs of captions, each once, in strips of rows; where the softmax is streamed they are never held together."""
    text, start = step.embeddings.text, step.initial_text
    known = None if step.heads["hn"].scores is None else remembered_cosines(text, step.memo)
    total = drift = torch.zeros((), dtype=torch.float64, device=text.device)
    hardest = text.new_full((len(text),), -2.0)
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=text.device)
    for rows in row_slices(len(text), len(text)):
        after = slice(rows.start, None)
        cosines = text[rows] @ text[after].T if known is None else known[rows, after].clone()  # [n, N - start]
        seen = _below(cosines)
        total = total + 2 * _cleared(cosines, seen).sum(dtype=torch.float64)
        if start is not None:
            moved = _cleared(cosines - start[rows] @ start[after].T, seen)
            drift = drift + 2 * moved.abs_().sum(dtype=torch.float64)
        _cleared(cosines, seen, -2.0)
        hardest[rows] = torch.maximum(hardest[rows], cosines.amax(dim=1))
        hardest[after] = torch.maximum(hardest[after], cosines.amax(dim=0))
        counts += _counts(cosines, seen)
    pairs = len(text) * (len(text) - 1)
    mean = (total / pairs).to(text.dtype)
    return _Seen(mean=mean, hardest=hardest, counts=counts[:BINS], drift=None if start is None else drift / pairs)


def _below(strip: Tensor) -> Tensor:
    """Of a strip [n, m] that begins at the diagonal: which cells of its first n columns are no pair, or one that was seen."""
    n = len(strip)
    return torch.ones(n, n, dtype=torch.bool, device=strip.device).tril_()


def _cleared(strip: Tensor, seen: Tensor, value: float = 0.0) -> Tensor:
    """The strip, those cells overwritten."""
    strip[:, : len(strip)].masked_fill_(seen, value)
    return strip


def _counts(strip: Tensor, seen: Tensor) -> Tensor:
    """The pairs of a strip [n, m]: counts [BINS + 1], what is nan, or was seen, in the last."""
    places = _cleared(strip.sub(LOW).div_(HIGH - LOW).mul_(BINS).clamp_(0, BINS - 1), seen, math.nan)
    return counts_of(places.nan_to_num_(nan=BINS).to(torch.uint8).flatten(), BINS + 1)


def _mean_margin(hn: Head) -> Tensor:
    if hn.scores is None:
        assert hn.margin_mean is not None
        return hn.margin_mean
    assert hn.scores.margin is not None
    return off_diagonal_mean(hn.scores.margin, hn.scores.excluded)
