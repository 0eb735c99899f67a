"""Captions that repeat each other, and negatives that look like positives.

    identical_groups  [N]     equal numbers for captions of the same token ids, at any width
    identical_rows    [N, N]  captions whose token ids are the same: the encoder cannot tell them apart, whatever their strings say
    same_strings      [N, N]  captions whose strings are the same
    token_overlap     [N]     Jaccard of two sets of token ids, |A and B| / |A or B|
    above_positive    [N, N]  cells whose guide similarity exceeds the anchor's own positive similarity p, less a margin m:
                                  absolute   guide > p - m
                                  relative   guide > p - |p| m        (m = .05 keeps what is below 95 % of a positive p; a negative
                                                                      p is lowered too, not raised)

Source: GISTEmbed (Solatorio, 2024) for the guide; the two margins are defined as in sentence-transformers' GISTEmbedLoss.
How it can mislead: identical ids hold for the ids GIVEN: cut at the context, and in the tokenizer's own spelling (CLIP's ignores
case). Keys of 64 bits find the candidates and the ids themselves are compared, so two different captions are never called the same;
two equal ones are missed only where a key collides, once in about 2^64 / N^2 batches. No function here makes a GPU wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Any large odd number: its powers modulo 2^64 give each position of a caption a weight of its own.
_BASE = 6364136223846793005


def row_keys(ids: Tensor) -> Tensor:
    """int64 [N, L] -> int64 [N]: equal for equal rows, and for others but once in about 2^64 pairs."""
    weights = torch.full((ids.shape[1],), _BASE, dtype=torch.int64, device=ids.device).cumprod(0)  # int64 wraps around
    return (ids * weights).sum(dim=1)


def identical_groups(ids: Tensor) -> Tensor:
    """int64 [N, L] -> int64 [N]: the place of the earliest row that equals this one; its own, where there is none. No [N, N] tensor."""
    keys = row_keys(ids)
    order = keys.argsort(stable=True)  # equal keys stand together, the earliest row first
    ordered = keys.index_select(0, order)
    starts = torch.ones_like(order, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    place = torch.arange(len(ids), device=ids.device)
    leader = torch.where(starts, place, 0).cummax(0).values  # of each run of equal keys, where it begins
    first = torch.empty_like(order).scatter_(0, order, order.index_select(0, leader))
    sure = (ids == ids.index_select(0, first)).all(dim=1)
    return torch.where(sure, first, place)


def group_sizes(groups: Tensor) -> Tensor:
    """Numbers from 0 to N - 1, int64 [N] -> how many rows share each row's, int64 [N]."""
    return torch.zeros_like(groups).scatter_add_(0, groups, torch.ones_like(groups)).index_select(0, groups)


def identical_rows(ids: Tensor) -> Tensor:
    """int64 [N, L] -> bool [N, N], False on the diagonal."""
    groups = identical_groups(ids)
    return (groups[:, None] == groups).fill_diagonal_(False)


def repeats(ids: Tensor) -> int:
    """How many rows of int64 [N, L] repeat an earlier one, by their keys."""
    return len(ids) - len(row_keys(ids).unique())


def same_strings(captions: Sequence[str], device: torch.device) -> Tensor:
    """bool [N, N], False on the diagonal."""
    numbers: dict[str, int] = {}
    group = torch.tensor([numbers.setdefault(caption, len(numbers)) for caption in captions])
    group = group.to(device, non_blocking=True)
    return (group[:, None] == group).fill_diagonal_(False)


def token_overlap(a: Tensor, a_words: Tensor, b: Tensor, b_words: Tensor) -> Tensor:
    """Jaccard of row i of ``a`` with row i of ``b``: [N] float64; nan where both are empty.

    Args:
        a, b: token ids of 0 or more, int64 [N, L].
        a_words, b_words: bool [N, L], which ids count.
    """
    sets = [_distinct(a, a_words), _distinct(b, b_words)]
    sizes = [(ids >= 0).sum(dim=1) for ids in sets]
    together = _in_order(torch.cat(sets, dim=1))  # an id of both sets now stands beside itself
    shared = ((together[:, 1:] == together[:, :-1]) & (together[:, 1:] >= 0)).sum(dim=1)
    return shared.double() / (sizes[0] + sizes[1] - shared)


def above_positive(guide: Tensor, positive: Tensor, *, absolute: float = 0.0, relative: float = 0.0) -> Tensor:
    """Which cells of a guide [N, N] (anchors in rows) exceed the anchors' positive similarities [N], less a margin; bool [N, N]."""
    return guide > (positive - positive.abs() * relative - absolute)[:, None]


def _distinct(ids: Tensor, words: Tensor) -> Tensor:
    """Each row's ids once, the rest -1, in no order that matters."""
    ordered = _in_order(ids.masked_fill(~words, -1))
    again = torch.zeros_like(words)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(again, -1)


def _in_order(ids: Tensor) -> Tensor:
    """Sorted rows; on the CPU numpy sorts short ones in a tenth of torch's time."""
    return torch.from_numpy(np.sort(ids.numpy(), axis=1)) if ids.device.type == "cpu" else ids.sort(dim=1).values
