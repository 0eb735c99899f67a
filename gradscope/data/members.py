"""A picture's path: a file, or a member of a tar file, read by its place in it.

    photos/a.jpg                            a file
    photos/train-000003.tar/@1536+20480/a.jpg   20,480 bytes from byte 1,536 of train-000003.tar on, called a.jpg in it

Below a file there are no files, so the second form is no file's name; where "train-000003.tar" is a folder, the path is an ordinary
one. Everything about where the bytes lie stands in the path, so a worker process needs nothing else, and reading a member costs two
reads, of its header and of its bytes, whatever the size of the tar. The header must still give the same name and size: a tar that is
rewritten while a run reads it would give a picture that belongs to another caption.

How it can mislead: a tar rewritten with members of the same names and sizes in the same places gives other bytes.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tarfile import BLOCKSIZE

_NAME = 100  # bytes of the name in a header
_SIZE = slice(124, 136)
_REFERENCE = re.compile(r"(?P<shard>.+\.tar)/@(?P<offset>\d+)\+(?P<size>\d+)/(?P<name>.+)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Member:
    """``size`` bytes from ``offset`` on in the tar file ``shard``. ``name`` is for people, and for the ending of the file."""

    shard: str
    offset: int
    size: int
    name: str

    def path(self) -> str:
        """What stands in ``Record.image``; ``member`` reads it back. Parts of the name that would lead elsewhere are left out."""
        parts = [part for part in self.name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
        return f"{self.shard}/@{self.offset}+{self.size}/{'/'.join(parts) or '_'}"

    def read(self, start: int = 0, count: int | None = None) -> bytes:
        """Bytes ``start`` to ``start + count`` of the member (to its end).

        Raises:
            OSError: no such shard.
            ValueError: it is too short, or holds something else there.
        """
        wanted = self.size - start if count is None else min(count, self.size - start)
        with open(self.shard, "rb", buffering=0) as file:  # noqa: PTH123 - Path.open costs as much as the read
            file.seek(max(0, self.offset - BLOCKSIZE))
            header = file.read(BLOCKSIZE)
            if len(header) == BLOCKSIZE and not self._fits(header):
                raise ValueError("its shard has been rewritten since it was indexed; give the command again, without --resume")
            if start:
                file.seek(self.offset + start)
            found = file.read(wanted)
            while len(found) < wanted and (more := file.read(wanted - len(found))):
                found += more
        if len(found) < wanted:
            raise ValueError("its shard has become shorter since it was indexed; fetch or pack it again")
        return found

    def _fits(self, header: bytes) -> bool:
        """Is it this member's header? Where a name is long or not ASCII it stands elsewhere, and so does a size that reads 0."""
        field, size = header[:_NAME].rstrip(b"\0"), header[_SIZE].strip(b" \0").lstrip(b"0")
        if size not in (b"", b"%o" % self.size):
            return False
        if len(field) == _NAME or len(self.name) + 2 > _NAME or not self.name.isascii():
            return True
        return field.replace(b"\\", b"/").rpartition(b"/")[2] == self.name.rpartition("/")[2].encode()


def member(path: str | Path) -> Member | None:
    """The member that a path names; None for a file."""
    text = os.fspath(path)
    if "/@" not in text:
        return None
    found = _REFERENCE.fullmatch(text)
    if found is None or _is_folder(found["shard"]):
        return None
    return Member(shard=found["shard"], offset=int(found["offset"]), size=int(found["size"]), name=found["name"])


@lru_cache(maxsize=4096)
def _is_folder(shard: str) -> bool:
    return Path(shard).is_dir()


def content_size(path: str | Path) -> int:
    """Bytes of a regular file or a member. Raises OSError: there is none, or it is no regular file."""
    found = member(path)
    facts = Path(path if found is None else found.shard).stat()
    if not stat.S_ISREG(facts.st_mode):
        raise IsADirectoryError(os.fspath(path))
    if found is None:
        return facts.st_size
    if found.offset + found.size > facts.st_size:
        raise FileNotFoundError(os.fspath(path))
    return found.size


def content(path: str | Path, start: int = 0, count: int | None = None) -> bytes:
    """Bytes of a file or a member, from ``start`` on, at most ``count``. Raises OSError, or ValueError for too short a shard."""
    found = member(path)
    if found is not None:
        return found.read(start, count)
    with Path(path).open("rb") as file:
        file.seek(start)
        return file.read() if count is None else file.read(count)


def is_there(path: str | Path) -> bool:
    """Is it a regular file, or a member whose shard is long enough? False, too, for names that no file can have."""
    try:
        return content_size(path) >= 0
    except (OSError, ValueError):
        return False


def stamp(path: str | Path) -> str:
    """Where it lies, its size and the time of its last change (of the shard, for a member). Raises OSError."""
    found = member(path)
    facts = Path(path if found is None else found.shard).stat()
    return f"{Path(path).absolute()}\0{facts.st_size}\0{facts.st_mtime_ns}"
