"""The benchmark of tar files runs whole on a few small pictures, and its arms read the same bytes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_shards", FOLDER / "shards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_path(bench, tmp_path, monkeypatch):
    words = [
        "shards",
        "--output",
        str(tmp_path),
        "--pictures",
        "7",
        "--side",
        "48",
        "--per-shard",
        "3",
        "--passes",
        "1",
        "--rounds",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    facts = json.loads((tmp_path / "bytes.json").read_text())
    assert [row["arm"] for row in facts["rows"]] == ["files", "members", "webdataset"]
    assert all(row["seconds"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in facts["rows"])
    assert set(facts["notes"]) == {"seconds for 1,000 records, first", "seconds for 1,000 records, again"}
    assert [row["arm"] for row in json.loads((tmp_path / "pixels.json").read_text())["rows"]] == ["files, decoded", "members, decoded"]


def test_settings_that_make_no_sense(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["shards", "--output", str(tmp_path), "--pictures", "0"])
    with pytest.raises(ValueError, match="at least 1 picture"):
        bench.main()
