"""A data set: named splits of records, each read from disk when it is asked for.

    open_data("docci")                   a registered name
    open_data("my/folder")               a folder or a file of your own (see ``gradscope.data.own_files``)
    open_data("a/{000..031}.tar")        tar files of samples, here or at an address (see ``gradscope.data.shards``)
    open_data("dci", caption="short")    settings are the fields of the registered component
    source.read("test+qual_test")        splits joined with + are read one after the other

How it can mislead: recall depends on the size of the gallery, so a number without its split and its count says nothing. What reading
left out, and counts that differ from the published ones, are notes of the split and belong beside every number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradscope.data import data_sets
from gradscope.data.shard_names import names_shards
from gradscope.registry import unknown_name
from gradscope.types import Record

#: Reads one split: its records in order, and notes on what was left out.
Reader = Callable[[], tuple[list[Record], list[str]]]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The records of one split in order, and counted facts about the reading of it (nothing is left out silently)."""

    name: str
    folder: Path  # of the data set
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """sha256 over ids, captions, segments and image paths in order: what "the same data" means on resume.
        Paths count relative to ``folder``, so a data set may be moved. Picture contents do not count."""
        digest = hashlib.sha256()
        for record in self.records:
            image = None if record.image is None else os.path.relpath(record.image, self.folder)
            row = [record.id, image, record.captions, [dataclasses.astuple(s) for s in record.segments]]
            digest.update(json.dumps(row, ensure_ascii=False).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Splits of records.

    Args:
        name: what the user called it; written beside every number.
        folder: where it was found; image paths count as relative to it in the fingerprint.
        readers: split name -> reader.
        default_split: what evaluation and geometry use when no split is named; may be joined with "+".
        expected: published number of records by split, where there is one.
    """

    name: str
    folder: Path
    readers: Mapping[str, Reader]
    default_split: str = "test"
    expected: Mapping[str, int] = field(default_factory=dict)

    def splits(self) -> list[str]:
        return list(self.readers)

    def read(self, split: str) -> Split:
        """A split, or several joined with "+". Raises ValueError naming the splits there are, or what is wrong with the records."""
        records: list[Record] = []
        notes: list[str] = []
        for part in split.split("+"):
            if part not in self.readers:
                raise ValueError(f"data set '{self.name}' has no split '{part}'; it has {', '.join(self.splits()) or 'none'}")
            found, said = self.readers[part]()
            records += found
            notes += said
            published = self.expected.get(part)
            if published is not None and published != len(found):
                notes.append(f"split '{part}' of {self.name} has {len(found):,} records, published are {published:,}")
        _refuse_repeats(records, f"split '{split}' of '{self.name}'")
        return Split(name=split, folder=self.folder, records=tuple(records), notes=tuple(notes))

    def records(self, split: str) -> list[Record]:
        """The records alone; ``read`` gives the notes too."""
        return list(self.read(split).records)

    def split_or_only(self, split: str) -> str:
        """``split`` if there is one of that name (or it is a joined one), else the only split there is; ValueError otherwise."""
        if "+" in split or split in self.readers:
            return split
        if len(self.readers) == 1:
            return next(iter(self.readers))
        raise ValueError(f"data set '{self.name}' has no split '{split}'; name one of {', '.join(self.splits())}")

    def fingerprint(self, split: str) -> str:
        """Of a split that is not at hand; see ``Split.fingerprint``."""
        return self.read(split).fingerprint()


def _refuse_repeats(records: Sequence[Record], where: str) -> None:
    """A row per caption would put copies of a picture into the gallery and call its other captions wrong."""
    if not records:
        raise ValueError(f"{where} holds no records")
    identity, count = Counter(record.id for record in records).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{where} uses the id '{identity}' {count} times; ids name the images, put captions into one record")
    pictures = Counter(os.path.normpath(record.image) for record in records if record.image is not None)
    if pictures:
        picture, count = pictures.most_common(1)[0]
        if count > 1:
            raise ValueError(f"{where} gives the picture '{picture}' to {count} records; put all captions of a picture into one record")


def open_data(name: str, **settings: Any) -> DataSource:
    """A registered name, or the path of a folder or file -> DataSource.

    Raises:
        ValueError: unknown name, a setting the data set does not take, or files that are not there (the message says how to get them).
    """
    if name not in data_sets and (names_shards(name) or Path(name).expanduser().exists()):
        from gradscope.data.own_files import OwnFiles

        component: Any = OwnFiles
        settings = {"path": name, **settings}
    else:
        try:
            component = data_sets[name]
        except ValueError as error:
            raise ValueError(f"{error} Or give the path of a folder or file; there is none called '{name}'.") from error
    allowed = [f.name for f in dataclasses.fields(component)]
    for setting in settings:
        if setting not in allowed:
            raise ValueError(unknown_name(f"setting of data set '{name}'", setting, [a for a in allowed if a != "path"]))
    source: DataSource = component(**settings).open()
    return source


def held_out(records: Sequence[Record], share: float, seed: int) -> tuple[list[Record], list[Record]]:
    """Split records into (train, validation) by a hash of seed and image id: the same ids whatever the order of the file."""
    key = {record.id: hashlib.sha256(f"{seed}/{record.id}".encode()).digest() for record in records}
    count = max(2, round(share * len(records)))
    chosen = set(sorted(key, key=lambda i: key[i])[:count])
    return [r for r in records if r.id not in chosen], [r for r in records if r.id in chosen]
