"""The JSON lists that GOAL and StructXLIP release -> records.

    [{"filename", "caption"}]                                             a picture and its caption
    [{"original_filename", "original_caption",                            a picture, its caption and its parts
      "segment": [{"filename", "caption", "similarity_score",
                   "bbox_coordinates": {"x1", "y1", "x2", "y2", "width", "height"}}]}]
    [{"filename", "caption", "similarity_score", "bbox_coordinates"}]     parts alone: each crop is a record of its own

StructXLIP adds "original_filename_structure" and "filename_structure_cropped" (edge maps); their paths are kept in ``aux`` as
"structure" and "segment_structures". Similarities are kept as "segment_scores". Fields as in the released files and loaders of
PerceptualAI-Lab/GOAL and intelligolabs/StructXLIP.

How it can mislead: boxes were found by matching the crop against the picture as stored, so they are upright only if the picture is
stored upright. Lists that mix pictures with crops of the same pictures (GOAL's "joint" test lists) hold near-twins on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from gradscope.data.published import base_name, slashed, text_in
from gradscope.types import Record, Segment

#: Where GOAL's lists are, as of the commit at which they were looked at.
GOAL_LISTS = "https://raw.githubusercontent.com/PerceptualAI-Lab/GOAL/2db3d4a0c03576bb961632832af7a43aaf3c60db/datasets"

_CORNERS = ("x1", "y1", "x2", "y2")


def segment_records(items: Sequence[Any], image_root: Path, where: str) -> tuple[list[Record], list[str]]:
    """Records in the list's order, and notes.

    Args:
        items: the list in the file.
        image_root: folder that relative names start from. A name with folders of another machine is looked for in it by its last
            part; where that fails too the path is kept, so that what is missing can be named.
        where: the file, for messages.

    Raises:
        ValueError: an item without file name or caption (says which), or with a box that is no box.
    """
    captions = [_caption_of(item, f"{where}, record {number}") for number, item in enumerate(items, 1)]
    kept = [(number, item, caption) for number, (item, caption) in enumerate(zip(items, captions, strict=True), 1) if caption.strip()]
    names = [_name_of(item, f"{where}, record {number}") for number, item, _ in kept]
    finder = _Finder(image_root)
    records = [
        _record(item, caption, name, identity, finder, f"{where}, record {number}")
        for (number, item, caption), name, identity in zip(kept, names, _ids(names), strict=True)
    ]
    notes = [f"{len(items) - len(kept):,} records of {where} left out: empty captions"] if len(kept) < len(items) else []
    return records, notes + finder.notes()


class _Finder:
    """Where a named picture is, counting those found by file name alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.by_name = 0

    def path(self, name: str) -> str:
        straight = self.root / slashed(name)  # an absolute name replaces the root
        if not straight.exists() and (self.root / base_name(name)).exists():
            self.by_name += 1
            return str(self.root / base_name(name))
        return str(straight)

    def notes(self) -> list[str]:
        return (
            [f"{self.by_name:,} pictures found by their file name in {self.root}; the list names other folders"] if self.by_name else []
        )


def _nested(item: Any) -> bool:
    return isinstance(item, Mapping) and "original_filename" in item


def _caption_of(item: Any, where: str) -> str:
    return text_in(item, "original_caption" if _nested(item) else "caption", where)


def _name_of(item: Any, where: str) -> str:
    name = text_in(item, "original_filename" if _nested(item) else "filename", where)
    if not base_name(name):
        raise ValueError(f"{where}: '{name}' is not the name of a picture")
    return name


def _ids(names: Sequence[str]) -> list[str]:
    """File names without ending, which stay the same on every machine; whole names where those are not unique."""
    stems = [PurePosixPath(base_name(name)).stem for name in names]
    count = Counter(stems)
    return [stem if count[stem] == 1 else slashed(name) for stem, name in zip(stems, names, strict=True)]


def _record(item: Mapping[str, Any], caption: str, name: str, identity: str, finder: _Finder, where: str) -> Record:
    aux: dict[str, object] = {}
    if isinstance(item.get("original_filename_structure"), str) and item["original_filename_structure"]:
        aux["structure"] = finder.path(item["original_filename_structure"])
    if not _nested(item):
        box = _box(item, where)
        if box is not None:
            aux["box"] = box
        return Record(id=identity, image=finder.path(name), captions=(caption,), aux=aux)
    parts = _parts(item, where)
    crops = [finder.path(part["filename"]) if isinstance(part.get("filename"), str) and part["filename"] else None for part in parts]
    segments = tuple(replace(part, image=crop) for part, crop in zip(segments_of(item, where), crops, strict=True))
    for key, field in (("segment_scores", "similarity_score"), ("segment_structures", "filename_structure_cropped")):
        values = [part.get(field) for part in parts]
        if any(value is not None for value in values):
            aux[key] = [finder.path(v) if field.startswith("filename") and isinstance(v, str) and v else v for v in values]
    return Record(id=identity, image=finder.path(name), captions=(caption,), segments=segments, aux=aux)


def segments_of(item: Any, where: str) -> tuple[Segment, ...]:
    """Captions and boxes of an item's parts (an item without parts is one itself), without the paths of the crops.
    Raises ValueError as ``segment_records`` does."""
    if not _nested(item):
        return (Segment(caption=_caption_of(item, where), box=_box(item, where)),)
    return tuple(
        Segment(caption=text_in(part, "caption", f"{where}, segment {number}"), box=_box(part, f"{where}, segment {number}"))
        for number, part in enumerate(_parts(item, where), 1)
    )


def _parts(item: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    parts = item.get("segment") or []
    if not (isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts)):
        raise ValueError(f"{where}: 'segment' must be a list of segments")
    return parts


def _box(part: Mapping[str, Any], where: str) -> tuple[float, float, float, float] | None:
    """(left, top, right, bottom) in pixels; None where there is none (StructXLIP writes zeros then)."""
    given = part.get("bbox_coordinates")
    if given is None:
        return None
    try:
        left, top, right, bottom = (float(given[corner]) for corner in _CORNERS)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: 'bbox_coordinates' needs the numbers {', '.join(_CORNERS)}; got {given!r}") from error
    if left == top == right == bottom == 0:
        return None
    if not (math.isfinite(left + top + right + bottom) and right > left and bottom > top):
        raise ValueError(f"{where}: the box {given!r} has no area; x2 must lie right of x1, and y2 below y1")
    return left, top, right, bottom
