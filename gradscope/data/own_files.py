"""Data of one's own: a folder of SPLIT.jsonl files with one JSON object a line,

{"id", "image": path relative to the folder, "captions": [dense first, ...], "aux": {...}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradscope.data.source import DataSource
from gradscope.types import Record

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """A folder with train.jsonl, val.jsonl, test.jsonl (one of them is enough)."""

    path: str

    def open(self) -> DataSource:
        folder = Path(self.path).expanduser()
        files = {split: folder / f"{split}.jsonl" for split in SPLITS}
        readers = {split: partial(_read, file, folder) for split, file in files.items() if file.is_file()}
        if not readers:
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise ValueError(f"folder '{self.path}' has neither train.jsonl nor test.jsonl; it holds {found}")
        return DataSource(name=self.path, folder=folder, readers=readers)


def _read(path: Path, folder: Path) -> tuple[list[Record], list[str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a caption may hold other line separators
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    records = [_record(line, folder, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise ValueError(f"'{path}' holds no records")
    return records, []


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
