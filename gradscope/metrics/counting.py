"""How often each number occurs among many small whole numbers, and sums by them: bins, over tensors of any length.

On a CPU by bincount. A GPU would have to wait for the host there (the length of its answer depends on the values), so it adds ones in
place. Both are exact: counts are int64, sums float64 (on a GPU in an order that may change from run to run).
"""

from __future__ import annotations

import torch
from torch import Tensor


def waits_for_nothing(tensor: Tensor) -> bool:
    """Whether reading a value of this tensor keeps no device waiting."""
    return tensor.device.type == "cpu"


def counts_of(places: Tensor, size: int) -> Tensor:
    """How often each of 0 ... size - 1 occurs in ``places`` (uint8 or int32 [n], all in that range), int64 [size]."""
    if waits_for_nothing(places):
        return torch.bincount(places, minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places.long(), torch.ones_like(places, dtype=torch.int64))


def sums_of(places: Tensor, weights: Tensor, size: int) -> Tensor:
    """The sum of the weights [n] at each of 0 ... size - 1 in ``places`` (uint8 [n], all in that range), float64 [size]."""
    if waits_for_nothing(places):
        return torch.bincount(places, weights=weights, minlength=size).double()
    return torch.zeros(size, dtype=torch.float64, device=places.device).scatter_add_(0, places.long(), weights.double())
