"""Everything that only a GPU can say, in one run of under eight minutes: is it right there, how fast, and what does it cost?

    python benchmarks/gpu.py --output runs/gpu
    python benchmarks/gpu.py --device cpu --tiny --output runs/gpu-tiny      every part at toy sizes, to see that it runs

Sections (--only names some of them), each described in ``gpu_parts``:
    peaks         products of the run in bf16, TF32, fp32 and fp64: what shares of a peak refer to
    correctness   the streaming loss by Triton and by torch against float64 autograd, losses from 1e-20 to 40
    loss          its time and memory against open_clip's ClipLoss, Inf-CL and memeff
    training      ViT-B/16 and L/14 at 248 tokens, images a second and MFU against open_clip's own train_one_epoch
    watching      what the probe costs by set, and how often a step makes the host wait
    pairs         caption geometry and retrieval ranks against bare products
What could not be reached in a section's time (--budget, in proportion), or did not run, is listed at the end and in the JSON; a wrong
result, or a part of ours that fails, makes the exit code 1.

How to read it: ratios are of arms that took turns in one process, median and extremes of the rounds; a ratio of 0.5 is half the time of
the case's reference. How it can mislead: clocks of a GPU move with heat; weights, pictures and captions are noise; and a GPU that
others use makes every figure a lower bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gpu_parts.correctness import correctness
from gpu_parts.loss import loss
from gpu_parts.pairs import pairs
from gpu_parts.peaks import peaks
from gpu_parts.setting import Clock, Row, Setting
from gpu_parts.training import training
from gpu_parts.watching import watching
from rich import box
from rich.table import Table
from rich.text import Text
from side_by_side import machine, say_machine

from gradscope.console import console, out

#: Section -> its share of the budget.
SHARES = {"peaks": 20.0, "correctness": 40.0, "loss": 120.0, "training": 120.0, "watching": 60.0, "pairs": 60.0}
#: Characters of a table in a file, where nothing says how many there are.
WIDTH = 140
#: Column -> its heading, where that is not its name.
HEADINGS = {"true_loss": "true loss", "images_per_s": "images/s", "mfu": "MFU", "memory_mb": "MB", "tflops": "TFLOP/s"}
#: Column -> how it is written.
COLUMNS = {
    "tflops": "{:.3g}",
    "true_loss": "{:.1e}",
    "loss": "{:.1e}",
    "residual": "{:.1e}",
    "image": "{:.1e}",
    "text": "{:.1e}",
    "scale": "{:.1e}",
    "every": "{:.0f}",
    "seconds": "{:.3g}",
    "ratio": "{:.3f}",
    "watched": "{:.3f}",
    "low": "{:.3f}",
    "high": "{:.3f}",
    "share": "{:.2%}",
    "syncs": "{:.0f}",
    "images_per_s": "{:.0f}",
    "mfu": "{:.1%}",
    "memory_mb": "{:,.0f}",
}


def measure(setting: Setting, only: list[str], output: Path, known: dict[str, Any]) -> dict[str, list[Row]]:
    """Section -> rows; each table is printed and written as soon as it is there."""
    found: dict[str, list[Row]] = {}
    for name in SHARES:
        if name not in only:
            continue
        setting.clock.open(name)
        console.print(f"{name} ...")
        found[name] = _section(setting, name, found)
        out.print(table(name, found[name]))
        write(output, setting, found, known)  # what is there is kept, whatever becomes of the rest
        setting.tidy()
    return found


def _section(setting: Setting, name: str, found: dict[str, list[Row]]) -> list[Row]:
    """The rows of one section; one that breaks is a failure, its rows until then are kept, and the next begins."""
    rows: list[Row] = []
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "peaks": lambda: peaks(setting),
        "correctness": lambda: correctness(setting),
        "loss": lambda: loss(setting),
        "training": lambda: training(setting, _bf16(found)),
        "watching": lambda: watching(setting),
        "pairs": lambda: pairs(setting),
    }
    try:
        rows.extend(sections[name]())  # keeps what came before an error
    except Exception as error:
        setting.failures.append(f"{name}: {type(error).__name__}: {error}")
    return rows


def _bf16(found: dict[str, list[Row]]) -> float:
    return next((row["tflops"] for row in found.get("peaks", []) if row["arm"] == "bf16"), math.nan)


def table(name: str, rows: list[Row]) -> Table:
    """The columns that any row of the section has something in."""
    shown = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = [column for column in COLUMNS if any(_cell(column, row) for row in rows)]
    noted = any(row.get("note") for row in rows)
    for heading in ("arm", *columns, *["note"] * noted):
        words = heading in ("arm", "note")
        shown.add_column(HEADINGS.get(heading, heading), justify="left" if words else "right", no_wrap=not words)
    case = ""
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            shown.add_row(Text(case, style="bold"))
        shown.add_row(f"  {row['arm']}", *(_cell(column, row) for column in columns), *[row.get("note", "")] * noted)
    return shown


def _cell(column: str, row: Row) -> str:
    value = row.get(column)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    noise = column == "share" and row["share_low"] <= 0  # no round can gain by watching
    return COLUMNS[column].format(value) + " (noise)" * noise


def facts(setting: Setting) -> dict[str, Any]:
    """The machine, the GPU and the versions that matter on it."""
    import importlib.metadata as metadata

    packages = ("triton", "open_clip_torch", "inf-cl", "memeff")
    versions = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"] in packages}
    found = {**machine(), "device": str(setting.device), "packages": versions}
    if setting.cuda:
        gpu = torch.cuda.get_device_properties(setting.device)
        found |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "gpu_gb": gpu.total_memory / 1e9,
            "cuda": torch.version.cuda,
        }
    return found


def write(output: Path, setting: Setting, found: dict[str, list[Row]], known: dict[str, Any]) -> None:
    """One CSV a section, and all of it as gpu.json."""
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in found.items():
        pd.DataFrame(rows).to_csv(output / f"{name}.csv", index=False)
    clock = setting.clock
    rest = {"left_out": clock.left_out, "failures": setting.failures, "took_seconds": clock.took()}
    text = json.dumps({"machine": known, **rest, "sections": found}, indent=2, default=str)
    (output / "gpu.json").write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One run on one GPU.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder for CSV and JSON")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that every part runs")
    parser.add_argument("--only", default=",".join(SHARES), help="sections, by commas")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for all sections; a case that has begun is finished")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm")
    parser.add_argument("--seed", type=int, default=0, help="of rows, weights and order")
    return parser.parse_args()


def _setting(given: argparse.Namespace) -> tuple[Setting, list[str]]:
    only = given.only.split(",")
    unknown = [name for name in only if name not in SHARES]
    if unknown:
        raise ValueError(f"--only names {', '.join(unknown)}; the sections are {', '.join(SHARES)}")
    if given.rounds < 1 or given.budget <= 0:
        raise ValueError(f"at least 1 round and some seconds are needed; got --rounds {given.rounds} --budget {given.budget}")
    try:
        device = torch.device(given.device)
    except RuntimeError:
        raise ValueError(f"--device {given.device} is unknown; give cuda, cuda:1 or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device {given.device} is no NVIDIA GPU; give cuda, cuda:1 or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device here; use --device cpu --tiny to see that every part runs")
    if device.type == "cpu" and not given.tiny:
        raise ValueError("the sizes are those of a GPU; on a CPU add --tiny")
    clock = Clock(seconds=given.budget, shares={name: SHARES[name] for name in only})
    return Setting(device=device, clock=clock, tiny=given.tiny, rounds=given.rounds, seed=given.seed), only


def run(given: argparse.Namespace) -> int:
    """The exit code: 1 where something of ours is wrong or does not run."""
    setting, only = _setting(given)
    known = facts(setting)
    say_machine(known)
    if not setting.cuda:
        console.print("no GPU: Triton, Inf-CL and memeff are left out, memory and host waits are not measured")
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = max(out.width, WIDTH)
    measure(setting, only, given.output, known)
    for heading, lines in (("out of time", setting.clock.left_out), ("FAILED", setting.failures)):
        for line in lines:
            out.print(f"{heading}: {line}", soft_wrap=True, markup=False)
    out.print(f"{setting.clock.took():.0f} s; tables as CSV, everything as JSON: {given.output}", soft_wrap=True, markup=False)
    return 1 if setting.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(run(_arguments()))
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
