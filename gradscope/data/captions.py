"""Captions without pictures: a JSON, JSONL, CSV, TSV or TXT file, or a registered name -> one caption per image.

Policies, all counted in the result:
    empty captions          dropped (a caption of white space only is empty)
    several captions        the first of each image is used; captions of one image are not negatives of each other
    repeated image ids      kept; counted, because two captions of one image look like hard negatives and are not
    text encoding           UTF-8, with or without byte-order mark, whatever the locale; anything else is refused with its line
Nothing is read as a missing value: the captions "None", "NA", "null" and "42" stay text.

How it can mislead: the file decides what a caption is. Of the records' keys the first of CAPTION_KEYS that is there is taken
unless ``caption_key`` names one; the key used is in the result.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gradscope.data import data_sets
from gradscope.data.caption_rows import SUFFIXES, Row, read_rows
from gradscope.paths import data_folders, search
from gradscope.registry import unknown_name


@dataclass(frozen=True, kw_only=True)
class Captions:
    """The captions of one source, in its order, one per image, none empty."""

    name: str
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    source: str  # path, or the registered name of a generated set
    sha256: str  # of the file's bytes, or of the captions where there is no single file
    key: str  # the caption key that was read; "" for plain lines
    n_rows: int  # records in the source that belong to the set
    n_empty: int  # dropped
    n_further: int  # second and later captions of an image, not used
    n_repeated_ids: int  # records whose id came before


@dataclass(frozen=True, kw_only=True)
class NamedCaptions:
    """A public data set that is used when its file is on disk; it is never downloaded."""

    files: tuple[str, ...]  # accepted file names, the best first
    splits: tuple[str, ...]  # values of the key "split" that belong to the set; ignored where records have no such key
    how: str  # which file to fetch, from where


NAMED = {
    "docci": NamedCaptions(
        files=("docci_descriptions.jsonlines", "docci_test_captions.json"),
        splits=("test", "qual_test"),
        how="fetch docci_descriptions.jsonlines from https://google.github.io/docci/",
    ),
    "dci": NamedCaptions(
        files=("dci_test_captions.json",),
        splits=(),
        how="get the annotations from https://github.com/facebookresearch/DCI and write those of the test split "
        'as dci_test_captions.json, a list of {"filename": ..., "caption": ...}',
    ),
}


def read_captions(data: str, *, caption_key: str | None = None, data_dir: Path | None = None, encoding: str = "utf-8") -> Captions:
    """Captions of a file or of a registered name (``scenes``, ``docci``, ``dci``).

    Raises:
        ValueError: unknown name, no such file, unreadable text, a record without caption or of a wrong type (with its line),
            or nothing left after the policies.
    """
    if data in NAMED:
        path, splits = _locate(data, data_dir), NAMED[data].splits
    elif data in data_sets:
        return _test_split(data)
    else:
        path, splits = _existing_file(data), ()
    rows, key = read_rows(path, caption_key=caption_key, encoding=encoding, splits=splits)
    return _finish(data if data in NAMED else path.stem, path, rows, key)


def _existing_file(data: str) -> Path:
    path = Path(data).expanduser()
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        raise ValueError(f"'{data}' is a folder (it holds {inside}); give one caption file in it ({', '.join(SUFFIXES)}).")
    if path.is_file():
        return path
    if path.suffix.lower() in SUFFIXES or len(path.parts) > 1:
        raise ValueError(f"there is no file '{data}' (looked in {path.absolute().parent}); check the path.")
    raise ValueError(
        unknown_name("data set", data, sorted([*data_sets.names(), *NAMED])) + f" Or give a caption file ({', '.join(SUFFIXES)})."
    )


def _locate(name: str, data_dir: Path | None) -> Path:
    """The first accepted file in the data folders; each is tried with a folder of the set's name too."""
    named = NAMED[name]
    for file in named.files:
        path = search(file, data_dir) or search(f"{name}/{file}", data_dir)
        if path is not None:
            return path
    folders = ", ".join(str(folder) for folder in data_folders(data_dir))
    raise ValueError(
        f"data set '{name}' is not on disk: looked for {' or '.join(named.files)} in {folders} (and in '{name}' there); "
        f"{named.how}, and put it into one of these folders, or name its folder with --data-dir."
    )


def _test_split(name: str) -> Captions:
    from gradscope.data.source import open_data

    rows = [Row(id=r.id, captions=tuple(r.captions)) for r in open_data(name).records("test")]
    return _finish(name, None, rows, "caption")


def _finish(name: str, path: Path | None, rows: list[Row], key: str) -> Captions:
    """Apply the policies of the module docstring and count what they did."""
    kept = [(row, row.captions[0]) for row in rows if row.captions and row.captions[0].strip()]
    if not kept:
        found = f"all {len(rows)} captions are empty" if rows else "it holds no records"
        raise ValueError(f"no captions in '{path or name}': {found}; give a file with at least two captions.")
    seen = Counter(row.id for row, _ in kept)
    texts = tuple(text for _, text in kept)
    content = path.read_bytes() if path is not None else "\0".join(texts).encode()
    return Captions(
        name=name,
        ids=tuple(row.id for row, _ in kept),
        texts=texts,
        source=str(path) if path is not None else name,
        sha256=hashlib.sha256(content).hexdigest(),
        key=key,
        n_rows=len(rows),
        n_empty=len(rows) - len(kept),
        n_further=sum(max(0, len(row.captions) - 1) for row in rows),
        n_repeated_ids=sum(count - 1 for count in seen.values()),
    )
