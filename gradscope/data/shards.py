"""Tar files of samples, as WebDataset writes them -> a data set whose records are all known before the first is used.

A record's picture is a place in a tar (see ``members``), so any order, any number of workers or ranks, uneven and empty shards and a
resume in mid-epoch are what they are for files, and an epoch has exactly as many records as were counted. What a sample is, and which
of its members are picture and captions: ``shard_samples``. Remote shards are fetched whole, when a split is read.

How it can mislead: the order of records is that of the shards' names. A tar that is packed anew has other places, so a run on it does
not count as the same data on resume.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from gradscope.data.own_records import OwnRecords
from gradscope.data.shard_fetch import Shard, ShardFetcher, copy_of
from gradscope.data.shard_index import ShardIndex, index_of
from gradscope.data.shard_names import ShardList, find_shards
from gradscope.data.shard_samples import Reading


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A name of tar files (see ``shard_names``), and what cannot be guessed.

    Args:
        image_key: ending of the pictures, such as "png"; "" takes the usual ones.
        caption_key: ending of the captions, such as "caption.txt", or a key in the .json; "" guesses.
        encoding: of the texts; "" is UTF-8 with or without byte-order mark.
    """

    path: str
    image_key: str = ""
    caption_key: str = ""
    encoding: str = ""

    @cached_property
    def found(self) -> ShardList:
        """Raises ValueError: no such shards, or splits that are not clear."""
        return find_shards(self.path)

    def parts(self) -> Mapping[str, Callable[[], OwnRecords]]:
        """Split -> what reads it; remote shards are fetched then, and no earlier."""
        return {split: partial(self._read, split, shards) for split, shards in self.found.splits.items()}

    def default_split(self) -> str:
        splits = list(self.found.splits)
        return splits[0] if len(splits) == 1 else str(self.found.manifest.get("default_split") or "test")

    def folder(self) -> Path:
        """What the shards' paths count from."""
        listed = [shard for shards in self.found.splits.values() for shard in shards]
        places = [copy_of(shard).parent if shard.remote else Path(shard.where).parent for shard in listed]
        return Path(os.path.commonpath([str(place.absolute()) for place in places])) if places else Path()

    def _read(self, split: str, shards: Sequence[Shard]) -> OwnRecords:
        notes = [*self.found.notes, *self.found.manifest.get("splits", {}).get(split, {}).get("notes", [])]
        reading = Reading(image_key=self.image_key.lower().lstrip("."), caption_key=self.caption_key, encoding=self.encoding)
        for tar, index in self._indexes(shards):
            reading.add(tar, index)
        records = reading.records()
        if not records:
            raise ValueError(f"no sample of '{self.path}' (split '{split}') has a picture and a caption: {reading.why_nothing()}")
        return OwnRecords(
            records=tuple(records),
            key="",
            n_rows=reading.samples,
            n_empty=reading.empty,
            notes=(*notes, *reading.notes()),
        )

    def _indexes(self, shards: Sequence[Shard]) -> Iterator[tuple[Path, ShardIndex]]:
        from gradscope.console import console, progress

        with progress("fetching shards (bytes)") as advance:
            places = ShardFetcher(say=lambda line: console.print(line, soft_wrap=True), advance=advance)(shards)
        with progress("looking into shards") as advance:
            for number, place in enumerate(places, start=1):
                yield place, index_of(place)
                advance(number, len(places))
