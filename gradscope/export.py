"""A run's tables as one CSV or Parquet file: long as they are, or wide with one row per step. Never imports torch.

    long   the rows that count; readings with ``value`` (a number) and ``values`` (a list), of which one is empty, and the step's epoch
    wide   one row per run and step: the step's own columns, and a column quantity/term/key per reading, and direction.metric per eval

A missing value is an empty field of CSV and a null of Parquet; nan and inf are data and stay "nan", "inf", "-inf" in CSV and floats in
Parquet. Numbers of CSV read back to the same bits.
How it can mislead: most readers, pandas among them, take an empty field and "nan" for the same; lists have no place in the wide table.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.run_tables import COLUMNS
from gradscope.runlog import Run

TABLES = tuple(COLUMNS)
FORMATS = (".csv", ".parquet")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of named columns; a row may lack some. ``left_out`` names what has no place in this form."""

    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    left_out: tuple[str, ...] = ()


def long_table(paths: Sequence[Path], table: str) -> Table:
    """The rows of "steps", "readings" or "evals" of some runs, each with its run's path.

    Raises:
        ValueError: a path is not a run, or no run has such rows.
    """
    rows: list[Row] = []
    for path in paths:
        run = Run(path)
        epochs = {row["step"]: row["epoch"] for row in run.rows("steps")} if table == "readings" else {}
        rows += [{"run": str(path), **_long_row(row, epochs)} for row in run.rows(table)]
    _refuse_empty(rows, paths, table)
    return Table(columns=_columns(rows), rows=rows)


def _long_row(row: Row, epochs: Mapping[int, Any]) -> Row:
    if "quantity" not in row:
        return row
    several = isinstance(row["value"], list)
    place = {"attempt": row["attempt"], "step": row["step"], "epoch": epochs.get(row["step"])}
    split = {"value": None if several else row["value"], "values": row["value"] if several else None}
    return {**place, **{name: split.get(name, value) for name, value in row.items() if name not in place}, "values": split["values"]}


def wide_table(paths: Sequence[Path]) -> Table:
    """One row per run and step with everything measured at that step; lists are named in ``left_out``.

    Raises:
        ValueError: a path is not a run, or no run has a row.
    """
    rows: list[Row] = []
    lists: dict[str, None] = {}
    for path in paths:
        run = Run(path)
        by_step: dict[int, Row] = {}
        for table, name in _NAMES.items():
            for row in run.rows(table):
                cells = by_step.setdefault(row["step"], {"run": str(path), "step": row["step"]})
                if name is None:
                    cells.update(row)
                elif isinstance(row["value"], list):
                    lists[name(row)] = None
                elif name(row) in cells:  # the same metric by another protocol
                    cells[f"{name(row)} ({row['protocol']})"] = row["value"]
                else:
                    cells[name(row)] = row["value"]
        rows += [by_step[step] for step in sorted(by_step)]
    _refuse_empty(rows, paths, "steps")
    return Table(columns=_columns(rows), rows=rows, left_out=tuple(lists))


def _reading_name(row: Row) -> str:
    return "/".join(filter(None, (row["quantity"], row["term"], row["key"])))


def _eval_name(row: Row) -> str:
    return f"eval/{row['dataset']}/{row['split']}/{row['direction']}.{row['metric']}"


#: How a row of each table names its column of the wide table; a step is a row of its own.
_NAMES: dict[str, Callable[[Row], str] | None] = {"steps": None, "readings": _reading_name, "evals": _eval_name}


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """In order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _refuse_empty(rows: Sequence[Row], paths: Sequence[Path], table: str) -> None:
    if rows:
        return
    needs = "; run gradscope train with --log-grads to record them" if table == "readings" else ""
    raise ValueError(f"{', '.join(map(str, paths))}: no {table} have been written yet, so there is nothing to export{needs}.")


def check_target(path: Path) -> None:
    """Raises ValueError unless the name ends in a known format whose library is installed."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"'{path}' ends in neither {' nor '.join(FORMATS)}, and is no sink; name a file that does.")
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def write(table: Table, path: Path) -> None:
    """Writes all of the file or nothing of it; an older file of this name is replaced. Format by the name's ending."""
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    (_write_csv if path.suffix.lower() == ".csv" else _write_parquet)(table, partial)
    partial.replace(path)


def _write_csv(table: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows([_cell(row.get(name)) for name in table.columns] for row in table.rows)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps([_word(item) for item in value])
    return "" if value is None else _word(value)


def _word(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _write_parquet(table: Table, path: Path) -> None:
    pa = _pyarrow()
    import pyarrow.parquet

    columns = {name: [row.get(name) for row in table.rows] for name in table.columns}
    pyarrow.parquet.write_table(pa.table({name: _array(pa, values) for name, values in columns.items()}), path)


def _array(pa: Any, values: list[Any]) -> Any:
    """Whole numbers and floats may be mixed in one column, e.g. a share that is 0 at times."""
    kinds = {type(value) for value in values if value is not None}
    if float in kinds:
        return pa.array([None if value is None else float(value) for value in values], pa.float64(), from_pandas=False)
    if list in kinds:
        return pa.array([None if v is None else list(map(float, v)) for v in values], pa.list_(pa.float64()), from_pandas=False)
    return pa.array(values, from_pandas=False)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError("a Parquet file needs pyarrow; pip install 'gradscope[parquet]', or name a .csv file.") from None
    return pyarrow
