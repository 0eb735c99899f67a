"""Regions of a record: a list of {"caption", "box" or "bbox", "image"} -> Segments.

    box, bbox_xyxy     [left, top, right, bottom], or {"left", "top", "right", "bottom"}, or {"x1", "y1", "x2", "y2"}
    bbox, bbox_xywh    [left, top, width, height] (COCO), or {"x", "y", "width", "height"}

Mappings are read by their keys, whatever the box is called. Pixels of the whole picture.
How it can mislead: four numbers do not say which of the two they are; the key decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from gradscope.data.columns import CAPTION_KEYS, IMAGE_KEYS, folded
from gradscope.types import Segment

Box = tuple[float, float, float, float]

_CORNERS = {"box": True, "bbox_xyxy": True, "bbox": False, "bbox_xywh": False}  # key -> the last two numbers are right and bottom
_CORNER_NAMES = (("left", "top", "right", "bottom"), ("x1", "y1", "x2", "y2"))
_SIZE_NAMES = (("x", "y", "width", "height"), ("left", "top", "width", "height"), ("x", "y", "w", "h"))
_CAPTIONS = ("phrase", *CAPTION_KEYS)


def read_regions(value: object, root: Path, where: str) -> tuple[tuple[Segment, ...], int]:
    """Segments in order, and how many were dropped for an empty caption. Raises ValueError naming the line and the region."""
    if not isinstance(value, list):
        raise ValueError(f'{where}: regions must be a list of records with "caption" and "box".')
    found = [_segment(region, root, f"{where}, region {number}") for number, region in enumerate(value, start=1)]
    kept = tuple(segment for segment in found if segment.caption.strip())
    return kept, len(found) - len(kept)


def _segment(region: object, root: Path, where: str) -> Segment:
    if not isinstance(region, dict):
        raise ValueError(f'{where}: a region must be a record with "caption" and "box".')
    keys = {folded(key): value for key, value in region.items()}
    caption = next((keys[key] for key in _CAPTIONS if key in keys), None)
    image = next((keys[key] for key in ("crop", *IMAGE_KEYS) if key in keys), None)
    if not isinstance(caption, str):
        raise ValueError(f'{where}: no caption; expected {{"caption": "...", "box": [left, top, right, bottom]}}.')
    if image is not None and not isinstance(image, str):
        raise ValueError(f"{where}: the image of a region must be the path of a stored crop.")
    named = next(((keys[key], corners) for key, corners in _CORNERS.items() if keys.get(key) is not None), None)
    box = None if named is None else _box(*named, where)
    return Segment(caption=caption, box=box, image=str(root / image) if image else None)


def _box(value: object, corners: bool, where: str) -> Box:
    numbers: object = value
    if isinstance(value, Mapping):
        keys = {folded(key): number for key, number in value.items()}
        names = next((n for n in (*_CORNER_NAMES, *_SIZE_NAMES) if set(n) <= set(keys)), ())
        numbers, corners = [keys[name] for name in names], names in _CORNER_NAMES
    if not isinstance(numbers, list | tuple) or len(numbers) != 4 or not all(_is_number(n) for n in numbers):
        raise ValueError(f"{where}: a box must be four finite numbers in pixels; got {value!r:.80}.")
    left, top, right, bottom = (float(n) for n in numbers)
    if not corners:
        right, bottom = left + right, top + bottom
    if right <= left or bottom <= top:
        raise ValueError(
            f"{where}: the box {value!r:.80} has no area; 'box' is left, top, right, bottom and 'bbox' is left, top, width, height."
        )
    if right <= 1 and bottom <= 1:
        raise ValueError(f"{where}: the box {value!r:.80} is smaller than a pixel; boxes are in pixels, not in shares of the picture.")
    return left, top, right, bottom


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
