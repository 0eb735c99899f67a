"""Which records of a split can be used, decided before anything is computed.

    missing   a picture's path leads nowhere: the run stops with the list, or --allow-missing leaves the record out
    bad       a picture that cannot be decoded: "error" decodes nothing ahead, and the first bad one ends the run with its name;
              "skip" decodes every picture once, leaves the bad ones out by name, and refuses if they are too many

A record is left out here, before batches are formed. So a bad picture never becomes a black one, never shifts a pair and never
changes the number of candidates in a softmax.

Pictures that were decoded once are remembered in the cache folder by path, size, time of change and version of Pillow. How it can
mislead: a file that is changed without a change of those is not looked at again; and recall over what is left is recall over a
smaller gallery, which is why ``expected`` and the notes belong beside the number.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import PIL
from filelock import FileLock

from gradscope.data.images import load_rgb, missing_pictures, names, refuse_missing
from gradscope.data.members import stamp
from gradscope.paths import cache_folder
from gradscope.types import Record

ON_BAD_IMAGE = ("error", "skip")
_KEY = 16  # bytes of a remembered picture's key


@dataclass(frozen=True, kw_only=True)
class Usable:
    """Records after the policies.

    ``expected`` counts the records before them; ``missing`` holds the ids of those left out for want of a picture, ``bad`` the
    path and the reason of each picture that could not be decoded; ``notes`` say both in words (the first ten and fifty by name).
    """

    records: tuple[Record, ...]
    expected: int
    missing: tuple[str, ...] = ()
    bad: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def usable(
    records: Sequence[Record],
    *,
    allow_missing: bool,
    on_bad_image: str,
    workers: int,
    limit: float = 0.05,
    advance: Callable[[int, int], None] | None = None,
) -> Usable:
    """The records whose pictures are there, and with "skip" can be decoded.

    Args:
        allow_missing: leave records without a picture out, counted.
        on_bad_image: "error" or "skip".
        workers: processes that decode; 0 decodes in this one.
        limit: the largest share of bad pictures that is left out; one alone always may be.
        advance: called with pictures done and all that are to be decoded.

    Raises:
        ValueError: missing pictures that are not allowed, too many bad ones, or no record left.
    """
    if on_bad_image not in ON_BAD_IMAGE:
        raise ValueError(f"--on-bad-image is error or skip; got '{on_bad_image}'")
    if not allow_missing:
        refuse_missing(records)
    absent = missing_pictures(records) if allow_missing else []
    gone = {record.id for record in absent}
    kept = [record for record in records if record.id not in gone]
    notes = [f"{len(absent)} of {len(records)} records left out, their pictures do not exist: {names(absent)}"] if absent else []
    bad: dict[str, str] = {}
    if on_bad_image == "skip":
        bad = bad_pictures([str(record.image) for record in kept], workers=workers, advance=advance)
        if bad:
            _refuse_many(bad, len(kept), limit)
            notes.append(f"{len(bad)} of {len(records)} records left out, their pictures cannot be decoded: {_told(bad, 50)}")
        kept = [record for record in kept if record.image not in bad]
    if not kept:
        raise ValueError(f"none of {len(records)} records has a usable picture: {'; '.join(notes)}")
    return Usable(
        records=tuple(kept),
        expected=len(records),
        missing=tuple(record.id for record in absent),
        bad=tuple(bad.items()),
        notes=tuple(notes),
    )


def bad_pictures(paths: Sequence[str], *, workers: int = 0, advance: Callable[[int, int], None] | None = None) -> dict[str, str]:
    """Decodes all pictures that are not known to be good -> {path: reason} of those that cannot be, in order."""
    known = _remembered()
    keys = {path: _key(path) for path in paths}
    fresh = [path for path, key in keys.items() if key not in known]
    bad: dict[str, str] = {}
    good: set[bytes] = set()
    try:
        for done, (path, reason) in enumerate(zip(fresh, _reasons(fresh, workers), strict=True), start=1):
            if reason is None:
                good.add(keys[path])
            else:
                bad[path] = reason
            if advance:
                advance(done, len(fresh))
    finally:  # also after Ctrl-C: the next run goes on from here
        if good:
            _remember(good)
    return bad


def _reasons(paths: Sequence[str], workers: int) -> Iterator[str | None]:
    if workers == 0 or len(paths) < 2:
        yield from map(_why_bad, paths)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(_why_bad, paths, chunksize=16)
    except BrokenProcessPool as error:
        raise ValueError("a process that decoded pictures was killed, perhaps for want of memory; give fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _why_bad(path: str) -> str | None:
    try:
        load_rgb(path)
    except ValueError as error:
        # The path stands in front already where the reason is shown.
        return str(error).removeprefix(f"image '{path}' ").removeprefix("cannot be decoded: ")
    return None


def _refuse_many(bad: dict[str, str], count: int, limit: float) -> None:
    if len(bad) > max(1, limit * count):
        raise ValueError(
            f"{len(bad)} of {count} pictures cannot be decoded, more than the {limit:.0%} that --on-bad-image skip leaves out: "
            f"{_told(bad, 10)}; repair them or take their records out"
        )


def _told(bad: dict[str, str], most: int) -> str:
    shown = [f"{path} ({reason})" for path, reason in list(bad.items())[:most]]
    return "; ".join(shown) + (f"; and {len(bad) - most} more" if len(bad) > most else "")


# ---- the pictures that were good before: keys of 16 bytes, one after the other


def _memory() -> Path:
    return cache_folder() / "decoded_pictures.bin"


@functools.cache
def _versions() -> str:
    return f"1/{PIL.__version__}"


def _key(path: str) -> bytes:
    try:
        identity = f"{_versions()}\0{stamp(path)}"
    except OSError as error:  # decoding it will say why
        identity = f"unreadable\0{path}\0{error}"
    return hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=_KEY).digest()


def _remembered() -> set[bytes]:
    """Nothing where there is no file, or none that can be read: the pictures are then decoded again."""
    try:
        stored = _memory().read_bytes()
    except OSError:
        return set()
    return {stored[i : i + _KEY] for i in range(0, len(stored) - _KEY + 1, _KEY)}


def _remember(good: set[bytes]) -> None:
    """Adds to the file, whole or not at all. A cache folder that cannot be written costs the next run its time, nothing else."""
    path = _memory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(b"".join(sorted(_remembered() | good)))
            fresh.replace(path)
    except OSError:
        return
