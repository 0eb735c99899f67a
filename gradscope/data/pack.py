"""Any data set -> tar files that WebDataset reads, with their index and a manifest.

    OUTPUT/train-000000.tar             KEY.jpg (the picture, its bytes unchanged), KEY.json, KEY.txt; stored crops of segments too
    OUTPUT/train-000000.index.jsonl     where everything lies in it (see ``shard_index``)
    OUTPUT/shards.json                  splits, records, bytes and sha256 of every shard; written last: without it, it is not finished

KEY is the id with everything but letters, digits, "_" and "-" written as %XX, because WebDataset ends a key at the first dot; the id
itself stands in the .json ({"id", "captions", "segments", "aux"}), the first caption alone in the .txt. Records keep their order. The
same data give the same bytes: no times, no users. A shard gets its name when all of it is on the disk, and its index, made by
reading it back, marks it as finished; a command that was stopped goes on behind the last finished one.

With ``side`` pictures whose shorter side is longer are resized to it and saved as JPEG (quality 95, full colour), boxes with them.

How it can mislead: a resized picture is another picture: recall changes a little, and its file no longer matches the original's in a
check for overlap.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rich.filesize import decimal

from gradscope import __version__
from gradscope.data.members import content_size, is_there
from gradscope.data.pack_members import key_of, members_of
from gradscope.data.shard_index import ShardIndex, beside, load, save, scan
from gradscope.data.shard_names import MANIFEST, MANIFEST_FORMAT, PLAN, find_shards
from gradscope.data.source import DataSource
from gradscope.data.usable import usable
from gradscope.types import Record

_LOCK = ".pack.lock"
_TEXT_BYTES = 4096  # about what a record takes beside its picture: two texts, three headers, padding


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large a shard becomes: ``records`` of them, or where that is 0, as many as fit into ``bytes``. ``side``: see the module."""

    bytes: int = 10**9
    records: int = 0
    side: int = 0


@dataclass(frozen=True, kw_only=True)
class Packer:
    """How to pack, and who is told.

    Args:
        workers: threads that read (and resize) pictures.
        allow_missing: leave records without a picture out, counted.
        advance: told (records done, records in all).
    """

    sizes: Sizes = field(default_factory=Sizes)
    workers: int = 2
    allow_missing: bool = False
    say: Callable[[str], None] = print
    advance: Callable[[int, int], None] = field(default=lambda done, total: None)

    def __call__(self, source: DataSource, splits: Sequence[str], output: Path) -> Mapping[str, Any]:
        """The manifest of the finished pack.

        Raises:
            ValueError: no such split, pictures that are missing, an output that is taken, or no room on the disk.
        """
        try:
            read = {split: self._records(source, split) for split in splits}
        except ValueError as error:
            raise ValueError(f"{error}{'; --split packs the others alone' if len(set(splits)) > 1 else ''}") from error
        plan = {"source": source.name, "version": __version__, "sizes": asdict(self.sizes), "splits": _fingerprints(source, read)}
        with _alone(output):
            if (output / MANIFEST).is_file():
                return self._complete(output, plan)
            _claim(output, plan)
            self._refuse_full_disk(output, [record for records, _ in read.values() for record in records])
            with _full_disk_in_words(output):
                return _finish(output, source, self._splits(output, read), plan)

    def _complete(self, output: Path, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """The manifest of a finished pack of the same data and settings; of another nothing is touched."""
        manifest = find_shards(str(output)).manifest
        if manifest.get("plan") != _digest(plan):
            raise ValueError(
                f"'{output}' holds a finished pack of other data or settings ({MANIFEST}); choose another --output, or delete it first"
            )
        self.say(f"{output} is complete, nothing to do")
        return manifest

    def _splits(self, output: Path, read: Mapping[str, tuple[list[Record], list[str]]]) -> dict[str, dict[str, Any]]:
        done, total = 0, sum(len(records) for records, _ in read.values())
        facts = {}
        for split, (records, notes) in read.items():
            facts[split] = self._split(output, key_of(split), records, notes, done, total)
            done += len(records)
        return facts

    def _records(self, source: DataSource, split: str) -> tuple[list[Record], list[str]]:
        if "+" in split:
            raise ValueError(f"'{split}' joins splits; pack each by itself (--split a --split b), and join them when reading")
        found = source.read(split)
        kept = usable(found.records, allow_missing=self.allow_missing, on_bad_image="error", workers=0)
        return list(kept.records), [*found.notes, *kept.notes]

    def _refuse_full_disk(self, output: Path, records: Sequence[Record]) -> None:
        here = sum(path.stat().st_size for path in output.iterdir() if path.suffix == ".tar")
        needed = sum(content_size(str(record.image)) + _TEXT_BYTES for record in records)
        missing = max(0, needed - here)
        free = shutil.disk_usage(output).free
        before = f" ({decimal(here)} there already)" if here else ""
        size = "about " + decimal(needed) + (" before they are resized" if self.sizes.side else "") + before
        self.say(f"packing {len(records):,} records, {size}, into {output} ({decimal(free)} free)")
        if missing > free:
            raise ValueError(
                f"'{output}' has {decimal(free)} free and about {decimal(missing)} {'more ' if here else ''}are needed; make room, or "
                "choose another --output"
            )

    def _split(
        self, output: Path, name: str, records: Sequence[Record], notes: Sequence[str], before: int, total: int
    ) -> dict[str, Any]:
        shards = _finished(output, name, records)
        start = sum(shard["records"] for shard in shards)
        if start:
            self.say(f"{name}: {len(shards):,} finished shards with {start:,} records are kept")
        self.advance(before + start, total)
        prepared = self._prepared(records[start:])
        waiting = next(prepared, None)
        while waiting is not None:
            tar = output / f"{name}-{len(shards):06}.tar"
            with _new_shard(tar) as (sink, digest):
                count = 0
                while waiting is not None and (count == 0 or not self._full(count, sink.offset + _room(*waiting))):
                    _add(sink, *waiting)
                    count, start = count + 1, start + 1
                    self.advance(before + start, total)
                    waiting = next(prepared, None)
            shards.append(_indexed(tar, count, digest.hexdigest()))
        return {
            "records": len(records),
            "captions": sum(len(record.captions) for record in records),
            "bytes": sum(shard["bytes"] for shard in shards),
            "notes": [f"{note} (when packed)" for note in (*notes, *_lost_crops(records), *self._large(shards))],
            "shards": shards,
        }

    def _large(self, shards: Sequence[Mapping[str, Any]]) -> list[str]:
        large = [] if self.sizes.records else [shard for shard in shards if shard["bytes"] > self.sizes.bytes]
        alone = (
            f"{len(large):,} of {len(shards):,} shards are larger than {decimal(self.sizes.bytes)}, because one record alone needs more"
        )
        return [alone] if large else []

    def _full(self, count: int, size: int) -> bool:
        """Would a tar of ``size`` bytes before its end mark be too large?"""
        whole = -(-(size + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
        return count >= self.sizes.records if self.sizes.records else whole > self.sizes.bytes

    def _prepared(self, records: Sequence[Record]) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(key, ending -> bytes) of each record in order, a few of them read ahead."""
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            ahead: deque[Any] = deque()
            try:
                for record in records:
                    ahead.append(pool.submit(members_of, record, self.sizes.side))
                    if len(ahead) > 2 * self.workers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _lost_crops(records: Sequence[Record]) -> list[str]:
    """Of all records, so that a pack that was stopped says what one that was not says."""
    lost = sum(part.image is not None and not is_there(part.image) for record in records for part in record.segments)
    return [f"{lost:,} stored crops of segments are not on disk and were left out"] if lost else []


@contextmanager
def _full_disk_in_words(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"the disk of '{output}' is full ({error.strerror}); finished shards are kept: make room and give the same command again"
        ) from error


def bytes_of(amount: str) -> int:
    """ "1GB", "500 MB", "1.5GiB" or a plain number of bytes. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", amount.lower())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--shard-size is a number of bytes such as 500MB, 1GB or 1GiB; got '{amount}'")
    return round(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        return self._file.write(block)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _new_shard(tar: Path) -> Iterator[tuple[tarfile.TarFile, Any]]:
    """Under its name only when all of it is on the disk."""
    partial = tar.with_name(f".{tar.name}.partial")
    with partial.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w", format=tarfile.PAX_FORMAT) as sink:  # type: ignore[call-overload]
            yield sink, hashed.digest
        file.flush()
        os.fsync(file.fileno())
    partial.replace(tar)


def _add(sink: tarfile.TarFile, key: str, members: Mapping[str, bytes]) -> None:
    for ending in sorted(members):
        sink.addfile(_entry(key, ending, members[ending]), io.BytesIO(members[ending]))
        sink.members = []  # type: ignore[attr-defined]  # it keeps all it has written


def _entry(key: str, ending: str, held: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(f"{key}.{ending}")
    entry.size, entry.mode = len(held), 0o644
    return entry


def _room(key: str, members: Mapping[str, bytes]) -> int:
    """Bytes of a record in a tar: headers, and contents in whole blocks."""
    return sum(
        len(_entry(key, ending, held).tobuf(tarfile.PAX_FORMAT)) - (-len(held) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        for ending, held in members.items()
    )


def _indexed(tar: Path, count: int, sha256: str) -> dict[str, Any]:
    """Reads the shard back and keeps what is in it. Raises OSError if it is not what was written."""
    index = replace(scan(tar), sha256=sha256, changed=0)
    if len(index.runs) != count or index.skipped:
        raise OSError(f"{tar} was not written as it should be: {len(index.runs)} of {count} records, {dict(index.skipped)}")
    save(beside(tar), index)
    return _facts(tar, index)


def _facts(tar: Path, index: ShardIndex) -> dict[str, Any]:
    return {"name": tar.name, "records": len(index.runs), "bytes": index.size, "sha256": index.sha256}


def _finished(output: Path, name: str, records: Sequence[Record]) -> list[dict[str, Any]]:
    """The shards of an earlier try that hold the first records, in order."""
    shards: list[dict[str, Any]] = []
    start = 0
    while (tar := output / f"{name}-{len(shards):06}.tar").is_file():
        index = load(beside(tar), tar)
        if index is None or [run.key for run in index.runs] != [key_of(r.id) for r in records[start : start + len(index.runs)]]:
            break
        start += len(index.runs)
        shards.append(_facts(tar, index))
    return shards


def _fingerprints(source: DataSource, read: Mapping[str, tuple[list[Record], list[str]]]) -> dict[str, str]:
    """sha256 of what is packed, by split."""
    digests = {}
    for split, (records, _) in read.items():
        digest = hashlib.sha256()
        for record in records:
            row = [record.id, os.path.relpath(str(record.image), source.folder), record.captions, list(map(asdict, record.segments))]
            digest.update(json.dumps(row, default=str).encode())
        digests[split] = digest.hexdigest()
    return digests


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    if output.exists() and not output.is_dir():
        raise ValueError(f"--output '{output}' is a file; name a folder that does not exist yet")
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is packing into '{output}'; wait for it, or choose another --output") from None
    try:
        yield
    finally:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _claim(output: Path, plan: Mapping[str, Any]) -> None:
    """A new folder, or one that an unfinished pack of the same left."""
    kept = output / PLAN
    if not kept.is_file():
        if any(path.name != _LOCK for path in output.iterdir()):
            raise ValueError(f"'{output}' is not empty and no unfinished pack; choose another --output")
        kept.write_text(json.dumps(plan), encoding="utf-8")
    elif kept.read_text(encoding="utf-8") != json.dumps(plan):
        raise ValueError(f"'{output}' holds an unfinished pack of other data or settings; choose another --output, or delete it first")
    for left in output.glob(".*.partial"):
        left.unlink()


def _digest(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _finish(output: Path, source: DataSource, facts: Mapping[str, dict[str, Any]], plan: Mapping[str, Any]) -> Mapping[str, Any]:
    default = source.default_split if set(source.default_split.split("+")) <= set(facts) else ""
    manifest = {
        "format": MANIFEST_FORMAT,
        "made_by": f"gradscope {__version__}",
        "source": source.name,
        "plan": _digest(plan),
        "default_split": default or ("test" if "test" in facts else next(iter(facts))),
        "splits": facts,
    }
    partial = output / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    partial.replace(output / MANIFEST)
    (output / PLAN).unlink()
    return manifest
