"""Items of one file -> records: one per picture, every departure from the file counted.

    empty captions      dropped; a row without any other is dropped whole, so that no pair is shifted
    several captions    a list, or several rows with one picture: joined into one record, in order of first appearance
    repeated captions   of one picture, word for word: kept once
    ids                 the id column, else the picture's stem, longer where two pictures share it
Rows without a picture are joined by their id, where there is one. The documented format, {"id", "image", "captions": [...]}, is one
record per picture already: it is held to its types and nothing is joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradscope.data.caption_rows import type_name
from gradscope.data.columns import Columns, Item, find_columns, folded, missing_key
from gradscope.data.image_paths import Identities, picture_paths, short_names
from gradscope.data.regions import read_regions
from gradscope.types import Record, Segment

PLAIN_FORMAT = '{"id", "image", "captions": [...]}'
#: Names of the split that training validates on.
_VALIDATION = ("validation", "valid", "dev")


@dataclass(frozen=True, kw_only=True)
class OwnRecords:
    """The records of one split, and what reading it did."""

    records: tuple[Record, ...]
    key: str  # of the captions; "" for plain lines
    n_rows: int
    n_empty: int = 0  # rows dropped: no caption left
    n_joined: int = 0  # rows joined with an earlier one of the same picture
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Row:
    where: str
    identity: str | None
    image: str | None
    captions: tuple[str, ...]
    n_empty: int
    split: str
    segments: tuple[Segment, ...] = ()
    n_empty_regions: int = 0
    aux: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OwnTable:
    """All rows of one file."""

    columns: Columns
    rows: Sequence[_Row]
    notes: tuple[str, ...]

    def splits(self) -> list[str]:
        return list(dict.fromkeys(row.split for row in self.rows))

    def read(self, split: str | None = None) -> OwnRecords:
        """The records of a split; None takes all rows."""
        rows = [row for row in self.rows if split is None or row.split == split]
        full = [row for row in rows if row.captions]
        groups: dict[object, list[_Row]] = {}
        same_picture = Identities()
        for number, row in enumerate(full):
            by_id = number if row.identity is None else row.identity
            whose: object = by_id if row.image is None else same_picture(row.image)
            groups.setdefault(number if self.columns.plain else whose, []).append(row)
        records = tuple(_record(group) for group in groups.values())
        repeats = sum(len(row.captions) for row in full) - sum(len(record.captions) for record in records)
        return OwnRecords(
            records=records,
            key=self.columns.caption,
            n_rows=len(rows),
            n_empty=len(rows) - len(full),
            n_joined=len(full) - len(records),
            notes=(*self.columns.note(), *self.notes, *_counts(rows, full, len(records), repeats)),
        )


def _counts(rows: Sequence[_Row], full: Sequence[_Row], n_records: int, repeats: int) -> list[str]:
    empty, regions = sum(row.n_empty for row in rows), sum(row.n_empty_regions for row in rows)
    lines = {
        f"{empty:,} empty captions dropped, {len(rows) - len(full):,} of {len(rows):,} rows with them": empty,
        f"{len(full):,} rows joined into {n_records:,} records, because they name the same picture": len(full) > n_records,
        f"{repeats:,} captions dropped that repeat another of the same picture word for word": repeats,
        f"{regions:,} regions with an empty caption dropped": regions,
    }
    return [line for line, there in lines.items() if there]


def _record(group: Sequence[_Row]) -> Record:
    first = group[0]
    return Record(
        id=str(first.identity),
        image=first.image,
        captions=tuple(dict.fromkeys(caption for row in group for caption in row.captions)),
        segments=tuple(segment for row in group for segment in row.segments),
        aux=first.aux,
    )


def read_table(items: Sequence[Item], *, root: Path, image_key: str = "", caption_key: str = "") -> OwnTable:
    """Rows of a file, their pictures found and named.

    Args:
        items: of one file, at least one.
        root: folder that paths of pictures count from.

    Raises:
        ValueError: naming the line, for a missing key, a wrong type or a key that changes between records.
    """
    columns = find_columns(items, image_key=image_key, caption_key=caption_key)
    rows = [_row(where, item, columns, root) for where, item in items]
    given = [row.image for row in rows if row.image is not None]
    paths, notes = picture_paths(given, root)
    names = short_names(given, root) if not columns.identity else {}  # of the paths as given: the same on every machine
    found = dict(zip(given, paths, strict=True))
    for number, row in enumerate(rows, start=1):
        if row.identity is None:
            row.identity = str(number) if row.image is None else names[row.image]
        row.image = None if row.image is None else found[row.image]
    return OwnTable(columns=columns, rows=rows, notes=tuple(notes))


def _row(where: str, item: object, columns: Columns, root: Path) -> _Row:
    if isinstance(item, str) and not columns.caption:
        captions = _captions(item, where, "line")
        return _Row(where=where, identity=None, image=None, captions=captions, n_empty=1 - len(captions), split="all")
    if not isinstance(item, dict):
        needed = "a record" if columns.caption else "a record (or a string)"
        raise ValueError(f"{where}: a {type_name(item)}, but {needed} is needed; mend or remove it.")
    if columns.plain:
        _check_plain(where, item)
    values = {folded(key): value for key, value in item.items()}
    if columns.caption not in values:
        raise missing_key(where, item, columns.caption, "--caption-key")
    given = values[columns.caption]
    captions = _captions(given, where, columns.caption)
    segments, n_empty_regions = read_regions(values.get(columns.regions) or [], root, where)
    aux = values.get("aux", {})
    return _Row(
        where=where,
        identity=_identity(where, values, columns.identity),
        image=_image(where, item, values, columns.image),
        captions=captions,
        n_empty=max(1, len(given) if isinstance(given, list) else 1) - len(captions),
        split=_split(where, values) if columns.split else "all",
        segments=segments,
        n_empty_regions=n_empty_regions,
        aux=aux if isinstance(aux, dict) else {},
    )


def _check_plain(where: str, item: Mapping[str, object]) -> None:
    captions, image = item.get("captions"), item.get("image")
    missing = [key for key in ("captions", "id", "image") if key not in item]
    if missing:
        what = f"no key '{missing[0]}'"
    elif not isinstance(captions, list) or not captions or not all(isinstance(c, str) and c.strip() for c in captions):
        what = "'captions' must be a list of at least one non-empty string"
    elif not isinstance(image, str) or not image:
        what = "'image' must be the path of a picture"
    else:
        return
    raise ValueError(f"{where}: {what}; expected {PLAIN_FORMAT}")


def _captions(value: object, where: str, key: str) -> tuple[str, ...]:
    """The captions that are not empty."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(caption, str) for caption in listed):
        raise ValueError(f"{where}: '{key}' is a {type_name(value)}, but a string or a list of strings is needed; mend or remove it.")
    for caption in listed:
        try:
            caption.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: '{key}' holds half a character (a lone surrogate); write the text as valid Unicode.") from error
    return tuple(caption for caption in listed if caption.strip())


def _identity(where: str, values: Mapping[str, object], key: str) -> str | None:
    if not key:
        return None
    value = values.get(key)
    if not isinstance(value, str | int | float) or isinstance(value, bool) or value == "":
        raise ValueError(f"{where}: '{key}' must be a string or a number, because other records are named by it; got {value!r:.40}.")
    return str(value)


def _image(where: str, item: Mapping[str, object], values: Mapping[str, object], key: str) -> str | None:
    if not key:
        return None
    if key not in values:
        raise missing_key(where, item, key, "--image-key")
    value = values[key]
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"{where}: '{key}' must be the path of a picture; got {value!r:.40}.")
    return value


def _split(where: str, values: Mapping[str, object]) -> str:
    value = values.get("split")
    if not isinstance(value, str) or not value.strip() or "+" in value:
        raise ValueError(
            f"{where}: 'split' must be the name of a split (without +), because other records have one; got {value!r:.40}."
        )
    return usual_split(value.strip())


def usual_split(name: str) -> str:
    """ "validation", "valid" and "dev" are the split that training calls "val"."""
    return "val" if name in _VALIDATION else name
