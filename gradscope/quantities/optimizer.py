"""Does the optimizer see the gradient? Adam's normalised step, and the update really applied.

With Adam's bias-corrected moments m_hat, v_hat (after this step) over all entries:
    step_q10, step_q50, step_q90, step_q99    quantiles of |m_hat| / (sqrt(v_hat) + eps): 1 is a full step of the learning rate
    eps_dominated                 share of entries with sqrt(v_hat) < eps: their steps shrink by about g / eps
    stale                         share of entries with 0 < |g| < sqrt(v_hat) / 100: the memory of larger gradients mutes this one
    update_ratio.<tower>          norm(weights after - before) / norm(weights before), as applied (decay and clipping included)

Quantiles come from sixteen bins an octave, so they are right to 3 %; 0 stands for anything below 2^-126, and nan sizes are the
largest. Under FSDP each rank reads its shard and the counts are added. A normal distribution of gradients has a stale share of about
0.8 %; half of v's memory is ln 2 / (1 - beta2) steps old, 693 at .999.
Source: Adam (Kingma and Ba, 2015); paper facts, section 7.2. How it can mislead: early steps have little memory, so stale starts low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.distributed import local, summed
from gradscope.metrics.counting import counts_of
from gradscope.metrics.gradients import PIECE, change_and_size, pieces
from gradscope.quantities import quantities
from gradscope.quantities.gradient import parts_of
from gradscope.types import Reading, Step

QUANTILES = (0.10, 0.50, 0.90, 0.99)
STALE = 100.0

#: A bin of sizes is a float32 with all but its exponent and the first four bits of its fraction cut off.
_CUT = 23 - 4
BINS = 1 << 12


@quantities.register("optimizer")
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    phase: ClassVar[str] = "update"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("before",)

    def __call__(self, step: Step) -> list[Reading]:
        values = _adam(step)
        assert step.before is not None
        for part, indices in parts_of(step.names, step.towers).items():
            if "." in part:
                continue
            before = [local(step.before[i]) for i in indices]
            after = [local(step.parameters[i].detach()) for i in indices]
            change, size = change_and_size(after, before)
            if step.sharded:
                change, size = summed(torch.stack([change, size]).square()).sqrt()
            values[f"update_ratio.{part}"] = change / size
        return [Reading(quantity="optimizer", key=k, term="total", value=v, unit=_unit(k)) for k, v in values.items()]


def _unit(key: str) -> str:
    return "learning rates" if key.startswith("step_q") else "ratio" if key.startswith("update") else "share"


def _adam(step: Step) -> dict[str, Tensor]:
    """Moments are read where an Adam keeps them; an optimizer without them has no normalised step: {}."""
    assert step.optimizer is not None
    assert step.accumulated is not None
    gradients = {id(p): g for p, g in zip(step.parameters, step.accumulated, strict=True)}  # ``.grad`` itself may be gone by now
    device = step.embeddings.text.device
    counts = torch.zeros(BINS, dtype=torch.int64, device=device)
    scratch = _Scratch()
    found: list[Tensor] = []  # of each piece: eps-dominated, stale
    entries = 0
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            state = step.optimizer.state.get(parameter, {})
            gradient = gradients.get(id(parameter))
            if "exp_avg_sq" not in state or gradient is None:
                continue
            first, second = (1 - beta ** state["step"] for beta in group["betas"])  # the bias corrections
            square, eps, stale = first**2 / second, first * group["eps"], first * STALE * step.unscale
            moments = (pieces(local(state[name])) for name in ("exp_avg", "exp_avg_sq"))
            for m, v, g in zip(*moments, pieces(gradient), strict=True):
                root, size, mark = (buffer[: v.numel()] for buffer in scratch.of(v))
                torch.mul(v.to(root.dtype), square, out=root).sqrt_()  # first * sqrt(v_hat): one pass less than correcting each moment
                below = torch.lt(root, eps, out=mark).sum()
                found.append(torch.stack([below, _stale(g, root, stale, size, mark)]))
                counts += _binned(torch.div(m.to(root.dtype), root.add_(eps), out=size))
                entries += root.numel()
    if not found:
        return {}
    totals = torch.cat([torch.stack(found).sum(dim=0).double(), torch.full_like(counts[:1], entries).double(), counts.double()])
    stated, counts = (summed(totals) if step.sharded else totals).split([3, BINS])
    values = dict(zip((f"step_q{round(100 * q)}" for q in QUANTILES), _quantiles(counts), strict=True))
    return {**values, "eps_dominated": stated[0] / stated[2], "stale": stated[1] / stated[2]}


class _Scratch:
    """Three buffers of a piece, used for all of them: to get memory anew for each takes longer than to fill it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def of(self, piece: Tensor) -> Tensor:
        """[3, PIECE] where the piece is, fp32 or wider."""
        key = (piece.device, torch.promote_types(piece.dtype, torch.float32))
        if key not in self._buffers:
            self._buffers[key] = torch.empty(3, PIECE, dtype=key[1], device=key[0])
        return self._buffers[key]


def _stale(gradient: Tensor, root: Tensor, factor: Tensor, size: Tensor, mark: Tensor) -> Tensor:
    """[] number of entries with 0 < |g| * factor < root; ``size`` and ``mark`` are overwritten.

    Comparisons fill a float tensor, whose sum is many times faster than that of booleans.
    """
    torch.mul(gradient.to(size.dtype), factor, out=size).abs_()
    return torch.dot(torch.lt(size, root, out=mark), size.sign_())


def _binned(sizes: Tensor) -> Tensor:
    """A piece's sizes (overwritten) as counts [BINS], from the bits of the floats: no logarithm is taken."""
    return counts_of(sizes.float().abs_().view(torch.int32).bitwise_right_shift_(_CUT), BINS)


def _quantiles(counts: Tensor) -> Tensor:
    """Counts [BINS] float64 -> the geometric centres of the bins that hold QUANTILES; 0 for sizes below 2^-126, nan for nan."""
    edges = (torch.arange(BINS, dtype=torch.int32, device=counts.device) << _CUT).view(torch.float32).double()
    centres = (edges[:-1] * edges[1:]).sqrt()
    cumulative = counts.cumsum(0) / counts.sum()
    places = torch.stack([(cumulative < q).sum() for q in QUANTILES]).clamp(max=BINS - 2)
    return centres.gather(0, places)
