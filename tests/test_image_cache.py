"""Cached pictures: the twin is the path that decodes each time, to the bit. Kills, damage, changes, two processes."""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradscope.data import content_digests as digests
from gradscope.data import image_cache
from gradscope.data.image_cache import ROW, cached_pixels
from gradscope.data.members import Member
from gradscope.data.pixels import DECODES, PixelPath, pixel_path
from gradscope.paths import cache_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(folder: Path, count: int, suffix: str = "jpg") -> list[str]:
    rng = np.random.default_rng(secrets.randbits(31))
    folder.mkdir(exist_ok=True)
    paths = []
    for i in range(count):
        height, width = (int(v) for v in rng.integers(30, 200, 2))
        path = folder / f"{i}.{suffix}"
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        paths.append(str(path))
    return paths


def files(own_cache: Path) -> tuple[Path, Path]:
    (folder,) = (own_cache / "images").iterdir()
    return folder / "levels.bin", folder / "index.bin"


def same(cache, read: PixelPath, paths: list[str]) -> bool:
    return all(torch.equal(cache(path), read(path)) for path in paths)


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("settings", [{"size": 32}, {"size": (24, 40), "resize_mode": "longest", "fill_color": 7}])
def test_equal_to_decoding_bit_for_bit(tmp_path, decode, settings):
    paths = [*make(tmp_path / "a", 9), *make(tmp_path / "b", 4, "png")]
    read = pixel_path(settings, decode)
    first, again = cached_pixels(paths, read), cached_pixels(paths[::-1], read)
    assert same(first, read, paths)
    assert same(pickle.loads(pickle.dumps(again)), read, paths), "as a worker process gets it"
    assert first(paths[0]).dtype == torch.float32


def test_a_second_run_decodes_nothing_and_says_so(tmp_path, own_cache, monkeypatch):
    paths, read, said = make(tmp_path / "a", 5), pixel_path({"size": 16}), []
    cached_pixels(paths, read, say=said.append)
    monkeypatch.setattr(PixelPath, "levels", None)
    copies = [shutil.copy(path, tmp_path / f"copy{i}.jpg") for i, path in enumerate(paths)]
    cached_pixels([*paths, *map(str, copies)], read, say=said.append)
    assert "5 pictures of 16 x 16" in said[0]
    assert "5 to decode now" in said[0]
    assert "all decoded before" in said[1], "copies hold the same"
    assert files(own_cache)[0].stat().st_size == 5 * 3 * 16 * 16
    assert files(own_cache)[1].stat().st_size == 5 * ROW


def test_settings_that_change_levels_have_files_of_their_own(tmp_path, own_cache, monkeypatch):
    paths = make(tmp_path / "a", 2)
    for settings in ({"size": 16}, {"size": 16, "mean": (0.1,) * 3}, {"size": 17}, {"size": 16, "interpolation": "bilinear"}):
        cached_pixels(paths, pixel_path(settings))
    assert len(list((own_cache / "images").iterdir())) == 3, "the mean is applied on reading"
    cached_pixels(paths, pixel_path({"size": 16}, "exact"))
    monkeypatch.setattr("PIL.__version__", "0")
    cached_pixels(paths, pixel_path({"size": 16}))
    assert len(list((own_cache / "images").iterdir())) == 5


def test_a_picture_that_changed_is_noticed_whatever_its_date(tmp_path):
    paths, read = make(tmp_path / "a", 3, "bmp"), pixel_path({"size": 16})
    cached_pixels(paths, read)
    before = Path(paths[1]).stat()
    data = bytearray(Path(paths[1]).read_bytes())
    data[-900:] = bytes(secrets.randbits(8) for _ in range(900))
    Path(paths[1]).write_bytes(data)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Path(paths[1]).stat().st_size == before.st_size
    assert same(cached_pixels(paths, read), read, paths)


def test_files_that_have_settled_are_not_read_again(tmp_path, monkeypatch):
    paths, read = make(tmp_path / "a", 3), pixel_path({"size": 16})
    monkeypatch.setattr(digests, "FRESH", 0.0)
    time.sleep(0.01)
    cached_pixels(paths, read)
    monkeypatch.setattr(digests, "file_digest", None)
    cached_pixels(paths, read)
    assert (cache_folder() / "content_digests.bin").stat().st_size == 3 * 32


def test_fresh_files_are_not_remembered(tmp_path):
    paths = make(tmp_path / "a", 2)
    found = digests.content_digests(paths)
    assert not (cache_folder() / "content_digests.bin").exists()
    assert found[paths[0]] != found[paths[1]]
    assert digests.content_digests([str(tmp_path / "none")]) == {str(tmp_path / "none"): bytes(16)}


def test_damaged_levels_are_decoded_again_and_mended(tmp_path, own_cache, capsys):
    paths, read = make(tmp_path / "a", 4), pixel_path({"size": 16})
    cached_pixels(paths, read)
    levels, _ = files(own_cache)
    whole = levels.read_bytes()
    levels.write_bytes(whole[:800] + bytes([whole[800] ^ 1]) + whole[801:])
    cache = cached_pixels(paths, read)
    assert same(cache, read, paths)
    assert cache.damaged == 1
    assert "1 damaged" in capsys.readouterr().err
    assert levels.read_bytes() == whole
    assert same(cache, read, paths)
    assert cache.damaged == 1


@pytest.mark.parametrize("place", [3, 17, 22])  # of the digest, of the levels' checksum, of the row's own
def test_damaged_rows_are_made_again(tmp_path, own_cache, place):
    paths, read, said = make(tmp_path / "a", 4), pixel_path({"size": 16}), []
    cached_pixels(paths, read)
    _, index = files(own_cache)
    data = bytearray(index.read_bytes())
    data[ROW + place] ^= 16
    index.write_bytes(data)
    assert same(cached_pixels(paths, read, say=said.append), read, paths)
    assert "1 to decode now" in said[0]
    assert "(1 damaged entry left out)" in said[0]


@pytest.mark.parametrize("torn", ["levels", "index"])
def test_torn_files_are_taken_up_again(tmp_path, own_cache, torn):
    paths, read = make(tmp_path / "a", 6), pixel_path({"size": 16})
    cached_pixels(paths, read)
    file = files(own_cache)[0 if torn == "levels" else 1]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - secrets.randbelow(ROW * 2) - 1)
    cache = cached_pixels(paths, read)
    assert same(cache, read, paths)
    assert cache.damaged == 0
    assert files(own_cache)[1].stat().st_size == 6 * ROW


SCRIPT = """
import sys, time
pause = float(sys.argv.pop(1))
from gradscope.data.image_cache import cached_pixels
from gradscope.data.pixels import PixelPath, pixel_path
levels = PixelPath.levels
def slow(self, path):
    time.sleep(pause)
    return levels(self, path)
PixelPath.levels = slow
print("ready", flush=True)
cached_pixels(sys.argv[1:], pixel_path({"size": 16}), say=lambda line: print(line, flush=True))
"""


def start(paths: list[str], pause: float = 0.02) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(pause), *paths], stdout=subprocess.PIPE, text=True)


def test_killed_and_two_at_once(tmp_path, own_cache):
    """One process is killed in the middle; then two fill the rest together, and neither decodes what is there."""
    paths, read = make(tmp_path / "a", 60), pixel_path({"size": 16})
    killed = start(paths, pause=0.1)
    deadline = time.monotonic() + 120
    index = own_cache / "images" / image_cache._name(read) / "index.bin"
    while time.monotonic() < deadline and not (index.is_file() and index.stat().st_size >= 10 * ROW):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = index.stat().st_size // ROW
    assert 10 <= done < 60
    both = [start(paths), start(paths)]
    words = "".join(process.communicate(timeout=120)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert f"{60 - done} to decode now" in words
    assert "all decoded before" in words
    assert index.stat().st_size == 60 * ROW
    assert same(cached_pixels(paths, read), read, paths)


def test_workers_write_the_same(tmp_path, own_cache):
    paths, read = make(tmp_path / "a", 40), pixel_path({"size": 16})
    cached_pixels(paths, read, workers=2)
    one = files(own_cache)[0].read_bytes()
    shutil.rmtree(own_cache)
    cached_pixels(paths, read)
    assert files(own_cache)[0].read_bytes() == one


def test_members_of_a_tar_file(tmp_path):
    paths, read = make(tmp_path / "a", 5), pixel_path({"size": 16})
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in paths:
            tar.add(path, Path(path).name)
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = [Member(shard=str(tmp_path / "a.tar"), offset=m.offset_data, size=m.size, name=m.name).path() for m in tar]
    said: list[str] = []
    cached_pixels(paths, read)
    assert same(cached_pixels(members, read, say=said.append), read, members)
    assert "all decoded before" in said[0], "a member holds what the file holds"


def test_refusals_name_the_picture_or_the_room(tmp_path, own_cache, monkeypatch):
    paths, read = make(tmp_path / "a", 3), pixel_path({"size": 16})
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"bad\.jpg' cannot be decoded"):
        cached_pixels([*paths, str(bad)], read)
    with pytest.raises(ValueError, match=r"none\.jpg' does not exist"):
        cached_pixels([str(tmp_path / "none.jpg")], read)
    monkeypatch.setattr(image_cache, "SPARE", 2**60)
    cached_pixels(paths, read)  # nothing left to write
    with pytest.raises(ValueError, match=r"needs 0\.0 MB in .* are free; make room"):
        cached_pixels(make(tmp_path / "b", 1), read)
    monkeypatch.setenv("GRADSCOPE_CACHE", str(bad / "below a file"))
    with pytest.raises(ValueError, match="cannot be written"):
        cached_pixels(paths, read)


def test_a_full_cache_needs_no_right_to_write(tmp_path, monkeypatch):
    """As on a read-only disk, where no lock can be made; the twin of a permission, which root does not feel."""
    paths, read = make(tmp_path / "a", 3), pixel_path({"size": 16})
    cached_pixels(paths, read)

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(image_cache, "FileLock", refused)
    assert same(cached_pixels(paths, read), read, paths)
    with pytest.raises(ValueError, match="cannot be written: Read-only file system"):
        cached_pixels(make(tmp_path / "b", 1), read)


@pytest.mark.parametrize("looked", [False, True])
def test_a_folder_deleted_during_a_run_costs_time_only(tmp_path, own_cache, capsys, looked):
    paths, read = make(tmp_path / "a", 3), pixel_path({"size": 16})
    cache = cached_pixels(paths, read)
    if looked:
        cache(paths[0])
    shutil.rmtree(own_cache)
    assert same(cache, read, paths)
    assert same(pickle.loads(pickle.dumps(cache)), read, paths)
    assert "gone" in capsys.readouterr().err


def test_no_pictures(own_cache):
    assert cached_pixels([], pixel_path({"size": 16})).slots == {}


def test_a_file_whose_bytes_could_not_be_read_is_not_kept(tmp_path, own_cache, monkeypatch):
    """Else the digest of "unreadable" would stand for this picture, and for the next file that cannot be read."""
    paths, read = make(tmp_path / "a", 1), pixel_path({"size": 16})
    monkeypatch.setattr(digests, "file_digest", lambda path, contents: bytes(16))
    with pytest.raises(ValueError, match=r"0\.jpg' changed while it was read"):
        cached_pixels(paths, read)
    assert files(own_cache)[1].stat().st_size == 0


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    paths, read = make(tmp_path / "a", 2), pixel_path({"size": 16})
    levels = PixelPath.levels

    def changing(self, path):
        found = levels(self, path)
        with Path(path).open("ab") as file:
            file.write(b"x")
        return found

    monkeypatch.setattr(PixelPath, "levels", changing)
    with pytest.raises(ValueError, match="changed while it was read"):
        cached_pixels(paths, read)
    monkeypatch.undo()
