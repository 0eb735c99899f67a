"""Unpack a zip or tar archive that came from the network.

Only plain files and folders come out, only below the given folder, and at most ``EXPANSION`` times the archive's size + ``ALLOWANCE``
bytes in ``MOST_FILES`` files: an archive that holds a link, a device, a path that leads outside, one path twice or a flood of zeros
is refused as a whole. Bytes are counted as they are written; what the headers claim counts for nothing.

How it can mislead: file modes and times of the archive are not kept.
"""

from __future__ import annotations

import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

#: Pictures hardly shrink and captions shrink about fourfold; what unpacks to a hundred times its size is not a data set.
EXPANSION = 100
ALLOWANCE = 100 * 2**20
MOST_FILES = 2_000_000

#: How the temporary folders are called; one that is left was stopped by force.
TEMPORARY = ".unpack-"
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_BLOCK = 2**20
#: What the libraries raise for archives that are damaged, or packed in a way they cannot read (zipfile: NotImplementedError).
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, LZMAError, EOFError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A plain file in an archive. ``open`` is valid until the next entry is asked for."""

    name: str
    open: Callable[[], IO[bytes]]


def is_archive(name: str) -> bool:
    return name.lower().endswith((".zip", *TAR_ENDINGS))


def unpack(archive: Path, into: Path, *, advance: Callable[[int, int], None] | None = None) -> dict[str, int]:
    """Unpack ``archive`` into the folder ``into``; returns path (relative, with "/") -> bytes of every file.

    Everything is unpacked into a temporary folder in ``into`` first and then moved by renames, so a damaged or refused archive leaves
    nothing. A file that is there already under the same path is replaced.

    Args:
        advance: called with (bytes of the archive read so far, its size).

    Raises:
        ValueError: the archive is damaged, refused (see the module), or of a kind not known.
        OSError: writing failed.
    """
    if not is_archive(archive.name):
        raise ValueError(f"'{archive}' is no archive that can be unpacked; known are .zip, {', '.join(TAR_ENDINGS)}")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=TEMPORARY) as temporary:
        sizes = _write_all(archive, Path(temporary), advance or (lambda done, total: None))
        for name in sizes:
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(temporary) / name).replace(target)
    return sizes


def _write_all(archive: Path, folder: Path, advance: Callable[[int, int], None]) -> dict[str, int]:
    total = archive.stat().st_size
    allowed = EXPANSION * total + ALLOWANCE
    sizes: dict[str, int] = {}
    written = 0
    try:
        with archive.open("rb") as raw, _entries(archive, raw) as entries:
            for entry in entries:
                name = _safe_name(entry.name, archive)
                if name in sizes or len(sizes) >= MOST_FILES:
                    why = f"holds '{name}' twice" if name in sizes else f"holds more than {MOST_FILES:,} files"
                    raise ValueError(f"archive '{archive}' is refused: it {why}")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with entry.open() as source, target.open("xb") as sink:
                    sizes[name] = _copy(source, sink, allowed - written, archive)
                written += sizes[name]
                advance(min(raw.tell(), total), total)
    except _DAMAGE as error:
        raise ValueError(f"archive '{archive}' is damaged or not what its name says: {error}; delete it and fetch it again") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(f"archive '{archive}' is refused: two of its paths collide at '{error.filename}'") from error
    if not sizes:
        raise ValueError(f"archive '{archive}' holds no files")
    return sizes


@contextmanager
def _entries(archive: Path, raw: IO[bytes]) -> Iterator[Iterator[_Entry]]:
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(raw) as opened:
            yield _zip_entries(opened, archive)
    else:
        with tarfile.open(fileobj=raw, mode="r:*") as opened_tar:
            yield _tar_entries(opened_tar, archive)


def _zip_entries(opened: zipfile.ZipFile, archive: Path) -> Iterator[_Entry]:
    for member in opened.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"archive '{archive}' is refused: '{member.filename}' is neither a file nor a folder")
        if member.flag_bits & 1:
            raise ValueError(f"archive '{archive}' is refused: '{member.filename}' is encrypted")
        if not member.is_dir():
            yield _Entry(name=member.filename, open=lambda member=member: opened.open(member))  # type: ignore[misc]


def _tar_entries(opened: tarfile.TarFile, archive: Path) -> Iterator[_Entry]:
    for member in opened:
        if not (member.isreg() or member.isdir()):
            raise ValueError(f"archive '{archive}' is refused: '{member.name}' is neither a file nor a folder")
        if member.isreg():
            content = opened.extractfile(member)
            assert content is not None, "a regular file has content"
            yield _Entry(name=member.name, open=lambda content=content: content)  # type: ignore[misc]


def _safe_name(name: str, archive: Path) -> str:
    path = PurePosixPath(name)
    drive = PureWindowsPath(name).drive
    if path.is_absolute() or drive or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise ValueError(f"archive '{archive}' is refused: the path '{name}' could lead outside the folder")
    return str(path)


def _copy(source: IO[bytes], sink: IO[bytes], allowed: int, archive: Path) -> int:
    written = 0
    while block := source.read(_BLOCK):
        written += len(block)
        if written > allowed:
            raise ValueError(
                f"archive '{archive}' is refused: it unpacks to more than {EXPANSION} times its size plus {ALLOWANCE // 2**20} MiB"
            )
        if shutil.disk_usage(archive.parent).free < len(block):
            raise ValueError(f"no space left in {archive.parent} to unpack '{archive.name}'")
        sink.write(block)
    return written
