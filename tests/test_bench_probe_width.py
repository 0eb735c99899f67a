"""The benchmark of the probe by width, whole, on a few rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("probe_width", FOLDER / "probe_width.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "probe_width", module)  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_a_table_of_two_widths(bench, kernel, tmp_path, monkeypatch, capsys):
    flags = {"dim": 8, "rounds": 1, "kernel": kernel, "tokens": 5, "output": tmp_path}
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["probe_width", "--widths", "12", "20", *given])
    bench.main()
    for width in (12, 20):
        frame = pd.read_csv(tmp_path / f"width_{width}.csv")
        assert list(frame["arm"]) == ["loss", 'loss, read "loss"', 'loss, read "default"']
        assert (frame["seconds"] > 0).all()
    assert ("streaming: as asked" if kernel == "streaming" else "at most") in capsys.readouterr().out


def test_too_few_are_refused(bench, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["probe_width", "--widths", "1"])
    with pytest.raises(ValueError, match="widths of 2 or more"):
        bench.main()
