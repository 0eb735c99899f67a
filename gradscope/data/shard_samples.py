"""Samples of tar files -> records, one shard after the other, every departure counted.

    picture     the member with the ending of a picture (.jpg, .png, ...), or --image-key; two of them are ambiguous
    captions    .json with {"id", "captions": [...]}, as ``gradscope data pack`` writes it, with segments and aux; else .txt (line
                breaks read as spaces), .text, .caption; else a usual key of the .json. --caption-key names an ending or a key
    id          that of the .json of our form, else the key; with the name of its shard in front where two shards share it

A key that stands in two places of a shard: its first run with a picture and a caption is taken and the rest counted; runs that are
whole only together are joined and counted (WebDataset itself reads them as two broken samples); anything else is ambiguous and left
out. Every sample left out is counted by reason, the first ones by name.

How it can mislead: which ending holds the caption is a guess, shown in the notes. A sample left out makes the gallery smaller.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.data.columns import CAPTION_KEYS, folded
from gradscope.data.members import Member
from gradscope.data.picture_pairs import PICTURES
from gradscope.data.shard_index import Piece, Run, ShardIndex
from gradscope.types import Record, Segment

PICTURE_ENDINGS = (*(suffix.removeprefix(".") for suffix in PICTURES), "avif", "jp2", "ppm", "pgm", "pbm", "pnm", "ico")
_TEXTS = ("txt", "text", "caption")
_NAMED = 3
_EMPTY = "empty captions"
_OURS = "the .json of this tool"
_DOTTED = "no picture, because its name has a dot before its ending, and a key ends at the first dot"
_RENAME = "write the tar files anew with no dot in a name but the one before its ending, as `gradscope data pack` does from the files"


class _LeftOut(Exception):
    """Why a sample gives no record."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """The chosen members of one key of one shard."""

    key: str
    tar: str
    pieces: tuple[Piece, ...]


class Reading:
    """Samples -> records, and counts of everything on the way."""

    def __init__(self, *, image_key: str, caption_key: str, encoding: str) -> None:
        self._image_key, self._caption_key, self._encoding = image_key, caption_key, encoding
        self.samples = 0
        self._left_out: dict[str, list[str]] = {}
        self._joined: list[str] = []
        self._repeated: list[str] = []
        self._sources: Counter[str] = Counter()
        self._found: list[tuple[Record, str]] = []
        self._shards, self._empty = 0, list[str]()
        self._skipped: Counter[str] = Counter()
        self._endings: Counter[str] = Counter()

    def add(self, tar: Path, index: ShardIndex) -> None:
        """One shard at a time: its texts are not kept twice."""
        self._shards += 1
        self._skipped.update(index.skipped)
        if not index.runs:
            self._empty.append(tar.name)
        for sample in self._chosen(str(tar), index.runs):
            try:
                self._found.append((self._record(sample), sample.tar))
            except _LeftOut as reason:
                self._left_out.setdefault(str(reason), []).append(sample.key)
        if not self._found:  # of use only where there is nothing
            self._endings.update(piece.ending.lower() for run in index.runs for piece in run.pieces)

    @property
    def empty(self) -> int:
        """Samples left out because all their captions are empty."""
        return len(self._left_out.get(_EMPTY, []))

    def records(self) -> list[Record]:
        return _named_apart(self._found)

    def why_nothing(self) -> str:
        """Where no sample gives a record: reasons, the endings there are, and what to do."""
        if not self.samples:
            skipped = "".join(f"; not read: {count:,} {what}" for what, count in self._skipped.items())
            return f"there is no sample in {'the shard' if self._shards == 1 else f'{self._shards:,} shards'}{skipped}"
        listed = ", ".join(f".{ending} ({count:,})" for ending, count in self._endings.most_common(8))
        reasons = "; ".join(f"{len(keys):,} {why}" for why, keys in self._left_out.items())
        advice = _RENAME if set(self._left_out) == {_DOTTED} else "name endings with --image-key and --caption-key"
        return f"{reasons}; members end in {listed}; {advice}"

    def notes(self) -> list[str]:
        """What was done, in words."""
        sources = ", ".join(f"{source} ({count:,})" for source, count in self._sources.most_common())
        lines = [f"{len(self._empty):,} of {self._shards:,} shards hold no samples ({_first(self._empty)})"] if self._empty else []
        lines += [f"not read, or doubtful: {count:,} {what}" for what, count in self._skipped.items()]
        lines += [] if set(self._sources) == {_OURS} else [f"captions from {sources}"]
        lines += self._doubled()
        lines += [f"{len(keys):,} of {self.samples:,} samples left out: {why} ({_first(keys)})" for why, keys in self._left_out.items()]
        return lines

    def _doubled(self) -> list[str]:
        lines = {
            f"{len(self._joined):,} samples whose members do not lie together are read here; WebDataset itself reads each as two "
            f"broken ones ({_first(self._joined)})": self._joined,
            f"{len(self._repeated):,} keys stand in a shard twice; the first sample is read ({_first(self._repeated)})": self._repeated,
        }
        return [line for line, there in lines.items() if there]

    def _chosen(self, tar: str, runs: Sequence[Run]) -> Iterator[_Sample]:
        """One sample for each key, in order of first appearance."""
        by_key: dict[str, list[Run]] = {}
        for run in runs:
            by_key.setdefault(run.key, []).append(run)
        self.samples += len(by_key)
        for key, group in by_key.items():
            try:
                yield _Sample(key=key, tar=tar, pieces=self._pieces(key, group))
            except _LeftOut as reason:
                self._left_out.setdefault(str(reason), []).append(key)

    def _pieces(self, key: str, runs: Sequence[Run]) -> tuple[Piece, ...]:
        whole = next((run for run in runs if not _repeats(run.pieces) and self._is_whole(run.pieces)), None)
        if whole is not None:
            if len(runs) > 1:
                self._repeated.append(key)
            return whole.pieces
        together = tuple(piece for run in runs for piece in run.pieces)
        if _repeats(together):
            raise _LeftOut("two members of one name")
        if len(runs) > 1 and self._is_whole(together):
            self._joined.append(key)
        return together

    def _is_whole(self, pieces: Sequence[Piece]) -> bool:
        return bool(self._pictures(pieces)) and bool(self._caption_pieces(pieces))

    def _pictures(self, pieces: Sequence[Piece]) -> list[Piece]:
        wanted = (self._image_key,) if self._image_key else PICTURE_ENDINGS
        return [piece for piece in pieces if piece.ending.lower() in wanted]

    def _caption_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those that may hold the caption, the likeliest first."""
        by_ending = {piece.ending.lower(): piece for piece in pieces if piece.text is not None}
        named = by_ending.get(self._caption_key.lower().lstrip("."))
        if named is not None:
            return [named]
        usual = () if self._caption_key else _TEXTS
        return [by_ending[ending] for ending in (*usual, "json") if ending in by_ending]

    def _record(self, sample: _Sample) -> Record:
        pictures = self._pictures(sample.pieces)
        if not pictures:
            raise _LeftOut(_no_picture(sample.pieces, self._image_key))
        if len(pictures) > 1:
            raise _LeftOut(f"several pictures ({', '.join(p.ending for p in pictures)}: --image-key)")
        image = _place(sample, pictures[0])
        ours = self._ours(sample, image)
        if ours is not None:
            self._sources[_OURS] += 1
            return ours
        source, captions = self._captions(sample)
        _refuse_half_characters(captions)
        self._sources[source] += 1
        return Record(id=sample.key, image=image, captions=captions)

    def _ours(self, sample: _Sample, image: str) -> Record | None:
        """From a .json of the documented form; None where there is none."""
        piece = next((p for p in sample.pieces if p.ending.lower() == "json" and p.text is not None), None)
        if piece is None or self._caption_key:
            return None
        item = _parsed_if_valid(piece)
        if not isinstance(item, dict) or not isinstance(item.get("id"), str) or not _are_captions(item.get("captions")):
            return None
        by_ending = {p.ending: p for p in sample.pieces}
        try:
            segments = tuple(_segment(s, sample, by_ending) for s in item.get("segments", []))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _LeftOut('the "segments" of its .json are not {"caption", "box", "image"}') from None
        _refuse_half_characters([item["id"], *item["captions"], *(segment.caption for segment in segments)])
        aux = item.get("aux", {})
        return Record(
            id=item["id"], image=image, captions=tuple(item["captions"]), segments=segments, aux=aux if isinstance(aux, dict) else {}
        )

    def _captions(self, sample: _Sample) -> tuple[str, tuple[str, ...]]:
        """(where they were found, captions)."""
        pieces = self._caption_pieces(sample.pieces)
        if not pieces:
            raise _LeftOut("no caption")
        first = pieces[0]
        if first.ending.lower().rpartition(".")[2] != "json":
            text = " ".join(line for part in self._decoded(first).split("\n") if (line := part.strip()))
            return f".{first.ending.lower()}", _not_empty([text])
        key, value = self._json_captions(_parsed(first), first)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise _LeftOut(f"'{key}' in the .{first.ending} is no string")
        return f"'{key}' in .{first.ending.lower()}", _not_empty(listed)

    def _json_captions(self, item: object, piece: Piece) -> tuple[str, Any]:
        if self._caption_key.lower().lstrip(".") == piece.ending.lower() and not isinstance(item, dict):
            return "value", item  # the .json is the caption, or the list of them
        if not isinstance(item, dict):
            raise _LeftOut(f"the .{piece.ending} is no record")
        by_name = {folded(key): key for key in item}
        key_named = self._caption_key and self._caption_key.lower().lstrip(".") != piece.ending.lower()
        wanted = (folded(self._caption_key),) if key_named else CAPTION_KEYS
        key = next((by_name[name] for name in wanted if name in by_name), None)
        if key is None or item[key] is None:
            raise _LeftOut("no caption")
        return str(key), item[key]

    def _decoded(self, piece: Piece) -> str:
        content = (piece.text or "").encode("utf-8", "surrogateescape")
        try:
            return content.decode(self._encoding or "utf-8-sig")
        except LookupError as error:
            raise ValueError(f"unknown text encoding '{self._encoding}'; use a name Python knows, such as utf-8 or latin-1.") from error
        except UnicodeDecodeError:
            raise _LeftOut(f"the caption is not {self._encoding or 'UTF-8'} (--encoding)") from None


def _no_picture(pieces: Sequence[Piece], image_key: str) -> str:
    """A name with a dot in it is the usual reason."""
    dotted = [p.ending for p in pieces if "." in p.ending and p.ending.lower().rpartition(".")[2] in PICTURE_ENDINGS]
    if dotted and not image_key:
        return _DOTTED
    return f"no picture (.{image_key})" if image_key else "no picture"


def _repeats(pieces: Sequence[Piece]) -> bool:
    return len({piece.ending.lower() for piece in pieces}) < len(pieces)


def _place(sample: _Sample, piece: Piece) -> str:
    return Member(shard=sample.tar, offset=piece.offset, size=piece.size, name=f"{sample.key}.{piece.ending}").path()


def _segment(item: Mapping[str, Any], sample: _Sample, by_ending: Mapping[str, Piece]) -> Segment:
    box = item.get("box")
    crop = by_ending.get(item.get("image") or "")
    if not isinstance(item["caption"], str):
        raise TypeError("a caption is a string")
    return Segment(caption=item["caption"], box=_box(box), image=None if crop is None else _place(sample, crop))


def _box(value: Any) -> tuple[float, float, float, float] | None:
    if value is None:
        return None
    left, top, right, bottom = map(float, value)
    return left, top, right, bottom


def _parsed(piece: Piece) -> object:
    found = _parsed_if_valid(piece)
    if found is None:
        raise _LeftOut(f"the .{piece.ending} is not valid JSON")
    return found


def _parsed_if_valid(piece: Piece) -> object:
    try:
        return json.loads((piece.text or "").removeprefix("\ufeff"))
    except ValueError:
        return None


def _refuse_half_characters(texts: Sequence[str]) -> None:
    """Bytes of a .json that are no UTF-8, or half of a surrogate pair in it."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise _LeftOut("a text in the .json is not valid Unicode") from None


def _are_captions(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(c, str) and c.strip() for c in value)


def _not_empty(texts: Sequence[str]) -> tuple[str, ...]:
    kept = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not kept:
        raise _LeftOut(_EMPTY)
    return kept


def _named_apart(found: Sequence[tuple[Record, str]]) -> list[Record]:
    """Ids that several shards use get the name of the shard in front."""
    count = Counter(record.id for record, _ in found)
    label = _labels(list(dict.fromkeys(tar for record, tar in found if count[record.id] > 1)))
    return [record if count[record.id] == 1 else dataclasses.replace(record, id=f"{label[tar]}/{record.id}") for record, tar in found]


def _labels(tars: Sequence[str]) -> dict[str, str]:
    """As many of the last parts of their paths as tell them apart."""
    stems = {tar: Path(tar).with_suffix("").parts for tar in tars}
    for depth in range(1, max(map(len, stems.values()), default=0) + 1):
        labels = {tar: "/".join(parts[-depth:]) for tar, parts in stems.items()}
        if len(set(labels.values())) == len(tars):
            return labels
    return {tar: tar for tar in tars}


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
