"""What the probe costs on a GPU, by set, in plain steps' time; and how often a step makes the host wait.

Each round takes every set once, in an order drawn anew: one step that makes the log (not timed), one that is probed, one that is not.
    watched   seconds of a probed step / a plain step of the round
    share     (watched + (every - 1) * not probed) / every - 1, at the cadence the set is meant for; "noise" where a round saw none
    syncs     host waits in one step, as torch's sync debug mode reports them (nan on a CPU). How it can mislead: waits of other
              libraries are not seen, and one wait may cost nothing or a whole step.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from talk import without_paths
from torch import Tensor
from torch.nn import functional as F

from gradscope.frameworks.clip import Clip
from gradscope.objectives.infonce import InfoNCE
from gradscope.probe import Probe

from .models import Model, make_batch, make_model
from .setting import Row, Setting, seconds_of
from .training import OurStep, TheirEpoch

#: set -> the cadence at which it is meant to run.
CADENCES = {"loss": 1, "default": 5, "full": 10}
CONTEXT, COUNT = 248, 128


class Loop:
    """Somebody's training loop, as plain as it gets: open_clip's model, bf16 autocast, AdamW."""

    def __init__(self, setting: Setting, model: Model, batch: tuple[Tensor, Tensor]) -> None:
        self.model, self.device, self.batch = model.copied().train(), setting.device, batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.targets = torch.arange(len(batch[1]), device=setting.device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        images, ids = (t.to(self.device, non_blocking=True) for t in self.batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            out = self.model(images, ids)
        logits = out["logit_scale"] * out["image_features"].float() @ out["text_features"].float().T
        loss = (F.cross_entropy(logits, self.targets) + F.cross_entropy(logits.T, self.targets)) / 2
        loss.backward()
        self.optimizer.step()


def watching(setting: Setting) -> Iterator[Row]:
    """Rows (case, arm, every, seconds, watched, low, high, share, share_low, share_high, syncs).

    Of the training loops only host waits are counted, so that a CPU has no rows of them.
    """
    name, count = ("tiny", 4) if setting.tiny else ("ViT-B-16", COUNT)
    if not setting.clock.allows(f"watching: {name}, batch {count}"):
        return
    model = make_model(setting, name, CONTEXT)
    case = f"{name}, {model.context} tokens, batch {count}"
    batch = make_batch(setting, model, count)
    loop = Loop(setting, model, batch)
    loop.step()
    for row in _probed_rows(setting, loop):
        yield {"case": case, **row}
    for arm, waits in _loops(setting, model, batch).items() if setting.cuda else ():
        yield {"case": case, "arm": arm, "syncs": waits}


def _probed_rows(setting: Setting, loop: Loop) -> list[Row]:
    plain: list[float] = []
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in CADENCES}
    syncs: dict[str, float] = {}
    order = random.Random(setting.seed)
    with tempfile.TemporaryDirectory() as folder, without_paths():
        for turn in range(setting.rounds + 1):
            plain.append(seconds_of(setting, loop.step, 1))
            for name in order.sample(list(CADENCES), len(CADENCES)):
                if turn == 0:
                    syncs[name] = _turn(loop, Path(folder) / f"{turn}-{name}", name, lambda: host_syncs(setting, loop.step))[0]
                else:
                    found = _turn(loop, Path(folder) / f"{turn}-{name}", name, lambda: seconds_of(setting, loop.step, 1))
                    timed[name].append((found[0], found[1]))
    rows: list[Row] = [{"arm": "plain step", "seconds": statistics.median(plain[1:]), "syncs": host_syncs(setting, loop.step)}]
    return rows + [_row(name, timed[name], plain[1:], syncs[name]) for name in CADENCES]


def _row(name: str, timed: list[tuple[float, float]], plain: list[float], syncs: float) -> Row:
    every = CADENCES[name]
    watched = [probed / base for (probed, _), base in zip(timed, plain, strict=True)]
    shares = [(probed + (every - 1) * other) / every / base - 1 for (probed, other), base in zip(timed, plain, strict=True)]
    row: Row = {"arm": f"probe {name}", "every": every, "seconds": statistics.median(probed for probed, _ in timed), "syncs": syncs}
    return row | {
        "watched": statistics.median(watched), "low": min(watched), "high": max(watched),
        "share": statistics.median(shares), "share_low": min(shares), "share_high": max(shares),
    }  # fmt: skip


def _turn(loop: Loop, output: Path, probe_set: str, measure: Callable[[], float]) -> tuple[float, float]:
    """What ``measure`` says of a probed step, and of one that is not probed while the probe is attached."""
    with Probe(loop.model, optimizer=loop.optimizer, output=output, probe_set=probe_set, every=1) as probe:
        loop.step()
        watched = measure()
        probe.reader.every = sys.maxsize
        return watched, measure()


def _loops(setting: Setting, model: Model, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Host waits of one step of each training loop."""
    ours, theirs = OurStep(setting, model, Clip(objective=InfoNCE())), TheirEpoch(setting, model, [batch])
    found = {}
    for name, step in (("our loop", lambda: ours(*batch)), ("open_clip's loop", theirs)):
        step()
        found[name] = host_syncs(setting, step)
    return found


def host_syncs(setting: Setting, step: Callable[[], object]) -> float:
    """How often the host waited for the device in one step."""
    if not setting.cuda:
        step()
        return math.nan
    torch.cuda.synchronize(setting.device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return float(sum("synchroniz" in str(warning.message) for warning in said))
