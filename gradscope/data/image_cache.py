"""Pictures that were decoded once: uint8 [3, H, W] each, resized and cropped, in one memory-mapped file per preprocessing.

    <cache folder>/images/<preprocessing>/levels.bin   the pictures, one after the other
                                          index.bin    of each the digest of its file's bytes, a checksum of its levels, and one
                                                       of these two
                                          what.json    the preprocessing in words
A picture is found by what its file holds, not by its name: a copy is found, a changed picture is not and is decoded again. The
preprocessing is all that decides the levels: size, filter, padding, decode, and the versions of what computes them. Normalisation
is applied on reading, so a picture from here equals the decoded one bit for bit, in every decode.

Each picture is written before its index row, so that a kill leaves only whole ones, and the next run goes on from there. One process
fills the file at a time; others wait, then find it filled. A picture whose checksum fails when it is read is decoded from its file
again, put right in place, and said; so are all, in a run that goes on while the folder is deleted. A cache that holds all pictures
may be read-only. Entries are never thrown away: delete the folder to win its room back.

How it can mislead: a file is compared with the cache when a run starts; one that changes later is used as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import gradscope
from gradscope.console import console, progress
from gradscope.data.content_digests import content_digests, stamp
from gradscope.data.identity import ABSENT, WIDTH
from gradscope.data.pixels import PixelPath, pixel_path
from gradscope.paths import cache_folder
from gradscope.types import Record

ROW = 24  # bytes of the index a picture: digest, checksum of the levels, checksum of those 20

#: Room on the disk that is left to others.
SPARE = 256 * 2**20
_AT_ONCE = 16

Say = Callable[[str], None]


def tell(line: str) -> None:
    """To the console, as one line."""
    console.print(line, soft_wrap=True)


@dataclass(kw_only=True)
class CachedPixels:
    """path -> float32 [3, H, W], the same as ``read`` gives. Can be sent to worker processes.

    Args:
        read: the way from file to picture that the cache stands for.
        file: its levels.
        slots: path -> number and checksum of its picture.
        damaged: pictures of this process that had to be decoded again.
    """

    read: PixelPath
    file: Path
    slots: Mapping[str, tuple[int, int]]
    damaged: int = 0
    _levels: NDArray[np.uint8] | None = field(default=None, repr=False)

    def __call__(self, path: str) -> Tensor:
        """Raises ValueError naming the file, where a damaged entry's file cannot be decoded."""
        return self.read.normalised(self.levels(path))

    def levels(self, path: str) -> Tensor:
        """uint8 [3, H, W]."""
        slot, checksum = self.slots[path]
        stored = self._stored(slot)
        if stored is None or zlib.crc32(stored.data) != checksum:
            return self._mended(path, slot, checksum)
        return torch.from_numpy(stored).view(3, *self.read.size)

    def _stored(self, slot: int) -> NDArray[np.uint8] | None:
        """None where the file has gone since the start."""
        if self._levels is None:
            shape = max(slot for slot, _ in self.slots.values()) + 1, _bytes(self.read)
            try:
                # "c": pages are shared until written to, and nothing writes; torch would warn of a read-only array.
                self._levels = np.memmap(self.file, np.uint8, "c", shape=shape)
            except (OSError, ValueError):  # no file, or a shorter one
                return None
        row: NDArray[np.uint8] = self._levels[slot]
        return row

    def _mended(self, path: str, slot: int, checksum: int) -> Tensor:
        levels = self.read.levels(path).contiguous()
        data = levels.numpy().tobytes()
        if zlib.crc32(data) == checksum:  # else its file has changed since the start
            _write_at(self.file, slot * _bytes(self.read), data)
        self.damaged += 1
        if self.damaged & (self.damaged - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            words = f"image cache: {self.damaged} damaged or gone, decoded again, the last for '{path}'"
            console.print(words, style="yellow", soft_wrap=True, markup=False)
        return levels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_levels": None}  # each process maps the file itself


def picture_reader(
    records: Sequence[Record], preprocess: Mapping[str, Any], *, decode: str, cache: str, workers: int = 0, say: Say = tell
) -> Callable[[str], Tensor]:
    """path -> picture for all of ``records``: through the cache, filled first, where ``cache`` is "images"; else decoded each time.

    Raises:
        ValueError: as ``pixel_path`` and ``cached_pixels`` do.
    """
    read = pixel_path(preprocess, decode)
    if cache != "images":
        return read
    return cached_pixels([record.image for record in records if record.image is not None], read, workers=workers, say=say)


def cached_pixels(paths: Sequence[str], read: PixelPath, *, workers: int = 0, say: Say = tell) -> CachedPixels:
    """The cache of ``read``, after every picture of ``paths`` has been put into it.

    Args:
        workers: processes that decode; 0 decodes in this one.
        say: told how large it is before it is filled.

    Raises:
        ValueError: no room or no right to write, or a picture that cannot be decoded or changes meanwhile.
    """
    folder = cache_folder() / "images" / _name(read)
    before = {path: stamp(path) for path in paths}
    with progress("reading pictures' files") as advance:
        digests = content_digests(paths, advance)
    store = _Store(folder=folder, read=read)
    if not store.holds(digests):
        with _locked(folder, say):
            store.complete(digests, before, workers, say)
    else:
        store.announce(digests, {}, say)  # nothing to write: a cache that may only be read will do
    known = store.rows()
    return CachedPixels(read=read, file=store.levels, slots={path: known[digest] for path, digest in digests.items()})


_WAYS_OUT = "make room, set GRADSCOPE_CACHE to a folder elsewhere, or leave --cache out"


@dataclass(frozen=True, kw_only=True)
class _Store:
    """The files of one preprocessing. Who calls ``complete`` holds the lock."""

    folder: Path
    read: PixelPath

    @property
    def levels(self) -> Path:
        return self.folder / "levels.bin"

    @property
    def index(self) -> Path:
        return self.folder / "index.bin"

    def rows(self) -> dict[bytes, tuple[int, int]]:
        """digest -> slot and checksum, of all pictures that are whole in both files."""
        stored = self.index.read_bytes() if self._whole() else b""
        rows = (stored[slot * ROW : (slot + 1) * ROW] for slot in range(self._whole()))
        sound = {slot: row for slot, row in enumerate(rows) if row[-4:] == _checksum(row[:-4])}
        return {row[:WIDTH]: (slot, int.from_bytes(row[WIDTH:-4], "little")) for slot, row in sound.items()}

    def _whole(self) -> int:
        """Pictures that both files hold whole; a kill may have torn the next."""
        if not (self.index.is_file() and self.levels.is_file()):
            return 0
        return min(self.index.stat().st_size // ROW, self.levels.stat().st_size // _bytes(self.read))

    def holds(self, digests: Mapping[str, bytes]) -> bool:
        return self.rows().keys() >= set(digests.values())

    def complete(self, digests: Mapping[str, bytes], before: Mapping[str, bytes], workers: int, say: Say) -> None:
        """Puts in what is missing. Raises ValueError as ``cached_pixels`` does."""
        known = self.rows()
        wanted = {digest: path for path, digest in digests.items() if digest not in known}
        self.announce(digests, wanted, say)
        try:
            self.fill(wanted, before, workers)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def announce(self, digests: Mapping[str, bytes], wanted: Mapping[bytes, str], say: Say) -> None:
        """Says how large it is. Raises ValueError if the disk has no room for it."""
        total, more = len(set(digests.values())), len(wanted) * _bytes(self.read)
        free = shutil.disk_usage(self.folder).free if wanted else 0
        damaged = self._whole() - len(self.rows())
        size = f"{self.read.size[0]} x {self.read.size[1]}"
        to_do = f"{len(wanted):,} to decode now, {_said(more)} of {_said(free)} free" if wanted else "all decoded before"
        to_do += f" ({damaged:,} damaged {'entry' if damaged == 1 else 'entries'} left out)" if damaged else ""
        say(f"image cache: {total:,} pictures of {size}, {_said(total * _bytes(self.read))}, {to_do}: {self.folder}")
        if wanted and more + SPARE > free:
            raise ValueError(f"the image cache needs {_said(more)} in '{self.folder}', where {_said(free)} are free; {_WAYS_OUT}")

    def fill(self, wanted: Mapping[bytes, str], before: Mapping[str, bytes], workers: int) -> None:
        """Decodes ``wanted`` (digest -> path) and writes each picture, then its row. ``before``: path -> stamp when it was digested."""
        if not wanted:
            return
        self._begin()
        slot = self._whole()
        with self.levels.open("r+b") as levels, self.index.open("r+b") as index, progress("image cache") as advance:
            levels.seek(slot * _bytes(self.read))
            index.truncate(slot * ROW)
            index.seek(0, os.SEEK_END)
            pictures = _decoded(list(wanted.values()), self.read, workers)
            for done, ((digest, path), picture) in enumerate(zip(wanted.items(), pictures, strict=True), start=1):
                if digest == ABSENT or stamp(path) != before[path]:
                    raise ValueError(f"image '{path}' changed while it was read; start again once it is left alone")
                row = digest + _checksum(picture)
                levels.write(picture)
                levels.flush()
                index.write(row + _checksum(row))
                index.flush()
                advance(done, len(wanted))

    def _begin(self) -> None:
        for file in (self.levels, self.index):
            file.touch()
        (self.folder / "what.json").write_text(json.dumps(_what(self.read), indent=2) + "\n", encoding="utf-8")


class _Levels(Dataset):
    """Number -> the levels of that picture, or in words why there are none."""

    def __init__(self, paths: Sequence[str], read: PixelPath) -> None:
        self.paths, self.read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return self.read.levels(self.paths[index]).contiguous()
        except ValueError as error:
            return str(error)


def _decoded(paths: Sequence[str], read: PixelPath, workers: int) -> Iterator[bytes]:
    own = torch.Generator()  # the loader draws a seed when it starts: not the one that training draws from
    loader = DataLoader(_Levels(paths, read), batch_size=_AT_ONCE, num_workers=workers, collate_fn=list, generator=own)
    for picture in (one for some in loader for one in some):
        if isinstance(picture, str):
            raise ValueError(picture)
        yield picture.numpy().tobytes()


# ---- small things


def _what(read: PixelPath) -> dict[str, Any]:
    """All that decides the levels. The mean and the deviation do not, and encoders that differ in those share a cache."""
    way = {key: value for key, value in asdict(read).items() if key not in ("mean", "std")}
    versions = {module.__name__: cast(str, module.__version__) for module in (gradscope, PIL, torch)}
    versions["torchvision"] = version("torchvision")  # importing it takes longer than torch
    return {**way, **versions, "instructions": torch.backends.cpu.get_cpu_capability()}


def _name(read: PixelPath) -> str:
    return hashlib.blake2b(json.dumps(_what(read), sort_keys=True).encode(), digest_size=WIDTH // 2).hexdigest()


def _bytes(read: PixelPath) -> int:
    return 3 * read.size[0] * read.size[1]


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def _said(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _write_at(file: Path, offset: int, data: bytes) -> None:
    """A cache that cannot be mended (read-only) is still right: the entry is decoded again each time."""
    try:
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(data)
    except OSError:
        return


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"the image cache in '{folder}' cannot be written: {error.strerror}; {_WAYS_OUT}")


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Raises ValueError if the folder cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("image cache: another process is filling it; waiting until it is done")
            lock.acquire()
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()
