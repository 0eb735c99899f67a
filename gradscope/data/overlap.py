"""Which evaluated items were among the training items: contamination, level by level (``gradscope.data.identity`` defines them).

    overlap(items(test, source="dci"), load_items(...)).any        bool [N], one per evaluated item

How it can mislead: no overlap found is not no overlap (a picture saved again under another name is another file), and what is not on
disk can be compared by id and caption only; ``uncompared`` counts those. Numbers without the overlapping items are those of a
smaller gallery, which is easier: compare them with a random gallery of that size, not with the full one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.data.identity import ABSENT, ItemTable, as_bytes

Mask = NDArray[np.bool_]
LEVELS = ("id", "file", "content", "caption")


@dataclass(frozen=True, kw_only=True, eq=False)
class Overlap:
    """Masks over the N evaluated items, in their order.

    ``name_only`` marks a file name that training had too while nothing else agrees; it is a hint and not in ``any``.
    ``uncompared`` counts evaluated items whose content could not be compared: no file on one of the two sides.
    """

    by_id: Mask
    by_file: Mask
    by_content: Mask
    by_caption: Mask
    name_only: Mask
    uncompared: int

    @property
    def any(self) -> Mask:
        """The same by any level."""
        return self.by_id | self.by_file | self.by_content | self.by_caption

    def counts(self) -> dict[str, int]:
        """Items by level, and in all."""
        masks = (self.by_id, self.by_file, self.by_content, self.by_caption, self.any, self.name_only)
        return dict(zip((*LEVELS, "any", "name_only"), (int(mask.sum()) for mask in masks), strict=True))

    def sentence(self) -> str:
        """ "1,000 of 1,000 evaluated items were in training (by id 1,000, file 1,000, ...)"; what was not compared is said too."""
        counts, n = self.counts(), len(self.by_id)
        said = f"{counts['any']:,} of {n:,} evaluated items were in training"
        if counts["any"]:
            said += f" (by {', '.join(f'{level} {counts[level]:,}' for level in LEVELS)})"
        if counts["name_only"]:
            said += f"; {counts['name_only']:,} share nothing but a file name, which numbered pictures do anywhere, and are not counted"
        if self.uncompared:
            said += f"; {self.uncompared:,} could not be compared by content"
        return said


def overlap(evaluated: ItemTable, trained: ItemTable) -> Overlap:
    """Marks the evaluated items that are training items.

    Raises:
        ValueError: the two tables hold digests of different kinds, which never agree.
    """
    kinds = {evaluated.contents, trained.contents} - {"none"}
    if len(kinds) > 1:
        raise ValueError(f"one table holds digests of '{evaluated.contents}', the other of '{trained.contents}'; make both alike")
    ids, names, digests = as_bytes(evaluated.ids), as_bytes(evaluated.names), as_bytes(evaluated.digests)
    rows = list(zip(names, evaluated.sizes.tolist(), digests, strict=True))
    known = _Known.of(trained)
    same_source = evaluated.source == trained.source
    by_id = [same_source and any(_agree(row, other) for other in known.by_id.get(i, ())) for i, row in zip(ids, rows, strict=True)]
    by_file = [size >= 0 and any(_agree((name, size, d), o) for o in known.by_file.get((name, size), ())) for name, size, d in rows]
    by_content = [digest != ABSENT and digest in known.digests for digest in digests]
    by_caption = np.zeros(len(evaluated), bool)
    hits = [row for row, text in zip(evaluated.caption_rows, as_bytes(evaluated.captions), strict=True) if text in known.captions]
    by_caption[hits] = True
    found = Overlap(
        by_id=np.array(by_id, bool),
        by_file=np.array(by_file, bool),
        by_content=np.array(by_content, bool),
        by_caption=by_caption,
        name_only=np.array([name != ABSENT and name in known.names for name in names], bool),
        uncompared=int((evaluated.sizes < 0).sum()) if (trained.sizes >= 0).any() else len(evaluated),
    )
    return Overlap(**{**vars(found), "name_only": found.name_only & ~found.any})


Row = tuple[bytes, int, bytes]  # base name, size, content


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The training items by each level."""

    by_id: dict[bytes, list[Row]]
    by_file: dict[tuple[bytes, int], list[Row]]
    digests: set[bytes]
    captions: set[bytes]
    names: set[bytes]

    @classmethod
    def of(cls, table: ItemTable) -> _Known:
        names, sizes, digests = as_bytes(table.names), table.sizes.tolist(), as_bytes(table.digests)
        by_id: dict[bytes, list[Row]] = {}
        by_file: dict[tuple[bytes, int], list[Row]] = {}
        for identity, *rest in zip(as_bytes(table.ids), names, sizes, digests, strict=True):
            row: Row = (rest[0], rest[1], rest[2])
            by_id.setdefault(identity, []).append(row)
            by_file.setdefault((row[0], row[1]), []).append(row)
        return cls(by_id=by_id, by_file=by_file, digests=set(digests), captions=set(as_bytes(table.captions)), names=set(names))


def _agree(one: Row, other: Row) -> bool:
    """Whether nothing that is known of both speaks against their being one file."""
    absent = (ABSENT, -1, ABSENT)
    return all(a == b or none in (a, b) for a, b, none in zip(one, other, absent, strict=True))
