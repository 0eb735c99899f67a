"""The benchmark of the streaming loss, whole, on a few rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("streaming_loss", FOLDER / "streaming_loss.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "streaming_loss", module)  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def test_both_tables_of_two_widths(bench, tmp_path, monkeypatch, capsys):
    flags = {"peer-up-to": 50, "margins-up-to": 50, "top": 3, "width": 8, "other-width": 4, "rounds": 1, "output": tmp_path}
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["streaming_loss", "--rows", "40", "60", *given])
    before = torch.get_float32_matmul_precision()
    bench.main()
    assert torch.get_float32_matmul_precision() == before
    small = pd.read_csv(tmp_path / "peer_40.csv")
    assert list(small["arm"]) == ["ClipLoss, no margin", "plain HN", "auto", "streaming, shared", "streaming, safe"]
    assert list(pd.read_csv(tmp_path / "peer_60.csv")["arm"]) == list(small["arm"])[1:]
    assert len(pd.read_csv(tmp_path / "margin_40.csv")) == 4
    assert not (tmp_path / "margin_60.csv").exists()
    notes = json.loads((tmp_path / "peer_40.json").read_text())["notes"]
    assert notes["auto takes the kernel"] == "dense"
    assert notes["blocks of the shared form that needed no second exp"] == "100.0%"
    assert float(notes["mean loss"]) > 0
    assert "40 rows of 8" in capsys.readouterr().out


def test_arms_do_the_same_work(bench):
    """The plain form and the streamed one with a margin have the same gradients; without, those of the peer."""
    given = bench.argparse.Namespace(seed=1, width=16, other_width=4, noise=0.3, scale=20.0, gamma=0.3)
    rows = bench.make_rows(50, given)
    found = {}
    rows_clear = bench.Rows.clear
    for name, work in {
        "plain": bench.plain(rows),
        "shared": bench.streaming(rows, gamma=0.3),
        "peer": bench.peer(rows),
        "base": bench.streaming(rows),
    }.items():
        bench.Rows.clear = lambda self, name=name: found.update({name: [leaf.grad for leaf in (self.image, self.text, self.scale)]})
        work()
        rows_clear(rows)
    bench.Rows.clear = rows_clear
    for one, other in (("plain", "shared"), ("peer", "base")):
        torch.testing.assert_close(found[one], found[other], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("rows", "0", "at least 1 row"),
        ("scale", "-3", "a finite --scale above 0"),
        ("noise", "nan", "noise"),
        ("threads", "-1", "threads"),
    ],
)
def test_impossible_sizes_are_refused(bench, tmp_path, monkeypatch, flag, value, words):
    monkeypatch.setattr(sys, "argv", ["streaming_loss", "--output", str(tmp_path), f"--{flag}", value])
    with pytest.raises(ValueError, match=words):
        bench.main()
