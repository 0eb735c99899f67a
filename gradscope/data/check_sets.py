"""Checks several splits together: each by itself (``gradscope.data.check``), then which items of one are in another.

Content is compared exactly and cheaply: a file is read only if another of the files looked at has the same size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from gradscope.data.check import Checked, Progress, Tokenize, check_records
from gradscope.data.identity import ItemTable, file_size, items
from gradscope.data.overlap import LEVELS, overlap
from gradscope.data.source import DataSource
from gradscope.types import Record


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The records of one split as they are on disk, duplicates included."""

    source: str  # where the ids come from
    label: str  # what it is called beside numbers
    split: str
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitOverlap:
    """How many records of ``evaluated`` are in ``trained`` too, by level (``gradscope.data.overlap``), and which."""

    evaluated: str
    trained: str
    records: int
    counts: dict[str, int]
    uncompared: int
    ids: tuple[str, ...]

    def finding(self) -> str:
        levels = ", ".join(f"{level} {self.counts[level]:,}" for level in LEVELS)
        return f"records of {self.evaluated} that are in {self.trained} too: {self.counts['any']:,} of {self.records:,} (by {levels})"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found."""

    name: str
    splits: tuple[Checked, ...]
    overlaps: tuple[SplitOverlap, ...]

    def findings(self) -> list[str]:
        """One sentence for each thing that would change a result; none: the data are clean."""
        own = [f"{checked.split}: {said}" for checked in self.splits for said in checked.findings()]
        return own + [found.finding() for found in self.overlaps if found.counts["any"]]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**dataclasses.asdict(self), "findings": self.findings(), "clean": not self.findings()}


def read_piece(source: DataSource, split: str, label: str = "") -> Piece:
    """One split without ``DataSource.read``'s refusal of repeated ids and pictures: they are what a check is for.

    Raises:
        ValueError: no such split, or files that cannot be read.
    """
    split = source.split_or_only(split)
    records: list[Record] = []
    notes: list[str] = []
    for part in split.split("+"):
        found, said = source.readers[source.split_or_only(part)]()
        records += found
        notes += said
        published = source.expected.get(part)
        if published is not None and published != len(found):
            notes.append(f"split '{part}' has {len(found):,} records, published are {published:,}")
    return Piece(source=source.name, label=label or split, split=split, records=tuple(records), notes=tuple(notes))


def check_data(
    name: str,
    pieces: Sequence[Piece],
    *,
    against: Sequence[Piece] = (),
    tokenize: Tokenize,
    contexts: Sequence[int],
    pictures: bool,
    workers: int,
    progress: Progress,
) -> Report:
    """Checks each of ``pieces``, compares them with one another and with ``against``; ``against`` itself is not checked."""
    tables = _tables([*pieces, *against], pictures=pictures, workers=workers, progress=progress)
    checked = [
        check_records(
            piece.records,
            split=piece.label,
            table=table,
            tokenize=tokenize,
            contexts=contexts,
            pictures=pictures,
            workers=workers,
            notes=piece.notes,
            progress=progress,
        )
        for piece, table in zip(pieces, tables, strict=False)
    ]
    own = list(zip(pieces, tables, strict=False))
    others = list(zip(against, tables[len(pieces) :], strict=True))
    pairs = [_training_last(one, other) for one, other in combinations(own, 2)] + [(one, other) for one in own for other in others]
    return Report(name=name, splits=tuple(checked), overlaps=tuple(_overlap(*one, *other) for one, other in pairs))


def _tables(pieces: Sequence[Piece], *, pictures: bool, workers: int, progress: Progress) -> list[ItemTable]:
    if not pictures:
        return [items([dataclasses.replace(r, image=None) for r in p.records], source=p.source, contents="none") for p in pieces]
    sizes = Counter(file_size(record.image) for piece in pieces for record in piece.records)
    shared = {size for size, count in sizes.items() if count > 1}
    tables = []
    for piece in pieces:
        with progress(f"{piece.label}: files") as advance:
            found = items(piece.records, source=piece.source, contents="whole", among=shared, threads=workers, advance=advance)
            tables.append(found)
    return tables


Held = tuple[Piece, ItemTable]


def _training_last(one: Held, other: Held) -> tuple[Held, Held]:
    """(evaluated, trained): of two splits the training one is what the other is looked for in."""
    return (other, one) if one[0].split == "train" else (one, other)


def _overlap(evaluated: Piece, evaluated_table: ItemTable, trained: Piece, trained_table: ItemTable) -> SplitOverlap:
    found = overlap(evaluated_table, trained_table)
    return SplitOverlap(
        evaluated=evaluated.label,
        trained=trained.label,
        records=len(evaluated.records),
        counts=found.counts(),
        uncompared=found.uncompared,
        ids=tuple(evaluated.records[row].id for row in np.flatnonzero(found.any)),
    )
