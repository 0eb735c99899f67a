"""The tables of a run directory, ``steps.jsonl``, ``readings.jsonl`` and ``evals.jsonl``; ``gradscope.runlog`` has the whole of it.

Each is a long table: a schema header, then one JSON object per line, only ever appended. A resumed run appends under a higher
``attempt``. Let attempt b start after step r_b; then a row (attempt a, step t) counts only while no newer attempt b > a has
r_b < t, and of two rows with one identity the newer attempt's counts. That is decided when reading (``counting``), so that nothing
that was measured is ever erased.

How it can mislead: a table that is still being written, or whose writer was killed, is read up to its last whole line. A non-finite
value is written as the string "nan", "inf" or "-inf" and comes back as a float; a missing one is null. In a frame of numbers both
look like NaN; ``with_gaps`` keeps them apart.

This file imports neither torch nor pandas.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gradscope.types import STREAMED

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1

#: The columns every row of a table has. ``steps`` rows carry more (one per loss term, the rate, throughput, ...).
COLUMNS: dict[str, tuple[str, ...]] = {
    "steps": ("attempt", "step", "samples", "epoch", "loss"),
    "readings": ("attempt", "step", "quantity", "term", "key", "value", "unit", "stamps"),
    "evals": (
        *("attempt", "step", "epoch", "dataset", "split", "direction", "metric", "value"),
        *("low", "high", "n_queries", "n_candidates", "protocol"),
    ),
}

#: What makes two rows of a table the same measurement.
IDENTITY: dict[str, list[str]] = {
    "steps": ["step"],
    "readings": ["step", "quantity", "term", "key"],
    "evals": ["step", "dataset", "split", "direction", "metric", "protocol"],
}

#: Columns of words: here "nan" and "inf" are words too.
TEXT_COLUMNS = frozenset({"quantity", "term", "key", "unit", "stamps", "dataset", "split", "direction", "metric", "protocol"})

#: Columns that two equal runs need not share: clocks, throughput, memory, and which attempt wrote the row.
VOLATILE_COLUMNS = ("attempt", "time", "seconds", "wait_seconds", "probe_seconds", "images_per_s", "peak_mem")

#: Units of readings that two equal runs need not share.
VOLATILE_UNITS = ("s", "ms", "MB", "MiB", "share of plain time")

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The part of a steps, readings or evals frame that must be equal in two equal runs (see ``VOLATILE_COLUMNS``)."""
    if "unit" in frame:
        frame = frame[~frame["unit"].isin(VOLATILE_UNITS)]
    return frame.drop(columns=[name for name in VOLATILE_COLUMNS if name in frame]).reset_index(drop=True)


def with_gaps(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows as a frame in which a missing cell is None, and nan a value that was written. Columns with gaps are of objects."""
    import pandas as pd

    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    gaps = {name: any(cell is None for cell in cells) for name, cells in columns.items()}
    return pd.DataFrame({name: pd.Series(cells, dtype=object if gaps[name] else None) for name, cells in columns.items()})


def was_streamed(readings: pd.DataFrame) -> bool:
    """Whether a softmax of these readings was, so that what needs its cells is not among them."""
    return any(STREAMED in str(stamps) for stamps in readings["stamps"].unique()) if "stamps" in readings else False


def table_file(path: Path, table: str) -> Path:
    """Where a run directory keeps a table."""
    return path / f"{table}.jsonl"


def open_table(path: Path, table: str) -> IO[bytes]:
    """The file to append lines to, with its header written if it is new."""
    file = table_file(path, table).open("ab", buffering=0)
    if file.seek(0, os.SEEK_END) == 0:
        header = {"schema": f"gradscope.{table}", "version": SCHEMA_VERSION, "columns": COLUMNS[table]}
        write_all(file, (json.dumps(header) + "\n").encode())
    return file


def cut_torn_line(path: Path) -> int:
    """Cut a file after its last newline; returns the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        keep = size
        while keep:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            keep = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        file.truncate(keep)
        return size - keep


def encoded(table: str, row: dict[str, Any]) -> str:
    """One line, newline included. A row must have every column of ``COLUMNS``; what else it has is kept too."""
    missing = [name for name in COLUMNS[table] if name not in row]
    assert not missing, f"a row for {table} lacks {', '.join(missing)}"
    try:
        return _encode(row) + "\n"
    except (TypeError, ValueError):  # numpy's values, or a float that is not finite: few rows
        return _encode(plain(row)) + "\n"


_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False).encode


def plain(value: Any) -> Any:
    """A JSON value: numpy values become Python ones, non-finite floats become words."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_all(file: IO[bytes], data: bytes) -> None:
    """Every byte of ``data``, into an unbuffered file."""
    view = memoryview(data)
    while view:  # an unbuffered write may be short, e.g. when a disk fills up
        view = view[file.write(view) :]


def read_rows(path: Path, table: str, holding: str = "") -> tuple[list[dict[str, Any]], int]:
    """The whole rows of a table, and 1 if it ends in a torn line (0 otherwise). ``holding``: only lines with this word are parsed."""
    if not path.exists():
        return [], 0
    *lines, rest = path.read_bytes().split(b"\n")
    if lines:
        _check_header(path, table, lines[0])
    word = _encode(holding).encode() if holding else b""
    return [_row(path, number, line) for number, line in enumerate(lines[1:], start=2) if word in line], int(rest != b"")


def counting(rows: Iterable[dict[str, Any]], attempts: Sequence[Mapping[str, Any]], identity: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that count, in file order: not beyond a newer attempt's start, and the newest of each identity."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if any(row["attempt"] < entry["attempt"] and row["step"] > entry["from_step"] for entry in attempts):
            continue
        key = tuple(row[name] for name in identity)
        kept.pop(key, None)
        kept[key] = row
    return list(kept.values())


class Tail:
    """One table of a run that is being written: each call gives the whole lines that were added since the last.

    A torn last line waits until it is whole, or is cut by the writer that continues the run. Rows of all attempts are given, as they
    were written. ``wanted``: only lines that hold one of these pieces of text are parsed.
    """

    def __init__(self, path: Path, table: str, wanted: Sequence[str] = ()) -> None:
        self._file = table_file(path, table)
        self._table = table
        self._wanted = [text.encode() for text in wanted]
        self._at = 0  # always the start of a line
        self._line = 0

    @property
    def written(self) -> float:
        """When the file last grew, in seconds since the epoch; 0 if it is not there."""
        return self._file.stat().st_mtime if self._file.exists() else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Raises ValueError for a line that is whole and not a row."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._at)
            added = file.read()
        lines = added[: added.rfind(b"\n") + 1].split(b"\n")[:-1]
        self._at += sum(len(line) + 1 for line in lines)
        rows = []
        for line in lines:
            self._line += 1
            if self._line == 1:
                _check_header(self._file, self._table, line)
            elif not self._wanted or any(text in line for text in self._wanted):
                rows.append(_row(self._file, self._line, line))
        return rows


def _check_header(path: Path, table: str, line: bytes) -> None:
    header = _row(path, 1, line)
    if header.get("schema") != f"gradscope.{table}":
        raise ValueError(f"{path} does not start with the header of a {table} table; restore the file from a copy.")
    if header["version"] > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {header['version']}, this gradscope reads up to {SCHEMA_VERSION}; install a newer one."
        )


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{path} line {number} is not a JSON object; repair or remove that line.")
    if b'nan"' in line or b'inf"' in line:
        return {name: value if name in TEXT_COLUMNS else _restore(value) for name, value in row.items()}
    return row


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    return [_restore(item) for item in value] if isinstance(value, list) else value
