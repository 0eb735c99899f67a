"""Benchmarks of cached accumulation, of tokenizing and of start-up: their arithmetic, and the whole path at a small size."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """``load("cached")``: a benchmark as a module; they find the harness beside them."""

    def module(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    return module


@pytest.fixture
def call(load, monkeypatch, tmp_path):
    """``call("cached", "--size", 4)`` -> its table and its notes."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))

    def run(name: str, *words: object) -> tuple[pd.DataFrame, dict[str, str]]:
        bench = load(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words), "--output", str(tmp_path / "out")])
        bench.main()
        written = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        return pd.read_csv(tmp_path / "out" / f"{name}.csv").set_index("arm"), written["notes"]

    return run


def test_cached(call, one_thread):
    table, notes = call("cached", "--count", 2, "--size", 3, "--rounds", 1, "--threads", 1)
    assert list(table.index) == ["one batch", "cached", "narrow"]
    assert table.loc["one batch", "ratio"] == 1
    assert notes["floor of cached"] == f"{7 / 6:.3f}"
    assert float(notes["gradient, cached against one batch"].split()[0]) < 1e-4


def test_cached_refuses_an_unknown_model(load):
    with pytest.raises(ValueError, match="no model of open_clip"):
        load("cached").encoder_of("ViT-nope")


def test_tokenizer(call, tmp_path, one_thread, monkeypatch):
    from gradscope.encoders import token_cache

    monkeypatch.setattr(token_cache, "WORTHWHILE", token_cache.WORTHWHILE)  # the benchmark lowers it
    file = tmp_path / "captions.json"
    file.write_text(json.dumps(["a red ball", {"caption": "fish &amp; chips, café"}] * 20))
    table, notes = call("tokenizer", file, "--rounds", 1)
    assert list(table.index) == ["open_clip warm", "open_clip cold", "ours warm", "ours cold", "ours cached"]
    assert notes["captions"].startswith("40, ")
    assert "every one" in notes["ids"]


def test_tokenizer_draws_captions_and_refuses_other_files(load, tmp_path):
    bench = load("tokenizer")
    captions = bench.captions_of([], 5)
    assert len(set(captions)) == 5
    (tmp_path / "bad.json").write_text('[{"text": "a"}]')
    with pytest.raises(ValueError, match="no JSON list of captions"):
        bench.captions_of([tmp_path / "bad.json"], 5)


def test_tokenizer_stops_at_a_wrong_id(load, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path))
    bench = load("tokenizer")
    monkeypatch.setattr(bench.ClipTokenizer, "contents", lambda self, given: [[1] for _ in given])
    with pytest.raises(ValueError, match="2 captions have other ids than open_clip's, the first: 'red'"):
        bench.compare(["red", "blue"], 8)


def test_startup(call):
    table, notes = call("startup", "--rounds", 1, "--only", "gradscope --help")
    assert list(table.index) == ["import torch", "gradscope --help"]
    assert table.loc["import torch", "ratio"] == 1
    assert "gradscope --help" in notes["fastest start, seconds"]


def test_startup_arithmetic_and_refusals(load, tmp_path):
    bench = load("startup")
    timed = pd.DataFrame(
        [(0, "a", 1.0), (0, "import torch", 2.0), (1, "a", 3.0), (1, "import torch", 4.0), (2, "a", 1.0), (2, "import torch", 1.0)],
        columns=["round", "arm", "seconds"],
    )
    row = bench.summary(timed, ["a"]).iloc[0]
    assert (row["seconds"], row["least"]) == (1.0, 1.0)
    assert (row["ratio"], row["low"], row["high"]) == (0.75, 0.5, 1.0)
    with pytest.raises(ValueError, match="ended with 0 and not 2"):
        bench.measure({"a": (["-c", "pass"], 2)}, rounds=1)
    assert {"figure 4", "diagnose"} <= set(bench.commands(tmp_path, tmp_path))
