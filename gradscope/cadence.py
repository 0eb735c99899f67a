"""How often to look, so that looking costs no more than its budget: ``--probe-budget 2%``.

Time is counted in plain steps: a probed step costs r = (seconds in the probe) / (seconds of a step without it). A block is a probed
step and the steps up to the next one. Its length is the smallest of a coarse grid with
    r + debt <= budget * every,    never below ``densest``
so that each whole block keeps the budget; r is the cost of the block's own probed step, known when its length is chosen. Where a
loop becomes faster within a block, its cost turns out too high: that is the debt, which the next blocks pay off. What a block spent
too little is not saved up. A longer block is taken at once; a shorter one only if it is shorter by a quarter, so that the noise of
a clock does not move it. The first block has at least ``FIRST`` steps, since the first step is no measure of the others (memory is
got then).

Deterministic: same costs, same cadence. How it can mislead: on a GPU the seconds are the host's. A budget thins what is recorded: rare
events, such as one saturated batch in fifty, are then seen late or never; no reading tells what was not looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Steps of the first block, at least.
FIRST = 10
#: A cadence is lowered only below this share of the one in force.
LOWER = 0.75
#: Cadences are 1, 2, 3, ... 10, 12, 15, 20, ... 100, 120, ...: these, times powers of ten.
_GRID = (10, 12, 15, 20, 25, 30, 40, 50, 60, 80)


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The cadence in force. ``after_probe`` is the next one.

    Args:
        budget: share of a plain step's time, 0 < budget < 1.
        densest: never probe more often than every so many steps.
        every: steps of the block that has begun; 0 before the first.
        debt: plain steps that past blocks have cost beyond their budget.
    """

    budget: float
    densest: int = 1
    every: int = 0
    debt: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.budget < 1
        assert self.densest >= 1

    def after_probe(self, cost: float, over: float = 0.0) -> Cadence:
        """The cadence of the block that begins with a probed step of this cost.

        ``over`` is what the block before has cost beyond its budget (negative if less). Both in plain steps.
        """
        debt = max(0.0, self.debt + over)
        wanted = _on_grid(max(self.densest, math.ceil((cost + debt) / self.budget - 1e-9)))
        if self.every == 0:
            wanted = max(wanted, FIRST)
        keep = LOWER * self.every <= wanted <= self.every
        return replace(self, every=self.every if keep else wanted, debt=debt)


def _on_grid(least: int) -> int:
    """The smallest cadence of the grid that is at least ``least``."""
    if least <= 10:
        return least
    power = 10 ** (len(str(least)) - 2)
    return next((step * power for step in _GRID if step * power >= least), 100 * power)


@dataclass(kw_only=True)
class Ledger:
    """Seconds of the block that is under way: what its probed step cost, and its steps without the probe.

    On several processes each keeps its own; ``Cadence`` is given the largest cost of all (see the step reader).
    """

    probed: float = 0.0
    plain: float = 0.0
    steps: int = 0

    def add(self, seconds: float, inside: float) -> None:
        """One step: its whole duration, and the part of it that was spent in the probe."""
        self.probed += inside
        self.plain += max(seconds - inside, 0.0)
        self.steps += 1

    @property
    def share(self) -> float:
        """Time in the probe in units of the rest; nan before any time has passed."""
        return self.probed / self.plain if self.plain > 0 else math.nan


def percent(value: object) -> str:
    """A budget, "2%" or "0.02" or 0.02, as "2%". Raises ValueError unless it is above 0 and below 100 %."""
    text = str(value).strip()
    try:
        number = float(text[:-1]) if text.endswith("%") else 100 * float(text)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not 0 < number < 100:
        raise ValueError(
            "the budget of the probe (--probe-budget) is a share of a step's time above 0 and below 100 %, such as 2% or 0.02; "
            f"got {value!r}"
        )
    return f"{number:.6g}%"


def share(budget: str) -> float:
    """ "2%" -> 0.02"""
    return float(budget.rstrip("%")) / 100
