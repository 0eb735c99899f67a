"""How long commands take before they do their work, against importing the libraries that they would need.

    python benchmarks/startup.py --output runs/bench_startup

Every arm is a fresh process, files in the page cache, in an order drawn anew in each round:
    import typer, torch, open_clip    ``python -c "import ..."``; torch is the reference
    gradscope --help                  and --version, ``train --help``
    a wrong argument                  refused in one sentence: an unknown figure, a recipe that is not there
    data list                         a table of what is registered
    figure start-widths               drawn from a CSV, to PDF, PNG and CSV; with ``--run`` also figure 4 and diagnose of that run
    Probe, audit                      ``from gradscope import Probe``, and an audit of one batch: what needs torch, and the whole of the
                                      lightest command that computes with it

How to read it: ``least`` is the fastest round, which other work on the machine disturbs least; a person waits for the median. How it
can mislead: the first start after a boot also reads the files from disk, which no arm here does; importing torch differs by a factor
of two between builds.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from side_by_side import machine, report, say_machine
from talk import told

REFERENCE = "import torch"
TABLE = "start_widths.csv"
#: Exit codes: 2 is a refusal in one sentence.
OK, REFUSED = 0, 2

Command = tuple[list[str], int]


def commands(folder: Path, run: Path | None) -> dict[str, Command]:
    """Arm -> words behind ``python``, and the exit code that they must end with."""
    start = ["-c", "from gradscope.cli import main; main()"]
    draw = [*start, "figure", "start-widths", str(folder / TABLE), "--output", str(folder)]
    found: dict[str, Command] = {
        "import typer": (["-c", "import typer"], OK),
        REFERENCE: (["-c", "import torch"], OK),
        "import open_clip": (["-c", "import open_clip"], OK),
        "import Probe": (["-c", "from gradscope import Probe"], OK),
        "gradscope --version": ([*start, "--version"], OK),
        "gradscope --help": ([*start, "--help"], OK),
        "train --help": ([*start, "train", "--help"], OK),
        "no such figure": ([*start, "figure", "nope", "x"], REFUSED),
        "no such recipe": ([*start, "train", "--recipe", str(folder / "nope.toml"), "--output", str(folder / "run")], REFUSED),
        "data list": ([*start, "data", "list"], OK),
        "figure start-widths": (draw, OK),
        "audit of one batch": ([*start, "audit", "--synthetic", "--batches", "1", "--width", "8"], OK),
    }
    if run:
        found["figure 4"] = ([*start, "figure", "4", str(run), "--output", str(folder)], OK)
        found["diagnose"] = ([*start, "diagnose", str(run)], OK)
    return found


def _widths() -> pd.DataFrame:
    """In the shape of what the demo writes."""
    order = random.Random(0)
    rows = [(width, batch, order.gauss(-4 + math.log2(width) / 3, 0.5)) for width in (16, 32, 64, 128) for batch in range(20)]
    return pd.DataFrame(rows, columns=["width", "batch", "log10_true"])


def measure(arms: Mapping[str, Command], rounds: int, seed: int = 0) -> pd.DataFrame:
    """Rows (round, arm, seconds), after one start of each that is not timed.

    Raises:
        ValueError: one ended otherwise than it must.
    """
    order = random.Random(seed)
    rows = []
    with told("starts") as advance:
        for turn in range(-1, rounds):
            for number, arm in enumerate(order.sample(list(arms), len(arms)), start=1):
                seconds = _seconds(*arms[arm])
                if turn >= 0:
                    rows.append({"round": turn, "arm": arm, "seconds": seconds})
                advance((turn + 1) * len(arms) + number, (rounds + 1) * len(arms))
    return pd.DataFrame(rows)


def _seconds(words: Sequence[str], wanted: int) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    seconds = time.perf_counter() - start
    if done.returncode != wanted:
        raise ValueError(f"`{' '.join(words)}` ended with {done.returncode} and not {wanted}: {(done.stderr or done.stdout)[-300:]}")
    return seconds


def summary(timed: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """Rows (arm, seconds, ratio, low, high, memory_mb, least): ratios to importing torch in the same round."""
    wide = timed.pivot_table(index="round", columns="arm", values="seconds")
    ratio = wide.div(wide[REFERENCE], axis=0)
    columns = {"seconds": wide.median(), "ratio": ratio.median(), "low": ratio.min(), "high": ratio.max(), "least": wide.min()}
    frame = pd.DataFrame(columns).loc[list(arms)].rename_axis("arm").reset_index()
    return frame.assign(memory_mb=math.nan)


def _arguments() -> argparse.Namespace:
    arms = ", ".join(f"'{arm}'" for arm in commands(Path(), Path()))
    parser = argparse.ArgumentParser(description="Start-up.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_startup"), help="folder for CSV and JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--run", type=Path, default=None, help="a run with dual readings: figure 4 and diagnose are timed too")
    parser.add_argument("--only", nargs="*", default=None, help=f"these arms only, beside importing torch; of {arms}")
    return parser.parse_args()


def _chosen(arms: Mapping[str, Command], only: Sequence[str] | None) -> dict[str, Command]:
    unknown = set(only or ()) - set(arms)
    if unknown:
        known = ", ".join(f"'{arm}'" for arm in arms)
        raise ValueError(f"--only: {', '.join(sorted(unknown))} is no arm; known: {known} (quote names with spaces)")
    return {arm: words for arm, words in arms.items() if only is None or arm in {*only, REFERENCE}}


def main() -> None:
    given = _arguments()
    if given.rounds < 1:
        raise ValueError("give at least 1 round")
    with tempfile.TemporaryDirectory() as folder:
        chosen = _chosen(commands(Path(folder), given.run), given.only)
        facts = machine()
        say_machine(facts)
        _widths().to_csv(Path(folder) / TABLE, index=False)
        frame = summary(measure(chosen, given.rounds), list(chosen))
    notes = {"fastest start, seconds": ", ".join(f"{row['arm']} {row['least']:.2f}" for row in frame.to_dict("records"))}
    report(frame, title="from the prompt to the answer", output=given.output, name="startup", facts=facts, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"startup: {error}", file=sys.stderr)
        sys.exit(2)
