"""Looks through the records of a split for what would change a result, and for what one should know before training on them.

    missing, unreadable     pictures that are not on disk, or that the decode path of training cannot read
    duplicates              one id, picture file, picture content or caption in two records: a correct answer is then called wrong
    empty captions          nothing to train on; a caption of white space is empty, and so is that of a part of a picture
    token lengths           start and end of text included, before truncation: what is longer than the context is cut

How it can mislead: a caption counts as a duplicate of another record's only if it is the same text after NFKC, case folding and
collapsing white space, and a picture only if its file is the same, byte by byte; near duplicates are not looked for. Parts of pictures
("segments") are decoded and their tokens counted, but they are not compared with each other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from gradscope.data.identity import ABSENT, ItemTable, as_bytes, normalised
from gradscope.data.images import other_case
from gradscope.data.members import is_there
from gradscope.data.picture_facts import PictureFacts, all_picture_facts
from gradscope.types import Record

#: Texts -> number of tokens of each, start and end included, before truncation.
Tokenize = Callable[[Sequence[str]], Sequence[int]]
Advance = Callable[[int, int], None]
#: Title -> a context that gives the function to be told (done, total); ``gradscope.console.progress`` is one.
Progress = Callable[[str], AbstractContextManager[Advance]]

QUANTILES = {"min": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99, "max": 1.0}
_TEXTS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Token lengths of captions. ``longer`` counts those above each context; ``longest`` names (record id, tokens), longest first."""

    captions: int
    quantiles: Mapping[str, int]
    longer: Mapping[int, int]
    longest: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Facts of the picture files of a split, stored crops of their parts included.

    ``sides`` has min, median and max of the shorter and the longer side, in pixels.
    """

    listed: int
    without: int  # records that name no picture
    missing: tuple[str, ...]
    other_case: Mapping[str, str]  # of the missing: path -> the file that differs in case only
    decoded: int
    unreadable: Mapping[str, str] = field(default_factory=dict)  # path -> reason
    modes: Mapping[str, int] = field(default_factory=dict)
    sides: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    rotated: int = 0
    animated: int = 0
    alpha: int = 0


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of record ids that share something, the largest first."""

    id: tuple[tuple[str, ...], ...]
    path: tuple[tuple[str, ...], ...]
    content: tuple[tuple[str, ...], ...]
    caption: tuple[tuple[str, ...], ...]  # word for word
    caption_normalised: tuple[tuple[str, ...], ...]

    def surplus(self) -> dict[str, int]:
        """Records by kind that are a copy of an earlier one."""
        return {kind: sum(len(group) - 1 for group in groups) for kind, groups in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Everything found in one split. ``pictures`` is None where only captions were looked at."""

    split: str
    records: int
    captions: int
    captions_per_record: Mapping[int, int]  # captions -> records with that many
    empty: tuple[str, ...]  # ids of records with an empty caption, or with none
    lengths: Lengths
    segment_lengths: Lengths | None  # of the captions of parts of pictures; None where there are no parts
    pictures: Pictures | None
    duplicates: Duplicates
    notes: tuple[str, ...] = ()

    def findings(self) -> list[str]:
        """One sentence for each thing that would change a result."""
        said = []
        if self.pictures is not None:
            if self.pictures.missing:
                said.append(_missing(self.pictures))
            if self.pictures.unreadable:
                said.append(f"unreadable pictures: {len(self.pictures.unreadable):,} of {self.pictures.listed:,}")
        if self.empty:
            said.append(f"records with an empty caption, or with none: {len(self.empty):,} of {self.records:,}")
        words = {"id": "id", "path": "picture file", "content": "picture content", "caption_normalised": "caption"}
        surplus = self.duplicates.surplus()
        said += [
            f"records that repeat the {word} of an earlier one: {surplus[kind]:,}" for kind, word in words.items() if surplus[kind]
        ]
        return said


def _missing(pictures: Pictures) -> str:
    if len(pictures.missing) == pictures.listed:
        return f"none of the {pictures.listed:,} pictures is on disk"
    said = f"pictures not on disk: {len(pictures.missing):,} of {pictures.listed:,}"
    return said + (f" (with a file that differs in case only: {len(pictures.other_case):,})" if pictures.other_case else "")


def check_records(
    records: Sequence[Record],
    *,
    split: str,
    table: ItemTable,
    tokenize: Tokenize,
    contexts: Sequence[int],
    pictures: bool = True,
    workers: int = 1,
    notes: Sequence[str] = (),
    progress: Progress,
) -> Checked:
    """Looks through the records of one split.

    Args:
        table: ``items(records)``; its content digests are what "the same picture" means.
        contexts: context lengths in tokens for which the share of longer captions is counted.
        pictures: False leaves the files alone.
    """
    per_record = Counter(len(record.captions) for record in records)
    texts = [(record.id, caption) for record in records for caption in record.captions]
    parts = [(record.id, segment.caption) for record in records for segment in record.segments]
    with progress(f"{split}: tokens") as advance:
        lengths = token_lengths(texts, tokenize, contexts, advance)
        segment_lengths = token_lengths(parts, tokenize, contexts, advance) if parts else None
    found = None
    if pictures:
        with progress(f"{split}: pictures") as advance:
            found = check_pictures(records, workers=workers, advance=advance)
    return Checked(
        split=split,
        records=len(records),
        captions=len(texts),
        captions_per_record=dict(sorted(per_record.items())),
        empty=tuple(r.id for r in records if not r.captions or not all(map(str.strip, _all_captions(r)))),
        lengths=lengths,
        segment_lengths=segment_lengths,
        pictures=found,
        duplicates=find_duplicates(records, table),
        notes=tuple(notes),
    )


def _all_captions(record: Record) -> list[str]:
    return [*record.captions, *(segment.caption for segment in record.segments)]


def token_lengths(
    texts: Sequence[tuple[str, str]], tokenize: Tokenize, contexts: Sequence[int], advance: Advance | None = None
) -> Lengths:
    """Lengths of (record id, caption). A quantile q is the shortest length that at least a share q of the captions does not exceed."""
    lengths: list[int] = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        lengths += tokenize([caption for _, caption in texts[start : start + _TEXTS_AT_ONCE]])
        if advance:
            advance(len(lengths), len(texts))
    tokens = np.array(lengths, np.int64)
    levels = list(QUANTILES.values())
    found = np.quantile(tokens, levels, method="inverted_cdf") if len(tokens) else np.zeros(len(levels))
    longest = sorted(((identity, n) for (identity, _), n in zip(texts, lengths, strict=True)), key=lambda pair: -pair[1])
    shortest_context = min(contexts, default=0)
    return Lengths(
        captions=len(texts),
        quantiles=dict(zip(QUANTILES, (int(q) for q in found), strict=True)),
        longer={context: int((tokens > context).sum()) for context in sorted(set(contexts))},
        longest=tuple(pair for pair in longest if pair[1] > shortest_context),
    )


def check_pictures(records: Sequence[Record], *, workers: int, advance: Advance | None = None) -> Pictures:
    """Looks for every file, stored crops included, and decodes each that is there, once."""
    listed = [image for record in records for image in (record.image, *(segment.image for segment in record.segments))]
    paths = list(dict.fromkeys(os.path.normpath(image) for image in listed if image is not None))
    on_disk = {path: is_there(path) for path in paths}
    there = [path for path in paths if on_disk[path]]
    missing = tuple(path for path in paths if not on_disk[path])
    facts = dict(zip(there, all_picture_facts(there, workers=workers, advance=advance), strict=True))
    good = [fact for fact in facts.values() if not fact.reason]
    return Pictures(
        listed=len(paths),
        without=sum(record.image is None for record in records),
        missing=missing,
        other_case={path: found for path in missing if (found := other_case(path)) is not None},
        decoded=len(good),
        unreadable={path: fact.reason for path, fact in facts.items() if fact.reason},
        modes=dict(Counter(fact.mode for fact in good).most_common()),
        sides=_sides(good),
        rotated=sum(fact.rotated for fact in good),
        animated=sum(fact.animated for fact in good),
        alpha=sum(fact.alpha for fact in good),
    )


def _sides(good: Sequence[PictureFacts]) -> dict[str, tuple[int, int, int]]:
    sides = {
        "shorter side": [min(fact.width, fact.height) for fact in good],
        "longer side": [max(fact.width, fact.height) for fact in good],
    }
    return {name: (min(v), int(np.median(v)), max(v)) for name, v in sides.items() if v}


def find_duplicates(records: Sequence[Record], table: ItemTable) -> Duplicates:
    """Groups of two and more records. Content is compared between different files only; captions between different records only."""
    ids = [record.id for record in records]
    paths = [None if record.image is None else os.path.normpath(record.image) for record in records]
    rows = dict(zip(reversed(paths), reversed(range(len(paths))), strict=True))  # path -> the first record that has it
    contents = [(d, ids[row]) for row, d in enumerate(as_bytes(table.digests)) if d != ABSENT and rows[paths[row]] == row]
    exact = [(text, record.id) for record in records for text in dict.fromkeys(record.captions) if text.strip()]
    loose = [(text, record.id) for record in records for text in dict.fromkeys(map(normalised, record.captions)) if text]
    return Duplicates(
        id=_groups((identity, identity) for identity in ids),
        path=_groups((path, identity) for path, identity in zip(paths, ids, strict=True) if path is not None),
        content=_groups(contents),
        caption=_groups(exact),
        caption_normalised=_groups(loose),
    )


def _groups(pairs: Iterable[tuple[object, str]]) -> tuple[tuple[str, ...], ...]:
    """(key, id) pairs -> the ids of each key that has two and more, the largest group first."""
    by_key: dict[object, list[str]] = {}
    for key, identity in pairs:
        by_key.setdefault(key, []).append(identity)
    return tuple(sorted((tuple(group) for group in by_key.values() if len(group) > 1), key=len, reverse=True))
