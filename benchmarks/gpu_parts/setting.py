"""What all sections share: the device, the clock, and arms that are timed in turn, with what could not run as a row of its own."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Row = dict[str, Any]
Arm = Callable[[], object]

#: An arm that is shorter is called several times for one reading.
SHORTEST = 0.02
MOST_CALLS = 50


@dataclass(kw_only=True)
class Clock:
    """``seconds`` for all sections; each ends at its cumulative share, so that what one leaves over the later ones have."""

    seconds: float
    shares: Mapping[str, float]
    start: float = field(default_factory=time.perf_counter)
    end: float = math.inf
    left_out: list[str] = field(default_factory=list)

    def open(self, section: str) -> None:
        names = list(self.shares)
        passed = sum(self.shares[name] for name in names[: names.index(section) + 1])
        self.end = self.start + self.seconds * passed / sum(self.shares.values())

    def took(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def allows(self, what: str) -> bool:
        """Whether there is time; what there is none for is noted."""
        if time.perf_counter() < self.end:
            return True
        self.left_out.append(what)
        return False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how large."""

    device: torch.device
    clock: Clock
    tiny: bool = False
    rounds: int = 5
    seed: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Gives back what nobody holds any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Peak bytes of tensors since the last call; then the peak is what is there now."""
        if not self.cuda:
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def compare(setting: Setting, case: str, arms: Mapping[str, Arm], reference: str, *, ours: Sequence[str] = ()) -> Iterator[Row]:
    """Rows (case, arm, seconds, ratio, low, high, memory_mb, note): the arms take turns, in an order drawn anew each round.

    An arm that cannot run is a row with a note; if it is one of ``ours``, it is a failure too. The first call of each builds and is not
    timed. ``memory_mb``: peak of tensors on the GPU over what was there before, nan on a CPU.
    """
    first = {name: _first(setting, case, name, arm, name in ours) for name, arm in arms.items()}
    running = [name for name, (_, note) in first.items() if not note]
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order = random.Random(setting.seed)
    for _ in range(setting.rounds):
        for name in order.sample(running, len(running)):
            seconds[name].append(seconds_of(setting, arms[name], first[name][0]))
    for name in arms:
        row: Row = {"case": case, "arm": name, "note": first[name][1]}
        if name in running:
            row |= {"seconds": statistics.median(seconds[name]), "memory_mb": _memory(setting, arms[name])}
            if reference in running:
                ratios = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
                row |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        yield row


def _first(setting: Setting, case: str, name: str, arm: Arm, ours: bool) -> tuple[int, str]:
    """How often the arm is called for one reading, and why it cannot be; a failure of a peer's must not end the run."""
    once, note = 0.0, ""
    try:
        arm()
        once = seconds_of(setting, arm, 1)
    except torch.cuda.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:
        note = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
        if ours:
            setting.failures.append(f"{case}, {name}: {note}")
    if note:
        setting.tidy()  # only now: while an error is handled it holds the tensors of its frames
        return 0, note
    return max(1, min(MOST_CALLS, math.ceil(SHORTEST / once))), ""


def seconds_of(setting: Setting, arm: Arm, calls: int) -> float:
    setting.synchronise()
    start = time.perf_counter()
    for _ in range(calls):
        arm()
    setting.synchronise()
    return (time.perf_counter() - start) / calls


def _memory(setting: Setting, arm: Arm) -> float:
    if not setting.cuda:
        return math.nan
    gc.collect()
    setting.allocated()
    before = torch.cuda.memory_allocated(setting.device)
    arm()
    return (setting.allocated() - before) / 1e6
