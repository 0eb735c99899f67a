"""The state of a run or a log in one line: how far the loss has gone, which share of batches and anchors is done, and the word for it.

The window and the words are those of ``gradscope.judgement``; of a log without readings the share is that of logged steps, of which
it takes ``LOGGED``. Readings whose gradient is not the one that trains (GS026) are not judged. How it can mislead: the loss is the
trained objective's; where nothing says what is trained it is taken as InfoNCE. This file never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradscope.judgement import NOT_TRAINED, ONE_CANDIDATE, saturation_state
from gradscope.rules import MEASURED, where_measured
from gradscope.rules.gs026_probe_silent import another_direction
from gradscope.rules.saturated import anchors_evidence, under_1e3
from gradscope.run_view import Series, Unmeasured, View


@dataclass(frozen=True, kw_only=True)
class State:
    """``word`` as in ``gradscope.judgement``; the numbers are None where they were not measured. ``numbers`` says them in words."""

    word: str
    numbers: str = ""
    loss: float | None = None
    batches: float | None = None
    anchors: float | None = None


def run_state(view: View) -> State:
    """What can be said of the run as a whole; never raises."""
    if view.width == 1:
        return State(word=ONE_CANDIDATE)
    log10 = view.reading("loss", "log10_true", view.term)
    series = log10 if len(log10.values) else view.column("loss")
    try:
        below = under_1e3(view, MEASURED)
        window = series.recent(MEASURED)
    except Unmeasured as reason:
        return State(word=_too_little(view, series, str(reason)))
    for turned in another_direction(view):
        return State(word=NOT_TRAINED, numbers=f"{turned.what}: {turned.value:.3g}")
    loss = 10 ** window.median() if series is log10 else window.median()
    rows = where_measured(lambda: anchors_evidence(view, MEASURED))
    anchors = rows[0].value if rows else None
    unit = "batches" if series is log10 else "logged steps"
    both = f" and {anchors:.0%} of anchors" if anchors is not None else ""
    where = window.where.rpartition(", ")[2].rstrip(")").replace(" (", ": ")
    rounded = view.resolution("loss") if series is not log10 and loss == 0 else 0.0
    level = f"under {rounded / 2:.0e}" if rounded else f"{loss:.2g}"
    numbers = f"loss {level} nat (median), {below.mean():.0%} of {unit}{both} under 1e-3 ({where})"
    word = saturation_state(below.mean(), math.nan if anchors is None else anchors)
    return State(word=word, numbers=numbers, loss=loss, batches=below.mean(), anchors=anchors)


def _too_little(view: View, series: Series, reason: str) -> str:
    finite = int(sum(math.isfinite(value) for value in series.values))
    if "cannot be told" in reason:
        return f"not to be judged: {reason}"
    unit = "measured batches" if len(view.readings) else "logged steps"
    return f"too few {unit} to judge ({finite})"
