"""Get one file over HTTP(S): resumable, checked, and under its final name only when it is whole.

A transfer lives in ``PART`` beside a small JSON of what it is a part of. Later runs go on where it stopped, by ``Range`` with
``If-Range``, if the server still has the same file (ETag, else Last-Modified); a server that ignores ``Range`` or has another file
sends it whole and we start from the first byte. A cut connection is tried again, with pauses that double, until ``tries`` attempts in
a row brought no new byte. Proxies, redirects and certificates are the client's (httpx2: the usual environment variables).

Checked at the end: sha256 where known (or the hub's git hash), the size where known, else the length the server stated.
How it can mislead: where neither a hash nor a length is known, a file cut by the server looks whole; ``Got.checked`` says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from httpx2 import Client, Response

#: Answers that a server gives when it is busy; every other refusal is final.
BUSY = (408, 425, 429, 500, 502, 503, 504)
#: How long a server may ask us to wait (Retry-After), in seconds.
LONGEST_WAIT = 60.0
#: Left free on the disk.
SPARE_BYTES = 64 * 2**20
_BLOCK = 2**20
_SNIFFED = 512
_MAGIC = {".zip": b"PK", ".gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".parquet": b"PAR1"}


@contextmanager
def alone(folder: Path, lock: str, say: Callable[[str], object]) -> Iterator[None]:
    """Holds ``folder``/``lock``, so that one process at a time fetches into the folder; ``say`` hears that another one does."""
    from filelock import FileLock, Timeout

    (folder / lock).parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching into {folder}; waiting for it")
        held.acquire()
    try:
        yield
    finally:
        held.release()


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A file on a server, and what is known of it beforehand. ``git_sha1`` is the hub's hash of small files (git's blob hash)."""

    url: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """``tries`` attempts in a row without a new byte, the k-th followed by a pause of ``pause * 2**(k-1)`` seconds."""

    tries: int = 5
    pause: float = 1.0
    timeout: float = 30.0  # seconds without a byte


@dataclass(frozen=True, kw_only=True)
class Got:
    """What arrived. ``checked`` says by what it was found whole."""

    size: int
    sha256: str
    checked: str


class _TryAgain(Exception):
    """The attempt ended early; ``wait`` is what the server asked for, in seconds."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def new_client(patience: Patience) -> Client:
    """A client that follows redirects; credentials in headers are dropped when one leads to another host."""
    from httpx2 import Client

    from gradscope import __version__

    headers = {"User-Agent": f"gradscope/{__version__}", "Accept-Encoding": "identity"}
    return Client(follow_redirects=True, timeout=patience.timeout, headers=headers)


def size_on_server(client: Client, remote: Remote) -> int | None:
    """Bytes of the file as its server states them, None if it does not. Reads the head of the answer only.

    Raises:
        ValueError: the server cannot be reached, refuses, or sends a web page.
    """
    from httpx2 import RequestError

    try:
        with client.stream("GET", remote.url, headers=dict(remote.headers)) as response:
            if response.status_code != 200:
                _refuse_status(response, remote)
            _refuse_kind(response, remote)
            return _length(response)
    except RequestError as error:
        raise ValueError(f"{remote.url} cannot be reached: {_say(error)}") from error


def transfer(
    client: Client,
    remote: Remote,
    target: Path,
    part: Path,
    *,
    patience: Patience,
    advance: Callable[[int, int | None], None],
    say: Callable[[str], None],
    copies: int = 1,
) -> Got:
    """Bring ``remote`` to ``target``, through ``part`` (kept when this fails, so that a later call goes on).

    Args:
        advance: called with (bytes here, bytes in all or None).
        say: told when and why an attempt is repeated.
        copies: how many times its size must be free on the disk; 2 for an archive that is unpacked.

    Raises:
        ValueError: refused or not reachable, not the file that was promised (then kept as ``target`` + ".bad"), or no space.
        OSError: writing failed.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    job = _Job(client=client, remote=remote, target=target, part=part, advance=advance, say=say, copies=copies)
    resumed = part.exists()
    _until_whole(job, patience)
    wrong, got = _examine(part, remote, job.total())
    if wrong and resumed:  # the part of an earlier run may be what is bad: once more, from the first byte
        job.forget()
        _until_whole(job, patience)
        wrong, got = _examine(part, remote, job.total())
    if wrong:
        bad = target.with_name(target.name + ".bad")
        part.replace(bad)
        job.forget()
        raise ValueError(f"{target} did not arrive as published: {wrong} (from {remote.url}). What came is kept as {bad}.")
    part.replace(target)
    job.forget()
    return got


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One transfer and the two files it lives in."""

    client: Client
    remote: Remote
    target: Path
    part: Path
    advance: Callable[[int, int | None], None]
    say: Callable[[str], None]
    copies: int

    @property
    def note(self) -> Path:
        return self.part.with_name(self.part.name + ".json")

    def here(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def total(self) -> int | None:
        """Bytes in all as published or, once the server has answered, as it stated."""
        stated = self.noted().get("total")
        return self.remote.size if self.remote.size is not None else stated if isinstance(stated, int) else None

    def noted(self) -> dict[str, object]:
        """What the part is a part of; empty if that is not known or was another address."""
        try:
            found = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("url") == self.remote.url else {}

    def forget(self) -> None:
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def _until_whole(job: _Job, patience: Patience) -> None:
    """Attempts until the part has all its bytes."""
    from httpx2 import RequestError, TransportError

    most = job.here()
    failed = 0
    while True:
        try:
            return _attempt(job)
        except _TryAgain as error:
            why, wait = str(error), error.wait
        except TransportError as error:
            why, wait = _say(error), 0.0
        except RequestError as error:  # too many redirects, an answer that cannot be decoded: trying again will not help
            raise ValueError(f"{job.remote.url} cannot be fetched: {_say(error)}") from error
        failed = 0 if job.here() > most else failed + 1  # a server that cuts and cannot resume brings no NEW byte
        most = max(most, job.here())
        if failed >= patience.tries:
            kept = f"{job.here():,} bytes are kept; run the same command again to go on" if job.here() else "nothing arrived"
            raise ValueError(f"{job.remote.url} stopped {failed} times in a row without progress ({why}); {kept}")
        wait = max(wait, patience.pause * 2 ** max(failed - 1, 0))
        job.say(f"{job.target.name}: {why}; trying again in {wait:.0f} s")
        time.sleep(wait)


def _attempt(job: _Job) -> None:
    """One request, from where the part ends. Returns when the part has all its bytes."""
    validator = str(job.noted().get("validator", ""))
    start = job.here() if validator else 0
    total = job.total()
    if start and total is not None and start >= total:
        if start == total:
            return
        start = 0
    headers = {**job.remote.headers, **({"Range": f"bytes={start}-", "If-Range": validator} if start else {})}
    with job.client.stream("GET", job.remote.url, headers=headers) as response:
        if response.status_code in BUSY:
            raise _TryAgain(f"the server answered {response.status_code}", _wait(response))
        if response.status_code == 416 or (response.status_code == 206 and not _continues(response, start, validator, total)):
            if not start:
                _refuse_status(response, job.remote)
            job.forget()
            raise _TryAgain("the server has another file than the part that was here")
        if response.status_code not in (200, 206):
            _refuse_status(response, job.remote)
        _refuse_kind(response, job.remote)
        _refuse_downgrade(response, job.remote)
        _receive(response, job, start if response.status_code == 206 else 0)


def _receive(response: Response, job: _Job, start: int) -> None:
    encoded = response.headers.get("content-encoding", "identity") != "identity"  # though we asked for none: then no resuming
    length = None if encoded else _length(response)
    total = None if length is None else start + length
    if total is not None and job.remote.size is not None and total != job.remote.size:
        raise ValueError(f"{job.remote.url} offers {total:,} bytes where {job.remote.size:,} are published; not fetched")
    total = total if total is not None else job.remote.size
    _refuse_full_disk(job, (total or 0) - start + (job.copies - 1) * (total or 0))
    validator = "" if encoded else _validator(response)
    job.note.write_text(json.dumps({"url": job.remote.url, "validator": validator, "total": total}), encoding="utf-8")
    done = start
    job.advance(done, total)
    with job.part.open("ab" if start else "wb") as sink:
        for block in _checked_blocks(response.iter_bytes() if encoded else response.iter_raw(), job, start):
            sink.write(block)
            done += len(block)
            job.advance(done, total)
        sink.flush()
        os.fsync(sink.fileno())
    if total is not None and done < total:
        raise _TryAgain(f"the connection ended after {done:,} of {total:,} bytes")


def _checked_blocks(blocks: Iterator[bytes], job: _Job, start: int) -> Iterator[bytes]:
    """The blocks as they come (a larger block would be lost in a cut), once the head of the file does not look like something else."""
    head: bytes | None = b""
    for block in blocks:
        if start or head is None:
            yield block
            continue
        head += block
        if len(head) >= _SNIFFED:
            _refuse_content(head, job.remote, job.target)
            yield head
            head = None
    if head:
        _refuse_content(head, job.remote, job.target)
        yield head


def _continues(response: Response, start: int, validator: str, total: int | None) -> bool:
    """Is this 206 the rest of the part we have? Some servers heed Range but not If-Range."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("content-range", "").strip())
    if not start or not found or int(found[1]) != start:
        return False
    now = _validator(response)
    return (not now or now == validator) and (total is None or found[3] in ("*", str(total)))


def _validator(response: Response) -> str:
    """What If-Range may be given: a strong ETag, else the date of the last change, else nothing (then no resuming)."""
    etag = response.headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("last-modified", "")


def _length(response: Response) -> int | None:
    stated = response.headers.get("content-length", "")
    return int(stated) if stated.isdigit() else None


def _wait(response: Response) -> float:
    asked = response.headers.get("retry-after", "")
    return min(float(asked), LONGEST_WAIT) if asked.isdigit() else 0.0


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refuse_status(response: Response, remote: Remote) -> NoReturn:
    code = response.status_code
    hint = {
        401: "it wants a login; fetch the file by hand",
        403: "access is not granted; accept the terms on the data set's page or fetch the file by hand",
        404: "the file is not there any more",
        410: "the file is not there any more",
    }.get(code, "try again later" if code in BUSY else "the address may have changed")
    raise ValueError(f"{remote.url} answered {code} {response.reason_phrase}: {hint}")


def _refuse_kind(response: Response, remote: Remote) -> None:
    kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml") and not remote.url.lower().endswith((".html", ".htm")):
        raise ValueError(
            f"{remote.url} sent a web page instead of the file (a login, a notice or a moved address); open it in a browser"
        )


def _refuse_content(head: bytes, remote: Remote, target: Path) -> None:
    if target.suffix.lower() not in (".html", ".htm") and head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise ValueError(f"{remote.url} sent a web page instead of '{target.name}'; open the address in a browser")
    magic = _MAGIC.get(target.suffix.lower())
    if magic and not head.startswith(magic) and head[257:262] != b"ustar":  # some servers unpack gzip on the way; tar reads both
        raise ValueError(f"{remote.url} sent something that is no {target.suffix} file (it begins with {head[:16]!r}); nothing is kept")


def _refuse_downgrade(response: Response, remote: Remote) -> None:
    """Without a hash it is the encrypted connection that vouches for the content."""
    hops = [*response.history, response]
    if remote.url.startswith("https:") and remote.sha256 is None and any(hop.url.scheme != "https" for hop in hops):
        raise ValueError(f"{remote.url} leads to an address without encryption ({response.url}) and no hash is published; not fetched")


def _refuse_full_disk(job: _Job, needed: int) -> None:
    free = shutil.disk_usage(job.part.parent).free
    if needed + SPARE_BYTES > free:
        raise ValueError(
            f"{job.target.name} needs {needed / 1e9:,.2f} GB more{' (archive and contents)' if job.copies > 1 else ''} and "
            f"{job.target.parent} has {free / 1e9:,.2f} GB free; make room or name another folder with --data-dir"
        )


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _examine(path: Path, remote: Remote, stated: int | None) -> tuple[str, Got]:
    """What is wrong with the file, or "", and what it is. Size first: it says more than a hash that differs."""
    size = path.stat().st_size
    expected = remote.size if remote.size is not None else stated
    sha256 = _digest(path, hashlib.sha256())
    wrong = ""
    if expected is not None and size != expected:
        wrong = f"{size:,} bytes where {expected:,} are expected"
    elif remote.sha256 and sha256 != remote.sha256.lower():
        wrong = f"sha256 is {sha256}, expected {remote.sha256.lower()}"
    elif remote.git_sha1:
        git_sha1 = _digest(path, hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False))
        wrong = "" if git_sha1 == remote.git_sha1 else f"git hash is {git_sha1}, expected {remote.git_sha1}"
    checked = (
        "sha256" if remote.sha256 else "git hash" if remote.git_sha1 else "size" if expected is not None else "nothing: no size stated"
    )
    return wrong, Got(size=size, sha256=sha256, checked=checked)


def examine(path: Path, remote: Remote) -> tuple[str, Got]:
    """What is wrong with a file that is there already ("" if nothing is found wrong), and what it is."""
    return _examine(path, remote, None)
