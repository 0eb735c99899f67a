"""A data set: named splits of records on disk.

    open_data("scenes")      a registered name
    open_data("my/folder")   a folder of train.jsonl, val.jsonl, test.jsonl (train alone is enough)
One JSON object a line: {"id", "image": path relative to the folder, "captions": [dense first, ...], "aux": {...}}.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.data import data_sets
from gradscope.types import Record

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Splits of records under one folder."""

    name: str
    folder: Path

    def splits(self) -> list[str]:
        return [split for split in SPLITS if (self.folder / f"{split}.jsonl").is_file()]

    def records(self, split: str) -> list[Record]:
        """The records of a split in file order. Raises ValueError naming the splits there are, or the bad line."""
        path = self.folder / f"{split}.jsonl"
        if not path.is_file():
            raise ValueError(f"data set '{self.name}' has no split '{split}'; it has {', '.join(self.splits()) or 'none'}")
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a caption may hold other line separators
        except UnicodeDecodeError as error:
            raise ValueError(f"'{path}' is not UTF-8 (byte {error.start}); save it as UTF-8") from error
        records = [_record(line, self.folder, path, number) for number, line in enumerate(lines, 1) if line.strip()]
        if not records:
            raise ValueError(f"'{path}' holds no records")
        ids = [record.id for record in records]
        if len(set(ids)) < len(ids):
            twice = next(i for i, count in Counter(ids).items() if count > 1)
            raise ValueError(f"'{path}' uses the id '{twice}' more than once; ids name the images, put captions into one record")
        _refuse_repeated_pictures(records, path)
        return records

    def fingerprint(self, split: str) -> str:
        """sha256 of the split's file: what "the same data" means on resume."""
        return hashlib.sha256((self.folder / f"{split}.jsonl").read_bytes()).hexdigest()


def _refuse_repeated_pictures(records: Sequence[Record], path: Path) -> None:
    """A row per caption would put copies of a picture into the gallery and call its other captions wrong."""
    pictures = Counter(os.path.normpath(str(record.image)) for record in records)
    twice, count = pictures.most_common(1)[0]
    if count > 1:
        raise ValueError(f"'{path}' gives the picture '{twice}' to {count} records; put all captions of a picture into one record")


def _record(line: str, folder: Path, path: Path, number: int) -> Record:
    try:
        row: Any = json.loads(line)
        captions, identity, image = row["captions"], row["id"], row["image"]
        if not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c.strip() for c in captions):
            raise ValueError("'captions' must be a list of at least one non-empty string")
        if not isinstance(image, str) or not image:
            raise ValueError("'image' must be the path of a picture")
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f'{path}, line {number}: {what}; expected {{"id", "image", "captions": [...]}}') from error
    return Record(id=str(identity), image=str(folder / image), captions=tuple(captions), aux=row.get("aux", {}))


def open_data(name: str, **settings: Any) -> DataSource:
    """A registered name or a folder -> DataSource. ``settings`` are the fields of the registered component."""
    if (Path(name) / "train.jsonl").is_file() or (Path(name) / "test.jsonl").is_file():
        if settings:
            raise ValueError(f"data folder '{name}' takes no settings; got {', '.join(settings)}")
        return DataSource(name=name, folder=Path(name))
    if Path(name).is_dir():
        found = ", ".join(sorted(p.name for p in Path(name).iterdir())[:8]) or "nothing"
        raise ValueError(f"folder '{name}' has neither train.jsonl nor test.jsonl; it holds {found}")
    try:
        component = data_sets[name]
    except ValueError as error:
        raise ValueError(f"{error} A folder with train.jsonl works too.") from error
    source: DataSource = component(**settings).open()
    return source


def held_out(records: Sequence[Record], share: float, seed: int) -> tuple[list[Record], list[Record]]:
    """Split records into (train, validation) by a hash of seed and image id: the same ids whatever the order of the file."""
    key = {record.id: hashlib.sha256(f"{seed}/{record.id}".encode()).digest() for record in records}
    count = max(2, round(share * len(records)))
    chosen = set(sorted(key, key=lambda i: key[i])[:count])
    return [r for r in records if r.id not in chosen], [r for r in records if r.id in chosen]
