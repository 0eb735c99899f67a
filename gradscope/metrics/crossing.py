"""When a trace first falls under a threshold, with hysteresis.

The state turns on at the first value under the threshold and off again only at a value above ``release`` times the threshold, so a
trace that wobbles around the line is one crossing and not twenty.
How it can mislead: only measured steps are seen; a crossing at step 6 of a trace read every 5 steps happened in steps 2 ... 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

RELEASE = 3.0


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """``first``: the step at which the state first turned on, or None. ``entries``: how often it did. ``share``: of values spent on.
    ``on``: whether it was on at the end."""

    first: int | None
    entries: int
    share: float
    on: bool


def crossing(steps: Iterable[int], log10_values: Iterable[float], threshold: float, release: float = RELEASE) -> Crossing:
    """Walks a trace of log10 values in the order of its steps. A nan leaves the state as it is."""
    low, high = math.log10(threshold), math.log10(threshold * release)
    on, first, entries, spent, count = False, None, 0, 0, 0
    for step, value in zip(steps, log10_values, strict=True):
        if not on and value < low:
            on, entries = True, entries + 1
            first = step if first is None else first
        elif on and value > high:
            on = False
        spent, count = spent + on, count + 1
    return Crossing(first=first, entries=entries, share=spent / count if count else math.nan, on=on)
