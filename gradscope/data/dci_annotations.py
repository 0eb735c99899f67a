"""The annotation files of DCI -> records with a long and a short caption and the captions of their parts.

An annotation file is {"image", "short_caption", "extra_caption", "mask_data": {key: {"bounds", "label", "caption", "mask_quality"}}}.
A pair is made from what the annotation says, "image": the file is called after something else (112956-data.json). ``extra_caption``
is the long caption; it is empty in 203 of the 7,805 annotations. Masks become segments as in the authors' code: quality 0 gives label
and caption, 1 the label alone, 2 (unusable) nothing.

How it can mislead: boxes are in pixels of the picture as released; that the release is stored upright is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from gradscope.data.published import dropped_empty, read_json, slashed, text_in
from gradscope.types import Record, Segment

#: The release unpacks into this folder.
RELEASE = "densely_captioned_images"
ANNOTATIONS = ("annotations", f"{RELEASE}/annotations", "complete", f"{RELEASE}/complete")


def captioned(annotated: list[Record], images: Path, caption: str) -> tuple[list[Record], list[str]]:
    """Records with the wanted captions and whole picture paths; ``annotated`` carry (long, short) and the bare file name."""
    chosen = {"long": (0,), "short": (1,), "both": (0, 1)}[caption]
    records: list[Record] = []
    partly = 0
    for record in annotated:
        texts = tuple(record.captions[k] for k in chosen if record.captions[k].strip())
        partly += 0 < len(texts) < len(chosen)
        if texts:
            records.append(replace(record, image=str(images / (record.image or "")), captions=texts))
    notes = dropped_empty(len(annotated) - len(records), f"no {'caption' if caption == 'both' else caption + ' caption'}")
    return records, [*notes, *([f"{partly:,} records have one of the two captions only"] if partly else [])]


def all_annotations(annotations: Path) -> list[Record]:
    files = sorted(annotations.glob("*.json"))
    if not files:
        raise ValueError(f"'{annotations}' holds no .json files; unpack dci.tar.gz again")
    return [annotation(file) for file in files]


def annotation(file: Path) -> Record:
    """(long, short) captions, the picture's bare path and the segments of one annotation file. Raises ValueError naming the file."""
    try:
        stamp = file.stat().st_mtime_ns
    except FileNotFoundError as error:
        raise ValueError(f"'{file}' does not exist, though splits.json names it; unpack dci.tar.gz again") from error
    return _parsed(file, stamp)


@lru_cache(maxsize=16384)  # the files are large (they hold the masks) and are asked for once for each split and fingerprint
def _parsed(file: Path, stamp: int) -> Record:
    item = read_json(file)
    where = f"'{file}'"
    image = slashed(text_in(item, "image", where))
    long, short = item.get("extra_caption") or "", item.get("short_caption") or ""
    if not isinstance(long, str) or not isinstance(short, str):
        raise ValueError(f"{where}: 'extra_caption' and 'short_caption' must be strings")
    masks = item.get("mask_data") or {}
    if not isinstance(masks, Mapping):
        raise ValueError(f"{where}: 'mask_data' must be an object of masks")
    parts = [_segment(mask, f"{where}, mask {key}") for key, mask in masks.items()]
    return Record(id=record_id(image), image=image, captions=(long, short), segments=tuple(part for part in parts if part is not None))


def _segment(mask: Any, where: str) -> Segment | None:
    """None for an unusable mask, or one without words."""
    if not isinstance(mask, Mapping):
        raise ValueError(f"{where} is no object")
    quality = mask.get("mask_quality", 0)
    label, caption = (str(mask.get(key) or "").strip() for key in ("label", "caption"))
    words = {0: ": ".join(filter(None, (label, caption))), 1: label}.get(quality, "")
    return Segment(caption=words, box=_box(mask.get("bounds"), where)) if words else None


def _box(bounds: Any, where: str) -> tuple[float, float, float, float] | None:
    """(left, top, right, bottom) in pixels. Both published forms: {"topLeft": {"x", "y"}, "bottomRight": ...} and [[x, y], [x, y]]."""
    if bounds is None:
        return None
    try:
        if isinstance(bounds, Mapping):
            bounds = [(bounds[corner]["x"], bounds[corner]["y"]) for corner in ("topLeft", "bottomRight")]
        (left, top), (right, bottom) = ((float(x), float(y)) for x, y in bounds)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: 'bounds' must name two corners; got {bounds!r}") from error
    whole = math.isfinite(left + top + right + bottom) and right > left and bottom > top
    return (left, top, right, bottom) if whole else None


def record_id(image: str) -> str:
    return PurePosixPath(slashed(image)).stem
