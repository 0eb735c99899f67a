"""All gradient entries of a step by size and sign, over thirty decades, by tower: what a norm and a zero share leave out.

    counts.<tower>                          a list of octaves: negative by falling size, exact zeros, positive by rising size
                                            (bins: ``gradscope.metrics.octaves``; drawn by ``gradscope figure sketch``)
    log10_q1, _q10, _q50, _q90, _q99        log10 of the quantiles of |g| over finite non-zero entries, right to 0.026
    zero, positive, nonfinite               share of exact zeros among all entries; of positive among finite non-zero ones; number of
                                            entries that are inf or nan

Of the averaged gradient of the step, before clipping, unscaled. Source: ``gradscope.metrics.signed_log``.
How to read: a body that moves left by a decade an epoch is a gradient that dies; a second hump left of the first is a part of the
model that is hardly reached; a cliff at 6e-8 is fp16.
How it can mislead: most entries are small and count as much as the few that make up the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.distributed import summed
from gradscope.metrics import signed_log
from gradscope.quantities import quantities
from gradscope.quantities.gradient import parts_of
from gradscope.types import Reading, Step

QUANTILES = {"q1": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
TOWERS = ("image", "text")


@quantities.register("sketch")
@dataclass(frozen=True, kw_only=True)
class Sketch:
    phase: ClassVar[str] = "step"
    tier: ClassVar[str] = "full"

    def __call__(self, step: Step) -> list[Reading]:
        assert step.accumulated is not None
        readings = []
        parts = parts_of(step.names, step.towers)
        for tower in TOWERS:
            if tower not in parts:  # frozen
                continue
            gradient = [_unscaled(step.accumulated[i], step.unscale) for i in parts[tower]]
            counts = signed_log.sketch(gradient, step.embeddings.text.device)
            readings += _readings(tower, summed(counts) if step.sharded else counts)
        return readings


def _unscaled(gradient: Tensor | None, factor: Tensor | float) -> Tensor | None:
    return gradient if gradient is None or (isinstance(factor, float) and factor == 1.0) else gradient * factor


def _readings(tower: str, counts: Tensor) -> list[Reading]:
    sizes = signed_log.quantiles(counts, tuple(QUANTILES.values())).log10()
    finite = signed_log.sizes(counts).sum().double()
    values: dict[str, tuple[Tensor, str]] = {"counts": (signed_log.picture(counts), "entries")}
    values |= {f"log10_{name}": (sizes[i], "log10 nat / weight") for i, name in enumerate(QUANTILES)}
    values["zero"] = (signed_log.zeros(counts) / counts.sum().double(), "share")
    values["positive"] = (torch.where(finite > 0, signed_log.positive(counts) / finite, torch.nan), "share")
    values["nonfinite"] = (signed_log.nonfinite(counts), "entries")
    return _named(tower, values)


def _named(tower: str, values: dict[str, tuple[Tensor, str]]) -> list[Reading]:
    return [
        Reading(quantity="sketch", key=f"{key}.{tower}", term="total", value=value, unit=unit) for key, (value, unit) in values.items()
    ]
