"""One record -> the members that stand for it in a tar: picture, texts and stored crops. See ``pack``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from gradscope.data.images import load_rgb, opened
from gradscope.data.members import content, is_there
from gradscope.data.shard_samples import PICTURE_ENDINGS
from gradscope.types import Record, Segment

_QUALITY = 95


def key_of(identity: str) -> str:
    """A key that WebDataset does not cut: ``urllib.parse.unquote`` gives the id back."""
    return "".join(c if c.isalnum() or c in "_-" else "".join(f"%{byte:02X}" for byte in c.encode()) for c in identity)


def members_of(record: Record, side: int) -> tuple[str, dict[str, bytes]]:
    """(key, ending -> bytes). Pictures whose shorter side is longer than ``side`` are resized to it, and boxes with them; 0 leaves the
    bytes as they are. Stored crops of segments that are not on disk are left out.

    Raises:
        OSError: the picture cannot be read.
        ValueError: it has to be decoded and cannot be.
    """
    picture, ending, (across, down) = _picture(str(record.image), side)
    members = {ending: picture}
    segments = []
    for number, segment in enumerate(record.segments):
        name = None
        if segment.image is not None and is_there(segment.image):
            crop, crop_ending, _ = _picture(segment.image, side)
            name = f"segment{number}.{crop_ending}"
            members[name] = crop
        segments.append(_plain_segment(segment, name, across, down))
    text: dict[str, Any] = {"id": record.id, "captions": list(record.captions)}
    text |= {"segments": segments} if segments else {}
    text |= {"aux": dict(record.aux)} if record.aux else {}
    members["json"] = json.dumps(text, ensure_ascii=False).encode()
    members["txt"] = record.captions[0].encode()
    return key_of(record.id), members


def _plain_segment(segment: Segment, name: str | None, across: float, down: float) -> dict[str, Any]:
    box = None if segment.box is None else [n * factor for n, factor in zip(segment.box, (across, down) * 2, strict=True)]
    return {"caption": segment.caption, "box": box, "image": name}


def _picture(path: str, side: int) -> tuple[bytes, str, tuple[float, float]]:
    """Bytes, ending, and by what factors its width and height changed."""
    if side:
        image = load_rgb(path)
        if min(image.size) > side:
            ratio = side / min(image.size)
            width, height = (max(side, round(length * ratio)) for length in image.size)
            sink = io.BytesIO()
            image.resize((width, height), Image.Resampling.BICUBIC).save(sink, "JPEG", quality=_QUALITY, subsampling=0)
            return sink.getvalue(), "jpg", (width / image.width, height / image.height)
    return content(path), _ending(path), (1.0, 1.0)


def _ending(path: str) -> str:
    """That of the name, where it is a picture's; else by the content."""
    ending = Path(path).suffix.lower().removeprefix(".")
    if ending in PICTURE_ENDINGS:
        return ending
    with opened(path) as image:
        kind = (image.format or "").lower()
    return {"jpeg": "jpg", "mpo": "jpg", "jpeg2000": "jp2"}.get(kind, kind)
