"""Exported files read back with other readers, against the rows of the run: values to the bit, missing apart from nan."""

from __future__ import annotations

import csv
import json
import math
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_sinks import create, eval_row, reading, step_row
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.export import Table, check_target, long_table, wide_table, write
from gradscope.runlog import Run, RunLog

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1 / 3, 1e300]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts, lists, non-finite and missing values, an evaluation before the first step."""
    generator = np.random.default_rng(secrets.randbits(32))
    with create(tmp_path / "run") as log:
        log.write_evals([eval_row(0, 0.25)])
        for step in range(1, 6):
            log.write_steps([step_row(step, loss=float(generator.normal()))])
        log.write_readings([reading(5, -1.0)])
    with RunLog.reopen(tmp_path / "run", step=3, provenance={}) as log:
        for step, value in enumerate(SPECIAL, 4):
            log.write_readings([reading(step, value), reading(step, [value, 1.0], key="list", term="")])
            log.write_steps([step_row(step, loss=value, skipped=step % 2)])
        log.write_evals([eval_row(6, 0.75), eval_row(6, 0.5, "R@5")])
        log.finish()
    return tmp_path / "run"


def same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (math.isnan(a) and math.isnan(b))
    return a == b


def from_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def from_parquet(path: Path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("table", ["steps", "readings", "evals"])
def test_long_files_hold_the_rows_that_count(run: Path, tmp_path: Path, table: str):
    rows = Run(run).rows(table)
    for name in ("a.csv", "a.parquet"):
        write(long_table([run], table), tmp_path / name)
    flat, typed = from_csv(tmp_path / "a.csv"), from_parquet(tmp_path / "a.parquet")
    assert len(rows) == len(flat) == len(typed)
    epochs = {row["step"]: row["epoch"] for row in Run(run).rows("steps")}
    for row, text, value in zip(rows, flat, typed, strict=True):
        assert text["run"] == value["run"] == str(run)
        if table == "readings":
            several = isinstance(row["value"], list)
            assert value["epoch"] == epochs[row["step"]]
            assert (value["values"] is None) != several
            assert (value["value"] is None) == several
            row = {**row, "value": None} | {"value": value["values"] if several else row["value"]}
            again = json.loads(text["values"]) if several else text["value"]
            assert all(
                map(same, np.atleast_1d(value["values"] if several else value["value"]).tolist(), np.atleast_1d(row["value"]).tolist())
            )
            assert all(same(float(a), float(b)) for a, b in zip(np.atleast_1d(again), np.atleast_1d(row["value"]), strict=True))
            continue
        for key, expected in row.items():
            assert same(value[key], float(expected) if isinstance(value[key], float) else expected), key
            assert (
                text[key] == ""
                if expected is None
                else same(float(text[key]), float(expected))
                if not isinstance(expected, str)
                else True
            )


def test_the_wide_table_has_one_row_per_run_and_step(run: Path, tmp_path: Path):
    with create(tmp_path / "other") as log:
        log.write_steps([step_row(1, loss=9.0)])
    made = wide_table([run, tmp_path / "other"])
    assert made.left_out == ("loss/list",)
    write(made, tmp_path / "wide.parquet")
    write(made, tmp_path / "wide.csv")
    rows, flat = from_parquet(tmp_path / "wide.parquet"), from_csv(tmp_path / "wide.csv")
    assert [(row["run"], row["step"]) for row in rows] == [*((str(run), step) for step in range(12)), (str(tmp_path / "other"), 1)]
    steps = {row["step"]: row for row in Run(run).rows("steps")}
    readings = {row["step"]: row["value"] for row in Run(run).rows("readings") if row["key"] == "log10_true"}
    for row, text in zip(rows[:-1], flat, strict=False):
        expected = steps.get(row["step"], {}).get("loss")
        assert same(row["loss"], expected)
        assert text["loss"] == "" if expected is None else same(float(text["loss"]), expected)
        assert same(row["loss/hn/log10_true"], readings.get(row["step"]))
    assert {row["step"]: row["eval/scenes/val/i2t.R@1"] for row in rows[:-1] if row["eval/scenes/val/i2t.R@1"] is not None} == {
        0: 0.25,
        6: 0.75,
    }
    assert rows[-1]["loss/hn/log10_true"] is None
    frame = pd.read_parquet(tmp_path / "wide.parquet")
    assert len(frame) == 13


def test_whole_and_broken_numbers_share_a_column(tmp_path: Path):
    table = Table(columns=("a", "b"), rows=[{"a": 1, "b": "x"}, {"a": 0.5}, {"a": None, "b": "y"}])
    write(table, tmp_path / "t.parquet")
    assert from_parquet(tmp_path / "t.parquet") == [{"a": 1.0, "b": "x"}, {"a": 0.5, "b": None}, {"a": None, "b": "y"}]


def test_a_failed_export_leaves_the_old_file(run: Path, tmp_path: Path):
    target = tmp_path / "old.parquet"
    write(long_table([run], "steps"), target)
    before = target.read_bytes()
    with pytest.raises((TypeError, ValueError)):
        write(Table(columns=("a",), rows=[{"a": 1}, {"a": "x"}]), target)
    assert target.read_bytes() == before


# ---- the command


def cli(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result, *parts: str) -> None:
    assert isinstance(result.exception, ValueError)
    for part in parts:
        assert part in str(result.exception)


def test_the_command_writes_and_says_what(run: Path, tmp_path: Path):
    done = cli("export", run, "--to", tmp_path / "new" / "r.csv", "--wide")
    assert done.exit_code == 0, done.exception
    assert "12 rows" in done.stdout
    assert "loss/list" in done.stdout
    done = cli("export", run, "--to", "tensorboard")
    assert "new rows" in done.stdout
    assert "0 new rows" in cli("export", run, "--to", "tensorboard").stdout


def test_the_command_refuses(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(cli("export", run, "--to", "r.txt"), "'r.txt'", ".csv", ".parquet")
    refused(cli("export", run, "--to", "r.csv", "--table", "reading"), "Did you mean 'readings'")
    refused(cli("export", run, "--to", "r.csv", "--wide", "--table", "steps"), "--table has no effect with --wide")
    refused(cli("export", run, "--to", "wandb", "--wide"), "--wide has no effect with a sink")
    refused(cli("export", run, "--to", "wandb,r.csv"), "unknown sink 'r.csv'")
    refused(cli("export", run, "--to", "r.csv", "--sink-all"), "--sink-all has no effect")
    refused(cli("export", tmp_path, "--to", "r.csv"), "not a run directory")
    create(tmp_path / "empty").close()
    refused(cli("export", tmp_path / "empty", "--to", "r.csv"), "no readings", "--log-grads")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'gradscope\[parquet\]'"):
        check_target(Path("r.parquet"))


def test_it_needs_no_torch(run: Path, tmp_path: Path):
    code = f"""
import sys
from pathlib import Path
from gradscope.export import long_table, write
write(long_table([Path({str(run)!r})], "readings"), Path({str(tmp_path / "r.csv")!r}))
assert "torch" not in sys.modules and "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
