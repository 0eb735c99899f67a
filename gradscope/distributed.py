"""The thin layer over torch.distributed: who we are, rows and sums over ranks. On one process everything is itself.

Every function that talks to other ranks is a collective: each rank must call it, in the same order. torch is imported inside, so that
light modules may ask for the rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def world() -> int:
    """Number of processes."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathered(rows: Tensor) -> Tensor:
    """[N, ...] on each of W ranks -> [W N, ...] in order of rank, without gradient. All ranks must hold the same N."""
    if world() == 1:
        return rows.detach()
    import torch
    import torch.distributed as dist

    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def summed(values: Tensor) -> Tensor:
    """The sum over ranks."""
    return _reduced(values, "SUM")


def largest(values: Tensor) -> Tensor:
    """The largest over ranks; a nan on any rank is not promised to survive, so send counts of non-finite values as sums."""
    return _reduced(values, "MAX")


def _reduced(values: Tensor, operator: str) -> Tensor:
    if world() == 1:
        return values
    import torch.distributed as dist

    values = values.clone()
    dist.all_reduce(values, op=getattr(dist.ReduceOp, operator))
    return values


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor of which each rank holds a part (FSDP2)."""
    return hasattr(tensor, "to_local") and any(placement.is_shard() for placement in _placements(tensor))


def local(tensor: Tensor) -> Tensor:
    """This rank's part; the tensor itself where it is not distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _placements(tensor: Any) -> Any:
    return tensor.placements
