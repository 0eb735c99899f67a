"""File -> RGB picture, the one decode path of training and evaluation.

The stored orientation is applied; transparency is composited on white; every mode ends in 8-bit RGB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from gradscope.types import Record


def refuse_missing(records: Sequence[Record]) -> None:
    """Raises ValueError with the number of pictures that are not on disk, and the first few, before anything is computed."""
    missing = [str(record.image) for record in records if record.image is None or not Path(record.image).is_file()]
    if missing:
        more = ", ..." if len(missing) > 3 else ""
        raise ValueError(
            f"{len(missing)} of {len(records)} pictures do not exist: {', '.join(missing[:3])}{more}; fetch them or drop their lines"
        )


def load_rgb(path: str | Path) -> Image.Image:
    """Raises ValueError naming the file if it is missing or cannot be decoded."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except FileNotFoundError as error:
        raise ValueError(f"image '{path}' does not exist") from error
    except (OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"image '{path}' cannot be decoded: {error}") from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode.startswith("I"):
        image = image.point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
