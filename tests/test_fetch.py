"""Fetching against a real server that cuts, truncates, redirects, corrupts and lies: what lands is whole or does not land."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest
from file_server import FileServer, serving

from gradscope.data import unpack as unpacking
from gradscope.data.fetch import Fetcher, fetch_folder, piece
from gradscope.data.info import DataInfo, Download, on_disk
from gradscope.data.transfer import Patience
from gradscope.data.unpack import unpack

QUICK = Patience(tries=3, pause=0.01, timeout=5)
WORDS = bytes(random.Random(os.urandom(8)).randbytes(300_000))
SHA = hashlib.sha256(WORDS).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with serving() as running:
        yield running


def info_of(*downloads: Download, layout: tuple[str, ...] = ()) -> DataInfo:
    return DataInfo(title="t", homepage="h", licence="l", citation="c", layout=layout, how="", downloads=downloads)


def fetch(folder: Path, *downloads: Download, lines: list[str] | None = None, **settings):
    said = lines if lines is not None else []
    return Fetcher(say=said.append, patience=QUICK, **settings)(info_of(*downloads), folder)


def refused(folder: Path, *downloads: Download) -> str:
    with pytest.raises(ValueError) as error:
        fetch(folder, *downloads)
    assert "\n" not in str(error.value)
    return str(error.value)


def left(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def zipped(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def tarred(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


# whole, and once


@pytest.mark.parametrize("known", [{}, {"size": len(WORDS)}, {"sha256": SHA}, {"sha256": SHA.upper(), "size": len(WORDS)}])
def test_a_file_arrives_once(server: FileServer, tmp_path: Path, known: dict):
    server.add("a", WORDS)
    download = Download(to="sub/words.bin", url=server.url("a"), **known)
    seen: list[tuple] = []
    (got,) = fetch(tmp_path, download, advance=lambda *now: seen.append(now))
    assert (tmp_path / "sub/words.bin").read_bytes() == WORDS
    assert (got.new, got.size, got.checked) == (True, len(WORDS), "sha256" if "sha256" in known else "size")
    assert seen[0][1:] == (0, len(WORDS))
    assert seen[-1] == ("sub/words.bin", len(WORDS), len(WORDS))
    assert left(tmp_path) == {"sub/words.bin", ".fetch/sub__words.bin.json"}
    requests = len(server.log)
    (again,) = fetch(tmp_path, download)
    assert (again.new, len(server.log)) == (False, requests), "a whole file is not asked about"
    assert piece(tmp_path, download).state == "whole"


def test_an_empty_file_is_a_file(server: FileServer, tmp_path: Path):
    server.add("a", b"")
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    assert (tmp_path / "a").read_bytes() == b""


# cuts


def test_cut_connections_are_taken_up_where_they_stopped(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, troubles=[("cut", 0.4), ("cut", 0.4), ("status", 503, {"Retry-After": "0"}), ("cut", 0.0)])
    fetch(tmp_path, Download(to="a", url=server.url("a"), sha256=SHA))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [asked.status for asked in server.log] == [200, 206, 503, 206, 206]
    assert sum(a.sent for a in server.log if a.status in (200, 206)) == len(WORDS), "no byte came twice"


def test_a_cut_by_date_alone_is_taken_up(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, etag='W/"weak"', modified="Mon, 02 Nov 2020 10:00:00 GMT", troubles=[("cut", 0.4)])
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert server.log[1].headers["if-range"] == "Mon, 02 Nov 2020 10:00:00 GMT"
    assert server.log[1].status == 206


def test_without_etag_and_date_it_starts_anew(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, etag="", troubles=[("cut", 0.4)])
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [("range" in a.headers, a.status) for a in server.log] == [(False, 200)] * 2


def test_a_server_that_ignores_ranges_starts_anew(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, ranges=False, troubles=[("cut", 0.4)])
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [a.status for a in server.log] == [200, 200]


def test_it_gives_up_and_a_later_run_goes_on(server: FileServer, tmp_path: Path):
    served = server.add("a", WORDS, troubles=[("cut", 0.4)] + [("cut", 0.0)] * 3)
    download = Download(to="a", url=server.url("a"))
    said = refused(tmp_path, download)
    assert server.url("a") in said
    assert f"{round(0.4 * len(WORDS)):,} bytes are kept; run the same command again" in said
    assert not (tmp_path / "a").exists()
    assert not served.troubles[1:]
    served.troubles.clear()
    before = len(server.log)
    fetch(tmp_path, download)
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [a.status for a in server.log[before:]] == [206]


def test_a_server_that_always_cuts_and_never_resumes_ends(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, ranges=False, always=("cut", 0.4))
    assert "3 times in a row without progress" in refused(tmp_path, Download(to="a", url=server.url("a")))
    assert len(server.log) == 4, "one attempt with new bytes, three without"


def test_another_file_on_the_server_is_not_glued_to_the_old_part(server: FileServer, tmp_path: Path):
    other = WORDS[::-1]
    for careless in (False, True):
        folder = tmp_path / str(careless)
        served = server.add("a", WORDS, troubles=[("cut", 0.4)] + [("cut", 0.0)] * 3)
        download = Download(to="a", url=server.url("a"))
        refused(folder, download)
        served.content, served.etag, served.careless, served.troubles = other, '"v2"', careless, []
        fetch(folder, download)
        assert (folder / "a").read_bytes() == other


def test_a_killed_process_is_taken_up(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, troubles=[("stall", 0.4)])
    command = [sys.executable, "-c", TWO, tmp_path, server.url("a"), SHA]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    part = tmp_path / ".fetch/a.part"
    until = time.monotonic() + 120
    while not (part.exists() and part.stat().st_size > 100_000) and time.monotonic() < until:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    here = part.stat().st_size
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
    assert (tmp_path / "a").read_bytes() == WORDS
    assert (server.log[-1].status, server.log[-1].headers["range"]) == (206, f"bytes={here}-")


def test_a_silent_server_is_left_and_asked_again(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, troubles=[("stall", 0.4)])
    lines: list[str] = []
    impatient = Patience(tries=3, pause=0.01, timeout=1.0)  # long for a server in this process, also on a busy machine
    Fetcher(say=lines.append, patience=impatient)(info_of(Download(to="a", url=server.url("a"))), tmp_path)
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [a.status for a in server.log] == [200, 206]
    assert len(lines) == 1
    assert lines[0].startswith("a: ")
    assert "trying again in 0 s" in lines[0]


@pytest.mark.parametrize("part", [WORDS[:1000][::-1], WORDS[::-1], WORDS + b"more"])
def test_a_bad_part_of_an_earlier_run_is_started_anew(server: FileServer, tmp_path: Path, part: bytes):
    """The part does not hold what the note beside it says: it is found by the hash, once, and fetched from the first byte."""
    server.add("a", WORDS)
    (tmp_path / ".fetch").mkdir()
    (tmp_path / ".fetch/a.part").write_bytes(part)
    note = {"url": server.url("a"), "validator": '"v1"', "total": len(WORDS)}
    (tmp_path / ".fetch/a.part.json").write_text(json.dumps(note))
    fetch(tmp_path, Download(to="a", url=server.url("a"), sha256=SHA))
    assert (tmp_path / "a").read_bytes() == WORDS


# not the file


def test_corrupt_content(server: FileServer, tmp_path: Path):
    served = server.add("a", WORDS, troubles=[("corrupt",)])
    wrong = hashlib.sha256(WORDS[:-1] + bytes([WORDS[-1] ^ 1])).hexdigest()
    download = Download(to="a", url=server.url("a"), sha256=SHA)
    said = refused(tmp_path, download)
    for part in (str(tmp_path / "a"), f"sha256 is {wrong}, expected {SHA}", f"kept as {tmp_path / 'a.bad'}"):
        assert part in said
    assert left(tmp_path) == {"a.bad"}
    assert not served.troubles
    fetch(tmp_path, download)
    assert (tmp_path / "a").read_bytes() == WORDS


def test_a_truncated_file_with_an_honest_length(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, always=("short", 1000))
    said = refused(tmp_path, Download(to="a", url=server.url("a"), size=len(WORDS)))
    assert f"offers 1,000 bytes where {len(WORDS):,} are published" in said
    assert "sha256 is" in refused(tmp_path, Download(to="a", url=server.url("a"), sha256=SHA))
    assert not (tmp_path / "a").exists()


def test_no_length_at_all(server: FileServer, tmp_path: Path):
    served = server.add("a", WORDS, stated=-1)
    (got,) = fetch(tmp_path / "1", Download(to="a", url=server.url("a")))
    assert got.checked == "nothing: no size stated"
    served.always = ("cut", 0.4)
    assert "stopped" in refused(tmp_path / "2", Download(to="a", url=server.url("a"), size=len(WORDS)))
    assert "sha256 is" in refused(tmp_path / "3", Download(to="a", url=server.url("a"), sha256=SHA))


@pytest.mark.parametrize("trouble", [("html",), None])
def test_a_web_page_instead_of_the_file(server: FileServer, tmp_path: Path, trouble):
    """By its type, and by its content where the type lies."""
    server.add("a", b"\n <HTML>log in</HTML>", kind="application/json", always=trouble or ())
    said = refused(tmp_path, Download(to="a.json", url=server.url("a")))
    assert "sent a web page instead of" in said
    assert "a.json" not in left(tmp_path)
    assert len(server.log) == 1, "asking again would not help"


def test_a_page_after_a_cut_does_not_cost_the_part(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, troubles=[("cut", 0.4), ("html",)])
    download = Download(to="a", url=server.url("a"))
    assert "web page" in refused(tmp_path, download)
    fetch(tmp_path, download)
    assert (tmp_path / "a").read_bytes() == WORDS
    assert server.log[-1].status == 206


def test_something_that_is_no_archive(server: FileServer, tmp_path: Path):
    server.add("a", b"error: quota exceeded")
    assert "no .zip file (it begins with b'error: quota exc')" in refused(
        tmp_path, Download(to="a.zip", url=server.url("a"), unpack=True)
    )


@pytest.mark.parametrize(("code", "words"), [(404, "not there any more"), (403, "accept the terms"), (401, "login"), (400, "address")])
def test_final_refusals_are_not_repeated(server: FileServer, tmp_path: Path, code: int, words: str):
    server.add("a", WORDS, always=("status", code, {}))
    said = refused(tmp_path, Download(to="a", url=server.url("a")))
    assert f"answered {code}" in said
    assert words in said
    assert len(server.log) == 1


def test_busy_servers_are_asked_again(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, troubles=[("status", 503, {}), ("status", 429, {})])
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    server.add("b", WORDS, always=("status", 503, {}))
    assert "503" in refused(tmp_path, Download(to="b", url=server.url("b")))
    assert "nothing arrived" in refused(tmp_path, Download(to="b", url=server.url("b")))


def test_nobody_there(tmp_path: Path, server: FileServer):
    url = server.url("a")
    server.close()
    assert "without progress" in refused(tmp_path, Download(to="a", url=url))


def test_redirects(server: FileServer, tmp_path: Path):
    """To another host too, and the rest after a cut as well."""
    server.add("real", WORDS, troubles=[("cut", 0.4)])
    server.add("a", b"", always=("redirect", server.url("b", "localhost")))
    server.add("b", b"", always=("redirect", "/real"))
    fetch(tmp_path, Download(to="a", url=server.url("a")))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [a.status for a in server.log] == [302, 302, 200, 302, 302, 206]
    server.add("loop", b"", always=("redirect", "/loop"))
    assert "cannot be fetched" in refused(tmp_path, Download(to="loop", url=server.url("loop")))


def test_a_proxy_is_used(server: FileServer, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url(""))
    monkeypatch.setenv("http_proxy", server.url(""))
    address = "http://data.example.invalid/a"
    server.add("a", WORDS)
    server.files[address] = server.files["/a"]
    fetch(tmp_path, Download(to="a", url=address))
    assert (tmp_path / "a").read_bytes() == WORDS
    assert [a.path for a in server.log] == [address]


def test_content_that_is_compressed_on_the_way(server: FileServer, tmp_path: Path):
    """Though we ask for none. Then the length is not that of the file, and a cut starts anew."""
    packed = gzip.compress(WORDS)
    server.add("a", packed, headers={"Content-Encoding": "gzip"}, troubles=[("cut", 0.9)])
    (got,) = fetch(tmp_path, Download(to="a", url=server.url("a"), size=len(WORDS)))
    assert (got.size, got.checked) == (len(WORDS), "size")
    assert (tmp_path / "a").read_bytes() == WORDS
    assert not any("range" in a.headers for a in server.log)
    server.add("b", gzip.compress(tarred(PICTURES, "w")), headers={"Content-Encoding": "gzip"})
    (got,) = fetch(tmp_path, Download(to="b.tar.gz", url=server.url("b"), unpack=True))
    assert got.files == 3


def test_a_disk_too_small(server: FileServer, tmp_path: Path):
    server.add("a", WORDS, stated=10**18)
    said = refused(tmp_path, Download(to="a", url=server.url("a")))
    assert "a needs 1,000,000,000.00 GB more" in said
    assert "GB free" in said
    assert server.log[0].status == 200
    assert left(tmp_path) == set()


# what is there already


def test_files_put_there_by_hand_are_compared(server: FileServer, tmp_path: Path):
    server.add("a", WORDS)
    for known in ({}, {"size": len(WORDS)}, {"sha256": SHA}):
        folder = tmp_path / str(len(known) + ("sha256" in known))
        folder.mkdir()
        download = Download(to="a", url=server.url("a"), **known)
        (folder / "a").write_bytes(WORDS)
        assert piece(folder, download).state == "unchecked"
        sent = sum(a.sent for a in server.log if known)
        (got,) = fetch(folder, download)
        assert not got.new
        assert sum(a.sent for a in server.log if known) == sent
        (folder / "a").write_bytes(WORDS[:1000])
        lines: list[str] = []
        (got,) = fetch(folder, download, lines=lines)
        assert got.new
        assert f"{folder / 'a'} has changed since" in lines[0]
        assert "1,000 bytes where 300,000 are expected; fetching it again" in lines[1] or "sha256 is" in lines[1]
        assert (folder / "a").read_bytes() == WORDS
        (folder / "a").unlink()
        (got,) = fetch(folder, download, lines=lines)
        assert got.new
        assert "is gone" in lines[-1]


def test_a_folder_that_cannot_be_written(server: FileServer, tmp_path: Path):
    server.add("a", WORDS)
    (tmp_path / "file").write_text("in the way")
    said = refused(tmp_path / "file" / "set", Download(to="a", url=server.url("a")))
    assert "cannot write to" in said
    assert "--data-dir" in said
    assert not server.log


READ_ONLY = """
import os, sys, filelock, httpx2, gradscope.data.fetch as f, gradscope.data.info as i  # all before the rights are gone
from pathlib import Path
folder, url = Path(sys.argv[1]), sys.argv[2]
folder.mkdir()
folder.chmod(0o500)
folder.parent.chmod(0o755)
if os.getuid() == 0:
    os.chown(folder, 65534, 65534)
    os.setgid(65534)
    os.setuid(65534)
info = i.DataInfo(title="", homepage="", licence="", citation="", layout=(), how="", downloads=(i.Download(to="a", url=url),))
try:
    f.Fetcher()(info, folder)
except ValueError as error:
    print(error)
"""


def test_a_read_only_folder(server: FileServer, tmp_path_factory: pytest.TempPathFactory):
    import tempfile

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "set"
        done = subprocess.run([sys.executable, "-c", READ_ONLY, folder, server.url("a")], capture_output=True, text=True, check=False)
        assert f"cannot write to {folder}: Permission denied" in done.stdout, done.stderr


def test_a_whole_set_may_lie_where_nothing_can_be_written(server: FileServer, tmp_path: Path):
    """The lock is a folder here, so that taking it would fail for every user, the system's own included."""
    server.add("a", WORDS)
    download = Download(to="a", url=server.url("a"))
    fetch(tmp_path, download)
    (tmp_path / ".fetch/lock").unlink(missing_ok=True)
    (tmp_path / ".fetch/lock").mkdir()
    assert not fetch(tmp_path, download)[0].new
    (tmp_path / "a").unlink()
    assert "cannot write to" in refused(tmp_path, download)


TWO = """
import sys, gradscope.data.fetch as f, gradscope.data.info as i
from pathlib import Path
folder, url, sha256 = Path(sys.argv[1]), *sys.argv[2:]
download = i.Download(to="a", url=url, sha256=sha256)
info = i.DataInfo(title="", homepage="", licence="", citation="", layout=(), how="", downloads=(download,))
print(f.Fetcher()(info, folder)[0].new)
"""


def test_two_processes_at_once(server: FileServer, tmp_path: Path):
    server.add("a", WORDS)
    command = [sys.executable, "-c", TWO, tmp_path, server.url("a"), SHA]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate(timeout=120)[0].splitlines()[-1] for one in both]
    assert sorted(said) == ["False", "True"]
    assert [a.status for a in server.log] == [200]
    assert (tmp_path / "a").read_bytes() == WORDS


def test_a_second_one_says_that_it_waits(server: FileServer, tmp_path: Path):
    from filelock import FileLock

    server.add("a", WORDS)
    (tmp_path / ".fetch").mkdir()
    lines: list[str] = []
    with FileLock(tmp_path / ".fetch/lock"):
        waiting = threading.Thread(target=lambda: fetch(tmp_path, Download(to="a", url=server.url("a")), lines=lines))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert lines == [f"another process is fetching into {tmp_path}; waiting for it"]
    waiting.join(10)
    assert (tmp_path / "a").read_bytes() == WORDS


# archives


PICTURES = {"images/a.jpg": b"a" * 1000, "images/deep/b.jpg": b"b", "list.json": b"{}"}


@pytest.mark.parametrize("ending", [".zip", ".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz"])
def test_archives_are_unpacked_once(server: FileServer, tmp_path: Path, ending: str):
    mode = {".tar": "w", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}.get(ending, "w:gz")
    server.add("a", zipped(PICTURES) if ending == ".zip" else tarred(PICTURES, mode), troubles=[("cut", 0.4)])
    download = Download(to=f"sub/set{ending}", url=server.url("a"), unpack=True, makes="sub/images")
    (got,) = fetch(tmp_path, download)
    assert got.files == 3
    assert {name: (tmp_path / "sub" / name).read_bytes() for name in PICTURES} == PICTURES
    assert left(tmp_path) == {*(f"sub/{name}" for name in PICTURES), f".fetch/sub__set{ending}.json"}
    assert not fetch(tmp_path, download)[0].new
    (tmp_path / "sub/images/a.jpg").write_bytes(b"cut")
    (tmp_path / "sub/list.json").unlink()
    (tmp_path / "sub/.unpack-stopped/x").mkdir(parents=True)
    lines: list[str] = []
    assert fetch(tmp_path, download, lines=lines)[0].new
    assert f"2 of 3 files of sub/set{ending} are missing or changed (first: images/a.jpg)" in lines[0]
    assert {name: (tmp_path / "sub" / name).read_bytes() for name in PICTURES} == PICTURES


def test_what_an_archive_makes_may_be_there_by_hand(server: FileServer, tmp_path: Path):
    download = Download(to="set.zip", url=server.url("a"), unpack=True, makes="images")
    (tmp_path / "images").mkdir()
    (got,) = fetch(tmp_path, download)
    assert (got.new, got.checked) == (False, "nothing: put there by hand")
    assert not server.log


def test_an_archive_that_is_there_is_unpacked_without_fetching(server: FileServer, tmp_path: Path):
    content = zipped(PICTURES)
    (tmp_path / "set.zip").write_bytes(content)
    download = Download(to="set.zip", url=server.url("a"), unpack=True, sha256=hashlib.sha256(content).hexdigest())
    (got,) = fetch(tmp_path, download)
    assert (got.new, got.files) == (False, 3)
    assert not server.log


def link(name: str, target: str, kind: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)
    return made.getvalue()


def zip_link() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        member = zipfile.ZipInfo("link")
        member.create_system, member.external_attr = 3, 0o120777 << 16
        archive.writestr(member, "/etc/passwd")
    return made.getvalue()


BAD_ARCHIVES = {
    "climbs.zip": (zipped({"good": b"1", "../out": b"x"}), "'../out' could lead outside"),
    "climbs.tar.gz": (tarred({"good": b"1", "a/../../out": b"x"}), "could lead outside"),
    "root.tar": (tarred({"/out": b"x"}, "w"), "'/out' could lead outside"),
    "drive.zip": (zipped({"c:/out": b"x"}), "could lead outside"),
    "backslash.tar": (tarred({"..\\out": b"x"}, "w"), "could lead outside"),
    "symbolic.tar.gz": (link("link", "/etc/passwd", tarfile.SYMTYPE), "'link' is neither a file nor a folder"),
    "hard.tar.gz": (link("link", "../x", tarfile.LNKTYPE), "'link' is neither"),
    "device.tar.gz": (link("null", "", tarfile.CHRTYPE), "'null' is neither"),
    "link.zip": (zip_link(), "'link' is neither"),
    "twice.tar": (tarred({"a": b"1", "./a": b"2"}, "w"), "holds 'a' twice"),
    "collide.tar": (tarred({"a": b"1", "a/b": b"2"}, "w"), "collide"),
    "empty.zip": (zipped({}), "holds no files"),
    "cut.tar.gz": (tarred({"a": random.Random(1).randbytes(5000)})[:-2000], "damaged"),
    "cut.tar": (tarred({"a": bytes(5000)}, "w")[:3000], "damaged"),
    "cut.zip": (zipped({"a": bytes(5000)})[:-5], "damaged"),
}


def flipped() -> bytes:
    content = bytearray(zipped({"a": random.Random(2).randbytes(5000)}))
    content[3000] ^= 1
    return bytes(content)


BAD_ARCHIVES["flipped.zip"] = (flipped(), "damaged")


@pytest.mark.parametrize("name", sorted(BAD_ARCHIVES))
def test_bad_archives_leave_nothing(tmp_path: Path, name: str):
    content, words = BAD_ARCHIVES[name]
    archive = tmp_path / "in" / name
    archive.parent.mkdir()
    archive.write_bytes(content)
    with pytest.raises(ValueError) as error:
        unpack(archive, tmp_path / "out")
    assert words in str(error.value)
    assert str(archive) in str(error.value)
    assert left(tmp_path) == {f"in/{name}"}
    assert list((tmp_path / "out").iterdir()) == []


def test_bombs(tmp_path: Path, monkeypatch):
    """A flood of zeros, in one file and in many; and too many files."""
    monkeypatch.setattr(unpacking, "ALLOWANCE", 2**20)
    for name, content in {
        "one.zip": zipped({"a": bytes(20 * 2**20)}),
        "many.tar.gz": tarred({str(k): bytes(2**20) for k in range(20)}),
        "one.tar.xz": tarred({"a": bytes(20 * 2**20)}, "w:xz"),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="more than 100 times its size"):
            unpack(tmp_path / name, tmp_path / "out")
    monkeypatch.setattr(unpacking, "MOST_FILES", 2)
    (tmp_path / "three.zip").write_bytes(zipped(PICTURES))
    with pytest.raises(ValueError, match="more than 2 files"):
        unpack(tmp_path / "three.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_refused_archive_is_put_aside(server: FileServer, tmp_path: Path):
    server.add("a", zipped({"../out": b"x"}))
    said = refused(tmp_path / "set", Download(to="a.zip", url=server.url("a"), unpack=True))
    assert f"kept as {tmp_path / 'set' / 'a.zip.bad'}" in said
    assert left(tmp_path) == {"set/a.zip.bad"}


# the hub, by its own client


@pytest.fixture
def hub(server: FileServer, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    return server


COMMIT = "c" * 40


def put(hub: FileServer, name: str, content: bytes, etag: str, *, elsewhere: bool) -> None:
    """A small file is answered directly; a large one is a redirect to a store on another host."""
    for revision in ("main", COMMIT):
        path = f"datasets/org/set/resolve/{revision}/{name}"
        headers = {"X-Repo-Commit": COMMIT}
        if elsewhere:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
            hub.add(path, b"", headers=headers, always=("redirect", hub.url(f"store/{name}", "localhost")))
        else:
            hub.add(path, content, etag=f'"{etag}"', headers=headers)
    if elsewhere:
        hub.add(f"store/{name}", content, etag='"of-the-store"')


def hub_file(name: str, **known) -> Download:
    return Download(to=name, hub="org/set", hub_file=name, **known)


def test_a_large_hub_file(hub: FileServer, tmp_path: Path):
    put(hub, "a.bin", WORDS, SHA, elsewhere=True)
    hub.files["/store/a.bin"].troubles = [("cut", 0.4), ("cut", 0.4)]
    (got,) = fetch(tmp_path, hub_file("a.bin"))
    assert (got.checked, (tmp_path / "a.bin").read_bytes()) == ("sha256", WORDS)
    store = [a for a in hub.log if a.path.startswith("/store")]
    assert [a.status for a in store] == [200, 206, 206]
    assert not any("authorization" in a.headers for a in store), "the login stays with the hub"
    asked = [a for a in hub.log if a.path.startswith("/datasets")]
    assert all(a.headers["authorization"] == "Bearer hf_of_the_tests" for a in asked)
    assert {a.path.split("/")[5] for a in asked if a.method == "GET"} == {COMMIT}, "pinned to the commit"


def test_a_small_hub_file_is_checked_by_its_git_hash(hub: FileServer, tmp_path: Path):
    text = b"captions\n"
    blob = subprocess.run(["git", "hash-object", "--stdin"], input=text, capture_output=True, check=True).stdout.decode().strip()
    put(hub, "good.json", text, blob, elsewhere=False)
    assert fetch(tmp_path, hub_file("good.json"))[0].checked == "git hash"
    put(hub, "bad.json", text, "0" * 40, elsewhere=False)
    assert f"expected {'0' * 40}" in refused(tmp_path, hub_file("bad.json"))


def test_hub_files_corrupt_or_other_than_published(hub: FileServer, tmp_path: Path):
    put(hub, "a.bin", WORDS[::-1], SHA, elsewhere=True)
    assert f"expected {SHA}" in refused(tmp_path, hub_file("a.bin"))
    put(hub, "b.bin", WORDS, SHA, elsewhere=True)
    assert f"expected {'1' * 64}" in refused(tmp_path, hub_file("b.bin", sha256="1" * 64)), "what we know goes before what the hub says"


def test_hub_refusals(hub: FileServer, tmp_path: Path, monkeypatch):
    path = "datasets/org/set/resolve/main/"
    cases = {
        "gated.json": (("status", 403, {"X-Error-Code": "GatedRepo"}), "accept the terms"),
        "none.json": (("status", 404, {"X-Error-Code": "RepoNotFound"}), "no such data set"),
        "gone.json": (("status", 404, {"X-Error-Code": "EntryNotFound"}), "cannot be looked up"),
        "busy.json": (("status", 503, {}), "cannot be looked up"),
        "page.json": (("html",), "not answered by a hub"),
    }
    for name, (trouble, words) in cases.items():
        hub.add(path + name, b"", always=trouble)
        said = refused(tmp_path, hub_file(name))
        assert words in said
        assert f"'{name}' of the hub's data set 'org/set'" in said
    put(hub, "soon.json", b"{}", "", elsewhere=False)
    hub.files["/" + path + "soon.json"].troubles = [("status", 503, {})]
    assert fetch(tmp_path, hub_file("soon.json"))[0].new
    with serving() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url("").rstrip("/"))
    assert "cannot be looked up" in refused(tmp_path, hub_file("gated.json"))


# plan, choice, folders


def test_plan_writes_nothing(server: FileServer, tmp_path: Path):
    server.add("a", WORDS)
    downloads = (
        Download(to="a", url=server.url("a")),
        Download(to="b", url=server.url("b"), size=7),
        Download(to="c", url=server.url("c")),
        Download(to="d.zip", url=server.url("d"), unpack=True, makes="d*"),
    )
    folder = tmp_path / "set"
    plan = Fetcher(patience=QUICK).plan(info_of(*downloads), folder)
    assert [(p.state, p.size) for p in plan] == [("missing", len(WORDS)), ("missing", 7), ("missing", None), ("missing", None)]
    assert "404" in plan[2].why
    assert not folder.exists()
    folder.mkdir()
    (folder / "d1").write_text("")
    (folder / "b").write_text("")
    assert [p.state for p in Fetcher(patience=QUICK).plan(info_of(*downloads), folder)] == [
        "missing",
        "unchecked",
        "missing",
        "by hand",
    ]


def test_only(server: FileServer, tmp_path: Path):
    server.add("a", WORDS)
    info = info_of(Download(to="a.json", url=server.url("a")), Download(to="b.zip", url=server.url("none")))
    Fetcher(patience=QUICK)(info, tmp_path, only="*.json")
    assert (tmp_path / "a.json").exists()
    with pytest.raises(ValueError, match=r"no download is called '\*.csv'; there are a.json, b.zip"):
        Fetcher(patience=QUICK)(info, tmp_path, only="*.csv")


def test_where_it_goes(tmp_path: Path, monkeypatch):
    layout = ("a.json  captions", "or a.csv, b.csv  captions", "images/*.jpg  pictures", "also more.json  more", "a remark")
    info = info_of(layout=layout)
    assert info.needs() == [("a.json", "a.csv, b.csv"), ("images/*.jpg",)]
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    assert fetch_folder("set", info) == tmp_path / "cache/data/set"
    monkeypatch.setenv("GRADSCOPE_DATA", str(tmp_path / "mine"))
    assert fetch_folder("set", info) == tmp_path / "mine/set"
    assert fetch_folder("set", info, tmp_path / "given") == tmp_path / "given/set"
    assert on_disk("set", info).state == "no"
    (tmp_path / "cache/data/set/images").mkdir(parents=True)
    (tmp_path / "cache/data/set/a.json").write_text("")
    found = on_disk("set", info)
    assert (found.state, found.folder, found.missing) == ("partly", tmp_path / "cache/data/set", ("images/*.jpg",))
    assert fetch_folder("set", info) == tmp_path / "cache/data/set", "where it is already"
    (tmp_path / "mine/images").mkdir(parents=True)
    (tmp_path / "mine/images/x.jpg").write_text("")
    assert on_disk("set", info).folder == tmp_path / "cache/data/set", "a folder of another name counts only if whole"
    (tmp_path / "mine/a.csv").write_text("")
    assert on_disk("set", info).folder == tmp_path / "cache/data/set", "one of two is not enough"
    (tmp_path / "mine/b.csv").write_text("")
    found = on_disk("set", info)
    assert (found.state, found.folder) == ("yes", tmp_path / "mine")
