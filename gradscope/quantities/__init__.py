"""One finished step -> readings. One file, one quantity.

A quantity is a frozen dataclass with two class variables beside its settings:
    phase    "batch" (after the measured batch's backward), "step" (after the last backward), "update" (after the optimizer's step)
    tier     the smallest named set that holds it; each set holds the smaller ones too
                 loss       what the scores of the measured batch say; no pass over the parameters
                 default    plus the captions, the zeros up to the embeddings, and one pass over the averaged gradient
                 full       everything: the full gradient by objective, the optimizer's state, the update, geometry
and, where it needs more than that, ``needs``: "before" (a copy of the parameters ahead of the update), "param_grads" (the heads'
gradients over all parameters).
"""

from __future__ import annotations

from typing import Any

from gradscope.registry import Registry, unknown_name

quantities: Registry = Registry("quantity", "gradscope.quantities")

#: Named probe sets, each holding those before it.
SETS = ("loss", "default", "full")


def quantity_set(name: str) -> dict[str, Any]:
    """The quantities of a named set, with their defaults. Raises ValueError for an unknown name."""
    if name not in SETS:
        raise ValueError(unknown_name("probe set", name, list(SETS)))
    held = SETS[: SETS.index(name) + 1]
    return {key: component() for key, component in quantities if component.tier in held}
