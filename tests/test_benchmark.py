"""The overhead benchmarks' arithmetic: on invented seconds against plain loops, and on real but tiny measurements."""

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

FOLDER = Path(__file__).parent.parent / "benchmarks"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


bench = _load("probe_overhead")
peers = _load("probe_peers")


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


# ---- beside other tools


def invented_rounds(seed: int, rounds: int = 5):
    """Random seconds in the shape of a measurement beside other tools."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(1, rounds + 1):
        for arm in (*peers.PLAIN, *{arm for arm, _ in peers.CADENCES}, "wandb.watch", "naive"):
            for watched in (False,) if arm in peers.PLAIN else (True, False) if arm.startswith("probe") else (True,):
                inside = rng.uniform(0, 0.5 if watched else 0.01) if arm.startswith("probe") else 0.0
                seconds = rng.uniform(0.8, 1.2) + inside
                rows.append({"round": number, "arm": arm, "watched": watched, "seconds": seconds, "inside": inside})
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_ratios_and_shares_equal_plain_loops(seed):
    rows = invented_rounds(seed)
    frame = pd.DataFrame(rows)
    numbers = sorted({row["round"] for row in rows})
    plain = {n: statistics.mean(r["seconds"] for r in rows if r["round"] == n and r["arm"] in peers.PLAIN) for n in numbers}
    for row in peers.ratios(frame).to_dict("records"):
        mine = [r for r in rows if r["arm"] == row["arm"] and (r["watched"] or r["arm"] in peers.PLAIN)]
        found = [r["seconds"] / plain[r["round"]] for r in mine]
        assert len(found) == len(numbers)
        assert (row["ratio"], row["low"], row["high"]) == pytest.approx((statistics.median(found), min(found), max(found)), rel=1e-12)
    shares = peers.shares(frame)
    assert list(zip(shares["arm"], shares["every"], strict=True)) == list(peers.CADENCES)
    for row in shares.to_dict("records"):
        blocks = []
        for n in numbers:
            inside = {r["watched"]: r["inside"] for r in rows if r["arm"] == row["arm"] and r["round"] == n}
            blocks.append(sum([inside[True]] + [inside[False]] * (row["every"] - 1)) / (row["every"] * plain[n]))
        expected = (statistics.median(blocks), min(blocks), max(blocks))
        assert (row["share"], row["low"], row["high"]) == pytest.approx(expected, rel=1e-12)


def test_the_five_naive_statistics_are_those_of_numpy():
    work = peers.Work(peers.Plan(model="tiny", batch=2))
    kept = {}

    def look(work):
        kept.update({name: p.grad.double().numpy().ravel() for name, p in work.model.named_parameters() if p.grad is not None})
        kept["found"] = peers.five_statistics(work)

    work.step(look)
    found = kept.pop("found")
    assert set(found) == set(kept)
    for name, g in kept.items():
        expected = (np.linalg.norm(g), g.mean(), g.std(), np.abs(g).max(), (g == 0).mean())
        assert found[name] == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    plan = peers.Plan(model="tiny", batch=2, rounds=1)
    calls: list[tuple[int, int]] = []
    return plan, peers.measure(plan, tmp_path_factory.mktemp("peers"), lambda done, total: calls.append((done, total))), calls


def test_every_tool_has_its_turn(beside):
    _, measured, calls = beside
    assert calls == [(done, 20) for done in range(20)]
    assert set(measured["round"]) == {1}
    watched = measured[measured["watched"]]
    ours = {f"probe {name}" for name in ("loss", "default", "full", "full + second backward")}
    assert sorted(watched["arm"]) == sorted([*ours, "wandb.watch", "tensorboard", "traintools", "naive"])
    assert (measured["seconds"] > 0).all()
    inside = measured.set_index(["arm", "watched"])["inside"]
    for arm in ours:
        assert inside[arm, True] > inside[arm, False] >= 0
        assert inside[arm, True] < measured.set_index(["arm", "watched"])["seconds"][arm, True]
    assert (measured.loc[~measured["arm"].isin(ours), "inside"] == 0).all()


def test_tables_of_the_tools(beside):
    from rich.console import Console

    plan, measured, _ = beside
    console = Console(width=200, file=io.StringIO())
    console.print(peers.ratio_table(peers.ratios(measured), 1.0, plan))
    console.print(peers.share_table(peers.shares(measured), plan))
    text = console.file.getvalue()
    assert all(arm in text for arm in measured["arm"].unique())
    assert "tiny, batch 2" in text
    assert set(peers.PACKAGES) <= set(peers.machine())


@pytest.mark.parametrize(("settings", "words"), [({"rounds": 0}, "at least 1 round"), ({"batch": 1}, "batches of 2")])
def test_impossible_plans_beside_tools_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        peers.Plan(**settings)


@pytest.mark.parametrize("model", ["nothing", "roberta-ViT-B-32"])
def test_models_that_cannot_be_measured_are_refused(model):
    with pytest.raises(ValueError, match=r"--model '.*' (is neither tiny nor a model|has a text tower of another library)"):
        peers._model(model)
