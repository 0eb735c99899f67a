"""The cells of a contrastive loss as one product, and its few positive cells apart.

Off the positives, with v the image rows, t the caption rows, r another encoder's rows of the captions and sg() no gradient:
    live               cosine + margin = v.t + gamma sg(t).sg(t)   = q.k,   q = v + gamma t,      k = t
    frozen, external   cosine + margin = v.t + gamma r.r           = q.k,   q = [v, gamma r],     k = [t, r]
    fixed, centred     the constant c = +-gamma mean(G) on every negative is the same softmax as -c on the positives: it costs nothing
    mean(G)            (|sum of all t|^2 - sum over groups of |sum of the group's t|^2) / (N^2 - sum of n_group^2)
So a margin needs no second product, and no [N, N] store.

The sides (queries q, keys k) are what the blocked kernels see; the positives (the diagonal, or all captions of one record) never enter
them: their logits are formed in float64, one by one.
How it can mislead: on a positive cell q.k is NOT the logit (the positive has no margin); every kernel must leave those cells out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.objectives.margin import MARGINS

#: What may be asked of captions that belong to one record.
SEVERAL = ("exclude", "positives")
#: Rows or pairs that are widened to float64 at a time.
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The sides of the product q k^t whose cells are cosine + margin (less a constant) of the negatives; all detached.

    ``groups`` int64 [N], numbers from 0, or None: cells of rows of equal number are no negatives. The diagonal never is.
    """

    image: Tensor  # [N, D]
    text: Tensor  # [N, D]
    keys: Tensor  # [N, E]: E = D, or D + D0 under a frozen or external margin
    gamma: float  # 0.0 where the product holds no margin
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.image)

    def queries(self, rows: slice) -> Tensor:
        """q of some rows: [n, E]."""
        width = self.image.shape[1]
        if self.keys.shape[1] > width:
            return torch.cat([self.image[rows], self.gamma * self.keys[rows, width:]], dim=1)
        return torch.add(self.image[rows], self.text[rows], alpha=self.gamma) if self.gamma else self.image[rows]


def make_cells(image: Tensor, text: Tensor, gamma: float, margin: str, margin_text: Tensor | None, groups: Tensor | None) -> Cells:
    """The sides for one of ``objectives.margin.MARGINS``; the constant of "fixed" and "centred" is ``constant``."""
    image, text = image.detach().contiguous(), text.detach().contiguous()
    keys = text
    if margin in ("frozen", "external") and gamma:
        assert margin_text is not None
        keys = torch.cat([text, margin_text.detach().to(text.dtype)], dim=1)
    number = None if groups is None else group_numbers(groups)
    return Cells(image=image, text=text, keys=keys, gamma=0.0 if margin == "fixed" else gamma, groups=number)


def constant(text: Tensor, gamma: float, margin: str, groups: Tensor | None) -> Tensor:
    """What the margin adds to every negative beside the product: [] float64; ``MARGINS`` other than two have none."""
    assert margin in MARGINS
    if margin not in ("fixed", "centred") or not gamma:
        return torch.zeros((), dtype=torch.float64, device=text.device)
    return (gamma if margin == "fixed" else -gamma) * caption_mean(text.detach(), groups)


def caption_mean(text: Tensor, groups: Tensor | None = None) -> Tensor:
    """Mean caption cosine [] float64 over the pairs of different groups (each row its own, where there are none); 0 over no pair."""
    number = torch.arange(len(text), device=text.device) if groups is None else group_numbers(groups)
    sums = text.new_zeros(text.shape, dtype=torch.float64)
    for rows in _chunks(len(text)):
        sums.index_add_(0, number[rows], text[rows].double())
    sizes = torch.zeros_like(number).index_add_(0, number, torch.ones_like(number))
    pairs = len(text) ** 2 - (sizes**2).sum()
    return ((sums.sum(dim=0) ** 2).sum() - (sums**2).sum()) / pairs.clamp(min=1)


def group_numbers(groups: Tensor) -> Tensor:
    """Any int64 [N] -> 0, 1, 2 ... for its distinct values in order: int64 [N], without asking the device."""
    ordered, order = groups.sort(stable=True)
    new = torch.ones_like(ordered)
    new[1:] = (ordered[1:] != ordered[:-1]).long()
    return torch.empty_like(groups).scatter_(0, order, new.cumsum(0) - 1)


def positive_pairs(count: int, groups: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positive cells (rows, columns), int64 [K] each, in order of rows: the diagonal, or all cells of equal group."""
    own = torch.arange(count, device=device)
    if groups is None:
        return own, own
    number = group_numbers(groups)
    members = number.argsort(stable=True)
    sizes = torch.bincount(number, minlength=count)
    first = sizes.cumsum(0) - sizes
    mine = sizes[number]  # [N] positives of each row
    rows = own.repeat_interleave(mine)
    within = torch.arange(len(rows), device=device) - (mine.cumsum(0) - mine).repeat_interleave(mine)
    return rows, members[first[number[rows]] + within]


def pair_cosines(image: Tensor, text: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of chosen rows, [K] float64."""
    rows, columns = pairs
    parts = [(image[rows[k]].double() * text[columns[k]].double()).sum(dim=1) for k in _chunks(len(rows))]
    return torch.cat(parts)


def add_pairs(target: Tensor, rows: Tensor, weights: Tensor, source: Tensor, columns: Tensor) -> None:
    """target[rows] += weights * source[columns], pair by pair and in place."""
    for k in _chunks(len(rows)):
        target.index_add_(0, rows[k], weights[k, None].to(target.dtype) * source[columns[k]])


def log_sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """logsumexp of values [K] by index: [count] float64; every index must occur."""
    top = values.new_full((count,), -torch.inf).scatter_reduce(0, index, values, "amax")
    return top + torch.zeros_like(top).index_add_(0, index, (values - top[index]).exp()).log()


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))
