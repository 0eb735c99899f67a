"""Which setting records a reading, in this kind of run: a flag of ``gradscope train``, an argument of ``gradscope.Probe``, or the probe
itself for the log of another tool. Words for what was too little to look at.

How it can mislead: the setting is the one that is missing as far as the log tells; a quantity that failed is in console.log instead.
This file never imports torch, so it holds the set of each quantity that rules and gates read a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.types import NEED_CELLS

#: Named probe sets, each holding those before it.
SETS = ("loss", "default", "full")
#: quantity -> the smallest set that holds it.
TIERS = {
    **dict.fromkeys(("gap", "hooks", "loss", "residual", "saturation", "scale"), "loss"),
    **dict.fromkeys(("accumulation", "captions", "false_negatives", "zeros"), "default"),
    **dict.fromkeys(("gradient", "optimizer"), "full"),
}
CAPTIONS = ("captions", "false_negatives")


def recorded_by(quantity: str, key: str, recipe: Mapping[str, Any], *, kind: str, own: bool, streamed: bool = False) -> str:
    """The setting, as a clause; "" where none is known to be missing.

    Args:
        quantity, key: of the reading, e.g. "zeros", "entries.parameters".
        recipe: tables of the run's settings; {} of a log.
        kind, own: as of ``gradscope.run_view.View``.
        streamed: whether the softmax of that run was.
    """
    needed = _smallest_set(quantity, key, recipe)
    if kind != "run":
        given = 'probe_set="full"' if needed == "full" else ""
        return f"gradscope.Probe({given}) in that loop records it"
    probe = recipe.get("probe", {})
    there = probe.get("set", "full") if own else probe.get("set", "default")
    wider = SETS.index(needed) > SETS.index(there) if there in SETS else False
    words = _flags(quantity, key, probe, needed, wider) if own else _arguments(quantity, key, needed, wider)
    if streamed and (quantity in NEED_CELLS or key.startswith(("positive_zero", "loss_zero"))):
        words.append("--kernel dense" if own else 'Probe(kernel="dense")')
    return f"{' and '.join(words)} record{'s' * (len(words) == 1)} it" if words else ""


def _smallest_set(quantity: str, key: str, recipe: Mapping[str, Any]) -> str:
    """The first of ``SETS`` in which the reading is."""
    if quantity == "zeros" and (".parameters" in key or key.startswith("naive")):
        return "full"
    if quantity == "hooks" and recipe.get("objective", {}).get("name") == "other":
        return "default"  # the set "loss" forms no gradient of an objective that is not trained
    return TIERS.get(quantity, "full")


def measured_by(recipe: Mapping[str, Any], *, own: bool) -> str:
    """What makes more measured batches of a run, as a clause."""
    every = recipe.get("probe", {}).get("every", 1) > 1 or recipe.get("probe", {}).get("budget")
    return "a longer run" + (f", or {'--probe-every 1' if own else 'Probe(every=1)'}," * bool(every)) + " measures enough batches"


def _flags(quantity: str, key: str, probe: Mapping[str, Any], needed: str, wider: bool) -> list[str]:
    words = [] if probe.get("log_grads") else ["--log-grads"]
    words += [f"--probe-set {needed}"] * wider
    words += ["--scale learn"] * ((quantity, key) == ("scale", "at_limit") and bool(probe.get("log_grads")))
    return words


def _arguments(quantity: str, key: str, needed: str, wider: bool) -> list[str]:
    words = [f'Probe(probe_set="{needed}")'] * wider
    lengths = ", lengths=..." if key == "truncated" else ""
    words += [f"probe.watch(..., captions=...{lengths})"] * (quantity in CAPTIONS)
    words += ["Probe(scale_max=...)"] * ((quantity, key) == ("scale", "at_limit"))
    return words
