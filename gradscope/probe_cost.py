"""What observing costs a run, expected and measured: time in the probe as a share of the time of the steps without it, by probe set.

    share = sum of probe_seconds / sum of (seconds - probe_seconds)
over all steps but the first of each attempt, whose time is mostly memory got for good; over all, if no later step was probed.
By set: the quantities of that set which the smaller ones lack, and what only they need (full: the copy of the weights and the other
objective's backward). The objectives at the embeddings, moving the readings to the host and writing them count with ``loss``.

How it can mislead: seconds are the host's, so on a GPU the kernels of one part may be waited for in another; what the probe does to
caches is in no part.
"""

from __future__ import annotations

from gradscope.judgement import two_digits
from gradscope.quantities import SETS, quantities
from gradscope.runlog import Run

#: Parts of the probe's time that are no quantity, and the set that needs them; others (heads, flush, write) belong to every set.
_PARTS = {"update": "full", "second backward": "full"}


def cost_by_set(run: Run) -> dict[str, float]:
    """Set -> share of plain step time; sets without time in them are left out. They add up to the whole.

    Raises:
        ValueError: the run has no step with a duration.
    """
    steps = run.steps
    if steps.empty or "probe_seconds" not in steps:
        raise ValueError(f"{run.path} has no steps timed with the probe; run gradscope train with --log-grads to record them.")
    readings = run.readings
    parts = readings[(readings["quantity"] == "probe") & (readings["unit"] == "s")]
    later = steps[steps["step"] > steps.groupby("attempt")["step"].transform("min")]
    timed = later if later["step"].isin(parts["step"]).any() else steps
    parts = parts[parts["step"].isin(timed["step"])]
    plain = float((timed["seconds"] - timed["probe_seconds"]).sum())
    seconds = parts["value"].astype(float).groupby(parts["key"].map(_set_of)).sum()
    whole = float(timed["probe_seconds"].sum())
    by_set = {name: float(seconds.get(name, 0.0)) for name in SETS}
    by_set["loss"] += whole - sum(by_set.values())  # writing: timed too late to be a reading
    return {name: value / plain for name, value in by_set.items() if value > 0}


def _set_of(part: str) -> str:
    if part in quantities:
        return str(quantities[part].tier)
    return _PARTS.get(part, "loss")


def cost_sentence(run: Run) -> str:
    """One line for the end of a training run."""
    shares, probe = cost_by_set(run), run.recipe["probe"]
    budget = f", budget {probe['budget']}" if probe.get("budget") else ""
    every = "at every step" if probe["every"] == 1 else f"every {probe['every']} steps"
    parts = ", ".join(f"{name} {two_digits(share)}" for name, share in shares.items())
    return (
        f"Observing took {two_digits(sum(shares.values()))} of the time of the steps without it "
        f"(set {probe.get('set', 'full')}, {every}{budget}), by set: {parts or 'nothing was timed'}."
    )
