"""The benchmark of several processes: whole and small, its arithmetic, and what it refuses."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("processes")


def test_the_whole_path(bench, monkeypatch, tmp_path, capsys):
    """Three processes: the update is the same, and each arm has its seconds and its memory."""
    sizes = ["--batch", "4", "--steps", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["processes.py", "--output", str(tmp_path), *sizes])
    start = bench.group  # one thread each: two in one process wait for each other where other tests use the cores
    monkeypatch.setattr(bench, "group", lambda size, threads, arms, given: start(size, 1, arms, given))
    bench.main()
    frame = pd.read_csv(tmp_path / "processes.csv")
    assert frame["arm"].tolist() == [bench.ONE, bench.DDP, bench.SILENT, bench.FSDP]
    assert (frame["seconds"] > 0).all()
    notes = json.loads((tmp_path / "processes.json").read_text())["notes"]
    held = {part.split(" held")[0].rpartition(" ")[0]: float(part.split(" held")[0].rpartition(" ")[2]) for part in _parts(notes)}
    assert held[bench.DDP] == held[bench.ONE] == pytest.approx(2 * held[bench.FSDP], abs=1.1)
    assert "FSDP2" in notes["update against one process"]
    assert "update against one process: DDP" in capsys.readouterr().out


def _parts(notes: dict[str, str]) -> list[str]:
    return notes["MB of a process"].split("; ")


def test_ratios_and_shares_are_of_the_same_round(bench):
    seconds = {bench.ONE: [4.0, 2.0], bench.DDP: [2.0, 4.0], bench.SILENT: [1.0, 3.0], bench.FSDP: [4.0, 4.0]}
    timed = pd.DataFrame([{"round": n, "arm": arm, "seconds": s} for arm, both in seconds.items() for n, s in enumerate(both)])
    found = bench.table(timed, {bench.DDP: 7.0, bench.ONE: 8.0}).set_index("arm")
    assert found.loc[bench.DDP].tolist() == [3.0, (0.5 + 2.0) / 2, 0.5, 2.0, 7.0]
    assert found.loc[bench.ONE, "ratio"] == 1.0
    assert bench.talking(timed) == {bench.DDP: (0.5 + 0.25) / 2, bench.FSDP: (0.75 + 0.25) / 2}


class Answering:
    """A group whose processes say what they are told to."""

    arms = ("DDP", "FSDP2", "DDP, compiled", "DDP, nothing sent")

    def __init__(self, updates: dict[str, float]) -> None:
        self.updates = updates

    def ask(self, *, arm: str, **_: object) -> list[dict[str, float]]:
        return [{"update": 0.0}, {"update": self.updates[arm]}]


def test_an_update_that_differs_fails(bench):
    """On any rank; compiled blocks round otherwise and are shown."""
    good = {"DDP": 1e-7, "FSDP2": 9e-6, "DDP, compiled": 1e-3}
    assert bench.updates_of([Answering(good)]) == good
    for wrong in (2e-5, float("nan")):
        with pytest.raises(ValueError, match=r"the update differs from that of one process: \{'FSDP2'"):
            bench.updates_of([Answering({**good, "FSDP2": wrong})])


@pytest.mark.parametrize("changes", [{"batch": 5}, {"threads": 3}, {"processes": 1}, {"rounds": 0}])
def test_what_cannot_be_dealt_is_refused(bench, changes):
    given = {"batch": 4, "threads": 2, "processes": 2, "rounds": 1, "steps": 1, **changes}
    with pytest.raises(ValueError, match=r"multiples of|give at least"):
        bench._check(argparse.Namespace(**given))
