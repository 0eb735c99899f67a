"""File -> RGB picture, the one decode path of training and evaluation.

The stored orientation is applied; transparency is composited on white; every mode ends in 8-bit RGB.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps


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
