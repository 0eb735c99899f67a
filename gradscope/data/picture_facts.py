"""What a picture file is, found by decoding it: mode, sides, orientation, frames, transparency, or why it cannot be read.

Sides are those of the stored picture, before its orientation is applied. A picture counts as readable if the decode path of training
(``gradscope.data.images.load_rgb``) reads all of it: a file cut short has a perfect header.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gradscope.data.images import load_rgb, opened, orientation


@dataclass(frozen=True, kw_only=True)
class PictureFacts:
    """``reason`` says why the picture cannot be read, "" if it can; then the rest holds. Sides in pixels."""

    reason: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0
    rotated: bool = False
    animated: bool = False
    alpha: bool = False


def picture_facts(path: str) -> PictureFacts:
    """Decodes one file; never raises for what is wrong with it."""
    try:
        load_rgb(path)
        with opened(path) as image:
            return PictureFacts(
                mode=image.mode,
                width=image.width,
                height=image.height,
                rotated=orientation(image) != 1,
                animated=bool(getattr(image, "is_animated", False)),
                alpha=image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info,
            )
    except ValueError as error:
        return PictureFacts(reason=str(error))


def all_picture_facts(paths: Sequence[str], *, workers: int, advance: Callable[[int, int], None] | None = None) -> list[PictureFacts]:
    """The facts of each path, decoded by ``workers`` threads (decoding runs outside the interpreter's lock)."""
    found = []
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore")  # what Pillow warns of is counted here; filters set by threads would outlive them
        for facts in pool.map(picture_facts, paths):
            found.append(facts)
            if advance:
                advance(len(found), len(paths))
    return found
