"""One finished step -> readings. One file, one quantity.

A quantity is a frozen dataclass with two class variables beside its settings:
    phase    "batch" (after the measured batch's backward), "step" (after the last backward), "update" (after the optimizer's step)
    tier     the smallest named set that holds it; each set holds the smaller ones too
                 loss       what the scores of the measured batch say; no pass over the parameters, and no gradient of an objective
                            that is not trained: alone, such quantities find None there
                 default    plus the captions, the zeros up to the embeddings, and one pass over the averaged gradient
                 full       everything: the full gradient by objective, the optimizer's state, the update, geometry
and, where it needs more than that, ``needs``, of the closed list ``NEEDS``:
    before           a copy of the parameters ahead of the update
    param_grads      the heads' gradients over all parameters
    direction_grads  each direction's own part of the logit gradient
    cells            the [N, N] scores. At wide widths the softmax is streamed and has none: the quantity is left out there, and the
                     reader says so. A quantity that loses only a part names that part in ``left_out`` instead
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.registry import Registry, unknown_name

NEEDS = ("before", "param_grads", "direction_grads", "cells")

quantities: Registry = Registry("quantity", "gradscope.quantities")

#: Named probe sets, each holding those before it.
SETS = ("loss", "default", "full")


def quantity_set(name: str) -> dict[str, Any]:
    """The quantities of a named set, with their defaults. Raises ValueError for an unknown name."""
    if name not in SETS:
        raise ValueError(unknown_name("probe set", name, list(SETS)))
    held = SETS[: SETS.index(name) + 1]
    return {key: component() for key, component in quantities if component.tier in held}


def needs(quantity: Any, what: str) -> bool:
    """Whether a quantity needs ``what``, one of ``NEEDS``."""
    return what in getattr(quantity, "needs", ())


def needs_gradients(quantity: Any) -> bool:
    """Whether a quantity may look at the gradient of an objective that is not trained: those of the tier "loss" do not."""
    return getattr(quantity, "tier", "") != "loss" or needs(quantity, "param_grads") or needs(quantity, "direction_grads")


def left_out_words(held: Mapping[str, Any], width: int) -> str:
    """What of a set is not read where the softmax is streamed: which and why, in a sentence; "" where nothing is lost."""
    lost = [name for name, quantity in held.items() if needs(quantity, "cells")]
    lost += [f"parts of {name}" for name, quantity in held.items() if getattr(quantity, "left_out", "")]
    if not lost:
        return ""
    megabytes = width * width * 4 / 2**20
    size = f", at {megabytes:.0f} MB a matrix" if megabytes >= 1 else ""
    return (
        f"the softmax over {width} is streamed, without single cells; not read: {', '.join(lost)} "
        f'(--kernel dense, in a Probe kernel="dense", reads all{size}; docs/streaming.md)'
    )
