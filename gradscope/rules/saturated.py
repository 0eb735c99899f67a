"""What several rules ask first: which share of the batches is saturated. No rule of its own.

Where the probe ran, the share of measured batches whose TRUE loss is under 1e-3 (one softmax each, as the verdict takes it);
elsewhere the share of logged steps whose loss is, which with accumulation is a mean over softmaxes.
"""

from __future__ import annotations

import numpy as np

from gradscope.rules import LOGGED
from gradscope.run_view import PROBE, Evidence, Unmeasured, View, Window

UNDER = 1e-3


def under_1e3(view: View, least: int) -> Window:
    """0/1 per measured batch or, without readings, per logged step (then at least ``LOGGED`` of them)."""
    series = view.reading("saturation", "below_1e-3", view.term)
    if len(series.values):
        return series.recent(least)
    window = view.column("loss").recent(LOGGED)
    return Window(values=(np.abs(window.values) < UNDER).astype(float), where=window.where)


def share_evidence(view: View, window: Window) -> Evidence:
    what = "measured batches" if window.where.startswith("reading") else "logged steps"
    return window.evidence(f"share of {what} with a loss under 1e-3", window.mean())


def width_evidence(view: View) -> Evidence:
    where = "the run's provenance" if view.kind == "run" else "--width, or params.txt beside the log"
    return Evidence(what="softmax width", value=view.known_width, unit="candidates", where=where)


def residual_evidence(view: View, least: int) -> Evidence:
    """As the verdict takes it: by direction the median of the batches' log10 of the mean residual, then the mean of both."""
    series = [s for s in view.directions("residual", "log10_mean", view.term) if len(s.values)]
    if not series:
        raise Unmeasured(f"reading residual/log10_mean is not in the log; {PROBE}")
    windows = [s.recent(least) for s in series]
    value = 10 ** (sum(window.median() for window in windows) / len(windows))
    return windows[0].evidence("residual left, median over batches, both directions", value, "probability")
