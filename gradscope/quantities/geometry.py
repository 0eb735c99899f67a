"""The two clouds of the measured batch: how they lie, step by step.

    alignment, modality_gap, relative_gap                of the pairs and of the two towers
    uniformity, mean_cosine .<tower>                     tower: image (the first) or text; mean_cosine.text equals captions:mean
    effective_rank, effective_rank_centred .<tower>      as the rows are (RankMe), and with their mean taken off
    hub_skewness, hub_largest, antihubs .<direction>     of N_k over the candidates, k = 5, the positive left out: in a solved batch
                                                         it would be everybody's first and hide the rest
    gap_quantiles.<direction>                            positive cosine minus hardest negative cosine: its quantiles 0, .1, .25, .5,
                                                         .75, .9 and 1 over anchors
    gap_logit_quantiles.<direction>                      the same of the logits, by objective: HN's hold the margin
    order_kept, nearest_kept                             against the initial captions: Spearman's correlation of G with G0 over all
                                                         pairs, and the share of captions whose nearest other is still the same

Formulas and sources: ``gradscope.metrics.embedding_geometry``. The drift of G in cosines is captions:drift; the mean, minimum and
violations of the gap are in the quantity gap. Captions excluded as duplicates are no negatives.
How to read: order_kept near 1 with a large captions:drift says that G has moved as a whole and ranks its negatives as before.
How it can mislead: everything here is of ONE batch. Of 16 rows the effective rank is at most 16 (15 centred) and the modality gap is
too large; a trend at one width is real, a level is not: for levels use ``gradscope embedding-geometry`` on a whole gallery. The
number of logits in the HN gap that is one constant is captions:margin_logits. Ties (duplicates) make nearest_kept arbitrary.
Cost: the eigenvalues behind the four effective ranks come from one call, at which a GPU waits for the host, the only such place; no
trace of matrix powers holds that entropy. It is one wait in a step that the full set reads anyway; all else stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics import embedding_geometry as measure
from gradscope.metrics.softmax import negatives, per_direction
from gradscope.quantities import quantities
from gradscope.types import Embeddings, Head, Reading, Step

GAP_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@quantities.register("geometry")
@dataclass(frozen=True, kw_only=True)
class Geometry:
    k: int = 5
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "full"
    left_out: ClassVar[str] = "hubs and the order of neighbours"

    def __call__(self, step: Step) -> list[Reading]:
        readings = _clouds(step.embeddings)
        for direction in step.heads["hn"].directions:
            for name, head in step.heads.items():
                readings.append(_reading(f"gap_logit_quantiles.{direction}", _gap_in_logits(step, head, direction), "logits", name))
            gap = step.heads["infonce"].anchors
            quantiles = measure.quantiles(gap.positive - gap.hardest[direction], GAP_QUANTILES)
            readings.append(_reading(f"gap_quantiles.{direction}", quantiles, "cosine"))
        return readings + self._of_cells(step)

    def _of_cells(self, step: Step) -> list[Reading]:
        """What looks at every cell: hubs, and the order of neighbours."""
        readings, hn = [], step.heads["hn"]
        if hn.scores is None:
            return []
        for direction, matrix in per_direction(hn.scores.cosine, hn.directions).items():
            readings += self._hubs(direction, matrix, hn.scores.excluded)
        return readings + (_drift(step.embeddings.text, step.initial_text) if step.initial_text is not None else [])

    def _hubs(self, direction: str, matrix: Tensor, excluded: Tensor | None) -> list[Reading]:
        n = len(matrix)
        found = measure.hubness(measure.k_occurrences(negatives(matrix, excluded), min(self.k, n - 1)), n)
        broken = 0.0 * matrix.double().sum()  # a nan counts as the nearest of all: what follows from it is nan too
        names = {"skewness": ("hub_skewness", ""), "largest": ("hub_largest", "share"), "antihubs": ("antihubs", "share")}
        return [_reading(f"{names[key][0]}.{direction}", value + broken, names[key][1]) for key, value in found.items()]


def _clouds(embeddings: Embeddings) -> list[Reading]:
    image, text = embeddings.image.double(), embeddings.text.double()
    aligned = measure.alignment(image, text)
    readings = [
        _reading("alignment", aligned, "squared distance"),
        _reading("modality_gap", measure.modality_gap(image, text), "distance"),
        _reading("relative_gap", measure.relative_gap(image, text, aligned), "share"),
    ]
    ranks = measure.effective_ranks([image, text])
    for tower, rows, (as_is, centred) in zip(("image", "text"), (image, text), ranks, strict=True):
        readings += [
            _reading(f"uniformity.{tower}", measure.uniformity(rows), "nat"),
            _reading(f"mean_cosine.{tower}", measure.mean_cosine(rows), "cosine"),
            _reading(f"effective_rank.{tower}", as_is, "directions"),
            _reading(f"effective_rank_centred.{tower}", centred, "directions"),
        ]
    return readings


def _gap_in_logits(step: Step, head: Head, direction: str) -> Tensor:
    """[7] float64; without the cells, from the cosines and margins that the kernel saw."""
    if head.scores is None:
        gap = step.embeddings.scale.double() * (head.anchors.positive - head.anchors.hardest[direction])
    else:
        logits = per_direction(head.scores.logits)[direction]
        gap = logits.diagonal().double() - negatives(logits, head.scores.excluded).amax(dim=1)
    return measure.quantiles(gap, GAP_QUANTILES)


def _drift(text: Tensor, initial: Tensor) -> list[Reading]:
    now, start = (rows.double() @ rows.double().T for rows in (text, initial))
    n = len(now)
    upper = torch.triu_indices(n, n, offset=1, device=now.device)
    kept = (negatives(now).argmax(dim=1) == negatives(start).argmax(dim=1)).double().mean()
    return [
        _reading("order_kept", measure.rank_correlation(now[upper[0], upper[1]], start[upper[0], upper[1]]), ""),
        _reading("nearest_kept", kept + 0.0 * (now.sum() + start.sum()), "share"),
    ]


def _reading(key: str, value: Tensor, unit: str, term: str = "") -> Reading:
    return Reading(quantity="geometry", key=key, term=term, value=value, unit=unit)
