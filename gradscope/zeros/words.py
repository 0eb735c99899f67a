"""Zero accounting in words, and as plain rows for JSON and CSV."""

from __future__ import annotations

from typing import Any

from gradscope.metrics.zero_causes import CAUSES
from gradscope.zeros.accounting import Accounting, Tally
from gradscope.zeros.encoder_batch import ZeroBatch

#: What each cause says of an entry.
MEANING = {
    "frozen": "belong to parameters that do not train",
    "unused": "belong to parameters that the loss does not reach",
    "structural": "are structural: this batch cannot reach them",
    "dead_unit": "belong to dead units: no activation, or no gradient from above",
    "dtype_underflow": "are lost in this pass's dtype",
    "saturation_underflow": "are too small even for the next wider dtype: the objective is saturated",
    "unexplained": "are zero in every pass",
}


def explanation(found: Accounting) -> str:
    """Whether the pass overflows; what explains the zeros, the largest cause first; what a loss scale would do; what Adam mutes."""
    total = found.total()
    return " ".join(part for part in (_overflow(total), _causes(total), _remedy(found, total), _unseen(total)) if part)


def _overflow(total: Tally) -> str:
    """First of all: where a pass overflows, its zeros are no guide to a pass that does not."""
    lost = share(total.non_finite, total.entries)
    return f"The pass overflows: {lost} of all entries are inf or nan, and the rest is no guide." if total.non_finite else ""


def _causes(total: Tally) -> str:
    zeros = total.zero_entries
    if not zeros:
        return f"None of {total.entries:,} entries is exactly zero."
    ranked = sorted((cause for cause in CAUSES if total.zeros[cause]), key=lambda cause: -total.zeros[cause])
    parts = [f"{share(total.zeros[cause], zeros)} {MEANING[cause]}" for cause in ranked]
    return f"{share(zeros, total.entries)} of {total.entries:,} entries are exactly zero. Of these, {'; '.join(parts)}."


def share(part: int, whole: int) -> str:
    """Four digits, and no 100 % or 0 % that is not one; "-" of nothing."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "<0.01 %"
    if 99.99 < percent < 100:
        return ">99.99 %"
    return f"{percent:.2f} %".replace(".00 %", " %")


def _remedy(found: Accounting, total: Tally) -> str:
    underflow = total.zeros["dtype_underflow"]
    if total.non_finite or not total.zero_entries:
        return ""
    if not underflow and not total.zeros["saturation_underflow"]:
        return "Nothing here speaks of precision or saturation."
    if not underflow:
        return "A loss scale cannot give these entries a direction worth having: widen the softmax, or change the objective."
    if not total.comes_back:
        return "No loss scale brings any of the dtype underflow back: it is rounding, or lies beyond every factor."
    back = share(total.comes_back, underflow)
    rest = "" if total.comes_back == underflow else "; the rest is rounding, or lies beyond every factor"
    return (
        f"With the largest loss scale that overflows nowhere, 2^{found.exponent}, {back} of the dtype underflow would come back{rest}."
    )


def _unseen(total: Tally) -> str:
    """What table B adds, where it adds something."""
    words = {"eps_dominated": "are small against Adam's eps", "stale": "are under a hundredth of their remembered size"}
    found = [(total.invisible.get(key, 0), says) for key, says in words.items()]
    parts = [f"{share(count, total.entries - total.zero_entries)} {says}" for count, says in found if count]
    return f"Of the non-zero entries, {', '.join(parts)}." if parts else ""


def as_dict(tally: Tally) -> dict[str, Any]:
    return {
        "entries": tally.entries,
        "zero_entries": tally.zero_entries,
        "zeros": dict(tally.zeros),
        "of_structural_key_bias": tally.key_bias,
        "of_dtype_underflow_comes_back": tally.comes_back,
        "invisible": dict(tally.invisible),
        "non_finite": tally.non_finite,
        "contradicted": tally.contradicted,
    }


def content(found: ZeroBatch) -> dict[str, Any]:
    """The whole answer for a JSON file."""
    accounting = found.accounting
    return {
        "encoder": found.encoder,
        "data": found.data,
        "split": found.split,
        "width": found.width,
        "precision": found.precision,
        "objective": found.objective,
        "loss_scale": accounting.loss_scale,
        "loss": accounting.loss,
        "largest_finite_factor_log2": accounting.exponent,
        "references": [str(dtype).removeprefix("torch.") for dtype in accounting.references],
        "explanation": explanation(accounting),
        "notes": list(accounting.notes),
        "total": as_dict(accounting.total()),
        "towers": {group: as_dict(accounting.total(group)) for group in accounting.groups},
        "tensors": [{"name": t.name, "tower": t.group, **as_dict(t.tally)} for t in accounting.tensors],
    }


def rows(accounting: Accounting) -> list[dict[str, Any]]:
    """One flat row per tensor for a CSV file."""
    return [
        {
            "name": t.name,
            "tower": t.group,
            "entries": t.tally.entries,
            **t.tally.zeros,
            "of_structural_key_bias": t.tally.key_bias,
            "of_dtype_underflow_comes_back": t.tally.comes_back,
            **t.tally.invisible,
            "non_finite": t.tally.non_finite,
            "contradicted": t.tally.contradicted,
        }
        for t in accounting.tensors
    ]
