"""What --log-grads costs: time in the probe against the time of a plain training step, on encoder tiny, scenes, 16 x 8 narrow.

    python benchmarks/probe_overhead.py --output runs/probe_overhead

Short training runs without and with the probe follow each other in one process, in pairs whose order is drawn. Of each run the
first steps are left out (allocator and optimizer state are made there), and whole cadence blocks of ``every`` steps are timed.
Two answers:
    inside     sum of probe_seconds / sum of (seconds - probe_seconds) over the timed steps of the runs with the probe; by part too:
               each quantity, the other objective's second backward, writing the readings, the rest
    pairs      seconds with the probe / seconds without, over the same steps of the two runs of a pair; median, smallest, largest

How to read it: inside is the answer; pairs is its cross-check and should be near 1 + inside. Decoding pictures and validation are
in neither time. How it can mislead: inside leaves out what the probe does to caches and memory,
and calls it plain step time; pairs holds it, but also everything else the machine does meanwhile. On a GPU both are host time,
and kernels that one part launches may be waited for in another. The probe's price is per probed micro-batch: more micro-batches
or a larger encoder make it a smaller share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from talk import told

from gradscope.console import console, out
from gradscope.data.source import open_data
from gradscope.recipe import Recipe, resolve
from gradscope.runlog import Run
from gradscope.train_display import counted
from gradscope.types import Record

#: At least so many steps at the start of each run are left out.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``pairs`` pairs of runs for each cadence in ``every``; ``steps`` timed steps a run."""

    every: tuple[int, ...] = (1, 5)
    pairs: int = 6
    steps: int = 10
    batch_size: int = 16
    accumulate: int = 8
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if min(self.pairs, self.steps, *self.every) < 1:
            raise ValueError(f"pairs, steps and cadences must be at least 1; got {self.pairs}, {self.steps}, {self.every}")
        uneven = [every for every in self.every if self.steps % every]
        if uneven:
            raise ValueError(f"{self.steps} timed steps are not whole blocks of {uneven[0]}; give a multiple of every cadence")

    def left_out(self, every: int) -> int:
        """Steps at the start of a run that are not timed: whole cadence blocks, WARM_UP steps or more."""
        return every * math.ceil(WARM_UP / every)

    def recipe(self, data: Path, every: int, probe: bool) -> Recipe:
        steps = self.left_out(every) + self.steps
        train: dict[str, Any] = {"epochs": steps, "max_steps": steps, "batch_size": self.batch_size, "lr": 1e-4, "seed": self.seed}
        if self.accumulate > 1:
            train |= {"accumulate": self.accumulate, "accumulate_mode": "narrow"}
        tables = {
            "data": {"name": str(data)},
            "train": train | {"device": self.device},
            "probe": {"log_grads": probe, "every": every},
        }
        return resolve(tables, {})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the timed steps took, in seconds, as long frames."""

    steps: pd.DataFrame  # a row per timed step: every, pair, probe, first (of the pair's two runs), step, seconds, probe_seconds
    parts: pd.DataFrame  # a row per part of a probed step: every, pair, step, part, seconds


# ---- measuring


def measure(plan: Plan, data: Path, work: Path, advance: Callable[[int, int], None] | None = None) -> Measured:
    """All runs of the plan on a data folder, written under ``work``."""
    from gradscope.train import train

    steps, parts = [], []
    order = random.Random(plan.seed)
    todo = [(every, pair, probe) for every in plan.every for pair in range(plan.pairs) for probe in order.sample([False, True], 2)]
    for done, (every, pair, probe) in enumerate(todo):
        if advance:
            advance(done, len(todo))
        path = work / f"every{every}-pair{pair}-{'with' if probe else 'without'}"
        train(plan.recipe(data, every, probe), path, quiet=True)
        run, first = Run(path), plan.left_out(every) + 1
        place = {"every": every, "pair": pair}
        timed = run.steps[run.steps["step"] >= first]
        steps.append(timed[["step", "seconds", "probe_seconds"]].assign(**place, probe=probe, first=done % 2 == 0))
        if probe:
            readings = run.readings
            mine = readings[(readings["quantity"] == "probe") & (readings["unit"] == "s") & (readings["step"] >= first)]
            found = mine[["step", "key", "value"]].rename(columns={"key": "part", "value": "seconds"}).astype({"seconds": float})
            parts.append(pd.concat([found, _writing(timed, found)]).assign(**place))
    if advance:
        advance(len(todo), len(todo))
    return Measured(steps=pd.concat(steps, ignore_index=True), parts=pd.concat(parts, ignore_index=True).astype({"seconds": float}))


def _writing(steps: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """What is left of each step's probe_seconds: the readings were written then, too late to be a reading of their own."""
    known = parts.groupby("step")["seconds"].sum()
    whole = steps.set_index("step")["probe_seconds"]
    return whole.sub(known, fill_value=0.0).rename("seconds").reset_index().assign(part="write")


def write_data(folder: Path, train: Sequence[Record], val: Sequence[Record]) -> Path:
    """A data folder of these records; their pictures stay where they are."""
    folder.mkdir(parents=True)
    for split, records in (("train", train), ("val", val)):
        rows = [{"id": r.id, "image": str(Path(str(r.image)).resolve()), "captions": list(r.captions)} for r in records]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


# ---- arithmetic on frames


def inside(measured: Measured) -> pd.DataFrame:
    """Rows (every, part, seconds_per_step, ratio, low, high); part "all" is the whole.

    ratio pools all runs with the probe; low and high are the smallest and largest of one run.
    """
    steps = measured.steps[measured.steps["probe"]]
    whole = steps[["every", "pair", "step", "probe_seconds"]].rename(columns={"probe_seconds": "seconds"}).assign(part="all")
    plain = steps.assign(plain=steps["seconds"] - steps["probe_seconds"]).groupby(["every", "pair"])["plain"].sum()
    by_run = pd.concat([whole, measured.parts]).groupby(["every", "part", "pair"])["seconds"].sum().reset_index()
    by_run = by_run.merge(plain.reset_index(), on=["every", "pair"])
    by_run["share"] = by_run["seconds"] / by_run["plain"]
    grouped = by_run.groupby(["every", "part"])
    frame = grouped.agg(seconds=("seconds", "sum"), low=("share", "min"), high=("share", "max")).reset_index()
    frame["seconds_per_step"] = frame["seconds"] / frame["every"].map(steps.groupby("every").size())
    frame["ratio"] = frame["seconds"] / frame["every"].map(plain.groupby("every").sum())
    frame = frame[["every", "part", "seconds_per_step", "ratio", "low", "high"]]
    return frame.sort_values(["every", "ratio"], ascending=[True, False], ignore_index=True)


def pairs(measured: Measured) -> pd.DataFrame:
    """Rows (every, pair, probe_first, without, with, ratio): seconds of the same steps of the two runs of a pair."""
    seconds = measured.steps.groupby(["every", "pair", "probe"])["seconds"].sum().unstack("probe")
    leading = measured.steps[measured.steps["first"]].groupby(["every", "pair"])["probe"].first()
    frame = pd.DataFrame({"probe_first": leading, "without": seconds[False], "with": seconds[True]})
    return frame.assign(ratio=frame["with"] / frame["without"]).reset_index()


def summary(measured: Measured) -> pd.DataFrame:
    """A row per cadence: inside, and the median, smallest and largest of the paired ratios less 1."""
    whole = inside(measured).query("part == 'all'").set_index("every")
    ratio = pairs(measured).groupby("every")["ratio"]
    plain = measured.steps[~measured.steps["probe"]].groupby("every")["seconds"].mean()
    columns = {"plain_step_seconds": plain, "inside": whole["ratio"], "inside_low": whole["low"], "inside_high": whole["high"]}
    columns |= {"paired_median": ratio.median() - 1, "paired_low": ratio.min() - 1, "paired_high": ratio.max() - 1}
    return pd.DataFrame(columns).reset_index()


# ---- what a person sees


def machine() -> dict[str, Any]:
    """Where the numbers come from, and how busy it was."""
    from gradscope.provenance import provenance

    facts = {key: value for key, value in provenance().items() if key not in ("argv", "flush_denormal")}
    return {**facts, "processor": _processor(), "cores": os.cpu_count(), "load_average_before": os.getloadavg()[0]}


def _processor() -> str:
    """Linux leaves ``platform.processor`` empty."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def summary_table(frame: pd.DataFrame, plan: Plan) -> Table:
    title = f"Cost of --log-grads, tiny on scenes, {plan.batch_size} x {plan.accumulate} narrow, share of a plain step's time"
    caption = f"[smallest, largest] of {counted(plan.pairs, 'pair')} of runs, {counted(plan.steps, 'timed step')} each"
    table = Table(title=title, caption=caption, title_justify="left")
    for heading in ("probe every", "plain step", "timed inside the probe", "with / without - 1, median"):
        table.add_column(heading, justify="right")
    for row in frame.to_dict("records"):
        inside_text = f"{row['inside']:.1%} [{row['inside_low']:.1%}, {row['inside_high']:.1%}]"
        paired_text = f"{row['paired_median']:.1%} [{row['paired_low']:.1%}, {row['paired_high']:.1%}]"
        table.add_row(str(row["every"]), f"{row['plain_step_seconds']:.3f} s", inside_text, paired_text)
    return table


def parts_table(frame: pd.DataFrame) -> Table:
    table = Table(title="By part, share of a plain step's time", caption="pooled over all runs with the probe", title_justify="left")
    cadences = sorted(frame["every"].unique())
    for heading in ("part", *(f"every {every}" for every in cadences)):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    shares = frame.pivot_table(index="part", columns="every", values="ratio").sort_values(cadences[0], ascending=False)
    for part, row in shares.iterrows():
        table.add_row(str(part), *(f"{row[every]:.2%}" for every in cadences))
    return table


def _arguments() -> argparse.Namespace:
    default = Plan()
    parser = argparse.ArgumentParser(description="What --log-grads costs.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/probe_overhead"), help="folder for CSV and JSON")
    parser.add_argument("--every", type=int, nargs="+", default=list(default.every), help="cadences of the probe")
    parser.add_argument("--pairs", type=int, default=default.pairs, help="pairs of runs for each cadence")
    parser.add_argument("--steps", type=int, default=default.steps, help="timed steps of each run, a multiple of every cadence")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the order of the data and of the runs")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its own choice")
    parser.add_argument("--device", default=default.device, help="auto, cpu, cuda or cuda:N")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    plan = Plan(every=tuple(given.every), pairs=given.pairs, steps=given.steps, seed=given.seed, device=given.device)
    if given.threads > 0:
        import torch

        torch.set_num_threads(given.threads)
    facts = machine()
    console.print(
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average_before']:.1f} before the start; "
        f"{counted(facts['threads'], 'thread')}, torch {facts['torch']}, Python {facts['python']}"
    )
    lengths = sorted({plan.left_out(every) + plan.steps for every in plan.every})
    runs, steps = 2 * plan.pairs * len(plan.every), " or ".join(map(str, lengths))
    console.print(f"drawing the pictures; then {runs} runs of {steps} steps, each of {plan.accumulate} x {plan.batch_size} pairs")
    source = open_data("scenes")
    needed = plan.batch_size * plan.accumulate * lengths[-1]
    with tempfile.TemporaryDirectory() as folder, told("runs") as advance:
        data = write_data(Path(folder) / "data", source.records("train")[:needed], source.records("val")[: plan.batch_size])
        measured = measure(plan, data, Path(folder), advance)
    parts, result = inside(measured), summary(measured)
    out.print(summary_table(result, plan))
    out.print(parts_table(parts))
    given.output.mkdir(parents=True, exist_ok=True)
    for name, frame in (("steps", measured.steps), ("parts", parts), ("pairs", pairs(measured)), ("summary", result)):
        frame.to_csv(given.output / f"{name}.csv", index=False)
    text = json.dumps({"machine": facts, "plan": dataclasses.asdict(plan), "summary": result.to_dict("records")}, indent=2)
    (given.output / "probe_overhead.json").write_text(text + "\n", encoding="utf-8")
    out.print(f"steps, parts, pairs and summary as CSV, and all of it with the machine as JSON: {given.output}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FloatingPointError) as error:
        print(f"probe_overhead: {error}", file=sys.stderr)
        sys.exit(2)
