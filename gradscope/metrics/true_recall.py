"""Recall as a fraction of all positives: of an image's captions, how many are within the first k.

    true R@k = mean over images of (1 / n_i) sum over its captions j of P(caption j within the first k)

A caption's place counts everything ahead of it, its image's other captions too; ties are in random order, so with g candidates
above and t others tied (within ``TIE_TOLERANCE``) the chance is (k - g) / (t + 1), cut to 0..1. Image -> text only: a caption
has one image.

How to read it: the retrieval literature's "R@k" is mostly hit-if-any (recall.py); this is the other reading of the word. It cannot
reach 1 where an image has more than k captions.
How it can mislead: the two are equal with one caption per image and far apart with five; never compare one with the other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.bootstrap import RESAMPLES, mean_interval
from gradscope.metrics.gallery_scores import TIE_TOLERANCE, check_gallery, finite, finite_rows
from gradscope.metrics.recall import MetricRow

DEPTHS = (1, 5, 10)
PROTOCOL = "every caption is a candidate; fraction of the image's captions within k; ties in random order"

#: Scores held at a time, 64 MiB: rows of all captions are wide where captions are many.
_ENTRIES = 1 << 23

Array = NDArray[np.float64]


def true_recall_rows(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, resamples: int = RESAMPLES, seed: int = 0, block: int = 1024
) -> list[MetricRow]:
    """Rows "true R@1", "true R@5", "true R@10" with 95 % intervals over images. Raises ValueError as ``ranks`` does."""
    greater, ties = caption_places(images, texts, image_of_text, block=block)
    owner = image_of_text.cpu().numpy()
    own = np.bincount(owner)
    chance = np.clip((np.array(DEPTHS) - greater[:, None]) / (ties[:, None] + 1), 0, 1)  # [M, K]
    share = np.stack([np.bincount(owner, weights=column) / own for column in chance.T], axis=1)  # [N, K]
    low, high = mean_interval(share, np.arange(len(images)), resamples=resamples, seed=seed)
    return [
        MetricRow(
            direction="i2t",
            metric=f"true R@{k}",
            value=float(value),
            low=float(a),
            high=float(b),
            n_queries=len(images),
            n_candidates=len(texts),
            protocol=PROTOCOL,
        )
        for k, value, a, b in zip(DEPTHS, share.mean(0), low, high, strict=True)
    ]


@torch.no_grad()
def caption_places(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int = 1024
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each caption, with its image as the query: candidates above it, and others tied with it; int64 [M] each.

    A caption whose score is not finite has all others above it. ``block``: images at a time, fewer where captions are very many.
    """
    check_gallery(images, texts, image_of_text)
    if images.device.type == "mps":  # has no float64
        images, texts = images.cpu(), texts.cpu()
    owner = image_of_text.to(images.device)
    good_image, good_text = finite_rows(images), finite_rows(texts)
    order = torch.argsort(owner, stable=True)
    number = torch.bincount(owner, minlength=len(images))
    first = number.cumsum(0) - number
    doubles = finite(texts)
    block = max(1, min(block, _ENTRIES // len(texts)))
    counts = torch.zeros(2, len(texts), dtype=torch.int64, device=images.device)
    for start in range(0, len(images), block):
        scores = finite(images[start : start + block]) @ doubles.T  # [rows, M]
        scores.masked_fill_(~good_image[start : start + block, None] | ~good_text, -torch.inf)
        rows = torch.arange(start, start + len(scores), device=images.device)
        for k in range(int(number[rows].max())):  # the k-th caption of each image that has one
            having = rows[number[rows] > k]
            column = order[first[having] + k]
            mine = scores[having - start]
            score = mine.gather(1, column[:, None])
            counts[0, column] = (mine > score + TIE_TOLERANCE).sum(1)
            counts[1, column] = (mine >= score - TIE_TOLERANCE).sum(1) - 1
    lost = ~(good_text & good_image[owner])
    counts[0, lost] = counts[1, lost] = len(texts) - 1
    return counts[0].cpu().numpy(), (counts[1] - counts[0]).cpu().numpy()
