"""Feeds the rows of one run to one sink: each row once, over resumes and replays, and never at the price of the training.

``sinks.json`` in the run directory keeps, per sink, its id and the last step sent of each table. A resumed run computes the steps after
its checkpoint again, to the same values; those already sent are not sent twice, and a replay of a finished run sends only what is new.
A sink that fails is counted and said once; training goes on, and the sink is left alone for ``PAUSE`` times as long as the failure
took, so that a server that does not answer slows training by a tenth at most. Opening fails before the first step, and that is the
user's to mend.

How it can mislead: on other hardware the repeated steps may differ in their last digits; the sink keeps the first attempt's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscope.run_tables import COLUMNS
from gradscope.runlog import Run, exclusive
from gradscope.sinks import Destination, Sink, parse, require, sinks
from gradscope.sinks.points import points

STATE = "sinks.json"
PAUSE = 10.0


class Feed:
    """A listener of a run log (``RunLog.listen``) that passes its rows on to one sink."""

    def __init__(self, name: str, sink: Sink, path: Path, *, everything: bool, say: Callable[[str], None]) -> None:
        self.name = name
        self.sent = _read(path).get(name, {}).get("sent", {})
        self.rows = self.lost = 0
        self.left_behind: set[str] = set()
        self._quiet_until = 0.0
        self._before = dict(self.sent)  # a later row of the same step is new, a row of an earlier attempt is not
        self._sink, self._path, self._everything, self._say = sink, path, everything, say
        self._save()

    def write(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends the rows of steps that no earlier attempt has sent. Does not raise."""
        fresh = [row for row in rows if row["step"] > self._before.get(table, -1)]
        if not fresh:
            return
        start = time.monotonic()
        if start < self._quiet_until:
            self.lost += len(fresh)
            return
        try:
            found, behind = points(table, fresh, self._everything)
            if found:
                self._sink.write(found)
            self.sent[table] = max(self.sent.get(table, -1), *(int(row["step"]) for row in fresh))
            self._save()
        except Exception as error:  # a dashboard must never end a training run
            self._failed(error, len(fresh))
            self._quiet_until = time.monotonic() + PAUSE * (time.monotonic() - start)
            return
        self.left_behind |= behind
        self.rows += len(fresh)

    def close(self, done: bool) -> None:
        """Says what did not arrive, and closes the sink. Does not raise."""
        if self.lost:
            self._say(f"sink {self.name}: {self.lost} rows did not arrive, {self.rows} did; the run directory holds them all")
        if self.left_behind:
            names = ", ".join(sorted(self.left_behind))
            self._say(f"sink {self.name}: lists that are no histograms stay in the run directory: {names}")
        try:
            self._sink.close(done)
        except Exception as error:
            self._say(f"sink {self.name} could not be closed: {type(error).__name__}: {error}")

    def _failed(self, error: Exception, rows: int) -> None:
        if not self.lost:
            self._say(f"sink {self.name} failed, training goes on: {type(error).__name__}: {error}")
        self.lost += rows

    def _save(self) -> None:
        state = _read(self._path)
        state[self.name] = {"id": self._sink.id, "sent": self.sent}
        (self._path / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")


def open_feeds(
    names: str, path: Path, recipe: Mapping[str, Any], *, everything: bool = False, say: Callable[[str], None] = print
) -> list[Feed]:
    """Opens, or continues, the named sinks for the run in ``path``.

    Args:
        names: sinks joined with commas; "" opens none.
        path: the run directory, which must exist.
        recipe: its settings, shown by the sinks that can.
        everything: all scalars instead of the short list.
        say: takes one line for the user.

    Raises:
        ValueError: an unknown name, a missing library, or a sink that cannot be opened.
    """
    require(names)
    feeds: list[Feed] = []
    for name in parse(names):
        known = _read(path).get(name, {}).get("id", "")
        try:
            sink = sinks[name]()(Destination(path=path, recipe=recipe, id=known))
        except Exception as error:
            for feed in feeds:
                feed.close(done=False)
            words = " ".join(str(error).split())
            raise ValueError(
                f"sink '{name}' cannot be opened ({type(error).__name__}: {words}); mend that, or leave it out."
            ) from error
        say(f"sink {name}: {sink.where}")
        feeds.append(Feed(name, sink, path, everything=everything, say=say))
    return feeds


def replay(path: Path, names: str, *, everything: bool = False, say: Callable[[str], None] = print) -> dict[str, int]:
    """Sends the rows of a run, those that count, to sinks; returns how many rows each took. Sends nothing twice.

    Raises:
        ValueError: ``path`` is not a run, another process is writing it, or a sink cannot be opened.
    """
    require(names)
    run = Run(path)
    with exclusive(path):
        feeds = open_feeds(names, path, run.recipe, everything=everything, say=say)
        for feed in feeds:
            for table in COLUMNS:
                for rows in _by_step(run, table):
                    feed.write(table, rows)
            feed.close(run.done)
    return {feed.name: feed.rows for feed in feeds}


def _by_step(run: Run, table: str) -> list[list[dict[str, Any]]]:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in run.rows(table):
        by_step.setdefault(int(row["step"]), []).append(row)
    return [by_step[step] for step in sorted(by_step)]


def _read(path: Path) -> dict[str, Any]:
    file = path / STATE
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}); remove it, and sinks start this run anew.") from None
