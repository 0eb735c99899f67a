"""File (or member of a shard, see ``members``) -> upright 8-bit RGB picture. The rules of training and evaluation alike:

    orientation    the stored one is applied; a damaged tag counts as upright
    transparency   composited on white, whether it is a channel, a palette table or one colour
    16-bit gray    v / 257, so that 65535 is white; mode "I" is read the same way
    float gray     0..1 is times 255, up to 255 is taken as it is
    CMYK, YCCK     PIL's plain conversion, inks as Adobe stores them; colour profiles are not applied
    animations     the first frame

Everything that is wrong with a file is a ValueError with the path and the reason; PIL's warnings are not shown. How it can mislead: a
wide-gamut or CMYK profile is ignored, as open_clip ignores it, so such colours are only nearly right.
"""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from gradscope.data.members import content, is_there, member
from gradscope.types import Record

#: Larger pictures are refused, whatever PIL's own limit is set to: some 700 MB as RGB in memory.
MAX_PIXELS = 178_956_970

#: Longest over shortest side. At 1000, a strip resized to 224 pixels across has 50 million of them before it is cropped.
MAX_ASPECT = 1000

#: What is tried (JPEG includes MPO). Not among them: formats that run another program (EPS) and formats without a signature.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")

#: EXIF orientation -> what makes the picture upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112


def load_rgb(path: str | Path) -> Image.Image:
    """The picture as it is meant to be seen. Raises ValueError naming the file and the reason."""
    with opened(path) as image:
        image.load()
        turn = TURNS.get(orientation(image))
        return to_rgb(image if turn is None else _turned(image, turn))


@contextmanager
def opened(path: str | Path) -> Iterator[Image.Image]:
    """The file with only its header read. Whatever goes wrong in the block is a ValueError naming the file and the reason."""
    try:
        source = _source(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(source, formats=_formats()) as image:
                _refuse_size(*image.size)
                yield image
    except FileNotFoundError as error:
        raise ValueError(f"image '{path}' does not exist") from error
    except Exception as error:  # a damaged file can make a decoder raise nearly anything
        raise ValueError(f"image '{path}' cannot be decoded: {_reason(path, error)}") from error


def _source(path: str | Path) -> str | Path | BytesIO:
    found = member(path)
    if found is not None:
        return BytesIO(found.read())
    _refuse_what_is_no_file(path)
    return path


def stored_bytes(image: Image.Image, path: str | Path) -> NDArray[np.uint8]:
    """uint8 [bytes] of the file of a picture that is ``opened``; those of a member are at hand and are not read again."""
    at_hand = getattr(image, "fp", None)
    return np.frombuffer(at_hand.getvalue(), np.uint8) if isinstance(at_hand, BytesIO) else np.fromfile(path, dtype=np.uint8)


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def orientation(image: Image.Image) -> int:
    """The stored orientation, 1 to 8; 1 where there is none or where it cannot be read."""
    try:
        found: Any = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata; the pixels may be whole
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode -> RGB by the rules above."""
    if image.mode.startswith(("I", "F")):
        image = _eight_bit(image)
    if image.mode == "LAB":
        return _from_lab(image)
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Image.Image, turn: Image.Transpose) -> Image.Image:
    turned = image.transpose(turn)
    turned.info = dict(image.info)  # a transparent colour stays one
    return turned


def _eight_bit(image: Image.Image) -> Image.Image:
    """Gray of more than 8 bits -> L, or LA where one value is declared transparent."""
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    whole = image.mode.startswith("I")
    # NaN fails every comparison, so it is refused too.
    if not (low >= 0 and high <= (65535 if whole else 255)):
        raise ValueError(f"gray values from {low:g} to {high:g} have no agreed brightness; store it with 8 or 16 bits")
    scaled = values / 257 if whole else values * (255 if high <= 1 else 1)
    gray = Image.fromarray(np.rint(scaled).astype(np.uint8))
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return gray
    gray.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return gray


def _from_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None
    return converted


def _refuse_what_is_no_file(path: str | Path) -> None:
    """Opening a pipe would wait for ever."""
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError("it is a folder")
    if not stat.S_ISREG(mode):
        raise ValueError("it is not a regular file")


def _refuse_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise Image.DecompressionBombError
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"{width} x {height} pixels is a strip, one side over {MAX_ASPECT} times the other")


def _reason(path: str | Path, error: Exception) -> str:
    """In words; PIL says of an empty file and of a web page alike that it 'cannot identify' them."""
    if isinstance(error, Image.DecompressionBombError):
        return f"it declares more than {MAX_PIXELS:,} pixels, the most that is read"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, UnidentifiedImageError):
        return _what_it_is(path)
    said = " ".join(str(error).split())
    return said or type(error).__name__


def _what_it_is(path: str | Path) -> str:
    start = content(path, count=512)
    if not start:
        return "the file is empty"
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "it holds a web page or XML, not a picture"
    return f"it is damaged, or not a picture in one of the formats {', '.join(FORMATS)}"


# ---- pictures that are not there


def missing_pictures(records: Sequence[Record]) -> list[Record]:
    """Records without a picture, or whose picture's path leads nowhere. A folder or a damaged file is there, but bad."""
    return [record for record in records if record.image is None or not _leads_somewhere(record.image)]


def _leads_somewhere(path: str) -> bool:
    if member(path) is not None:
        return is_there(path)
    try:
        return Path(path).exists()
    except PermissionError:  # a closed folder: reading will say so
        return True
    except OSError:  # such as a name that is too long
        return False


def refuse_missing(records: Sequence[Record]) -> None:
    """Raises ValueError with the number of pictures that are not on disk, and the first ten, before anything is computed."""
    missing = missing_pictures(records)
    if missing and all(record.image is None for record in records):
        raise ValueError(
            f"none of {len(records)} records names a picture; name the key or column of the pictures' paths with --image-key, "
            "or give data with pictures"
        )
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(records)} pictures do not exist: {names(missing)}; "
            "put them there, drop their lines, or leave them out with --allow-missing"
        )


def names(records: Sequence[Record], most: int = 10) -> str:
    """The first pictures of ``records``, with a hint where a file's name differs only in upper and lower case."""
    shown = []
    for record in records[:most]:
        if record.image is None:
            shown.append(f"record '{record.id}' names none")
            continue
        twin = other_case(record.image)
        if twin and Path(twin).parent == Path(record.image).parent:
            twin = Path(twin).name
        shown.append(f"{record.image} (there is '{twin}': only the case differs)" if twin else record.image)
    more = f", and {len(records) - most} more" if len(records) > most else ""
    return ", ".join(shown) + more


def other_case(path: str) -> str | None:
    """The file that ``path`` would be if case did not count; None if there is none."""
    missing = Path(path)
    tail: list[str] = []
    while not missing.is_dir():
        if missing == missing.parent:
            return None
        tail.append(missing.name)
        missing = missing.parent
    for name in reversed(tail):
        found = _listing(missing).get(name.casefold())
        if found is None:
            return None
        missing = missing / found
    return str(missing) if missing.is_file() else None


@lru_cache(maxsize=256)
def _listing(folder: Path) -> dict[str, str]:
    """Names in a folder by their form without case."""
    try:
        return {entry.name.casefold(): entry.name for entry in folder.iterdir()}
    except OSError:
        return {}
