"""The thin layer over torch.distributed: who we are, rows and sums over ranks. On one process everything is itself.

Every function that talks to other ranks is a collective: each rank must call it, in the same order. torch is imported inside, so that
light modules may ask for the rank. Rows with gradient: ``gradscope.joining``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Entries that ``averaged`` sends at once.
BUCKET = 1 << 24

#: Whether ranks ask each other, ahead of each collective, if all are there: inside ``failing_together``.
_asking: ContextVar[bool] = ContextVar("asking", default=False)


def world() -> int:
    """Number of processes."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def own_share(count: int) -> slice:
    """This rank's contiguous part of ``count`` items: none twice, none left out, the first ranks hold one more where it must be."""
    each, more = divmod(count, world())
    start = rank() * each + min(rank(), more)
    return slice(start, start + each + (rank() < more))


# ---- rows


def gathered(rows: Tensor) -> Tensor:
    """[N, ...] on each of W ranks -> [W N, ...] in order of rank, without gradient. All ranks must hold the same N."""
    if world() == 1:
        return rows.detach()
    import torch
    import torch.distributed as dist

    _refuse_failed()
    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def completed(rows: Tensor) -> Tensor:
    """[W n, ...] of which each rank knows its own n rows for certain -> all of them, the same on every rank."""
    if world() == 1:
        return rows
    each = len(rows) // world()
    return gathered(rows[rank() * each : (rank() + 1) * each])


def joined(rows: Tensor) -> Tensor:
    """``gathered`` with gradient: see ``gradscope.joining``, which says why no collective is needed on the way back."""
    if world() == 1:
        return rows
    from gradscope.joining import Joined

    return Joined.apply(rows)


def concatenated(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pieces [n, D] of this rank, any number of them -> all rows of all ranks [M, D] in order of rank, fp32 and without gradient.

    Raises:
        ValueError: no rank has a row.
    """
    import torch
    import torch.distributed as dist

    if world() == 1:
        return torch.cat(list(parts))
    sizes = gathered(torch.tensor([[sum(map(len, parts)), parts[0].shape[1] if parts else 0]], device=device))  # [W, 2]
    longest, width = sizes.amax(dim=0).tolist()
    if not longest:
        raise ValueError("there is nothing to embed on any process")
    padded = torch.zeros(longest, width, device=device)  # a collective needs equal sizes; what was padded is cut off again
    if parts:
        padded[: sum(map(len, parts))] = torch.cat(list(parts))
    every = [torch.empty_like(padded) for _ in range(world())]
    dist.all_gather(every, padded)
    return torch.cat([rows[:count] for rows, count in zip(every, sizes[:, 0].tolist(), strict=True)])


def from_first(rows: Tensor | None, device: torch.device) -> Tensor:
    """The first rank's tensor on every rank; the others give None."""
    import torch
    import torch.distributed as dist

    if world() == 1:
        assert rows is not None
        return rows
    shape, dtype = shared(None if rows is None else (tuple(rows.shape), rows.dtype))
    sent = torch.empty(shape, dtype=dtype, device=device) if rows is None else rows.to(device).contiguous()
    dist.broadcast(sent, src=0)
    return sent


# ---- sums


def summed(values: Tensor) -> Tensor:
    """The sum over ranks."""
    return _reduced(values, "SUM")


def summed_rows(rows: Tensor) -> Tensor:
    """The sum over W ranks of [W n, ...], of which each rank gets its own n rows; half of what ``summed`` sends."""
    if world() == 1:
        return rows
    import torch.distributed as dist

    _refuse_failed()
    own = rows.new_empty(len(rows) // world(), *rows.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its older name, which newer torch warns of
    scatter(own, rows.contiguous())
    return own


def largest(values: Tensor) -> Tensor:
    """The largest over ranks; a nan on any rank is not promised to survive, so send counts of non-finite values as sums."""
    return _reduced(values, "MAX")


def _reduced(values: Tensor, operator: str) -> Tensor:
    if world() == 1:
        return values
    import torch.distributed as dist

    _refuse_failed()
    values = values.clone()
    dist.all_reduce(values, op=getattr(dist.ReduceOp, operator))
    return values


def averaged(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The means over ranks, as copies; what is None (on all ranks alike) stays so. Sent in pieces of at most ``BUCKET`` entries or one
    tensor."""
    found: list[Tensor | None] = list(tensors)
    if world() == 1:
        return found
    bucket: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if bucket and _entries(found, [*bucket, index]) > BUCKET:
            _average(found, bucket)
            bucket = []
        bucket.append(index)
    _average(found, bucket)
    return found


def _entries(tensors: Sequence[Tensor | None], indices: Sequence[int]) -> int:
    return sum(tensor.numel() for tensor in (tensors[i] for i in indices) if tensor is not None)


def _average(tensors: list[Tensor | None], indices: Sequence[int]) -> None:
    """In place of the list, not of its tensors."""
    import torch

    chosen = [tensor for tensor in (tensors[i] for i in indices) if tensor is not None]
    if not chosen:
        return
    means = summed(torch.cat([tensor.detach().flatten() for tensor in chosen])) / world()
    for index, tensor, mean in zip(indices, chosen, means.split([t.numel() for t in chosen]), strict=True):
        tensors[index] = mean.view_as(tensor)


# ---- failures


class FailedElsewhereError(RuntimeError):
    """Another rank failed inside the block of ``failing_together`` that this one is in."""


@contextmanager
def failing_together() -> Iterator[None]:
    """What fails on one rank inside the block raises ``FailedElsewhereError`` on the others: at their next gather or sum, which would
    wait for ever, or at the end of the block. A collective itself, for processes that may send what lies on the host. On a GPU a
    backward runs in a thread of its own, and the sums in it are not covered."""
    token = _asking.set(world() > 1)
    try:
        yield
        _refuse_failed()
    except FailedElsewhereError:
        raise
    except Exception:
        if _asking.get():
            _failed_anywhere(here=True)
        raise
    finally:
        _asking.reset(token)


def _refuse_failed() -> None:
    if _asking.get() and _failed_anywhere(here=False):
        raise FailedElsewhereError("another rank failed")


def _failed_anywhere(*, here: bool) -> bool:
    import torch
    import torch.distributed as dist

    failed = torch.tensor(int(here))
    dist.all_reduce(failed)
    return bool(failed)


# ---- words and order


def shared(value: Any) -> Any:
    """The first rank's value, small and picklable, on every rank."""
    if world() == 1:
        return value
    import torch.distributed as dist

    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def everyones(value: Any) -> list[Any]:
    """Every rank's value, small and picklable, in order of rank."""
    if world() == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * world()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def first_rank_first() -> Iterator[None]:
    """The first rank does the block before the others do, who then find its results in the cache."""
    import torch.distributed as dist

    several, leads = world() > 1, rank() == 0
    if several and not leads:
        dist.barrier()
    try:
        yield
    finally:
        if several and leads:
            dist.barrier()


# ---- parameters of which each rank holds a part


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor of which each rank holds a part (FSDP2)."""
    return hasattr(tensor, "to_local") and any(placement.is_shard() for placement in _placements(tensor))


def local(tensor: Tensor) -> Tensor:
    """This rank's part; the tensor itself where it is not distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All parts of it; the tensor itself where it is not distributed."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _placements(tensor: Any) -> Any:
    return tensor.placements
