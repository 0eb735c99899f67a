"""Shards on a server or in an object store -> copies in the cache folder, each fetched once.

    http, https     by ``gradscope.data.transfer``: resumed after a cut, checked by the manifest's sha256, else by the stated length
    anything else   by fsspec (s3, gs, az, ...: the extra gradscope[webdataset] and fsspec's own package for that store), resumed too

All shards of a split must fit on the disk: what is missing is counted, and its size stated and compared with the free space, before
the first byte. One process fetches into a folder at a time; others wait and then find the copies there. A copy with a receipt is not
asked about again, so a run needs no network once its shards are here.

How it can mislead: a shard that changes at its address later is not noticed (unless a manifest gives another sha256); delete the copy
to fetch it anew. Where neither a sha256 nor a length is known, a file cut by the server looks whole until it is indexed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from gradscope.data.transfer import SPARE_BYTES, Patience, Remote, alone, new_client, size_on_server, transfer
from gradscope.paths import cache_folder, shown_name

_BLOCK = 8 * 2**20
_ASKED_AT_ONCE = 16

#: (bytes done, bytes in all as far as they are known)
Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar: its path or address, and what a manifest says of it."""

    where: str
    size: int | None = None
    sha256: str | None = None
    records: int | None = None

    @property
    def remote(self) -> bool:
        return is_address(self.where)


@dataclass(frozen=True, kw_only=True)
class ShardFetcher:
    """How to fetch: who is told, and how patiently."""

    say: Callable[[str], None]
    advance: Advance = field(default=lambda done, total: None)
    patience: Patience = field(default_factory=Patience)

    def __call__(self, shards: Sequence[Shard]) -> list[Path]:
        """Paths in the same order; local shards as they are.

        Raises:
            ValueError: not reachable, refused, not what the manifest promised, no room, or a package that is not installed.
        """
        places = [copy_of(shard) if shard.remote else Path(shard.where) for shard in shards]
        remote = {place: shard for place, shard in zip(places, shards, strict=True) if shard.remote}
        by_folder: dict[Path, dict[Path, Shard]] = {}
        for place, shard in remote.items():
            by_folder.setdefault(place.parent, {})[place] = shard
        for folder, wanted in by_folder.items():
            if all(_is_whole(place, shard) for place, shard in wanted.items()):
                continue
            with alone(folder, ".lock", self.say):
                self._fetch(folder, {place: shard for place, shard in wanted.items() if not _is_whole(place, shard)})
        return places

    def _fetch(self, folder: Path, missing: Mapping[Path, Shard]) -> None:
        if not missing:  # another process has fetched them meanwhile
            return
        sizes = self._sizes(list(missing.values()))
        needed = sum(size or 0 for size in sizes) - sum(_part(p).stat().st_size for p in missing if _part(p).is_file())
        free = shutil.disk_usage(folder).free
        unknown = sum(size is None for size in sizes)
        amount = f"{decimal(needed)}{f' and {unknown:,} of unknown size' if unknown else ''}"
        count = f"{len(missing):,} shard{'' if len(missing) == 1 else 's'}"
        source = shown_name(next(iter(missing.values())).where).rpartition("/")[0]
        self.say(f"fetching {count}, {amount}, from {source} into {folder} ({decimal(free)} free)")
        if needed + SPARE_BYTES > free:
            raise ValueError(
                f"{len(missing):,} shards need {amount} and {folder} has {decimal(free)} free; make room, or put the cache "
                "elsewhere with $GRADSCOPE_CACHE"
            )
        before, total = 0, sum(size or 0 for size in sizes)
        for place, shard in missing.items():
            before += self._one(place, shard, before, total)

    def _sizes(self, shards: Sequence[Shard]) -> list[int | None]:
        with new_client(self.patience) as client, ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:

            def size(shard: Shard) -> int | None:
                if shard.size is not None:
                    return shard.size
                return size_on_server(client, Remote(url=shard.where)) if _over_http(shard.where) else _stored(shard.where)[1]

            return list(pool.map(size, shards))

    def _one(self, place: Path, shard: Shard, before: int, in_all: int) -> int:
        """Returns its bytes."""

        def advance(done: int, total: int | None) -> None:
            self.advance(before + done, max(in_all, before + done))

        if _over_http(shard.where):
            remote = Remote(url=shard.where, size=shard.size, sha256=shard.sha256)
            with new_client(self.patience) as client:
                got = transfer(client, remote, place, _part(place), patience=self.patience, advance=advance, say=self.say)
            sha256, length = got.sha256, got.size
        else:
            sha256, length = _copy(shard, place, advance)
        receipt = {"address": shard.where, "size": length, "sha256": sha256}
        partial = _receipt(place).with_suffix(".partial")
        partial.write_text(json.dumps(receipt), encoding="utf-8")
        partial.replace(_receipt(place))
        return length


def is_address(name: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", name) is not None


def copy_of(shard: Shard) -> Path:
    """Where the copy of a remote shard lies: a folder for each folder it may come from."""
    folder, _, name = shard.where.partition("?")[0].rpartition("/")
    if "?" in shard.where or not name.lower().endswith(".tar"):  # the address tells it from others, not the name
        name = hashlib.blake2b(shard.where.encode(), digest_size=8).hexdigest() + ".tar"
    return cache_folder() / "shards" / hashlib.blake2b(folder.encode(), digest_size=8).hexdigest() / name


def read_text(address: str) -> tuple[str | None, list[str]]:
    """A small text file at an address (None if there is none) and notes. A copy is kept for when the address cannot be reached."""
    kept = copy_of(Shard(where=address)).with_suffix(".txt")
    try:
        text = _http_text(address) if _over_http(address) else _store_text(address)
    except ConnectionError as error:
        if not kept.is_file():
            raise ValueError(f"{address} cannot be reached: {error}") from error
        return kept.read_text(encoding="utf-8"), [f"{address} cannot be reached; the copy of an earlier run is used"]
    if text is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    return text, []


def listing(folder: str) -> list[str]:
    """Addresses of the tar files of a folder, in order of name; [] where a server gives no listing (http)."""
    if _over_http(folder):
        return []
    filesystem, path = _filesystem(folder)
    scheme = folder.partition("://")[0]
    return [f"{scheme}://{str(found).lstrip('/') if scheme != 'file' else found}" for found in sorted(filesystem.glob(f"{path}/*.tar"))]


def _over_http(address: str) -> bool:
    return address.lower().startswith(("http://", "https://"))


def _http_text(address: str) -> str | None:
    from httpx2 import RequestError

    try:
        with new_client(Patience()) as client:
            answer = client.get(address)
    except RequestError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    if answer.status_code in (404, 410):
        return None
    if answer.status_code != 200:
        raise ConnectionError(f"the server answered {answer.status_code} {answer.reason_phrase}")
    return answer.text


def _store_text(address: str) -> str | None:
    filesystem, path = _filesystem(address)
    try:
        return bytes(filesystem.cat_file(path)).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _filesystem(address: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"{address} needs fsspec; install gradscope[webdataset]") from error
    try:
        return url_to_fs(address)
    except ImportError as error:  # fsspec names the package of that kind of store
        named = re.search(r"[Ii]nstall (\w+)", str(error))
        words = f"; pip install 'gradscope[webdataset]' {named[1]}" if named else ""
        raise ValueError(f"{address} cannot be read: {error}{words}") from error
    except ValueError as error:
        raise ValueError(f"{address} cannot be read: {error}; fsspec knows https, s3, gs, az, hf and others") from error


def _stored(address: str) -> tuple[str, int | None]:
    """(what tells this version of the file from another, bytes)."""
    filesystem, path = _filesystem(address)
    try:
        return str(filesystem.ukey(path)), filesystem.info(path).get("size")
    except FileNotFoundError as error:
        raise ValueError(f"{address} does not exist; mend the pattern") from error
    except OSError as error:
        raise ValueError(f"{address} cannot be read: {error}") from error


def _copy(shard: Shard, place: Path, advance: Callable[[int, int | None], None]) -> tuple[str, int]:
    """Through the part of an earlier try, if the file is still the same; returns (sha256, bytes)."""
    version, size = _stored(shard.where)
    filesystem, path = _filesystem(shard.where)
    part, note = _part(place), _part(place).with_suffix(".version")
    same = note.is_file() and note.read_text(encoding="utf-8") == version and part.is_file()
    start = part.stat().st_size if same else 0
    note.write_text(version, encoding="utf-8")
    try:
        with filesystem.open(path, "rb") as source, part.open("ab" if start else "wb") as sink:
            source.seek(start)
            while block := source.read(_BLOCK):
                sink.write(block)
                advance(sink.tell(), size)
    except OSError as error:
        raise ValueError(f"{shard.where} stopped: {error}; what came is kept, run the same command again to go on") from error
    length = part.stat().st_size
    with part.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    note.unlink()
    wanted = shard.size if shard.size is not None else size
    if (wanted is not None and length != wanted) or (shard.sha256 and sha256 != shard.sha256):
        part.unlink()
        raise ValueError(f"{shard.where} did not arrive as promised: {length:,} bytes, sha256 {sha256}; fetch it again")
    part.replace(place)
    return sha256, length


def _part(place: Path) -> Path:
    return place.with_name(place.name + ".part")


def _receipt(place: Path) -> Path:
    return place.with_name(place.name + ".json")


def _is_whole(place: Path, shard: Shard) -> bool:
    """Is the copy there as it arrived, and is it what the manifest of now asks for?"""
    try:
        receipt = json.loads(_receipt(place).read_text(encoding="utf-8"))
        fits = receipt["address"] == shard.where and receipt["size"] == place.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(fits and shard.sha256 in (None, receipt["sha256"]))
