"""Numbers with and without the evaluated items that were in training.

Two readings of "without", given a mask of items (``gradscope.data.overlap``):
    removed       the items leave queries AND gallery; what remains is a smaller gallery
    queries only  the items ask no question, but stay in the gallery as distractors: the gallery keeps its size

How to read it: if "queries only" is well below the full number, the full number was helped by what training had seen.
How it can mislead: "removed" is a smaller gallery, and smaller galleries score higher whatever was trained on; "queries only" keeps
distractors that the model has seen, which may be easier to reject. Neither undoes the training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope.evaluate import Embedded, score
from gradscope.metrics.ranks import Ranks
from gradscope.metrics.recall import MetricRow, Retrieval, metric_rows


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """``counts``: items by level and in all; the rows are empty where no item, or every item, was in training."""

    trained_on: str
    items: int
    counts: Mapping[str, int]
    sentence: str
    removed: list[MetricRow]
    queries_only: list[MetricRow]


def contamination(
    embedded: Embedded, result: Retrieval, seen: NDArray[np.bool_], *, trained_on: str, counts: Mapping[str, int], sentence: str
) -> Contamination:
    """Both readings of "without".

    Args:
        embedded, result: the gallery and its numbers.
        seen: bool [N], the images that were in training. counts, sentence: of ``Overlap``.
        trained_on: what training had, as the user called it.

    Raises:
        ValueError: the mask does not belong to the gallery.
    """
    if seen.shape != (len(embedded.ids),):
        raise ValueError(f"the mask of training items has shape {seen.shape}, the gallery {len(embedded.ids)} images.")
    some = seen.any() and not seen.all()
    removed = score(without(embedded, seen), resamples=result.resamples).rows if some else []
    kept = [asking(counted, ~seen) for counted in (result.i2t, result.t2i)] if some else []
    rows = [row for part in kept for row in metric_rows(part, resamples=result.resamples, seed=result.seed)]
    return Contamination(
        trained_on=trained_on, items=len(seen), counts=dict(counts), sentence=sentence, removed=removed, queries_only=rows
    )


def without(embedded: Embedded, drop: NDArray[np.bool_]) -> Embedded:
    """The gallery without some images and their captions. ``truncated`` still counts the whole gallery's captions."""
    device = embedded.image.device
    keep_image = torch.from_numpy(~drop).to(device)
    keep_text = keep_image[embedded.image_of_text]
    renumbered = keep_image.cumsum(0) - 1
    texts = keep_text.tolist()
    return dataclasses.replace(
        embedded,
        ids=tuple(i for i, kept in zip(embedded.ids, keep_image.tolist(), strict=True) if kept),
        image=embedded.image[keep_image],
        text=embedded.text[keep_text],
        image_of_text=renumbered[embedded.image_of_text[keep_text]],
        digests=tuple(d for d, kept in zip(embedded.digests, texts, strict=True) if kept),
        captions=tuple(c for c, kept in zip(embedded.captions, texts, strict=True) if kept) if embedded.captions else (),
    )


def asking(counts: Ranks, image: NDArray[np.bool_]) -> Ranks:
    """The queries of some images alone, against the whole gallery. ``image``: bool [N]."""
    keep = torch.from_numpy(image)[counts.image]
    cut = {name: getattr(counts, name)[keep] for name in ("greater", "ties", "positives", "image", "negatives")}
    return dataclasses.replace(counts, **cut)
