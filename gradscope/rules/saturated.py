"""What several rules ask first: which share of the batches is saturated. No rule of its own.

Where the probe ran, the share of measured batches whose TRUE loss is under 1e-3 (one softmax each, as the verdict takes it);
elsewhere the share of logged steps whose loss is, which with accumulation is a mean over softmaxes.
"""

from __future__ import annotations

import numpy as np

from gradscope.rules import LOGGED
from gradscope.run_view import Evidence, Unmeasured, View, Window

UNDER = 1e-3


def under_1e3(view: View, least: int) -> Window:
    """0/1 per measured batch or, without readings, per logged step (then at least ``LOGGED`` of them)."""
    series = view.reading("saturation", "below_1e-3", view.term)
    if len(series.values):
        return series.recent(least)
    window = view.column("loss").recent(LOGGED)
    if 0.5 * view.resolution("loss") > UNDER:
        raise Unmeasured(f"{view.rounding('loss')}, and a loss under 1e-3 cannot be told from one above")
    return Window(values=(np.abs(window.values) < UNDER).astype(float), where=window.where)


def share_evidence(view: View, window: Window) -> Evidence:
    what = "measured batches" if window.where.startswith("reading") else "logged steps"
    return window.evidence(f"share of {what} with a loss under 1e-3", window.mean())


def width_evidence(view: View) -> Evidence:
    where = "the run's provenance" if view.kind == "run" else "--width, or the settings that the log holds"
    return Evidence(what="softmax width", value=view.known_width, unit="candidates", where=where)


def anchors_evidence(view: View, least: int) -> Evidence:
    window = view.both("saturation", "rows_below_1e-3", view.term).recent(least)
    return window.evidence("share of anchors with a residual under 1e-3", window.mean())


def scale_words(view: View) -> str:
    """A sentence on what the scale makes of a gap; nothing where no scale was logged."""
    try:
        scale = view.column("scale").recent().median()
    except Unmeasured:
        return ""
    return f" At a scale of {scale:.0f} a gap of 0.1 in cosine is {scale / 10:.1f} logits."


def residual_evidence(view: View, least: int) -> Evidence:
    """As the verdict takes it: by direction the median of the batches' log10 of the mean residual, then the mean of both."""
    series = [s for s in view.directions("residual", "log10_mean", view.term) if len(s.values)]
    if not series:
        view.both("residual", "log10_mean", view.term).recent(least)  # raises, and says what records it
    windows = [s.recent(least) for s in series]
    value = 10 ** (sum(window.median() for window in windows) / len(windows))
    return windows[0].evidence("residual left, median over batches, both directions", value, "probability")
