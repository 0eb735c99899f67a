"""Norms, cosines and zero counts of a gradient that lives in many tensors, true over forty decades.

A naive fp32 norm squares its entries: below 1e-23 each square is 0 and so is the norm. Here squares are formed and summed in float64,
where no square of an fp32 entry under- or overflows; entries that are float64 themselves are divided by the largest magnitude of the
whole gradient first. Source: paper facts, section 7.1 (ii).
Wide tensors are read in pieces that stay in the processor's cache: one pass over memory per statistic, and no copy of a tensor.
How it can mislead: a norm says nothing about how many entries carry it; read it beside the zero shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.distributed import largest, summed

Gradient = Sequence[Tensor | None]

#: Entries of a piece: 1 MiB of fp32. Below 2^24, so that a count of them is exact in fp32.
PIECE = 2**18
#: Entries that are summed in their own dtype.
RUN = 2**15


def present(gradient: Gradient) -> list[Tensor]:
    return [g for g in gradient if g is not None]


def pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The entries of a tensor as flat views of at most ``PIECE`` entries (copies, where its memory is not in order)."""
    return tensor.detach().reshape(-1).split(PIECE)


def max_abs(gradient: Gradient) -> Tensor:
    """The largest magnitude, [] of the gradient's dtype; nan if any entry is nan."""
    ends = [g.detach().aminmax() for g in present(gradient) if g.numel()]  # a shard may be empty
    if not ends:
        return torch.zeros((), device=present(gradient)[0].device)
    return torch.stack([torch.maximum(-low, high) for low, high in ends]).max()


def squared_parts(gradient: Gradient, unit: Tensor) -> Tensor:
    """Per tensor, the sum of squares of g / unit, float64 [tensors]; 0 for absent ones. ``unit`` [] is ``max_abs`` (0 gives 0)."""
    safe = torch.where(unit == 0, torch.ones_like(unit), unit).double()
    zero = [torch.zeros((), dtype=torch.float64, device=unit.device)]
    mixed = any(g.dtype == torch.float64 for g in present(gradient))  # then each is divided on its own
    norms = [zero if g is None else _norms(g, safe if mixed else None) for g in gradient]
    stacked = torch.stack([norm for some in norms for norm in some])  # few operations for all: most have one piece
    squares = (stacked if mixed else stacked / safe).square()
    if len(squares) == len(norms):
        return squares
    return torch.stack([some.sum() for some in squares.split(list(map(len, norms)))])


def _norms(tensor: Tensor, unit: Tensor | None) -> list[Tensor]:
    """Of each piece, [] float64; in units of ``unit`` where one is given, as float64 entries need it."""
    some = pieces(tensor) if tensor.numel() > PIECE else (tensor.detach(),)
    if unit is not None and tensor.dtype == torch.float64:
        return [torch.linalg.vector_norm(piece / unit) for piece in some]
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in some]
    return norms if unit is None else [norm / unit for norm in norms]


def _unit(gradient: Gradient) -> Tensor:
    """What squares are formed in units of: 1, which costs nothing, unless a float64 entry could under- or overflow."""
    if any(g.dtype == torch.float64 for g in present(gradient)):
        return max_abs(gradient).double()
    return torch.ones((), dtype=torch.float64, device=present(gradient)[0].device)


def true_norm(gradient: Gradient) -> Tensor:
    """The Euclidean norm over all entries, [] float64."""
    unit = _unit(gradient)
    return unit * squared_parts(gradient, unit).sum().sqrt()


def norm_over_ranks(gradient: Gradient, sharded: bool, memo: dict[Any, Any]) -> Tensor:
    """``true_norm``; where each rank holds a shard, of all shards together (then a collective: every rank must call it)."""
    if not sharded:
        return statistics(gradient, memo).norm
    unit = largest(_unit(gradient))
    return unit * summed(squared_parts(gradient, unit).sum()).sqrt()


def agreement_and_factor(passed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosine between two gradients by name, and the length of the first's projection on the second in units of the second's length.

    Both [] float64; nan where the second is zero, the cosine also where the first is.
    """
    first, second = list(passed.values()), [own[name] for name in passed]
    agreement = cosine(first, second)
    return agreement, agreement * true_norm(first) / true_norm(second)


def change_and_size(after: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The Euclidean norms of after - before and of before, of weights, each [] float64.

    Squares are summed in fp32 or wider over short runs, and those sums in float64: right to 1e-6, at a third of the time of float64
    squares. Differences under 1e-19 in fp32 count as 0; weights have no such steps unless they are that small themselves.
    """
    changes, sizes = [], []
    for x, y in zip(after, before, strict=True):
        wide = torch.promote_types(x.dtype, torch.float32)
        buffer = torch.empty(min(x.numel(), PIECE), dtype=wide, device=x.device)
        for a, b in zip(pieces(x), pieces(y), strict=True):
            changes += _dots(torch.sub(a.to(wide), b.to(wide), out=buffer[: a.numel()]))
            sizes += _dots(b.to(wide))
    return torch.stack(changes).double().sum().sqrt(), torch.stack(sizes).double().sum().sqrt()


def _dots(piece: Tensor) -> list[Tensor]:
    return [torch.dot(run, run) for run in piece.split(RUN)]


def naive_norm(gradient: Gradient, factor: Tensor | float = 1.0) -> Tensor:
    """What a plain fp32 square-and-sum of factor * gradient gives, [] fp32: zero where every square underflows."""
    return plain_squares(gradient, factor)[0].sum().sqrt()


def plain_squares(gradient: Gradient, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Of each tensor that is there, factor * g squared in fp32: the sums of squares, and how many squares are not 0 (int64)."""
    as_it_is = isinstance(factor, float) and factor == 1.0
    sums, counts = [], []
    for g in present(gradient):
        buffer = torch.empty(min(g.numel(), PIECE), dtype=torch.float32, device=g.device)  # memory anew for each piece takes longer
        found = []
        for piece in pieces(g):
            square = buffer[: piece.numel()]
            single = piece.float() if as_it_is else torch.mul(piece.float(), factor, out=square)
            torch.mul(single, single, out=square)
            # A comparison that fills a float tensor, and its sum, take half the time of ``count_nonzero`` in the cache (2026-11-30).
            found.append((square.sum(), torch.ne(square, 0, out=square).sum().long()))
        sums.append(torch.stack([total for total, _ in found]).sum())
        counts.append(torch.stack([count for _, count in found]).sum())
    return torch.stack(sums), torch.stack(counts)


def cosine(first: Gradient, second: Gradient) -> Tensor:
    """Cosine between two gradients over the same parameters, [] float64; nan where either is zero."""
    return cosine_between(Statistics(first), Statistics(second))


def cosine_between(first: Statistics, second: Statistics) -> Tensor:
    """``cosine`` of two gradients whose statistics may be known already."""
    pairs = zip(first.gradient, second.gradient, strict=True)
    dots = [_dot(x, first.unit, y, second.unit) for x, y in pairs if x is not None and y is not None]
    return torch.stack(dots).sum() / (first.squares.sum().sqrt() * second.squares.sum().sqrt())


def _dot(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
    both = zip(pieces(x), pieces(y), strict=True)
    if torch.float64 in (x.dtype, y.dtype):
        return torch.stack([torch.dot(p.double() / a, q.double() / b) for p, q in both]).sum()
    return torch.stack([torch.dot(p.double(), q.double()) for p, q in both]).sum() / a / b


def zero_counts(gradient: Gradient) -> Tensor:
    """Exactly zero entries per tensor, int64 [tensors]; an absent tensor counts none. nan is not zero."""
    device = present(gradient)[0].device
    none = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([none if g is None else g.numel() - torch.count_nonzero(g) for g in gradient])


class Statistics:
    """The statistics of one gradient, each formed when it is first asked for, and once.

    ``largest`` [] is the largest magnitude, ``squares`` [tensors] float64 the sums of squares in units of ``unit`` [], ``zeros``
    [tensors] counts.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = list(gradient)
        self._plain: tuple[Tensor, Tensor] | None = None

    @cached_property
    def largest(self) -> Tensor:
        return max_abs(self.gradient)

    @cached_property
    def unit(self) -> Tensor:
        return _unit(self.gradient)

    @cached_property
    def squares(self) -> Tensor:
        return squared_parts(self.gradient, self.unit)

    @cached_property
    def zeros(self) -> Tensor:
        return zero_counts(self.gradient)

    def plain_squares(self, factor: Tensor | float) -> tuple[Tensor, Tensor]:
        """See the function; a gradient has one factor."""
        if self._plain is None:
            self._plain = plain_squares(self.gradient, factor)
        return self._plain

    @property
    def norm(self) -> Tensor:
        """[] float64"""
        return self.unit * self.squares.sum().sqrt()


def statistics(gradient: Gradient, memo: dict[Any, Any]) -> Statistics:
    """The statistics of a gradient; of the very tensors that ``memo`` knows they are not formed again.

    A tensor counts as changed if its version counter says so; whoever keeps a memo answers for writes that bypass it (``.data``).
    """
    key = tuple(None if g is None else (id(g), g._version) for g in gradient)
    found: Statistics = memo.setdefault(key, Statistics(gradient))  # it keeps the tensors, so that no id comes to mean another
    return found
