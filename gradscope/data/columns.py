"""Which keys (or columns) of one's own file hold what: captions, picture, id, split, regions. Guessed unless named, and always shown.

Keys match without regard to case and outer spaces; "File Path" is file_path. Of the usual names below the first that is there is taken.
How it can mislead: a file with both "caption" and "long_caption" is read by "caption"; the note names the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

CAPTION_KEYS = (
    "caption",
    "captions",
    "description",
    "descriptions",
    "text",
    "texts",
    "long_caption",
    "sentence",
    "sentences",
    "comment",
    "title",
)
IMAGE_KEYS = (
    "image",
    "image_path",
    "image_file",
    "file_name",
    "filename",
    "image_name",
    "filepath",
    "file_path",
    "path",
    "img",
    "img_path",
    "picture",
    "file",
)
ID_KEYS = ("id", "image_id", "example_id")
REGION_KEYS = ("segments", "regions")

#: One record of a file: where it stands (for messages), and its value.
Item = tuple[str, object]


@lru_cache(maxsize=1024)
def folded(key: object) -> str:
    """How keys are compared."""
    return "_".join(str(key).casefold().split())


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Folded keys; "" where the file has none."""

    caption: str
    image: str = ""
    identity: str = ""
    split: str = ""
    regions: str = ""
    other_captions: tuple[str, ...] = ()
    plain: bool = False  # the documented format: id, image and a list of captions, held to its types

    def note(self) -> list[str]:
        """What was guessed, for the notes of a split; nothing where the format is the documented one."""
        if self.plain:
            return []
        if not self.caption:
            return ["captions without keys and without pictures"]
        others = f" (there are also {_quoted(self.other_captions)}: --caption-key)" if self.other_captions else ""
        pictures = f"images from '{self.image}'" if self.image else "no key that names pictures (--image-key): captions only"
        extra = f", ids from '{self.identity}'" if self.identity else ""
        extra += f", regions from '{self.regions}'" if self.regions else ""
        return [f"captions from '{self.caption}'{others}, {pictures}{extra}"]


def find_columns(items: Sequence[Item], *, image_key: str = "", caption_key: str = "") -> Columns:
    """The columns of records that may differ in optional keys.

    Raises:
        ValueError: the first record has no caption, or a named key is nowhere.
    """
    records = [(where, value) for where, value in items if isinstance(value, dict)]
    if not records:
        for key, flag in ((image_key, "--image-key"), (caption_key, "--caption-key")):
            if key:
                raise ValueError(f"{flag} {key} was given, but {_place(items)} holds strings without keys; leave it out.")
        return Columns(caption="")
    where, first = records[0]
    present = {folded(key) for key in dict.fromkeys(key for _, value in records for key in value)}
    caption = _caption(where, first, folded(caption_key))
    if image_key and folded(image_key) not in present:
        raise ValueError(f"{where}: no key '{image_key}' among {_listed(first)}; name the pictures' key with --image-key.")
    image = folded(image_key) or next((k for k in IMAGE_KEYS if k in present and k != caption), "")
    captions = first.get("captions")
    return Columns(
        caption=caption,
        image=image,
        identity=next((k for k in ID_KEYS if k in present and k not in (caption, image)), ""),
        split="split" if "split" in present else "",
        regions=_regions(records, caption),
        other_captions=() if caption_key else tuple(k for k in CAPTION_KEYS if k in present and k not in (caption, image)),
        plain=isinstance(captions, list) and {"id", "image"} <= set(first) and (caption, image) == ("captions", "image"),
    )


def _regions(records: Sequence[tuple[str, dict[Any, Any]]], caption: str) -> str:
    """A key of that name which holds lists of records somewhere: a table may call anything "regions"."""
    for _, record in records:
        for key, value in record.items():
            if (
                folded(key) in REGION_KEYS
                and folded(key) != caption
                and isinstance(value, list)
                and any(isinstance(v, dict) for v in value)
            ):
                return folded(key)
    return ""


def _caption(where: str, first: Mapping[str, object], wanted: str) -> str:
    there = {folded(key) for key in first}
    found = next((key for key in ([wanted] if wanted else CAPTION_KEYS) if key in there), None)
    if found is None:
        asked = f"'{wanted}'" if wanted else f"any of {', '.join(CAPTION_KEYS)}"
        raise ValueError(f"{where}: no key {asked} among {_listed(first)}; name the captions' key with --caption-key.")
    return found


def missing_key(where: str, record: Mapping[str, object], key: str, flag: str) -> ValueError:
    """A record that lacks the key that other records have: two kinds of records in one file are never mixed silently."""
    usual = CAPTION_KEYS if flag == "--caption-key" else IMAGE_KEYS
    instead = [str(k) for k in record if folded(k) in usual]
    has = f"but '{instead[0]}'" if instead else f"among {_listed(record)}"
    return ValueError(
        f"{where}: no key '{key}', which other records have, {has}; give all records the same keys, or name one with {flag}."
    )


def _listed(record: Mapping[str, object]) -> str:
    return ", ".join(map(str, record)) or "none"


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys)


def _place(items: Sequence[Item]) -> str:
    return items[0][0].rsplit(" line ", 1)[0] if items else "the file"
