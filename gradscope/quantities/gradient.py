"""The full-parameter gradient of each objective at the same parameters and on the same batch (the paper's Figure 4b).

    norm, log10_norm, max_abs     over all trainable parameters, by objective; norm.<tower>, norm.<tower>.<block> of its parts
    pair: ratio, log10_ratio      norm of HN / norm of InfoNCE
    pair: cosine                  between the two gradients

Squares are formed and summed in float64 (``gradscope.metrics.gradients``).
The second objective costs one more backward pass through the towers.
How to read: ratio 1e4 with cosine .5 says that HN still moves the model where InfoNCE has stopped, in a related direction.
How it can mislead: Adam divides the size away: see ``optimizer``. The norm of ONE micro-batch is not the norm of the step's average
gradient: see ``accumulation``. A large HN norm can come from the margin's constant alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.gradients import cosine_between, statistics
from gradscope.quantities import quantities
from gradscope.types import Reading, Step

_IMAGE = re.compile(r"visual|vision|image|audio")
_BLOCK = re.compile(r"\.(?:resblocks|layers|layer|blocks|h)\.(\d+)\.")


@quantities.register("gradient")
@dataclass(frozen=True, kw_only=True)
class Gradient:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("param_grads",)

    def __call__(self, step: Step) -> list[Reading]:
        readings, norms = [], {}
        parts = parts_of(step.names, step.towers)
        for name, head in step.heads.items():
            if head.param_grads is None:
                continue
            found = statistics(head.param_grads, step.memo)
            unit = found.unit * head.param_factor
            norms[name] = found.norm * head.param_factor
            values = {"norm": norms[name], "log10_norm": norms[name].log10(), "max_abs": found.largest.double() * head.param_factor}
            for part, indices in parts.items():
                own = torch.stack([found.squares[i] for i in indices])  # squares[indices] would send the list to a GPU, and wait for it
                values[f"norm.{part}"] = unit * own.sum().sqrt()
            readings += [
                Reading(quantity="gradient", key=key, term=name, value=value, unit="log10" if "log10" in key else "nat / weight")
                for key, value in values.items()
            ]
        if len(norms) == 2:
            readings += _pair(step, norms)
        return readings


def _pair(step: Step, norms: dict[str, Tensor]) -> list[Reading]:
    grads = [step.heads[name].param_grads for name in ("infonce", "hn")]
    found = [statistics(gradient, step.memo) for gradient in grads if gradient is not None]
    ratio = norms["hn"] / norms["infonce"]
    values = {"ratio": ratio, "log10_ratio": ratio.log10(), "cosine": cosine_between(*found)}
    units = {"ratio": "ratio", "log10_ratio": "log10", "cosine": "cosine"}
    return [Reading(quantity="gradient", key=k, term="pair", value=v, unit=units[k]) for k, v in values.items()]


def tower_of(name: str) -> str:
    """image, text or scale, by the name of a parameter; what names no tower is of the text's, as in open_clip."""
    return "scale" if "logit_scale" in name or "log_scale" in name else "image" if _IMAGE.search(name) else "text"


def parts_of(names: Sequence[str], towers: Sequence[str]) -> dict[str, list[int]]:
    """Parameter names and their towers ("image", "text", "shared", "scale") -> indices by tower and by block ("image.block03")."""
    parts: dict[str, list[int]] = {}
    for index, (name, tower) in enumerate(zip(names, towers, strict=True)):
        parts.setdefault(tower, []).append(index)
        block = _BLOCK.search(name)
        if block:
            parts.setdefault(f"{tower}.block{int(block.group(1)):02d}", []).append(index)
    return parts
