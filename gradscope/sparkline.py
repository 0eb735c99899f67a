"""A curve in one line of text: eight levels from the smallest to the largest finite value, one character per value or per stretch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"


def sparkline(values: Sequence[float], width: int, least: float = 0.0) -> str:
    """At most ``width`` characters. A stretch of several values shows their median; one that holds a value that is not finite is
    marked ``×``, so that nothing is smoothed over. A curve that varies by less than ``least`` is flat, at the lowest level."""
    stretches = _stretches(values, width)
    finite = [value for value in stretches if math.isfinite(value)]
    if not finite:
        return NOT_FINITE * len(stretches)
    low, high = min(finite), max(finite)
    unit = high - low if high - low > least else math.inf
    places = [int((value - low) / unit * (len(LEVELS) - 1) + 0.5) if math.isfinite(value) else -1 for value in stretches]
    return "".join(LEVELS[place] if place >= 0 else NOT_FINITE for place in places)


def _stretches(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    return [_median(values[a:b]) for a, b in pairwise(cuts)]


def _median(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
