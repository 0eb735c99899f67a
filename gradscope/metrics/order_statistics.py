"""The k-th smallest of many numbers, for several k, and quantiles, without a host read; many are not sorted.

A float's bits, with those of negative numbers turned over, order as the numbers do. One count over the upper sixteen bits says in which
of 65536 bins the k-th number lies, one over the lower sixteen of that bin's numbers which it is: exact, and linear in their number.
How it can mislead: numbers are taken as fp32, so that wider ones are rounded; a nan counts as larger than everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradscope.metrics import counting
from gradscope.metrics.counting import counts_of

_HALF = 16
_BINS = 1 << _HALF
_LAST = 0x7FFFFFFF  # a nan


def order_statistics(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """The numbers at ``ranks`` (0: the smallest) of values [n] in rising order, fp32 [ranks]."""
    if values.numel() < _BINS:
        ordered = values.float().sort().values  # fewer numbers than bins: sorting them is quicker
        return torch.stack([ordered[rank] for rank in ranks])
    bits = values.float().contiguous().view(torch.int32)
    keys = torch.where(values.isnan(), _LAST, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # rises with the number; nan has either sign
    upper = (keys >> _HALF) + _BINS // 2
    cumulative = counts_of(upper, _BINS).cumsum(0)
    if counting.waits_for_nothing(keys):
        found = torch.stack(_looked_up(upper, keys, cumulative, ranks))
    else:
        lower = keys & (_BINS - 1)
        found = torch.stack([_kth(upper, lower, cumulative, rank) for rank in ranks])
    return (found ^ ((found >> 31) & 0x7FFFFFFF)).view(torch.float32)


def quantile(values: Tensor, q: float) -> Tensor:
    """``torch.quantile`` of values [n], to rounding, [] in their dtype; torch before 2.14 reads ``q`` back from the device."""
    ordered, place = values.sort().values, q * (len(values) - 1)
    below = math.floor(place)
    found = torch.lerp(ordered[below], ordered[min(below + 1, len(values) - 1)], place - below)
    return torch.where(values.isnan().any(), math.nan, found)


def nan_median(values: Tensor) -> Tensor:
    """``torch.nanquantile`` at 0.5 over the last dimension of values [..., n], to rounding, without a host read."""
    ordered = values.sort(dim=-1).values
    last = ((~values.isnan()).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    below, above = (ordered.gather(-1, place) for place in (last // 2, (last + 1) // 2))
    return torch.lerp(below, above, (last % 2).to(values.dtype) / 2).squeeze(-1)


def _looked_up(upper: Tensor, keys: Tensor, cumulative: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """The keys at ``ranks``: the few of each bin that holds one are taken out and sorted, once per bin."""
    places = torch.searchsorted(cumulative, torch.tensor(ranks), right=True).tolist()
    bins = {place: keys[upper == place].sort().values for place in set(places)}
    before = {place: int(cumulative[place]) - len(held) for place, held in bins.items()}
    return [bins[place][rank - before[place]] for place, rank in zip(places, ranks, strict=True)]


def _kth(upper: Tensor, lower: Tensor, cumulative: Tensor, rank: int) -> Tensor:
    place = (cumulative <= rank).sum()  # the bin that holds it
    before = torch.where(place > 0, cumulative.gather(0, (place - 1).clamp(min=0).view(1))[0], 0)
    within = counts_of(torch.where(upper == place, lower, _BINS).to(torch.int32), _BINS + 1)[:_BINS]
    rest = (within.cumsum(0) <= rank - before).sum()
    return ((place - _BINS // 2) * _BINS + rest).to(torch.int32)
