"""What is in a picture's file, as a digest of all its bytes that is taken once and remembered until the file changes.

Remembered by path, device and file number, size and both times of change. The second one (ctime) cannot be set by a program, so that a
file which is replaced by one of the same size and date (cp -p, tar, rsync) is noticed. A file that was changed in the last seconds is
not remembered, since within one tick of the file system's clock it could change again unseen. Nor is anything where the second
time is that of creation (Windows): there the bytes are read each time.

How it can mislead: a file is looked at when this is asked, not later; and a file system that keeps no ctime (some network shares) is
only as good as its size and date.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from gradscope.data.identity import ABSENT, WIDTH, file_digest
from gradscope.data.members import member
from gradscope.paths import cache_folder

#: Seconds after a change during which a file is not remembered; the clocks of file systems tick at up to two.
FRESH = 5.0
_ROW = 2 * WIDTH
_THREADS = 4


def content_digests(paths: Sequence[str], advance: Callable[[int, int], None] | None = None) -> dict[str, bytes]:
    """path -> 16 bytes, equal for equal contents; zeros where there is no file. Files that are not remembered are read whole.

    Args:
        advance: told (done, total) while files are read.
    """
    known = _remembered()
    stamps = {path: stamp(path) for path in paths}
    found = {path: known[mark] for path, mark in stamps.items() if mark in known}
    unknown = [path for path in stamps if path not in found]
    fresh: dict[bytes, bytes] = {}
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for done, (path, digest) in enumerate(zip(unknown, pool.map(_whole, unknown), strict=True), start=1):
                found[path] = digest
                if digest != ABSENT and _settled(path) and stamp(path) == stamps[path]:
                    fresh[stamps[path]] = digest
                if advance:
                    advance(done, len(unknown))
    finally:  # also after Ctrl-C: the next run goes on from here
        if fresh:
            _remember(fresh)
    return found


def stamp(path: str) -> bytes:
    """16 bytes that change with the file: its place, its size and its times. Of a member of a tar file, those of the tar."""
    try:
        facts = _file(path).stat()
        words = f"{Path(path).absolute()}\0{facts.st_dev}\0{facts.st_ino}\0{facts.st_size}\0{facts.st_mtime_ns}\0{facts.st_ctime_ns}"
    except (OSError, ValueError) as error:
        words = f"unreadable\0{path}\0{error}"
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=WIDTH).digest()


def _whole(path: str) -> bytes:
    return file_digest(path, "whole")


def _file(path: str) -> Path:
    found = member(path)
    return Path(path if found is None else found.shard)


def _settled(path: str) -> bool:
    try:
        facts = _file(path).stat()
    except OSError:
        return False
    return os.name == "posix" and abs(time.time() - max(facts.st_mtime, facts.st_ctime)) > FRESH


# ---- what was read before: stamp and digest, 32 bytes a file, one after the other


def _memory() -> Path:
    return cache_folder() / "content_digests.bin"


def _remembered() -> dict[bytes, bytes]:
    """Nothing where there is no file, or none that can be read: the pictures are then read again."""
    try:
        stored = _memory().read_bytes()
    except OSError:
        return {}
    return {stored[i : i + WIDTH]: stored[i + WIDTH : i + _ROW] for i in range(0, len(stored) - _ROW + 1, _ROW)}


def _remember(fresh: dict[bytes, bytes]) -> None:
    """Adds to the file, whole or not at all. A cache folder that cannot be written costs the next run its time, nothing else."""
    path = _memory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            partial = path.with_suffix(".new")
            partial.write_bytes(b"".join(mark + digest for mark, digest in (_remembered() | fresh).items()))
            partial.replace(path)
    except OSError:
        return
