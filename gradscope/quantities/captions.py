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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.objectives.margin import caption_cosines, off_diagonal_mean
from gradscope.quantities import quantities
from gradscope.types import Reading, Step

NEAR = 0.95
BINS, LOW, HIGH = 60, -0.2, 1.0


@quantities.register("captions")
@dataclass(frozen=True, kw_only=True)
class Captions:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "default"

    def __call__(self, step: Step) -> list[Reading]:
        cosines = caption_cosines(step.embeddings.text)  # [N, N]
        n = len(cosines)
        eye = torch.eye(n, dtype=torch.bool, device=cosines.device)
        hardest = cosines.masked_fill(eye, -2.0).amax(dim=1)  # [N]
        mean = off_diagonal_mean(cosines)
        margin, excluded = step.heads["hn"].scores.margin, step.heads["hn"].scores.excluded
        assert margin is not None
        values: dict[str, tuple[Tensor | float, str]] = {
            "mean": (mean, "cosine"),
            "hardest_mean": (hardest.mean(), "cosine"),
            "hardest_max": (hardest.max(), "cosine"),
            "histogram": (_histogram(cosines), "pairs"),
            "near_duplicates": ((hardest >= NEAR).double().mean() + 0.0 * hardest.mean(), "share"),  # nan stays nan
            "margin_logits": (step.embeddings.scale * off_diagonal_mean(margin, excluded), "logits"),
        }
        if step.captions is not None:
            values["exact_duplicates"] = (float(n - len(set(step.captions))), "captions")
        if step.lengths is not None and step.token_ids is not None:
            values["truncated"] = ((step.lengths > step.token_ids.shape[1]).sum(), "captions")
        if step.initial_text is not None:
            start = caption_cosines(step.initial_text)
            values["drift"] = ((cosines - start).abs().sum() / (n * (n - 1)), "cosine")
        return [Reading(quantity="captions", key=key, term="", value=v, unit=unit) for key, (v, unit) in values.items()]


def _histogram(cosines: Tensor) -> Tensor:
    n = len(cosines)
    upper = torch.triu_indices(n, n, offset=1, device=cosines.device)
    pairs = cosines[upper[0], upper[1]]
    bins = ((pairs.nan_to_num(nan=LOW) - LOW) / (HIGH - LOW) * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.int64, device=cosines.device)
    return counts.scatter_add_(0, bins, (~pairs.isnan()).long())  # bincount would make a GPU wait for the host
