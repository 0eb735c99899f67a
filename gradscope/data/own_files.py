"""Data of one's own: a file, or a folder, of captions and pictures.

    photos.jsonl           a list of records: JSON, JSON lines, CSV, TSV, Parquet; splits are the values of a column "split", else "all"
    captions.txt           one caption a line, no pictures (enough for caption geometry)
    my/folder/             train, val, test .jsonl (or .json .csv .tsv .parquet): one is enough
    my/folder/             tar files of samples; also a pattern of them or an address (see ``shards``)
    my/folder/             pictures with a .txt of the same stem beside each, at any depth; or train/, val/, test/ of such pairs
The documented record is {"id", "image": path relative to the file's folder, "captions": [dense first, ...], "aux": {...},
"segments": [{"caption", "box": [left, top, right, bottom]}]}; other names are guessed (see ``columns``) and shown in the notes.
Whether pictures exist is not checked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradscope.data.caption_rows import RECORD_SUFFIXES, read_items
from gradscope.data.columns import Item
from gradscope.data.own_records import OwnRecords, OwnTable, read_table, usual_split
from gradscope.data.picture_pairs import PICTURES, Pairs, find_pairs, pair_names
from gradscope.data.shard_names import MANIFEST, names_shards
from gradscope.data.shards import Shards
from gradscope.data.source import DataSource
from gradscope.types import Record

SPLITS = ("train", "val", "test")
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """A path, and what cannot be guessed.

    Args:
        path: a file, or a folder.
        image_key, caption_key: keys (columns) of pictures and captions; "" guesses.
        image_root: folder that paths of pictures count from; "" is the folder of the file.
        encoding: of text files; "" is UTF-8 with or without byte-order mark.
    """

    path: str
    image_key: str = ""
    caption_key: str = ""
    image_root: str = ""
    encoding: str = ""

    def open(self) -> DataSource:
        """Raises ValueError: nothing there, a layout that is not known or not clear, or a file that cannot be read."""
        path, shards = Path(self.path).expanduser(), self._shards()
        parts = self._plain_parts() if shards is None else shards.parts()
        usual = next(iter(parts)) if len(parts) == 1 else "test"
        return DataSource(
            name=self.path,
            folder=shards.folder() if shards else path if path.is_dir() else path.parent,
            readers={split: partial(_records_and_notes, part) for split, part in parts.items()},
            default_split=usual if shards is None else shards.default_split(),
        )

    def parts(self) -> Mapping[str, Callable[[], OwnRecords]]:
        """Split -> what reads it, with the counts that caption geometry reports."""
        shards = self._shards()
        return self._plain_parts() if shards is None else shards.parts()

    def _plain_parts(self) -> Mapping[str, Callable[[], OwnRecords]]:
        path = Path(self.path).expanduser()
        if self.image_root and not Path(self.image_root).expanduser().is_dir():
            raise ValueError(f"--image-root '{self.image_root}' is no folder; name the folder that the pictures' paths count from.")
        if path.is_file():
            return self._file(path)
        if path.is_dir():
            return self._folder(path)
        parent = path.absolute().parent
        raise ValueError(f"there is no file or folder '{self.path}'; {parent} {_holds(parent)}.")

    def _shards(self) -> Shards | None:
        """None where the path names no tar files. Raises ValueError if it names other data too."""
        if not names_shards(self.path):
            return None
        folder = Path(self.path).expanduser()
        if folder.is_dir() and not (folder / MANIFEST).is_file():
            if _split_files(folder):  # archives, such as were fetched and unpacked beside the lists of their pictures
                return None
            if find_pairs(folder).pairs:
                raise ValueError(
                    f"'{self.path}' is two data sets: tar files, and pictures with a .txt beside them; name the tar files with a "
                    "pattern (shards-{000..031}.tar), or move one of the two."
                )
        if self.image_root:
            raise ValueError(f"'{self.path}' names tar files, whose pictures have no paths; leave out --image-root.")
        return Shards(path=self.path, image_key=self.image_key, caption_key=self.caption_key, encoding=self.encoding)

    def _file(self, path: Path) -> Mapping[str, Callable[[], OwnRecords]]:
        items = self._items(path)
        if self._is_segment_list(items):
            return {"all": partial(self._segments, path, items)}
        table = self._table(path, items)
        return {split: partial(table.read, split) for split in table.splits()}

    def _folder(self, folder: Path) -> Mapping[str, Callable[[], OwnRecords]]:
        files = _split_files(folder)
        pairs = self._pairs(folder, files)
        if files and pairs:
            listed = ", ".join(file.name for file in files.values())
            raise ValueError(
                f"'{self.path}' is two data sets: {listed}, and {sum(len(p.pairs) for p in pairs.values()):,} pictures with a .txt "
                "beside them; name the file, or move one of the two."
            )
        if files:
            return {split: partial(self._whole, file, split) for split, file in files.items()}
        if pairs:
            if self.image_key or self.caption_key or self.image_root:
                raise ValueError(
                    f"'{self.path}' holds pictures with .txt files, which have no keys and no paths; leave out --image-key, "
                    "--caption-key and --image-root."
                )
            names = pair_names(list(pairs.values()), folder)
            return {split: partial(found.read, names, self.encoding) for split, found in pairs.items()}
        raise ValueError(
            f"{_other_file(folder)}folder '{self.path}' has neither train.jsonl nor test.jsonl (val; .json, .csv, .tsv, .parquet), no "
            f"*.tar, and no picture with a .txt of its stem; it {_holds(folder)}"
        )

    def _pairs(self, folder: Path, files: Mapping[str, Path]) -> Mapping[str, Pairs]:
        """Pairs by split; where there are split files, only those at the top, because the pictures of the list may lie anywhere."""
        inside = {usual_split(p.name): p for p in sorted(folder.iterdir()) if p.is_dir() and usual_split(p.name) in SPLITS}
        if files:
            top = [p for p in folder.iterdir() if p.is_file()]
            stems = {p.stem for p in top if p.suffix.lower() == ".txt"}
            return {"all": find_pairs(folder)} if any(p.stem in stems and p.suffix.lower() in PICTURES for p in top) else {}
        found = {split: find_pairs(inside[split]) for split in SPLITS if split in inside}
        found = {split: pairs for split, pairs in found.items() if pairs.pairs}
        if not found:
            everything = find_pairs(folder)
            return {"all": everything} if everything.pairs else {}
        outside = [p for p, _ in find_pairs(folder).pairs if not any(p.is_relative_to(inside[split]) for split in inside)]
        if outside:
            raise ValueError(
                f"'{self.path}' has pairs in {', '.join(f'{split}/' for split in found)} and {len(outside):,} outside of them "
                f"({outside[0].relative_to(folder)}); move those into a split, or name one folder."
            )
        return found

    def _whole(self, file: Path, split: str) -> OwnRecords:
        items = self._items(file)
        if self._is_segment_list(items):
            return self._segments(file, items)
        table = self._table(file, items)
        found = table.read()
        if not table.columns.split or table.splits() == [split]:
            return found
        note = f"the column 'split' of {file.name} ({', '.join(table.splits())}) is not used: the name of the file is the split"
        return dataclasses.replace(found, notes=(*found.notes, note))

    def _items(self, file: Path) -> list[Item]:
        items = read_items(file, caption_key=self.caption_key, encoding=self.encoding)
        if not items:
            raise ValueError(f"'{file}' holds no records; give a file with at least one.")
        return items

    def _table(self, file: Path, items: list[Item]) -> OwnTable:
        table = read_table(items, root=self._root(file), image_key=self.image_key, caption_key=self.caption_key)
        if self.image_root and not table.columns.image:
            raise ValueError(f"--image-root was given, but '{file}' has no key that names pictures; name it with --image-key.")
        return table

    def _is_segment_list(self, items: list[Item]) -> bool:
        """The nested lists that GOAL and StructXLIP release, unless keys of one's own are asked for."""
        first = items[0][1]
        nested = isinstance(first, dict) and {"original_filename", "segment"} <= set(first)
        return nested and not self.image_key and not self.caption_key

    def _segments(self, file: Path, items: list[Item]) -> OwnRecords:
        from gradscope.data.segment_lists import segment_records

        records, notes = segment_records([item for _, item in items], self._root(file), str(file))
        said = ("captions from 'original_caption', images from 'original_filename', regions from 'segment'", *notes)
        empty = len(items) - len(records)
        return OwnRecords(records=tuple(records), key="original_caption", n_rows=len(items), n_empty=empty, notes=said)

    def _root(self, file: Path) -> Path:
        return Path(self.image_root).expanduser() if self.image_root else file.parent


def _records_and_notes(part: Callable[[], OwnRecords]) -> tuple[list[Record], list[str]]:
    found = part()
    return list(found.records), list(found.notes)


def _split_files(folder: Path) -> dict[str, Path]:
    """Split -> its file, in the order train, val, test. Raises ValueError where a split has two."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        split = usual_split(file.stem)
        if file.suffix.lower() not in RECORD_SUFFIXES or split not in SPLITS or not file.is_file():
            continue
        if split in found:
            raise ValueError(f"'{folder}' has two files for the split '{split}': {found[split].name} and {file.name}; keep one.")
        found[split] = file
    return {split: found[split] for split in SPLITS if split in found}


def _holds(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
    if names is None:
        return "does not exist either"
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"holds {', '.join(names[:_SHOWN]) or 'nothing'}{more}"


def _other_file(folder: Path) -> str:
    file = next((p for p in sorted(folder.iterdir()) if p.suffix.lower() in RECORD_SUFFIXES and p.is_file()), None)
    return f"to read '{file.name}', give its path: '{file}'; " if file else ""
