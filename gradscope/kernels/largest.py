"""The K largest numbers of each row of a block.

The columns are dealt into groups; the K largest numbers lie in the K groups of largest maximum, so only those are searched. That is
exact, also among equal numbers, and on the CPU (numpy's partition) takes under half the time of torch.topk (2026-11-30: .44 against
1.1 ns per cell of 1024 x 1024, K = 10).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Numbers of a row that share one maximum.
_DEPTH = 16


def largest(x: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row of [n, m], in no order: [n, min(count, m)]; a nan counts as the largest number."""
    rows, width = x.shape
    groups = width // _DEPTH
    if x.device.type != "cpu" or width % _DEPTH or groups < 2 * count or not x.is_contiguous():
        return x.topk(min(count, width), dim=1, sorted=False).values
    dealt = x.view(rows, _DEPTH, groups)  # strided groups: their maxima are formed by whole vectors
    best = np.argpartition(dealt.amax(dim=1).numpy(), groups - count, axis=1)[:, groups - count :]
    chosen = dealt.gather(2, torch.from_numpy(best)[:, None].expand(rows, _DEPTH, count)).view(rows, -1)
    return torch.from_numpy(np.partition(chosen.numpy(), chosen.shape[1] - count, axis=1)[:, -count:].copy())
