"""The overhead benchmark's arithmetic: on invented seconds against plain loops, and on a real but tiny measurement."""

from __future__ import annotations

import importlib.util
import io
import itertools
import statistics
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from gradscope.data.scenes import materialise
from gradscope.data.source import open_data

FILE = Path(__file__).parent.parent / "benchmarks" / "probe_overhead.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe_overhead", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_overhead"] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


bench = _load()


def invented(seed: int, cadences: tuple[int, ...] = (1, 3), n_pairs: int = 4, n_steps: int = 6):
    """Random seconds in the shape of a measurement, the parts of a probed step adding up to its probe_seconds."""
    rng = np.random.default_rng(seed)
    steps, parts = [], []
    for every, pair, probe in itertools.product(cadences, range(n_pairs), (False, True)):
        for step in range(every + 1, every + 1 + n_steps):
            due = probe and (step - 1) % every == 0
            cost = dict(zip(("loss", "zeros", "second backward"), rng.uniform(0.01, 0.2, 3), strict=True)) if due else {}
            parts += [{"every": every, "pair": pair, "step": step, "part": part, "seconds": s} for part, s in cost.items()]
            spent = sum(cost.values())
            row = {"every": every, "pair": pair, "probe": probe, "first": probe == (pair % 2 == 0), "step": step}
            steps.append({**row, "seconds": rng.uniform(0.8, 1.2) + spent, "probe_seconds": spent})
    return bench.Measured(steps=pd.DataFrame(steps), parts=pd.DataFrame(parts)), steps, parts


@pytest.mark.parametrize("seed", range(3))
def test_inside_equals_plain_loops(seed):
    measured, steps, parts = invented(seed)
    frame = bench.inside(measured)
    assert len(frame) == 2 * 4
    for row in frame.to_dict("records"):
        mine = [s for s in steps if s["every"] == row["every"] and s["probe"]]
        plain = {p: sum(s["seconds"] - s["probe_seconds"] for s in mine if s["pair"] == p) for p in range(4)}
        if row["part"] == "all":
            spent = {p: sum(s["probe_seconds"] for s in mine if s["pair"] == p) for p in range(4)}
        else:
            wanted = [q for q in parts if q["every"] == row["every"] and q["part"] == row["part"]]
            spent = {p: sum(q["seconds"] for q in wanted if q["pair"] == p) for p in range(4)}
        ratios = [spent[p] / plain[p] for p in range(4)]
        assert row["ratio"] == pytest.approx(sum(spent.values()) / sum(plain.values()), rel=1e-12)
        assert row["seconds_per_step"] == pytest.approx(sum(spent.values()) / len(mine), rel=1e-12)
        assert (row["low"], row["high"]) == pytest.approx((min(ratios), max(ratios)), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_and_summary_equal_plain_loops(seed):
    measured, steps, _ = invented(seed)
    frame, result = bench.pairs(measured), bench.summary(measured).set_index("every")
    for every in (1, 3):
        ratios = []
        for pair in range(4):
            mine = [s for s in steps if s["every"] == every and s["pair"] == pair]
            with_probe, without = (sum(s["seconds"] for s in mine if s["probe"] == probe) for probe in (True, False))
            row = frame[(frame["every"] == every) & (frame["pair"] == pair)].iloc[0]
            assert row["ratio"] == pytest.approx(with_probe / without, rel=1e-12)
            assert bool(row["probe_first"]) == (pair % 2 == 0)
            ratios.append(with_probe / without)
        assert result.loc[every, "paired_median"] == pytest.approx(statistics.median(ratios) - 1, rel=1e-9)
        assert result.loc[every, "paired_low"] == pytest.approx(min(ratios) - 1, rel=1e-9)
        assert result.loc[every, "paired_high"] == pytest.approx(max(ratios) - 1, rel=1e-9)


def test_a_known_cost_is_found():
    steps = [
        {"every": 2, "pair": 0, "probe": probe, "first": not probe, "step": step, "seconds": seconds, "probe_seconds": spent}
        for probe, step, seconds, spent in [(False, 3, 1.0, 0.0), (False, 4, 1.0, 0.0), (True, 3, 1.4, 0.4), (True, 4, 1.0, 0.0)]
    ]
    parts = [{"every": 2, "pair": 0, "step": 3, "part": "loss", "seconds": 0.4}]
    row = bench.summary(bench.Measured(steps=pd.DataFrame(steps), parts=pd.DataFrame(parts))).iloc[0]
    assert row["inside"] == pytest.approx(0.2)  # 0.4 s in two plain seconds
    assert row["paired_median"] == pytest.approx(0.2)
    assert row["plain_step_seconds"] == 1.0


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Four runs of a few steps, 4 x 2 narrow, on a few scenes."""
    root = tmp_path_factory.mktemp("benchmark")
    scenes = open_data(str(materialise(root / "scenes", seed=3, train=32, val=4, test=4)))
    plan = bench.Plan(every=(1, 2), pairs=1, steps=2, batch_size=4, accumulate=2, device="cpu")
    data = bench.write_data(root / "data", scenes.records("train"), scenes.records("val"))
    calls: list[tuple[int, int]] = []
    return plan, bench.measure(plan, data, root, lambda done, total: calls.append((done, total))), calls


def test_real_runs_time_whole_cadence_blocks(real):
    plan, measured, calls = real
    steps, parts = measured.steps, measured.parts
    assert len(steps) == 2 * 2 * plan.steps
    assert calls == [(done, 4) for done in range(5)]
    for every in plan.every:
        probed = steps[(steps["every"] == every) & steps["probe"]]
        due = (probed["step"] - 1) % every == 0
        assert due.sum() == plan.steps // every
        assert (probed.loc[due, "probe_seconds"] > 0).all()
        assert (probed.loc[~due, "probe_seconds"] < 1e-3).all(), "only the question whether anything is to be written"
        read = parts[(parts["every"] == every) & (parts["part"] != "write")]
        assert set(read["step"]) == set(probed.loc[due, "step"])
        assert (parts.loc[parts["part"] == "write", "seconds"] > 0).all()
    assert (steps.loc[~steps["probe"], "probe_seconds"] == 0).all()
    assert steps[steps["first"]].groupby(["every", "pair"])["probe"].nunique().eq(1).all()


def test_real_parts_add_up_to_the_time_in_the_probe(real):
    _, measured, _ = real
    parts = measured.parts.groupby(["every", "pair", "step"])["seconds"].sum()
    probed = measured.steps[measured.steps["probe_seconds"] > 0].set_index(["every", "pair", "step"])["probe_seconds"]
    pd.testing.assert_series_equal(parts, probed.sort_index(), check_names=False, rtol=1e-9)
    assert {"second backward", "zeros", "gradient", "optimizer", "flush", "write"} <= set(measured.parts["part"])
    frame = bench.inside(measured)
    for _, group in frame.groupby("every"):
        assert group[group["part"] == "all"]["ratio"].item() == pytest.approx(group[group["part"] != "all"]["ratio"].sum(), rel=1e-9)


def test_tables_name_every_part(real):
    from rich.console import Console

    plan, measured, _ = real
    console = Console(width=200, file=io.StringIO())
    console.print(bench.summary_table(bench.summary(measured), plan))
    console.print(bench.parts_table(bench.inside(measured)))
    text = console.file.getvalue()
    assert all(part in text for part in measured.parts["part"].unique())
    assert "4 x 2 narrow" in text


def test_machine_is_described():
    facts = bench.machine()
    assert facts["processor"]
    assert {"torch", "threads", "cores", "python", "load_average_before"} <= set(facts)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"steps": 12}, "whole blocks of 5"), ({"pairs": 0}, "at least 1"), ({"every": (0,)}, "at least 1")],
)
def test_impossible_plans_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        bench.Plan(**settings)
