"""A folder of pictures with a .txt of the same stem beside each: the whole text is one caption, its line breaks read as spaces.

    flowers/a.jpg  flowers/a.txt     any depth; train/, val/ and test/ at the top are splits
How it can mislead: a text without a picture (a README, say) and a picture without a text are no pair; both are counted in the notes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradscope.data.caption_rows import decode
from gradscope.data.image_paths import short_names
from gradscope.data.own_records import OwnRecords
from gradscope.types import Record

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pictures with their texts, in order of path, below one folder; and what has no partner."""

    folder: Path
    pairs: Sequence[tuple[Path, Path]]
    lone_pictures: Sequence[Path]
    lone_texts: Sequence[Path]

    def read(self, names: dict[str, str], encoding: str) -> OwnRecords:
        """Records with the ids ``names`` (by path); empty texts dropped and counted."""
        texts = [(picture, _caption(text, encoding)) for picture, text in self.pairs]
        records = tuple(Record(id=names[str(p)], image=str(p), captions=(caption,)) for p, caption in texts if caption)
        empty = len(texts) - len(records)
        lines = {
            f"captions from the .txt beside each picture, {len(texts):,} pairs in {self.folder}": True,
            f"{empty:,} empty captions dropped with their pictures": empty,
            f"{len(self.lone_pictures):,} pictures without a .txt left out ({self._shown(self.lone_pictures)})": self.lone_pictures,
            f"{len(self.lone_texts):,} .txt files without a picture left out ({self._shown(self.lone_texts)})": self.lone_texts,
        }
        notes = tuple(line for line, there in lines.items() if there)
        return OwnRecords(records=records, key="", n_rows=len(texts), n_empty=empty, notes=notes)

    def _shown(self, paths: Sequence[Path]) -> str:
        more = ", ..." if len(paths) > _SHOWN else ""
        return ", ".join(str(path.relative_to(self.folder)) for path in paths[:_SHOWN]) + more


def find_pairs(folder: Path) -> Pairs:
    """Every pair below a folder, hidden files and folders left aside. Raises ValueError if one text has two pictures, or a
    name is not UTF-8."""
    pictures: dict[Path, Path] = {}
    texts: dict[Path, Path] = {}
    seen: set[str] = set()  # a link to a folder above would be walked for ever
    for place, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = sorted(n for n in folders if not n.startswith(".") and os.path.realpath(Path(place, n)) not in seen)
        for path in (Path(place, name) for name in sorted(files) if not name.startswith(".")):
            stem = path.with_suffix("")
            if path.suffix.lower() in (".txt", *PICTURES):
                _refuse_raw_name(path)
            if path.suffix.lower() == ".txt":
                texts[stem] = path
            elif path.suffix.lower() in PICTURES:
                if stem in pictures and Path(f"{stem}.txt").exists():
                    raise ValueError(
                        f"'{stem.name}.txt' in {place} belongs to both '{pictures[stem].name}' and '{path.name}'; rename one."
                    )
                pictures[stem] = path
    return Pairs(
        folder=folder,
        pairs=sorted((picture, texts[stem]) for stem, picture in pictures.items() if stem in texts),
        lone_pictures=sorted(picture for stem, picture in pictures.items() if stem not in texts),
        lone_texts=sorted(text for stem, text in texts.items() if stem not in pictures),
    )


def _refuse_raw_name(path: Path) -> None:
    """Ids go into JSON and CSV files, which are UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of a file is not UTF-8: {os.fsencode(path)!r}; rename it") from None


def pair_names(groups: Sequence[Pairs], root: Path) -> dict[str, str]:
    """Picture path -> id, different over all splits."""
    return short_names([str(picture) for group in groups for picture, _ in group.pairs], root)


def _caption(path: Path, encoding: str) -> str:
    return " ".join(line for part in decode(path, encoding).split("\n") if (line := part.strip()))
