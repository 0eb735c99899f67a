"""Fetch the files of a data set: what is there already, what is to be fetched, and fetching it.

Each finished file leaves a receipt in ``FOLDER/.fetch`` (size, sha256, time of change; for an archive its files and their sizes; the
archive itself is deleted once unpacked). A file with a fitting receipt is whole and is not asked about again; a file without one is
compared with what the publisher or the server states, and fetched again if it differs. One process fetches a data set at a time; a
second one waits and then finds it done.

How it can mislead: a receipt vouches for a file whose size and time of change are as they were, not for its bits since.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gradscope.data.hub import hub_remote
from gradscope.data.info import DataInfo, Download, on_disk
from gradscope.data.transfer import Got, Patience, Remote, alone, examine, new_client, size_on_server, transfer
from gradscope.data.unpack import TEMPORARY, unpack
from gradscope.paths import data_folders

if TYPE_CHECKING:
    from httpx2 import Client

#: (what is going on, bytes done, bytes in all or None)
Advance = Callable[[str, int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One download and what is on disk of it.

    ``state``: "whole" (its receipt fits), "by hand" (what the archive makes is there, without a receipt: left alone),
    "unchecked" (something is there that has to be compared) or "missing". ``why`` says more.
    """

    download: Download
    target: Path
    state: str
    why: str = ""
    size: int | None = None

    @property
    def settled(self) -> bool:
        return self.state in ("whole", "by hand")


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What became of one download. ``files`` is the number of unpacked files, 1 for a plain file."""

    target: Path
    new: bool
    size: int
    checked: str
    files: int = 1


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """How to fetch: who is told, and how patiently.

    Args:
        say: takes one line for the user.
    """

    say: Callable[[str], None] = print
    advance: Advance = field(default=lambda what, done, total: None)
    patience: Patience = field(default_factory=Patience)

    def __call__(self, info: DataInfo, folder: Path, *, only: str = "*") -> list[Fetched]:
        """Bring the downloads whose ``to`` matches the pattern ``only`` into ``folder``; those that are whole are left alone.

        Raises:
            ValueError: nothing matches, no writing, no space, not reachable, or not the published file. What arrived is kept, and the
                next call goes on.
        """
        chosen = _chosen(info, only)
        pieces = [piece(folder, download) for download in chosen]
        if all(found.settled for found in pieces):  # also in a folder that may not be written
            return [_settled(found) for found in pieces]
        try:
            with alone(folder, ".fetch/lock", self.say), new_client(self.patience) as client:
                return [self._one(client, piece(folder, download)) for download in chosen]
        except OSError as error:
            what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            raise ValueError(f"cannot write to {folder}: {what}; name another folder with --data-dir or $GRADSCOPE_DATA") from error

    def plan(self, info: DataInfo, folder: Path, *, only: str = "*") -> list[Piece]:
        """What a call would find and do. Nothing is written; the server is asked for sizes that are not known."""
        with new_client(self.patience) as client:
            return [self._sized(client, piece(folder, download)) for download in _chosen(info, only)]

    def _sized(self, client: Client, found: Piece) -> Piece:
        if found.settled or found.size is not None:
            return found
        try:
            remote = self._remote(found.download)
            return dataclasses.replace(found, size=remote.size if remote.size is not None else size_on_server(client, remote))
        except ValueError as error:
            return dataclasses.replace(found, why=str(error))

    def _remote(self, download: Download) -> Remote:
        if download.hub:
            return hub_remote(download, self.patience)
        return Remote(url=download.url, size=download.size, sha256=download.sha256)

    def _one(self, client: Client, found: Piece) -> Fetched:
        if found.settled:
            return _settled(found)
        if found.why:
            self.say(found.why)
        remote = self._remote(found.download)
        got = self._already(client, remote, found)
        new = got is None
        if got is None:
            got = transfer(
                client,
                remote,
                found.target,
                _side(found, ".part"),
                patience=self.patience,
                advance=lambda done, total: self.advance(found.download.to, done, total),
                say=self.say,
                copies=2 if found.download.unpack else 1,
            )
        files = self._unpacked(found) if found.download.unpack else None
        _write_receipt(found, remote, got, files)
        if files is not None:
            found.target.unlink()
        return Fetched(target=found.target, new=new, size=got.size, checked=got.checked, files=1 if files is None else len(files))

    def _already(self, client: Client, remote: Remote, found: Piece) -> Got | None:
        """The file that is there, if it is the published one."""
        if not found.target.is_file():
            return None
        if remote.size is None and remote.sha256 is None:
            remote = dataclasses.replace(remote, size=size_on_server(client, remote))
        wrong, got = examine(found.target, remote)
        if wrong:
            self.say(f"{found.target} is there but is not whole: {wrong}; fetching it again")
            return None
        return got

    def _unpacked(self, found: Piece) -> dict[str, int]:
        target = found.target
        for stopped in target.parent.glob(f"{TEMPORARY}*"):  # of a run that was ended by force: we hold the lock
            shutil.rmtree(stopped)
        try:
            return unpack(target, target.parent, advance=lambda done, total: self.advance(f"unpacking {target.name}", done, total))
        except ValueError as error:
            bad = target.with_name(target.name + ".bad")
            target.replace(bad)
            raise ValueError(f"{error}. The archive is kept as {bad}.") from error


def fetch_folder(name: str, info: DataInfo, data_dir: Path | None = None) -> Path:
    """Where ``name`` is fetched to: where it is already, else NAME in --data-dir, $GRADSCOPE_DATA or the cache's data folder."""
    first = data_folders(data_dir.expanduser() if data_dir else None)[0] / name
    if data_dir is not None or (first / ".fetch").is_dir():
        return first
    found = on_disk(name, info)
    return found.folder if found.folder is not None and found.folder.name == name else first


def piece(folder: Path, download: Download) -> Piece:
    """What is on disk of one download; no network."""
    found = Piece(download=download, target=folder / download.to, state="missing", size=download.size)
    receipt = _receipt(found)
    if receipt and (download.sha256 or receipt["sha256"]).lower() == receipt["sha256"]:
        wrong = _changed(found, receipt)
        if not wrong:
            return dataclasses.replace(found, state="whole", size=receipt["size"])
        found = dataclasses.replace(found, why=wrong)
    elif download.makes and next(folder.glob(download.makes), None) is not None:
        return dataclasses.replace(found, state="by hand", why=f"{folder / download.makes} is there, put there by hand: left alone")
    return dataclasses.replace(found, state="unchecked") if found.target.is_file() else found


def _settled(found: Piece) -> Fetched:
    receipt = _receipt(found)
    checked = "receipt" if found.state == "whole" else "nothing: put there by hand"
    files = len(receipt.get("files") or [0])
    return Fetched(target=found.target, new=False, size=receipt.get("size", 0), checked=checked, files=files)


def _chosen(info: DataInfo, only: str) -> list[Download]:
    for download in info.downloads:
        assert bool(download.url) != bool(download.hub and download.hub_file), f"{download.to}: give an address or a hub file"
        assert not download.url or urlsplit(download.url).scheme in ("http", "https"), f"{download.url}: only http and https"
    chosen = [download for download in info.downloads if fnmatch(download.to, only)]
    if not chosen:
        raise ValueError(f"no download is called '{only}'; there are {', '.join(d.to for d in info.downloads) or 'none'}")
    return chosen


def _changed(found: Piece, receipt: dict[str, Any]) -> str:
    """Why what is on disk no longer fits its receipt, or ""."""
    files: dict[str, int] | None = receipt.get("files")
    if files is None:
        if not found.target.is_file():
            return f"{found.target} was fetched and is gone"
        now = found.target.stat()
        return "" if [now.st_size, now.st_mtime_ns] == [receipt["size"], receipt["changed"]] else f"{found.target} has changed since"
    wrong = [name for name, size in files.items() if _size(found.target.parent / name) != size]
    if not wrong:
        return ""
    return f"{len(wrong):,} of {len(files):,} files of {found.download.to} are missing or changed (first: {wrong[0]})"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _side(found: Piece, ending: str) -> Path:
    """A file of ours about this download, in ``.fetch`` of the data set's folder."""
    folder = found.target
    for _ in Path(found.download.to).parts:
        folder = folder.parent
    return folder / ".fetch" / (found.download.to.replace("/", "__") + ending)


def _receipt(found: Piece) -> dict[str, Any]:
    try:
        receipt = json.loads(_side(found, ".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return receipt if isinstance(receipt, dict) and {"size", "sha256", "changed"} <= set(receipt) else {}


def _write_receipt(found: Piece, remote: Remote, got: Got, files: dict[str, int] | None) -> None:
    content = {
        "url": remote.url,
        "size": got.size,
        "sha256": got.sha256,
        "checked": got.checked,
        "changed": found.target.stat().st_mtime_ns,
        "files": files,
    }
    path = _side(found, ".json")
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
