"""What an evaluation runs on: the records of a split after the policies, with every departure counted.

How it can mislead: leaving records out makes the gallery smaller and the numbers higher; ``missing`` and ``bad`` are part of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradscope.data.check import find_duplicates
from gradscope.data.identity import ItemTable, file_size, items, load_items
from gradscope.data.overlap import Overlap, overlap
from gradscope.data.source import DataSource, open_data
from gradscope.data.usable import usable
from gradscope.evaluate import Embedded
from gradscope.paths import shown_name
from gradscope.protocol import Protocol
from gradscope.recipe import Data
from gradscope.types import Record

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Records in order; ``expected`` counts them before the policies, ``missing`` and ``bad`` what those left out."""

    source: DataSource
    split: str
    sha256: str  # of all records of the split, before the policies
    records: tuple[Record, ...]
    expected: int
    missing: int
    bad: int
    notes: tuple[str, ...]


def read_gallery(data: Data, split: str | None, *, workers: int = 0, advance: Advance | None = None) -> Gallery:
    """The split (by default the data set's own choice) of a data set.

    Raises:
        ValueError: unknown data or split, or pictures that are missing or bad where ``data`` does not allow for it.
    """
    source = open_data(data.name, **data.settings())
    chosen = source.split_or_only(source.default_split) if split is None else split
    found = source.read(chosen)
    kept = usable(found.records, allow_missing=data.allow_missing, on_bad_image=data.on_bad_image, workers=workers, advance=advance)
    return Gallery(
        source=source,
        split=chosen,
        sha256=found.fingerprint(),
        records=tuple(kept.records),
        expected=kept.expected,
        missing=len(kept.missing),
        bad=len(kept.bad),
        notes=(*found.notes, *kept.notes, *repeats(kept.records)),
    )


def repeats(records: Sequence[Record]) -> list[str]:
    """Notes on records that repeat the picture (byte by byte, as far as "ends" looks) or a caption of an earlier one: a right answer
    is then called wrong. Only files whose size occurs twice are read."""
    sizes = Counter(file_size(record.image) for record in records)
    table = items(records, source="", among={size for size, count in sizes.items() if count > 1})
    found = find_duplicates(records, table).surplus()
    words = {"content": "picture", "caption_normalised": "caption"}
    return [
        f"{found[kind]:,} of {len(records):,} records repeat the {word} of an earlier one; each counts as a wrong answer for the other"
        for kind, word in words.items()
        if found[kind]
    ]


def protocol_of(encoder: str, gallery: Gallery, embedded: Embedded, *, note: str = "") -> Protocol:
    """The facts beside the numbers of ``encoder`` on ``gallery``; ``note`` is what is to be said of the encoder."""
    return Protocol(
        encoder=encoder,
        data=shown_name(gallery.source.name),
        split=gallery.split,
        sha256=gallery.sha256,
        images=len(embedded.ids),
        captions=len(embedded.text),
        expected=gallery.expected,
        missing=gallery.missing,
        bad=gallery.bad,
        context=embedded.context,
        truncated=embedded.truncated,
        preprocessing=embedded.preprocessing,
        precision=embedded.precision,
        notes=(*gallery.notes, note) if note else gallery.notes,
    )


def seen_in_training(gallery: Gallery, trained: ItemTable, *, advance: Advance | None = None) -> Overlap:
    """Which records of the gallery are items of ``trained``; reads only the pictures whose size occurs there."""
    among = set(trained.sizes.tolist()) if trained.contents != "none" else set()
    mine = items(gallery.records, source=gallery.source.name, contents=trained.contents, among=among, advance=advance)
    return overlap(mine, trained)


def training_items(name: str) -> ItemTable:
    """NAME[:SPLIT] of a data set, or a stored table (.npz) -> what training had. The split is "train" where none is named.

    Raises:
        ValueError: no such data, split or file.
    """
    if name.endswith(".npz"):
        return load_items(name)
    source_name, colon, split = name.rpartition(":")
    if not colon or "/" in split or "\\" in split:  # a colon inside a path
        source_name, split = name, ""
    source = open_data(source_name)
    return items(source.records(split or source.split_or_only("train")), source=source.name)
