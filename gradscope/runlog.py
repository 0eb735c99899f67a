"""A run directory: written by ``RunLog``, read into frames by ``Run``. The only file that knows the file names.

    recipe.toml  provenance.json  console.log  steps.jsonl  readings.jsonl  evals.jsonl
    arrays/  checkpoints/step-000500/  figures/  DONE (written last)
    sinks.json  tensorboard/  wandb/  mlflow.db     belong to ``gradscope.sinks``

The three ``.jsonl`` files are the tables of ``gradscope.run_tables``, which says which rows count after a run was resumed.

How it can mislead: a run that is still being written, or was killed, is read up to its last whole line; ``Run.done`` tells.

This file never imports torch, and pandas only where a frame is made.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from gradscope.run_tables import (
    COLUMNS,
    IDENTITY,
    SCHEMA_VERSION,
    counting,
    cut_torn_line,
    encoded,
    open_table,
    plain,
    read_rows,
    table_file,
    was_streamed,
    write_all,
)
from gradscope.types import NEED_CELLS

if TYPE_CHECKING:
    import pandas as pd

_CHECKPOINT = re.compile(r"step-(\d{6,})")
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_.=-]+")


class Listener(Protocol):
    """Hears of every row once it is on its way to the disk. Must not raise."""

    def write(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of "steps", "readings" or "evals", ``attempt`` included."""

    def close(self, done: bool) -> None:
        """No more rows will come; ``done`` says whether the run reached its end."""


class RunLog:
    """The one writer of a run directory. Make it with ``create`` or ``reopen``; use it as a context manager.

    Rows are dicts of plain values (numbers, strings, None, lists, numpy values); ``attempt`` is added here. Every call writes
    whole lines with one system call and keeps nothing back, so a killed process loses at most the line it was writing.
    """

    def __init__(self, path: Path, lock: Any, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._lock = lock
        self._files: dict[str, IO[bytes]] = {name: open_table(path, name) for name in COLUMNS}
        self._console = (path / "console.log").open("ab", buffering=0)
        self._listeners: list[Listener] = []

    @classmethod
    def create(cls, path: str | Path, *, recipe_toml: str, provenance: Mapping[str, Any]) -> RunLog:
        """Start a run. Raises ValueError if ``path`` holds anything already, or cannot be made."""
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the run directory {path} ({error.strerror}); choose another --output.") from None
        lock = _lock(path)
        try:
            _refuse_used(path)
            _write_whole(path / "recipe.toml", recipe_toml.encode())
            _write_provenance(path, [{"attempt": 1, "from_step": 0, **provenance}])
            return cls(path, lock, attempt=1)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def reopen(cls, path: str | Path, *, step: int, provenance: Mapping[str, Any]) -> RunLog:
        """Continue a run after ``step`` optimizer steps (0 = from the start), as attempt + 1.

        Rows of older attempts with a larger step no longer count; checkpoints of a larger step are renamed, not deleted. A torn
        last line is cut off. Raises ValueError if ``path`` is not a run or another process is writing it.
        """
        path = Path(path)
        _require_run(path)
        lock = _lock(path)
        try:
            attempts = _read_provenance(path)
            attempt = attempts[-1]["attempt"] + 1
            (path / "DONE").unlink(missing_ok=True)
            cut = {name: cut_torn_line(table_file(path, name)) for name in COLUMNS}
            _write_provenance(path, [*attempts, {"attempt": attempt, "from_step": step, **provenance}])
            log = cls(path, lock, attempt)
            for name, size in cut.items():
                if size:
                    log.console(f"{name}.jsonl ended in a torn line; its {size} bytes were cut off")
            log._set_aside_checkpoints(step)
            return log
        except BaseException:
            lock.release()
            raise

    def listen(self, listener: Listener) -> None:
        """From now on ``listener`` hears of every row; it is closed with this log."""
        self._listeners.append(listener)

    def write_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append step rows (``COLUMNS["steps"]`` and any further numeric columns)."""
        self._write("steps", rows)

    def write_readings(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append readings in long format (``COLUMNS["readings"]``)."""
        self._write("readings", rows)

    def write_evals(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append evaluation rows in long format (``COLUMNS["evals"]``)."""
        self._write("evals", rows)

    def console(self, text: str) -> None:
        """Append ``text`` to console.log, ending it with a newline."""
        write_all(self._console, (text if text.endswith("\n") else text + "\n").encode())

    def save_array(self, name: str, array: np.ndarray) -> str:
        """Save an array too long for a table; returns the reference that ``Run.array`` takes."""
        assert _ARRAY_NAME.fullmatch(name), f"array name {name!r} must be a plain file name"
        folder = self.path / "arrays"
        folder.mkdir(exist_ok=True)
        partial = folder / f".{name}.partial.npz"
        np.savez_compressed(partial, value=array)
        partial.replace(folder / f"{name}.npz")
        return f"arrays/{name}.npz"

    def checkpoint_dir(self, step: int) -> Path:
        """The folder for the checkpoint after ``step`` steps; its parent exists, the folder itself is the caller's to make.

        Rows written so far are forced to disk first, so that no checkpoint is ever ahead of the log.
        """
        self._sync()
        parent = self.path / "checkpoints"
        parent.mkdir(exist_ok=True)
        return parent / f"step-{step:06d}"

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders that count, by rising step."""
        return _checkpoints(self.path)

    def mark_best(self, step: int, recall: float) -> None:
        """Say which checkpoint is best on validation (``checkpoints/best.json``); step 0 is the start, which has no checkpoint."""
        content = {"step": step, "recall_at_1": recall, "checkpoint": f"step-{step:06d}" if step else None}
        _write_whole(self.path / "checkpoints" / "best.json", (json.dumps(content) + "\n").encode())

    def finish(self) -> None:
        """Mark the run as complete, last of all, and close it."""
        self._sync()
        _write_whole(self.path / "DONE", f"attempt {self.attempt}\n".encode())
        self._dismiss(done=True)
        self.close()

    def close(self) -> None:
        """Close the files and let another writer in. May be called twice."""
        self._dismiss(done=False)
        for file in (*self._files.values(), self._console):
            file.close()
        self._lock.release()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        whole = [{"attempt": self.attempt, **row} for row in rows]
        if whole:
            write_all(self._files[table], "".join(encoded(table, row) for row in whole).encode())
            for listener in self._listeners:
                listener.write(table, whole)

    def _dismiss(self, done: bool) -> None:
        """While console.log is still open: a listener may have last words."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close(done)

    def _sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())

    def _set_aside_checkpoints(self, step: int) -> None:
        for folder in self.checkpoints():
            if checkpoint_step(folder) > step:
                aside = folder.with_name(f"{folder.name}.superseded-by-attempt-{self.attempt}")
                folder.rename(aside)
                self.console(f"{folder.name} is later than the resumed step {step}; renamed to {aside.name}")


class Run:
    """A run directory, read. Frames are made on first use and kept; make a new ``Run`` to see new rows.

    Raises ValueError, saying what was looked for and what is there, if ``path`` is not a run directory.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _require_run(self.path)
        #: Rows left out per table because a newer attempt replaced them, and torn last lines; filled as tables are read.
        self.superseded: dict[str, int] = {}
        self.torn: dict[str, int] = {}
        self._readings_of: dict[str, pd.DataFrame] = {}

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved settings, as nested dicts."""
        try:
            return tomllib.loads((self.path / "recipe.toml").read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path / 'recipe.toml'} cannot be read as TOML: {error}.") from None

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """One dict per attempt: ``attempt``, ``from_step`` and the provenance it was started with."""
        return _read_provenance(self.path)

    @property
    def provenance(self) -> dict[str, Any]:
        """The newest attempt's entry of ``attempts``."""
        return self.attempts[-1]

    @property
    def done(self) -> bool:
        """Whether the newest attempt reached its end."""
        return (self.path / "DONE").exists()

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per optimizer step, counted from 1."""
        return _frame("steps", self.rows("steps"))

    @cached_property
    def readings(self) -> pd.DataFrame:
        """One row per reading; ``value`` is a float or a list of floats."""
        return _frame("readings", self.rows("readings"))

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row per evaluation metric; recall values are fractions in 0..1."""
        return _frame("evals", self.rows("evals"))

    def readings_of(self, quantity: str) -> pd.DataFrame:
        """The rows of ``readings`` of one quantity; of a long run the others' lines are not even parsed."""
        if quantity not in self._readings_of:
            self._readings_of[quantity] = self._one_quantity(quantity)
        return self._readings_of[quantity]

    def _one_quantity(self, name: str) -> pd.DataFrame:
        if "readings" in vars(self):  # they have been read
            return self.readings[self.readings["quantity"] == name]
        written, _ = read_rows(table_file(self.path, "readings"), "readings", holding=name)
        kept = counting((row for row in written if row["quantity"] == name), self.attempts, IDENTITY["readings"])
        return _frame("readings", kept)

    def reading(self, quantity: str, key: str, term: str) -> pd.DataFrame:
        """One quantity over the run: columns ``step``, ``epoch`` (NaN where the step itself was not logged), ``value``.

        Raises ValueError, naming the setting that would record it, if the run has no such reading.
        """
        frame = self.readings_of(quantity)
        chosen = frame[(frame["key"] == key) & (frame["term"] == term)]
        if chosen.empty:
            raise ValueError(self._missing(quantity, key, term))
        epochs = chosen["step"].map(self.steps.set_index("step")["epoch"])
        return chosen[["step"]].assign(epoch=epochs, value=chosen["value"].infer_objects()).reset_index(drop=True)

    def array(self, reference: str) -> np.ndarray:
        """The array behind a reference returned by ``RunLog.save_array``."""
        path = self.path / reference
        if not path.is_file():
            raise ValueError(f"{self.path} has no array '{reference}'; the run directory was copied without it.")
        with np.load(path, allow_pickle=False) as archive:
            return archive["value"]

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders that count, by rising step."""
        return _checkpoints(self.path)

    @property
    def figures_dir(self) -> Path:
        """Where this run's figures belong."""
        return self.path / "figures"

    def rows(self, table: str) -> list[dict[str, Any]]:
        """The rows of "steps", "readings" or "evals" that count, in file order; a missing value is None here, and not NaN."""
        written, self.torn[table] = read_rows(table_file(self.path, table), table)
        kept = counting(written, self.attempts, IDENTITY[table])
        self.superseded[table] = len(written) - len(kept)
        return kept

    def _missing(self, quantity: str, key: str, term: str) -> str:
        wanted = f"{self.path} has no reading '{quantity}' key '{key}'" + (f" of term '{term}'" if term else "")
        if self.readings.empty:
            return f"{wanted}: it has no readings at all; {self._remedy(small=True, both=False)}."
        same = self.readings[self.readings["quantity"] == quantity]
        there = {f"{k}/{t}" if t else str(k) for k, t in zip(same["key"], same["term"], strict=True)}
        found = ", ".join(sorted(there or set(self.readings["quantity"])))
        small = not there or self.recipe.get("probe", {}).get("set", "full") != "full"
        cells = quantity in NEED_CELLS and was_streamed(self.readings)
        return f"{wanted}, only {found}; {self._remedy(small=small, both=not small, cells=cells)}."

    def _remedy(self, *, small: bool, both: bool, cells: bool = False) -> str:
        """What would record it, in the words of whoever made the run.

        ``both``: the other objective's gradients may be missing; ``cells``: it needs those of a softmax that was streamed.
        """
        if "loop" in self.provenance:  # gradscope.Probe
            set_ = ', probe_set="full"' if small or both else ""
            set_ += ', kernel="dense"' if cells else ""
            return f"attach gradscope.Probe(..., output=...{set_}{', second_backward=True' if both else ''}) to record it"
        set_ = " --probe-set full" * small + " --kernel dense" * cells
        return f"run gradscope train with --log-grads{set_}{' --set probe.second_backward=true' if both else ''} to record it"


def _frame(table: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=None if rows else list(COLUMNS[table]))


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint folder's name. Raises ValueError if ``path`` is not named like a checkpoint."""
    match = _CHECKPOINT.fullmatch(path.name)
    if not match:
        raise ValueError(f"{path} is not a checkpoint folder: its name should look like step-000500.")
    return int(match[1])


def is_run(path: str | Path) -> bool:
    """Whether ``path`` is a run directory."""
    return all((Path(path) / name).is_file() for name in ("recipe.toml", "provenance.json"))


def _require_run(path: Path) -> None:
    if is_run(path):
        return
    raise ValueError(
        f"{path} is not a run directory: looked for recipe.toml and provenance.json, found {_contents(path)}; "
        "give a directory written by gradscope train or gradscope.Probe."
    )


def _contents(path: Path) -> str:
    if not path.exists():
        return "no such directory"
    if not path.is_dir():
        return "a file"
    names = sorted(item.name for item in path.iterdir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) + more) if names else "an empty directory"


def _refuse_used(path: Path) -> None:
    if is_run(path):
        raise ValueError(f"{path} already holds a run; continue it with --resume, or choose another --output.")
    if any(item.name != "writer.lock" for item in path.iterdir()):
        raise ValueError(f"{path} is not empty and not a run ({_contents(path)}); choose another --output.")


def _lock(path: Path) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(path / "writer.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process is writing {path} (it holds writer.lock); wait for it to end, or choose another --output."
        ) from None
    except OSError as error:
        raise ValueError(f"cannot write in {path} ({error.strerror}); choose another --output.") from None
    return lock


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Nobody else writes this run meanwhile. Raises ValueError if another process does."""
    lock = _lock(path)
    try:
        yield
    finally:
        lock.release()


def _checkpoints(path: Path) -> list[Path]:
    folder = path / "checkpoints"
    found = [item for item in folder.iterdir() if item.is_dir() and _CHECKPOINT.fullmatch(item.name)] if folder.is_dir() else []
    return sorted(found, key=checkpoint_step)


def _read_provenance(path: Path) -> list[dict[str, Any]]:
    file = path / "provenance.json"
    try:
        attempts = json.loads(file.read_text(encoding="utf-8"))["attempts"]
        sound = [entry for entry in attempts if {"attempt", "from_step"} <= set(entry)]
    except (ValueError, KeyError, TypeError):
        sound = attempts = []
    if not sound or len(sound) < len(attempts):
        raise ValueError(f"{file} is not a gradscope provenance file; restore it, or give another run directory.")
    return attempts


def _write_provenance(path: Path, attempts: list[dict[str, Any]]) -> None:
    text = json.dumps({"schema": "gradscope.provenance", "version": SCHEMA_VERSION, "attempts": plain(attempts)}, indent=2)
    _write_whole(path / "provenance.json", (text + "\n").encode())


def _write_whole(path: Path, data: bytes) -> None:
    """All of a file or nothing of it."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
