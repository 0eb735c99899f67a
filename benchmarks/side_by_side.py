"""The harness of the benchmarks: arms that do the same work, interleaved in one process, answered as ratios.

    result = side_by_side({"ours": f, "peer": g}, reference="peer", rounds=5)
    report(result, title="...", output=Path("runs/..."), facts=machine())

Each round runs every arm once, in an order drawn anew; a round before the first is not counted. Answers:
    ratio     seconds of the arm / seconds of the reference in the same round: median, smallest and largest round
    memory    peak resident memory of one more call, over what was resident before it, in MB of 10^6 bytes (Linux; nan elsewhere)

How to read it: ratios hold while other work uses the machine, seconds do not. How it can mislead: memory that an arm's allocator kept
from an earlier call is resident before, and so not counted; the first call after a larger one looks small.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from gradscope.console import console, out, progress

Arm = Callable[[], object]


def side_by_side(
    arms: Mapping[str, Arm], *, reference: str, rounds: int, seed: int = 0, memory: bool = True, label: str = "rounds"
) -> pd.DataFrame:
    """Rows (arm, seconds, ratio, low, high, memory_mb), in the order given; ``seconds`` is the median."""
    order = random.Random(seed)
    timed: list[dict[str, Any]] = []
    gc.freeze()  # all that was imported need not be looked through at every collection
    with progress(label) as advance:
        for turn in range(-1, rounds):
            for arm in order.sample(list(arms), len(arms)):
                seconds = _seconds(arms[arm])
                if turn >= 0:
                    timed.append({"round": turn, "arm": arm, "seconds": seconds})
            advance(turn + 2, rounds + 1)
    wide = pd.DataFrame(timed).pivot_table(index="round", columns="arm", values="seconds")
    ratio = wide.div(wide[reference], axis=0)
    columns = {"seconds": wide.median(), "ratio": ratio.median(), "low": ratio.min(), "high": ratio.max()}
    frame = pd.DataFrame(columns).loc[list(arms)].rename_axis("arm").reset_index()
    frame["memory_mb"] = [peak_memory(arms[arm]) if memory else math.nan for arm in arms]
    gc.unfreeze()
    return frame


def _seconds(work: Arm) -> float:
    gc.collect()
    _synchronise()
    start = time.perf_counter()
    work()
    _synchronise()
    return time.perf_counter() - start


def _synchronise() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(work: Arm) -> float:
    """MB that the process's resident set rises by during one call; nan where the system does not say."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier calls left must not hide what this one takes
        clear.write_text("5", encoding="ascii")  # resets the peak
    except OSError:
        return math.nan
    before = _kilobytes(status, "VmRSS")
    work()
    return (_kilobytes(status, "VmHWM") - before) * 1024 / 1e6


def _kilobytes(status: Path, key: str) -> int:
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(key))
    return int(line.split()[1])


def machine() -> dict[str, Any]:
    """Where the numbers come from, how busy it was, and which BLAS kernels are in use."""
    import torch
    from threadpoolctl import threadpool_info

    from gradscope.provenance import provenance

    facts = {key: value for key, value in provenance().items() if key not in ("argv", "flush_denormal")}
    blas = {_kernels(library) for library in threadpool_info()}
    return {
        **facts,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg()[0],
        "blas": sorted(blas),
    }


def _kernels(library: Mapping[str, Any]) -> str:
    """ "openblas Haswell, 2 threads" """
    which = library.get("architecture") or library["version"]
    return f"{library['internal_api']}{f' {which}' if which else ''} on {_threads(library['num_threads'])}"


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def processor() -> str:
    """Linux leaves ``platform.processor`` empty."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def say_machine(facts: Mapping[str, Any]) -> None:
    console.print(
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average_before']:.1f} before the start; "
        f"{_threads(facts['threads'])}, torch {facts['torch']}, Python {facts['python']}; {', '.join(facts['blas'])}",
        soft_wrap=True,
    )


def report(
    frame: pd.DataFrame, *, title: str, output: Path, name: str, facts: Mapping[str, Any], notes: Mapping[str, Any] = {}
) -> None:
    """Prints the table and writes ``output``/``name``.csv and .json."""
    shown = Table(title=title, caption="ratio: median [smallest, largest] round", title_justify="left")
    measured = bool(frame["memory_mb"].notna().any())
    for heading in ("arm", "seconds", "ratio", *(["extra memory"] if measured else [])):
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in frame.to_dict("records"):
        cells = [row["arm"], f"{row['seconds']:.3g}", f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"]
        memory = "" if math.isnan(row["memory_mb"]) else f"{row['memory_mb']:,.0f} MB"
        shown.add_row(*cells, *([memory] if measured else []))
    out.print(shown)
    for key, value in notes.items():
        out.print(f"{key}: {value}", soft_wrap=True, markup=False)
    output.mkdir(parents=True, exist_ok=True)
    frame.to_csv(output / f"{name}.csv", index=False)
    text = json.dumps({"machine": facts, "rows": frame.to_dict("records"), "notes": notes}, indent=2, default=str)
    (output / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    out.print(f"the table as CSV, and with the machine as JSON: {output}", soft_wrap=True, markup=False)
