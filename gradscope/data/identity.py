"""What makes two items the same, in a form small enough to be kept with a run (about 100 bytes an item).

    level      two items are the same when                             how it misleads
    id         their data set has one name, their ids are equal, and   a data set opened under two names is not recognised
               no file name, size or digest speaks against it
    file       base names (without case) and file sizes are equal      a re-saved copy has another size
    content    the digests of their files are equal                    a resized, re-encoded or re-tagged copy is another file
    caption    any two of their captions are equal after NFKC, case    a general caption ("a dog") fits two pictures; a corrected
               folding and collapsing white space                      comma makes another caption

Ids alone mean nothing between data sets: "0001" is an id in many of them. File names travel between data sets (DCI and Long-DCI share
theirs), but "000001.jpg" does too, so a name counts together with its size only.

Digests are BLAKE2b of 128 bits. Of a file, "ends" reads its size, first and last 64 KiB (all of a file up to 128 KiB), which tells
compressed pictures apart but would call two uncompressed ones equal that differ in the middle only; "whole" reads everything.
Nothing here finds two photographs of one scene, nor a picture saved again: what is counted is a lower bound.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradscope.data import data_sets
from gradscope.data.members import content, content_size
from gradscope.types import Record

Contents = Literal["none", "ends", "whole"]

#: Bytes of a digest; a row of zeros stands for "there is none".
WIDTH = 16
ABSENT = bytes(WIDTH)
_END = 64 * 1024
_PIECE = 8 * 1024 * 1024
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemTable:
    """What is remembered of N items with C captions.

    Args:
        source: the name of the data set; ids are compared between tables of one name only.
        contents: what the content digests were made from.
        ids, names, digests: uint8 [N, 16], of the id, the base name and the content; zeros where there is no file.
        sizes: int64 [N], bytes of the file; -1 where it is not on disk.
        captions: uint8 [C, 16]; caption_rows: int64 [C], the item each belongs to. Empty captions are left out.
    """

    source: str
    contents: Contents
    ids: NDArray[np.uint8]
    names: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    digests: NDArray[np.uint8]
    captions: NDArray[np.uint8]
    caption_rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


def normalised(caption: str) -> str:
    """NFKC, case folded, white space collapsed: equal for captions that differ in typography only."""
    if caption.isascii():
        return " ".join(caption.lower().split())  # the same, and most captions
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", caption).casefold())
    return " ".join(folded.split())


def text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=WIDTH).digest()


def base_name(path: str) -> str:
    """The last part of a path of any system, without case."""
    return unicodedata.normalize("NFC", path.replace("\\", "/").rsplit("/", 1)[-1]).casefold()


def file_size(path: str | None) -> int:
    """Bytes; -1 if there is no such file."""
    if path is None:
        return -1
    try:
        return content_size(path)
    except (OSError, ValueError):
        return -1


def file_digest(path: str, contents: Contents) -> bytes:
    """See the module's docstring. ABSENT if the file cannot be read."""
    try:
        size = content_size(path)
        digest = hashlib.blake2b(str(size).encode() + b"/", digest_size=WIDTH)
        if contents == "ends" and size > 2 * _END:
            digest.update(content(path, 0, _END))
            digest.update(content(path, size - _END))
        else:
            for start in range(0, size, _PIECE):
                digest.update(content(path, start, _PIECE))
    except (OSError, ValueError):
        return ABSENT
    return digest.digest()


def origin(name: str) -> str:
    """What a data set is called in tables: a registered name, an address, or where a path leads, however it was written."""
    return name if name in data_sets or "://" in name else str(Path(name).expanduser().resolve())


def items(
    records: Sequence[Record],
    *,
    source: str,
    contents: Contents = "ends",
    among: Container[int] | None = None,
    threads: int = 4,
    advance: Callable[[int, int], None] | None = None,
) -> ItemTable:
    """The table of ``records``, in their order.

    Args:
        contents: "ends" reads 128 KiB a picture; "none" asks for sizes only, "whole" reads all.
        among: sizes in bytes; files of another size are not read (they equal none of the files one compares with).
        advance: told (done, total) while files are read.
    """

    def look(paths: Sequence[str | None]) -> list[tuple[int, bytes]]:
        sizes = [file_size(path) for path in paths]
        wanted = [size >= 0 and contents != "none" and (among is None or size in among) for size in sizes]
        return [
            (size, file_digest(path, contents) if asked and path is not None else ABSENT)
            for path, size, asked in zip(paths, sizes, wanted, strict=True)
        ]

    images = [record.image for record in records]
    seen: list[tuple[int, bytes]] = []
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for some in pool.map(look, (images[at : at + _AT_ONCE] for at in range(0, len(images), _AT_ONCE))):
            seen += some
            if advance:
                advance(len(seen), len(records))
    captions = [(row, text_digest(text)) for row, record in enumerate(records) for text in _texts(record)]
    return ItemTable(
        source=origin(source),
        contents=contents,
        ids=_rows(text_digest(record.id) for record in records),
        names=_rows(ABSENT if record.image is None else text_digest(base_name(record.image)) for record in records),
        sizes=np.array([size for size, _ in seen], np.int64),
        digests=_rows(digest for _, digest in seen),
        captions=_rows(digest for _, digest in captions),
        caption_rows=np.array([row for row, _ in captions], np.int64),
    )


def _texts(record: Record) -> list[str]:
    """The different captions of a record, normalised, none empty."""
    return [text for text in dict.fromkeys(map(normalised, record.captions)) if text]


def _rows(digests: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, WIDTH)


def as_bytes(rows: NDArray[np.uint8]) -> list[bytes]:
    """uint8 [N, 16] -> N digests."""
    whole = rows.tobytes()
    return [whole[at : at + WIDTH] for at in range(0, len(whole), WIDTH)]


def save_items(path: str | Path, table: ItemTable) -> None:
    """Writes a .npz that needs no pickle. The name is taken as given."""
    arrays: dict[str, Any] = {field.name: np.asarray(getattr(table, field.name)) for field in fields(table)}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays)


def load_items(path: str | Path) -> ItemTable:
    """Raises ValueError if the file is missing or is not one of ``save_items``."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {field.name: stored[field.name] for field in fields(ItemTable)}
    except FileNotFoundError as error:
        raise ValueError(f"the table of training items '{path}' does not exist; it is written when a run starts") from error
    except Exception as error:  # a damaged file can make numpy and zipfile raise nearly anything
        raise ValueError(f"'{path}' is not a table of training items ({error}); restore it, or train again") from error
    return ItemTable(**{**found, "source": str(found["source"]), "contents": str(found["contents"])})
