"""The step as a whole: what its micro-batches add up to.

    mean_loss             mean over micro-batches of the total loss, as trained (nat); no reading where the loop does not hand it over
    norm, log10_norm      of the averaged gradient over all parameters, before clipping
    norm_clipped          of what the optimizer was handed; a reading only in a loop that is not ours and may have clipped by then
    norm_by_rank          of each rank's own gradient of the measured micro-batch, before averaging (DDP only)
    entries_zero          share of exactly zero entries of the gradient that the optimizer was handed

Averaged over ranks under DDP; under FSDP each rank counts its shard and the sums are added. Gradients are unscaled.
How it can mislead: with narrow accumulation this is an average of small softmaxes, not the gradient of one wide softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.distributed import summed
from gradscope.metrics.gradients import norm_over_ranks, present, statistics
from gradscope.quantities import quantities
from gradscope.types import Reading, Step


@quantities.register("accumulation")
@dataclass(frozen=True, kw_only=True)
class Accumulation:
    phase: ClassVar[str] = "step"
    tier: ClassVar[str] = "default"

    def __call__(self, step: Step) -> list[Reading]:
        assert step.accumulated is not None
        handed = norm_over_ranks(step.accumulated, step.sharded, step.memo) * step.unscale
        norm = handed if step.norm_before_clipping is None else step.norm_before_clipping
        values = {
            "norm": (norm, "nat / weight"),
            "log10_norm": (norm.log10(), "log10"),
            "entries_zero": (_zero_share(step), "share"),
        }
        if step.micro_losses is not None:
            values["mean_loss"] = (step.micro_losses.double().mean(), "nat")
        if step.norm_before_clipping is not None:
            values["norm_clipped"] = (handed, "nat / weight")
        return [Reading(quantity="accumulation", key=key, term="total", value=v, unit=unit) for key, (v, unit) in values.items()]


def _zero_share(step: Step) -> Tensor:
    assert step.accumulated is not None
    zeros = statistics(step.accumulated, step.memo).zeros.sum().double()
    entries = torch.full_like(zeros, float(sum(g.numel() for g in present(step.accumulated))))
    both = torch.stack([zeros, entries])
    both = summed(both) if step.sharded else both
    return both[0] / both[1]
