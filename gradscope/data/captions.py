"""Captions without pictures: a registered data set, or a file or folder of one's own -> one caption per image.

Read exactly as training reads them (see ``own_files``); no picture needs to be on disk. Policies, all counted in the result:
    empty captions          dropped (a caption of white space only is empty)
    several captions        the first of each image is used; captions of one image are not negatives of each other
    rows with one image     joined into one record where the file has a row per caption
    text encoding           UTF-8, with or without byte-order mark, whatever the locale; anything else is refused with its line
Nothing in a text file is read as a missing value: the captions "None", "NA", "null" and "42" stay text.

How it can mislead: the file decides what a caption is. Of the records' keys the first usual one that is there is taken unless
``caption_key`` names one; the key used is in the result.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from gradscope.data import data_sets
from gradscope.data.caption_rows import SUFFIXES
from gradscope.data.own_files import OwnFiles
from gradscope.data.own_records import OwnRecords
from gradscope.data.shard_names import file_label, names_shards
from gradscope.data.source import open_data
from gradscope.registry import unknown_name


@dataclass(frozen=True, kw_only=True)
class Captions:
    """The captions of one source, in its order, one per image, none empty."""

    name: str
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    source: str  # path, or the registered name
    sha256: str  # of the file's bytes, or of the captions where there is no single file
    key: str  # the caption key that was read; "" for plain lines, registered sets and pairs
    n_rows: int  # rows in the source that belong to the split
    n_empty: int  # dropped
    n_further: int  # second and later captions of an image, not used
    n_repeated_ids: int  # rows joined with an earlier one of the same image; their captions count in n_further
    split: str = ""  # what was read
    notes: tuple[str, ...] = ()  # of the reading: columns guessed, what was left out, counts that differ from the published ones


def read_captions(
    data: str,
    *,
    caption_key: str | None = None,
    data_dir: Path | None = None,
    encoding: str = "utf-8",
    split: str = "",
    caption: str = "",
) -> Captions:
    """Captions of a registered name, or of a file or folder.

    Args:
        split: "" takes the data set's own default, for geometry and evaluation alike.
        data_dir, caption: of the registered data sets that have such a setting; others take no notice of them.

    Raises:
        ValueError: unknown name, no such file, unreadable text, a record without caption or of a wrong type (with its line),
            no such split, or no captions left after the policies.
    """
    path = Path(data).expanduser()
    if data in data_sets:
        return _registered(data, caption_key, {"folder": str(data_dir or ""), "caption": caption}, split)
    if not names_shards(data) and not path.exists() and path.suffix.lower() not in SUFFIXES and len(path.parts) == 1:
        formats = f"a caption file ({', '.join(SUFFIXES)}) or a folder"
        raise ValueError(unknown_name("data set", data, data_sets.names()) + f" Or give {formats}; there is none called '{data}'.")
    return _own(data, path, OwnFiles(path=data, caption_key=caption_key or "", encoding=encoding), split)


def _own(data: str, path: Path, files: OwnFiles, split: str) -> Captions:
    parts = files.parts()
    chosen = split or (next(iter(parts)) if len(parts) == 1 else "test")
    missing = [part for part in chosen.split("+") if part not in parts]
    if missing:
        raise ValueError(
            f"data set '{data}' has no split '{missing[0]}'; name one of {', '.join(parts)} with --split (or join two with +)."
        )
    found = [parts[part]() for part in chosen.split("+")]
    content = path.read_bytes() if path.suffix.lower() in SUFFIXES and path.is_file() else None
    name = file_label(data) if names_shards(data) else path.stem if path.is_file() else path.absolute().name
    return _captions(name, data if names_shards(data) else str(path), found, chosen, content)


def _registered(name: str, caption_key: str | None, given: dict[str, str], split: str) -> Captions:
    component = data_sets[name]
    if caption_key:
        raise ValueError(
            f"--caption-key {caption_key} belongs to files of your own; data set '{name}' has its own format, leave it out."
        )
    takes = {field.name for field in dataclasses.fields(component)}
    source = open_data(name, **{key: value for key, value in given.items() if value and key in takes})
    chosen = split or component.info.default_split
    read = source.read(chosen)
    found = OwnRecords(records=read.records, key="", n_rows=len(read.records), notes=read.notes)
    return _captions(name, name, [found], chosen, None)


def _captions(name: str, source: str, found: list[OwnRecords], split: str, content: bytes | None) -> Captions:
    """Apply the policies of the module docstring and count what they did."""
    records = [record for part in found for record in part.records]
    n_rows = sum(part.n_rows for part in found)
    if not records:
        raise ValueError(f"no captions in '{source}': all {n_rows} captions are empty; give a file with at least two captions.")
    texts = tuple(record.captions[0] for record in records)
    return Captions(
        name=name,
        ids=tuple(record.id for record in records),
        texts=texts,
        source=source,
        sha256=hashlib.sha256(content if content is not None else "\0".join(texts).encode()).hexdigest(),
        key=found[0].key,
        n_rows=n_rows,
        n_empty=sum(part.n_empty for part in found),
        n_further=sum(len(record.captions) - 1 for record in records),
        n_repeated_ids=sum(part.n_joined for part in found),
        split=split,
        notes=tuple(note for part in found for note in part.notes),
    )
