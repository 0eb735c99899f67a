"""What is in a tar file of samples, and where: one pass over its headers, kept so that it is made once.

A sample is a run of members with one key, as WebDataset defines it: the path up to the FIRST dot of the base name, so "d.x/a.b.jpg"
has the key "d.x/a" and the ending "b.jpg". Texts are kept with the index, so captions are known without touching the pictures.

    train-000000.index.jsonl    beside the tar, written by ``gradscope data pack``; else one of the same form in the cache folder
An index counts if the size of the tar, its first and last 64 KiB and, for one in the cache, its time of change are as they were.

What is not read is counted: links and devices, metadata (__name__), names without an ending, hidden files ("._a.jpg" of a Mac), and
what follows the end mark of tars joined with ``cat``. A tar that is cut short or has a damaged header is refused with the byte:
Python's own ``tarfile`` stops at such a header as if the file ended there, and everything after it would be missing without a word.

How it can mislead: headers have a checksum, contents have none; a damaged picture is found when it is decoded. A tar whose middle is
rewritten in place, with size and time of change put back, is not noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from gradscope.data.identity import file_digest
from gradscope.paths import cache_folder

FORMAT = "gradscope shard index 1"
ENDING = ".index.jsonl"
#: Members with these endings are kept as text, if they are no larger than this.
TEXTS = ("txt", "text", "caption", "captions", "json")
LARGEST_TEXT = 16 * 2**20

_BLOCK = tarfile.BLOCKSIZE
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One member of a sample. ``text``: bytes that are no UTF-8 are lone surrogates, so that another encoding can be tried."""

    ending: str  # as written; compared in lower case
    offset: int
    size: int
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Members with one key that follow one another."""

    key: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """Of one tar. ``skipped`` counts what was not read, by reason; ``sha256`` is known of tars that were written here."""

    size: int
    ends: str  # digest of the first and last 64 KiB
    runs: tuple[Run, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    sha256: str = ""
    changed: int = 0  # time of change, ns; 0 where it does not count


def key_and_ending(name: str) -> tuple[str, str] | None:
    """Of a member's name; None for one that belongs to no sample (hidden, or without an ending)."""
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return (folder + slash + stem, ending) if stem and dot and ending else None


def index_of(tar: Path) -> ShardIndex:
    """The index beside the tar or in the cache, if it fits; else a new one, which is kept in the cache.

    Raises:
        ValueError: not a plain tar, cut short or damaged (with the byte).
        OSError: the tar cannot be read.
    """
    found = load(beside(tar), tar)
    if found is not None:
        return found
    place = cache_folder() / "shard_indexes" / (hashlib.blake2b(str(tar.absolute()).encode(), digest_size=16).hexdigest() + ".jsonl")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            found = load(place, tar)
            if found is None:
                found = scan(tar)
                save(place, found)
            return found
    except OSError:  # a cache that cannot be written costs the next run its time, nothing else; a tar that cannot be read raises again
        return scan(tar)


def beside(tar: Path) -> Path:
    return tar.with_name(tar.name.removesuffix(".tar") + ENDING)


def scan(tar: Path) -> ShardIndex:
    """Reads every header and every text; raises as ``index_of``."""
    facts = tar.stat()
    skipped: Counter[str] = Counter()
    with tar.open("rb") as file:
        runs = tuple(_runs(_members(tar, file, skipped), file, skipped))
        _look_behind_the_end(file, skipped)
    return ShardIndex(
        size=facts.st_size, ends=file_digest(str(tar), "ends").hex(), runs=runs, skipped=dict(skipped), changed=facts.st_mtime_ns
    )


def _members(tar: Path, file: IO[bytes], skipped: Counter[str]) -> Iterator[tarfile.TarInfo]:
    """Every member; leaves ``file`` at the first byte that is none."""
    opened: tarfile.TarFile | None = None
    name = ""
    try:
        opened = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - closing it would close nothing, and reads to the end
        while (member := opened.next()) is not None:
            opened.members = []  # type: ignore[attr-defined]  # it keeps all it has seen
            name = member.name
            yield member
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        if opened is None:
            raise ValueError(_no_tar(tar)) from error
        raise ValueError(_cut(tar, opened.offset, name)) from error
    file.seek(opened.offset)
    block = file.read(_BLOCK)
    if len(block) == 0:
        skipped["shards without an end mark (their writer may have been stopped)"] += 1
    elif len(block) < _BLOCK:
        raise ValueError(_cut(tar, opened.offset, name))
    elif block.strip(b"\0"):
        raise ValueError(
            f"'{tar}' is damaged at byte {opened.offset:,}, after the member '{name}': no valid header; fetch or pack it again, or "
            "move it out of the data set"
        )


def _cut(tar: Path, where: int, name: str) -> str:
    return (
        f"'{tar}' is cut short: it has {tar.stat().st_size:,} bytes, and its member '{name}' ends at byte {where:,}; fetch or pack it "
        "again, or move it out of the data set"
    )


def _no_tar(tar: Path) -> str:
    with tar.open("rb") as file:
        start = file.read(8)
    kind = next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), "")
    if kind:
        return f"'{tar}' is compressed ({kind}), so pictures cannot be read by their place in it; decompress it to a plain .tar"
    if not start:
        return f"'{tar}' has 0 bytes: a transfer or a writer that did not finish; fetch or pack it again, or move it away"
    return f"'{tar}' is no tar file (it begins with {start!r}); fetch it again, or move it out of the data set"


def _runs(members: Iterator[tarfile.TarInfo], file: IO[bytes], skipped: Counter[str]) -> Iterator[Run]:
    key, pieces = "", list[Piece]()
    for member in members:
        found = _sample_member(member, skipped)
        if found is None:
            continue
        if found[0] != key and pieces:
            yield Run(key=key, pieces=tuple(pieces))
            pieces = []
        key = found[0]
        pieces.append(_piece(member, found[1], file))
    if pieces:
        yield Run(key=key, pieces=tuple(pieces))


def _sample_member(member: tarfile.TarInfo, skipped: Counter[str]) -> tuple[str, str] | None:
    """(key, ending), or None with the reason counted; folders need no word."""
    if member.isdir():
        return None
    if not member.isreg() or member.sparse is not None:
        skipped["members that are links, devices or sparse files"] += 1
        return None
    name = member.name.removeprefix("./")
    found = key_and_ending(name)
    if _META.match(name):
        skipped["members that are metadata (__name__)"] += 1
        return None
    if found is None:
        skipped["members whose names are hidden or have no ending"] += 1
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        skipped["members whose names are not UTF-8"] += 1
        return None
    return found


def _piece(member: tarfile.TarInfo, ending: str, file: IO[bytes]) -> Piece:
    text = None
    if ending.lower().rpartition(".")[2] in TEXTS and member.size <= LARGEST_TEXT:
        file.seek(member.offset_data)
        text = file.read(member.size).decode("utf-8", "surrogateescape")
    return Piece(ending=ending, offset=member.offset_data, size=member.size, text=text)


def _look_behind_the_end(file: IO[bytes], skipped: Counter[str]) -> None:
    behind = file.tell()
    while block := file.read(2**20):
        rest = block.lstrip(b"\0")
        if rest:
            start = behind + len(block) - len(rest)
            skipped["bytes behind an end mark (tars joined with cat?)"] += file.seek(0, os.SEEK_END) - start
        behind += len(block)


def save(path: Path, index: ShardIndex) -> None:
    """Whole or not at all."""
    head = {"format": FORMAT, "runs": len(index.runs), "skipped": index.skipped}
    head |= {"size": index.size, "ends": index.ends, "sha256": index.sha256, "changed": index.changed}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="ascii") as file:
        file.write(json.dumps(head) + "\n")
        for run in index.runs:
            file.write(json.dumps([run.key, [_plain(piece) for piece in run.pieces]]) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _plain(piece: Piece) -> list[Any]:
    return [piece.ending, piece.offset, piece.size, *([] if piece.text is None else [piece.text])]


def load(path: Path, tar: Path) -> ShardIndex | None:
    """None where there is no index, a damaged one, or that of another tar. Raises OSError: there is no such tar."""
    facts = tar.stat()
    try:
        with path.open(encoding="ascii") as file:
            head = json.loads(file.readline())
            if head["format"] != FORMAT or head["size"] != facts.st_size or head["changed"] not in (0, facts.st_mtime_ns):
                return None
            if head["ends"] != file_digest(str(tar), "ends").hex():
                return None
            runs = tuple(_run(json.loads(line)) for line in file)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    if len(runs) != head["runs"]:
        return None
    return ShardIndex(
        size=head["size"], ends=head["ends"], runs=runs, skipped=head["skipped"], sha256=head["sha256"], changed=head["changed"]
    )


def _run(line: list[Any]) -> Run:
    key, pieces = line
    return Run(key=key, pieces=tuple(Piece(ending=p[0], offset=p[1], size=p[2], text=p[3] if len(p) > 3 else None) for p in pieces))
