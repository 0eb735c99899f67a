"""Tar files of samples: read as WebDataset reads them, pictures by their place, every fault named, remote copies whole or not there."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

import braceexpand
import fsspec
import pytest
import torch
import webdataset
from file_server import FileServer, serving
from PIL import Image
from shard_files import pair, pairs, picture, tar_of
from webdataset.tariterators import base_plus_ext

from gradscope.data import shard_index
from gradscope.data.captions import read_captions
from gradscope.data.identity import file_digest, file_size
from gradscope.data.images import load_rgb, missing_pictures
from gradscope.data.members import Member, content, content_size, is_there, member
from gradscope.data.picture_facts import picture_facts
from gradscope.data.pixels import PixelPath
from gradscope.data.shard_fetch import ShardFetcher, copy_of
from gradscope.data.shard_index import beside, index_of, key_and_ending, load, save, scan
from gradscope.data.shard_names import MANIFEST, Shard, expand, file_label, find_shards
from gradscope.data.source import open_data
from gradscope.data.transfer import Patience
from gradscope.data.usable import bad_pictures
from gradscope.evaluation_file import default_path
from gradscope.paths import shown_name

QUICK = Patience(tries=3, pause=0.01, timeout=5)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture
def server():
    with serving() as running:
        yield running


def read(name: object, split: str = "all", **keys: str):
    return open_data(str(name), **keys).read(split)


def refused(name: object, *words: str, split: str = "all", **keys: str) -> str:
    with pytest.raises(ValueError) as caught:
        read(name, split, **keys)
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said
    return said


def note_with(notes: tuple[str, ...], *words: str) -> str:
    found = [note for note in notes if all(word in note for word in words)]
    assert len(found) == 1, notes
    return found[0]


# ---- a picture's path


def test_a_member_is_read_by_its_place_and_is_no_file_name(tmp_path):
    bytes_ = secrets.token_bytes(900)
    tar = tar_of(tmp_path / "a.tar", [("./first.txt", b"x"), ("./dir/../x/e.jpg", bytes_)])
    found = Member(shard=str(tar), offset=1536, size=900, name="./dir/../x/e.jpg")
    path = found.path()
    assert path == f"{tar}/@1536+900/dir/x/e.jpg"
    assert os.path.normpath(path) == path
    assert member(path).read() == bytes_
    assert content(path, 100, 50) == bytes_[100:150]
    assert content(path, 880, 50) == bytes_[880:]
    assert (content_size(path), file_size(path), is_there(path)) == (900, 900, True)
    os.truncate(tar, 1536 + 899)
    assert (is_there(path), file_size(path)) == (False, -1)
    with pytest.raises(ValueError, match="has become shorter"):
        content(path)
    assert not is_there(Member(shard=str(tmp_path / "no.tar"), offset=0, size=1, name="e.jpg").path())
    assert member("photos/a.jpg") is None
    assert member(tmp_path / "x.tar" / "a.jpg") is None


def test_a_folder_that_is_called_like_a_tar_holds_files(tmp_path):
    path = tmp_path / "b.tar" / "@1+2" / "a.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(picture("PNG"))
    assert member(path) is None
    assert load_rgb(path).size == (16, 12)
    assert file_size(str(path)) == path.stat().st_size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("decode", ["exact", "fast", "scaled"])
def test_a_member_gives_the_bits_of_the_file(tmp_path, kind, decode):
    bytes_ = picture(kind, 300)
    file = tmp_path / "a.img"
    file.write_bytes(bytes_)
    place = index_of(tar_of(tmp_path / "t.tar", [("z.txt", b"first"), (f"a.{kind.lower()}", bytes_)])).runs[1].pieces[0]
    path = Member(shard=str(tmp_path / "t.tar"), offset=place.offset, size=place.size, name=f"a.{kind.lower()}").path()
    pixels = PixelPath(size=(32, 32), decode=decode)
    assert torch.equal(pixels(file), pixels(path))
    assert picture_facts(path) == picture_facts(str(file))
    for contents in ("ends", "whole"):
        assert file_digest(path, contents) == file_digest(str(file), contents)


def test_a_shard_replaced_in_use_gives_no_picture_of_another_caption(tmp_path):
    """One sample more in front, and the places of "b" hold the picture of "a", which decodes."""
    photo = picture("BMP")
    tar = tar_of(tmp_path / "0.tar", [m for k in "abc" for m in ((f"{k}.bmp", photo), (f"{k}.txt", b"x"))])
    images = [str(record.image) for record in read(tar).records]
    again = tar_of(tmp_path / "again" / "0.tar", [m for k in "zabc" for m in ((f"{k}.bmp", photo), (f"{k}.txt", b"x"))])
    again.replace(tar)
    for image in images:
        with pytest.raises(ValueError, match=r"0\.tar.*rewritten since it was indexed"):
            load_rgb(image)
    tar_of(tar, [("a.bmp", photo[:-1]), ("a.txt", b"x")])
    with pytest.raises(ValueError, match="rewritten"):
        load_rgb(images[0])


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize(
    "name", ["./d/a", "x" * 97, "x" * 101, "d" * 90 + "/" + "e" * 60, "é" * 60, "a\\b", "/abs/../a", "d" * 97 + "/a"]
)
def test_names_of_every_form_of_tar_are_known_again(tmp_path, format_, name):
    content_, text = picture(), b"caption"
    try:
        with tarfile.open(tmp_path / "0.tar", "w", format=format_) as tar:
            for ending, held in (("jpg", content_), ("txt", text)):
                entry = tarfile.TarInfo(f"{name}.{ending}")
                entry.size = len(held)
                tar.addfile(entry, io.BytesIO(held))
    except ValueError:
        assert format_ == tarfile.USTAR_FORMAT  # it has no room for such a name
        return
    assert [content(record.image) for record in read(tmp_path / "0.tar").records] == [content_]


def test_bad_members_have_the_words_of_bad_files(tmp_path):
    whole = picture("PNG", 40)
    bad = {"empty": b"", "page": b"<html>", "noise": secrets.token_bytes(900), "cut": whole[: len(whole) // 2]}
    tar_of(tmp_path / "t.tar", [m for name, b in bad.items() for m in ((f"{name}.png", b), (f"{name}.txt", b"x"))])
    records = {record.id: str(record.image) for record in read(tmp_path / "t.tar").records}
    found = bad_pictures(list(records.values()))
    for name, bytes_ in bad.items():
        file = tmp_path / f"{name}.png"
        file.write_bytes(bytes_)
        assert found[records[name]] == bad_pictures([str(file)])[str(file)]
        assert records[name] in picture_facts(records[name]).reason


# ---- the index


def test_keys_are_those_of_webdataset():
    """Save hidden files, of which its pattern makes keys that end in a slash."""
    letters = random.Random(secrets.token_bytes(8))
    for _ in range(5000):
        name = "".join(letters.choice("aB./_é") for _ in range(letters.randint(1, 12)))
        base = name.rpartition("/")[2]
        if not base.startswith(".") and not base.endswith("."):
            assert (key_and_ending(name) or (None, None)) == base_plus_ext(name), name
    assert key_and_ending("d/._a.jpg") is None


def test_samples_are_those_of_webdataset(tmp_path):
    """Random keys with folders, dots, spaces, non-ASCII and long names; every byte at its place."""
    letters = random.Random(secrets.token_bytes(8))
    keys = {"".join(letters.choice("ab é赤-/x") for _ in range(letters.randint(1, 150))).strip("/ ") or "k" for _ in range(40)}
    keys = {key.replace("//", "/").replace("/ ", "/").replace("/./", "/") for key in keys}
    members = [(f"{k}.{e}", secrets.token_bytes(letters.randint(0, 1500))) for k in sorted(keys) for e in ("jpg", "a.b.txt", "cls")]
    tar = tar_of(tmp_path / "r.tar", members)
    index = scan(tar)
    theirs = list(webdataset.WebDataset(str(tar), shardshuffle=False))
    assert [run.key for run in index.runs] == [sample["__key__"] for sample in theirs]
    bytes_ = tar.read_bytes()
    for run, sample in zip(index.runs, theirs, strict=True):
        ours = {piece.ending: bytes_[piece.offset : piece.offset + piece.size] for piece in run.pieces}
        assert ours == {ending: sample[ending] for ending in ("jpg", "a.b.txt", "cls")}
        text = next(piece.text for piece in run.pieces if piece.ending == "a.b.txt")
        assert text.encode("utf-8", "surrogateescape") == sample["a.b.txt"]


def test_an_index_is_kept_and_made_anew_when_the_tar_changes(tmp_path):
    tar = tar_of(tmp_path / "t.tar", pairs("ab"))
    first = index_of(tar)
    kept = next((tmp_path / "cache" / "shard_indexes").glob("*.jsonl"))
    made = kept.stat().st_mtime_ns
    assert index_of(tar) == first == scan(tar)
    assert kept.stat().st_mtime_ns == made
    changed = bytearray(tar.read_bytes())
    place = next(piece for piece in first.runs[0].pieces if piece.ending == "txt")
    changed[place.offset] ^= 1
    tar.write_bytes(changed)  # another text of the same size
    assert index_of(tar) != first
    kept.write_text(kept.read_text()[:-20])
    assert index_of(tar) == scan(tar)
    save(beside(tar), scan(tar_of(tmp_path / "other.tar", pairs("cd"))))
    assert [run.key for run in index_of(tar).runs] == ["a", "b"]
    assert load(tmp_path / "none", tar) is None


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "file"))
    assert [r.id for r in read(tar_of(tmp_path / "t.tar", pairs("ab"))).records] == ["a", "b"]
    with pytest.raises(FileNotFoundError):
        index_of(tmp_path / "none.tar")


def test_what_belongs_to_no_sample_is_counted(tmp_path):
    tar = tmp_path / "t.tar"
    with tarfile.open(tar, "w") as file:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        for name, kind in (("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE), ("p.jpg", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "a.jpg"
            file.addfile(entry)
        for name, bytes_ in [
            ("__meta__/x.json", b"{}"),
            ("._a.jpg", b"mac"),
            ("README", b"r"),
            ("./a.jpg", picture()),
            ("a.txt", b"one"),
        ]:
            entry = tarfile.TarInfo(name)
            entry.size = len(bytes_)
            file.addfile(entry, io.BytesIO(bytes_))
        entry = tarfile.TarInfo("\udcff.jpg")
        file.addfile(entry)
    found = read(tar)
    assert [record.id for record in found.records] == ["a"]
    for words, count in (("links", 3), ("metadata", 1), ("hidden", 2), ("not UTF-8", 1)):
        assert note_with(found.notes, words).startswith(f"not read, or doubtful: {count} members")


def test_a_tar_cut_anywhere_never_loses_samples_silently(tmp_path):
    whole = tar_of(tmp_path / "w.tar", pairs("abcdef")).read_bytes()
    ends = [piece.offset + -(-piece.size // 512) * 512 for run in scan(tmp_path / "w.tar").runs for piece in run.pieces]
    tar = tmp_path / "t.tar"
    for cut in {1, 511, 512, 513, *random.Random(secrets.token_bytes(8)).sample(range(len(whole)), 80), *ends, ends[-1] + 512}:
        tar.write_bytes(whole[:cut])
        try:
            index = scan(tar)
        except ValueError as error:
            assert str(tar) in str(error)  # noqa: PT017
            assert cut < ends[-1] + 512
            continue
        marked = any("without an end mark" in what for what in index.skipped)
        assert len(index.runs) == 6 or (marked and cut in ends), cut
        assert marked == (cut in ends)
    tar.write_bytes(whole[: ends[-2] + 700])
    refused(tar, "cut short", f"has {ends[-2] + 700:,} bytes", "'f.txt'")


def test_a_damaged_header_is_refused_with_its_byte(tmp_path):
    """tarfile itself stops there as if the file ended; WebDataset then has fewer samples, and no one is told."""
    tar = tar_of(tmp_path / "t.tar", pairs("abc"))
    bytes_ = bytearray(tar.read_bytes())
    header = scan(tar).runs[1].pieces[0].offset - 512
    bytes_[header + 5] ^= 0xFF
    tar.write_bytes(bytes_)
    with tarfile.open(tar) as silent:
        assert len(silent.getnames()) == 2
    refused(tar, f"damaged at byte {header:,}", "'a.txt'")


def test_what_is_no_plain_tar_is_refused(tmp_path):
    whole = tar_of(tmp_path / "w" / "t.tar", pairs("a")).read_bytes()
    for name, bytes_, word in (
        ("zip.tar", gzip.compress(whole), "compressed (gzip)"),
        ("named.tar.gz", gzip.compress(whole), "compressed (gzip)"),
        ("none.tar", b"", "0 bytes"),
        ("page.tar", b"<!doctype html>" + bytes(2000), "no tar file"),
    ):
        (tmp_path / name).write_bytes(bytes_)
        refused(tmp_path / name, word)


def test_tars_joined_with_cat_are_seen(tmp_path):
    one, two = (tar_of(tmp_path / f"{k}.tar", pairs(k)) for k in "ab")
    both = tmp_path / "both.tar"
    both.write_bytes(one.read_bytes() + two.read_bytes())
    found = read(both)
    assert [record.id for record in found.records] == ["a"]
    note_with(found.notes, "behind an end mark", f"{two.stat().st_size:,} bytes")


# ---- samples -> records


def test_faults_of_foreign_shards_are_counted_by_name(tmp_path):
    cut = [
        *pair("good"),
        *pair("dotted.name"),
        ("nopicture.txt", b"x"),
        ("nocaption.jpg", picture()),
        ("late.jpg", picture()),
        ("two.jpg", picture()),
        ("two.png", picture("PNG")),
        ("two.txt", b"x"),
        *pair("blank", " \n\t"),
        ("latin.jpg", picture()),
        ("latin.txt", "café".encode("latin-1")),
        ("late.txt", b"late"),
        *pair("twice", "first"),
        *pair("between"),
        *pair("twice", "second"),
        ("torn.jpg", picture()),
        *pair("x"),
        ("torn.jpg", picture()),
        ("badjson.jpg", picture()),
        ("badjson.json", b"{"),
        ("odd.jpg", picture()),
        ("odd.json", b'{"caption": 5}'),
        ("segments.jpg", picture()),
        ("segments.json", b'{"id": "s", "captions": ["c"], "segments": [{"box": 3}]}'),
    ]
    found = read(tar_of(tmp_path / "f.tar", cut))
    assert {record.id: record.captions for record in found.records} == {
        "good": ("caption of good",),
        "late": ("late",),
        "twice": ("first",),
        "between": ("caption of between",),
        "x": ("caption of x",),
    }
    total = "of 15 samples left out"
    for words in (
        ("no picture, because its name has a dot", "(dotted)"),
        ("no picture (nopicture)",),
        ("no caption", "(nocaption)"),
        ("several pictures (jpg, png: --image-key)", "(two)"),
        ("empty captions", "(blank)"),
        ("not UTF-8 (--encoding)", "(latin)"),
        ("two members of one name", "(torn)"),
        ("not valid JSON", "(badjson)"),
        ("'caption' in the .json is no string", "(odd)"),
        ('"segments" of its .json', "(segments)"),
    ):
        assert note_with(found.notes, total, *words).startswith("1 of 15")
    note_with(found.notes, "1 samples whose members do not lie together", "(late)")
    note_with(found.notes, "1 keys stand in a shard twice", "(twice)")
    note_with(found.notes, "captions from .txt (5)")
    for record in found.records:  # each has its own picture
        name = f"{record.id}.jpg"
        with tarfile.open(tmp_path / "f.tar") as tar:
            assert content(record.image) == tar.extractfile(next(m for m in tar if m.name == name)).read()


def test_keys_of_pictures_and_captions_can_be_named(tmp_path):
    rows = [
        m
        for k in "ab"
        for m in ((f"{k}.jpg", picture()), (f"{k}.png", picture("PNG")), (f"{k}.Long.TXT", b"long"), (f"{k}.txt", b"short"))
    ]
    rows += [("a.json", b'{"alt": ["one", "two", "one"], "caption": "x"}'), ("b.json", b'{"alt": "three"}')]
    tar = tar_of(tmp_path / "t.tar", rows)
    refused(tar, "several pictures", ".png (2)")
    assert [Path(r.image).suffix for r in read(tar, image_key="png").records] == [".png", ".png"]
    assert [r.captions for r in read(tar, image_key=".PNG", caption_key="long.txt").records] == [("long",)] * 2
    assert [r.captions for r in read(tar, image_key="jpg", caption_key="alt").records] == [("one", "two"), ("three",)]
    refused(tar, "no caption", image_key="jpg", caption_key="nothing")
    refused(tar, "no picture (.gif)", image_key="gif")
    refused(tar, "leave out --image-root", image_root=str(tmp_path))


def test_captions_without_txt_come_from_the_json(tmp_path):
    kinds = {
        "a.json": b'{"url": "u", "caption": "from json"}',
        "b.caption": b"plain",
        "c.json": b'{"id": "named", "captions": ["1", "2"]}',
    }
    rows = [m for name, bytes_ in kinds.items() for m in ((f"{name[0]}.webp", picture("WEBP")), (name, bytes_))]
    found = read(tar_of(tmp_path / "t.tar", rows))
    assert [(r.id, r.captions) for r in found.records] == [("a", ("from json",)), ("b", ("plain",)), ("named", ("1", "2"))]


def test_a_json_that_cannot_be_read_beside_a_txt(tmp_path):
    """The .txt is enough; half characters in a .json leave its sample out, wherever they come from."""
    rows = [*pair("good", "from txt"), ("good.json", b"{"), *pair("fine")]
    for key, bytes_ in {
        "raw": b'{"caption": "\xff"}',
        "half": b'{"caption": "\\ud800"}',
        "ours": b'{"id": "\\udc00", "captions": ["c"]}',
    }.items():
        rows += [(f"{key}.jpg", picture()), (f"{key}.json", bytes_)]
    found = read(tar_of(tmp_path / "t.tar", rows))
    assert [(r.id, r.captions) for r in found.records] == [("good", ("from txt",)), ("fine", ("caption of fine",))]
    note_with(found.notes, "3 of 5 samples left out: a text in the .json is not valid Unicode (raw, half, ours)")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "shift_jis"])
def test_texts_in_another_encoding(tmp_path, encoding):
    text = "赤い" if encoding == "shift_jis" else "café"
    tar = tar_of(
        tmp_path / "t.tar",
        [("a.jpg", picture()), ("a.txt", text.encode(encoding)), *pair("b", "plain ascii")][: 4 if encoding != "utf-16" else 2],
    )
    assert read(tar, encoding=encoding).records[0].captions == (text,)
    refused(tar, "unknown text encoding", encoding="klingon")
    bom = tar_of(tmp_path / "b.tar", [("a.jpg", picture()), ("a.txt", b"\xef\xbb\xbfcaf\xc3\xa9\r\n")])
    assert read(bom).records[0].captions == ("café",)


def test_ids_that_shards_share_are_told_apart(tmp_path):
    for name in ("0", "1", "2"):
        tar_of(tmp_path / "s" / f"{name}.tar", pairs(["000", name]))
    assert [r.id for r in read(tmp_path / "s").records] == ["0/000", "0", "1/000", "1", "2/000", "2"]
    tar_of(tmp_path / "t" / "0.tar", pairs(["000"]))
    assert [r.id for r in read(f"{tmp_path}/s/0.tar::{tmp_path}/t/0.tar").records] == ["s/0/000", "0", "t/0/000"]
    for name in ("x/s/0.tar", "y/s/0.tar"):
        tar_of(tmp_path / name, pairs(["000"]))
    assert [r.id for r in read(f"{tmp_path}/x/s/0.tar::{tmp_path}/y/s/0.tar").records] == ["x/s/0/000", "y/s/0/000"]


def test_empty_and_uneven_shards(tmp_path):
    for name, keys in {"a": "", "b": "p", "c": "qrstu", "d": ""}.items():
        tar_of(tmp_path / f"{name}.tar", pairs(keys))
    found = read(tmp_path)
    assert [r.id for r in found.records] == list("pqrstu")
    note_with(found.notes, "2 of 4 shards hold no samples (a.tar, d.tar)")
    refused(tmp_path / "a.tar", "no sample of", "there is no sample in the shard")
    for name in "xy":
        tar_of(tmp_path / "e" / f"{name}.tar", [("README", b"x")])
    refused(tmp_path / "e", "no sample in 2 shards; not read: 2 members whose names are hidden or have no ending")


def test_dots_in_all_names_are_told_what_to_do(tmp_path):
    said = refused(
        tar_of(tmp_path / "t.tar", pairs(["a.v1", "b.v1"])), "2 no picture, because its name has a dot", "write the tar files anew"
    )
    assert "--image-key" not in said


def test_what_img2dataset_writes(tmp_path):
    """A .json with key, status and url for every row; no .jpg where a download failed, no .txt where the caption is null."""
    rows = []
    for key, caption, status in (("000", "a dog", "success"), ("001", "a cat", "failed_to_download"), ("002", None, "success")):
        facts = {"url": f"http://x/{key}", "caption": caption, "key": key, "status": status, "error_message": None, "exif": "{}"}
        rows += [(f"{key}.jpg", picture())] if status == "success" else []
        rows += [(f"{key}.json", json.dumps(facts).encode())]
        rows += [(f"{key}.txt", caption.encode())] if caption and status == "success" else []
    tar_of(tmp_path / "00000.tar", rows)
    (tmp_path / "00000_stats.json").write_text('{"count": 3, "successes": 2}')
    (tmp_path / "00000.parquet").write_bytes(b"PAR1")
    found = read(tmp_path)
    assert [(record.id, record.captions) for record in found.records] == [("000", ("a dog",))]
    note_with(found.notes, "1 of 3 samples left out: no picture (001)")
    note_with(found.notes, "1 of 3 samples left out: no caption (002)")


def test_no_caption_anywhere_names_the_endings(tmp_path):
    refused(tar_of(tmp_path / "t.tar", [("a.jpg", picture()), ("a.cls", b"3")]), "1 no caption", ".jpg (1), .cls (1)", "--caption-key")


def test_missing_shards_are_missing_pictures(tmp_path):
    tar = tar_of(tmp_path / "t.tar", pairs("ab"))
    records = read(tar).records
    assert missing_pictures(records) == []
    tar.unlink()
    assert len(missing_pictures(records)) == 2
    with pytest.raises(ValueError, match="does not exist"):
        load_rgb(records[0].image)


def test_caption_geometry_reads_captions_of_shards(tmp_path):
    for split in ("train", "val"):
        tar_of(tmp_path / f"{split}-0.tar", pairs(f"{split}{k}" for k in range(3)))
    found = read_captions(str(tmp_path), split="train")
    assert found.texts == tuple(f"caption of train{k}" for k in range(3))
    assert read_captions(f"{tmp_path}/{{train,val}}-0.tar").texts[3:] == tuple(f"caption of val{k}" for k in range(3))


# ---- names


def test_patterns_stand_for_what_braceexpand_says():
    letters = random.Random(secrets.token_bytes(8))
    for _ in range(200):
        low, high = sorted(letters.sample(range(120), 2))
        parts = [f"{{{low:03}..{high:03}}}", f"{{{low}..{high}}}", f"{{{high}..{low}}}", "{a,b,}", "{x,y-z}", "plain", "-"]
        pattern = "".join(letters.choice(parts) for _ in range(2)) + ".tar"
        assert expand(pattern) == list(braceexpand.braceexpand(pattern)), pattern
    for wrong in ("a{0..3.tar", "a0..3}.tar", "a{b,{c,d}}.tar", "a{0..99999999}.tar", "{0..9999}{0..9999}.tar"):
        with pytest.raises(ValueError, match="brace"):
            expand(wrong)


def test_a_pattern_with_missing_shards_is_refused(tmp_path):
    tar_of(tmp_path / "s-1.tar", pairs("a"))
    refused(f"{tmp_path}/s-{{0..3}}.tar", "3 of 4 shards", f"first: {tmp_path}/s-0.tar")
    assert [r.id for r in read(f"file://{tmp_path}/s-1.tar").records] == ["a"]
    refused("pipe:curl http://host/a.tar", "would run a command")
    literal = tar_of(tmp_path / "s{1,2}.tar", pairs("b"))
    assert [r.id for r in read(literal).records] == ["b"]


def test_splits_of_a_folder(tmp_path):
    for name in ("train/0.tar", "validation/0.tar", "test/0.tar"):
        tar_of(tmp_path / "folders" / name, pairs([name[0]]))
    for name in ("train-0.tar", "train-1.tar", "val_0.tar", "test.tar"):
        tar_of(tmp_path / "names" / name, pairs([name]))
    for name in ("train-0.tar", "extra.tar"):
        tar_of(tmp_path / "mixed" / name, pairs([name[0]]))
    for name in ("train/0.tar", "0.tar"):
        tar_of(tmp_path / "both" / name, pairs([name]))
    assert open_data(str(tmp_path / "folders")).splits() == ["train", "val", "test"]
    assert {split: len(s) for split, s in find_shards(str(tmp_path / "names")).splits.items()} == {"train": 2, "val": 1, "test": 1}
    for name in ("cc3m-train-0000.tar", "cc3m-train-0001.tar", "cc3m-validation-0000.TAR"):
        tar_of(tmp_path / "within" / name, pairs([name]))
    assert open_data(str(tmp_path / "mixed")).splits() == ["all"]
    note_with(read(tmp_path / "mixed").notes, "1 of 2 tar files have a split in their names (train-0.tar)")
    assert {split: len(s) for split, s in find_shards(str(tmp_path / "within")).splits.items()} == {"train": 2, "val": 1}
    (tmp_path / "none").mkdir()
    refused(f"{tmp_path}/mixed::{tmp_path}/none", "none' holds no tar files")
    refused(f"{tmp_path}/mixed::{tmp_path}/mixed/extra.tar", "extra.tar 2 times")
    refused(tmp_path / "both", "name one of the folders")


@pytest.mark.parametrize(
    "held",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        *(
            json.dumps({"format": "gradscope shards 1"} | more).encode()
            for more in ({}, {"splits": {}}, {"splits": {"val": {}}}, {"splits": {"val": {"shards": [{"name": "x"}]}}}, {"splits": [1]})
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, held):
    tar_of(tmp_path / "val-0.tar", pairs("a"))
    (tmp_path / MANIFEST).write_bytes(held)
    assert "pack" in refused(tmp_path, MANIFEST)


def test_a_folder_with_tars_and_other_data(tmp_path):
    """An archive beside the list of its unpacked pictures is no data set of its own; pairs beside tars are refused."""
    (tmp_path / "a.jpg").write_bytes(picture())
    (tmp_path / "test.jsonl").write_text('{"id": "1", "image": "a.jpg", "captions": ["c"]}\n')
    tar_of(tmp_path / "images.tar", [("a.jpg", picture())])
    assert [r.id for r in read(tmp_path, "test").records] == ["1"]
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "a.txt").write_text("caption")
    refused(tmp_path, "two data sets")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a/shards-{000..031}.tar", "shards-000-031"),
        ("{train,val}-0.tar", "train-val-0"),
        ("s3://bucket/x-{0..3}.tar", "x-0-3"),
        ("https://host/x.tar?token=secret", "x"),
        ("https://host/set/shards.json", "set"),
        ("https://host/set/", "set"),
        ("gone/set/shards.json", "set"),
        ("https://host:8000", "host-8000"),
        ("a/one.tar::b/two.tar::three.tar", "one-and-2-more"),
        ("my/list.v1.csv", "list.v1.csv"),
        ("scenes", "scenes"),
        (".", "here"),
        ("inner/", "inner"),
        ("inner/..", "here"),
    ],
)
def test_files_about_shards_have_plain_names(tmp_path, monkeypatch, name, label):
    (tmp_path / "here" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for _ in ("no tar files", "tar files"):
        assert file_label(name) == label
        assert default_path("tiny", name, "all") == Path(f"tiny-eval-{label.removesuffix('.csv')}-all.json")
        tar_of(Path("inner/0.tar"), pairs("ab"))
        tar_of(Path("0.tar"), pairs("ab"))
    tar_of(Path("1.tar"), pairs("cd"))
    captions = read_captions("./{0..1}.tar")
    assert (captions.name, captions.source) == ("0-1", "./{0..1}.tar")


# ---- remote


def say_nothing(line: str) -> None:
    """Lines for the user."""


def test_shards_of_a_server_are_fetched_once(server: FileServer, tmp_path):
    bytes_ = {k: tar_of(tmp_path / f"{k}.tar", pairs([f"{k}{n}" for n in range(30)])).read_bytes() for k in "ab"}
    for k, b in bytes_.items():
        server.add(f"d/{k}.tar", b)
    server.files["/d/b.tar"].troubles = [(), ("cut", 0.6), ("cut", 0.3)]
    name = server.url("d/{a,b}.tar")
    found = read(name)
    assert [r.id for r in found.records] == [f"{k}{n}" for k in "ab" for n in range(30)]
    assert sum(asked.sent for asked in server.log if asked.status == 206) < len(bytes_["b"])
    for record in found.records:
        with tarfile.open(tmp_path / f"{record.id[0]}.tar") as tar:
            assert content(record.image) == tar.extractfile(f"{record.id}.jpg").read()
    asked = len(server.log)
    assert read(name).fingerprint() == found.fingerprint()
    assert len(server.log) == asked
    copy = copy_of(Shard(where=server.url("d/a.tar")))
    copy.write_bytes(copy.read_bytes()[:-100])  # a copy that was damaged is fetched again
    assert read(name).fingerprint() == found.fingerprint()
    assert len(server.log) > asked


def test_servers_that_fail(server: FileServer, tmp_path):
    refused(server.url("none.tar"), "answered 404")
    server.add("page.tar", b"", always=("html",))
    refused(server.url("page.tar"), "web page")
    server.add("huge.tar", b"x", stated=10**18)
    refused(server.url("huge.tar"), "shards need 1.0 EB", "make room")
    server.add("short.tar", tar_of(tmp_path / "s.tar", pairs("ab")).read_bytes()[:1700])
    refused(server.url("short.tar"), "cut short")
    refused(server.url("folder"), "has neither a shards.json nor a *.tar")
    refused(server.url("none.json"), "none.json does not exist there (404")


def manifest(server: FileServer, shards: dict[str, bytes], **change: object) -> None:
    rows = [
        {"name": name, "records": 1, "bytes": len(b), "sha256": hashlib.sha256(b).hexdigest(), **change} for name, b in shards.items()
    ]
    splits = {"train": {"records": len(rows), "captions": 1, "bytes": 1, "notes": ["when packed: a note"], "shards": rows}}
    text = json.dumps({"format": "gradscope shards 1", "made_by": "t", "source": "s", "default_split": "train", "splits": splits})
    server.add(f"m/{MANIFEST}", text.encode(), kind="application/json")
    for name, b in shards.items():
        server.add(f"m/{name}", b)


def test_a_name_for_people_has_no_query():
    assert shown_name("https://host/x-{0..3}.tar?token=secret::a/b.tar") == "https://host/x-{0..3}.tar::a/b.tar"
    assert shown_name("--data=s3://b/x.tar?token=secret") == "--data=s3://b/x.tar"
    assert shown_name("scenes?") == "scenes?"


def test_a_missing_package_of_a_store_is_named(monkeypatch):
    def absent(address):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    refused("s3://bucket/x.tar", "pip install 'gradscope[webdataset]' s3fs")


def test_a_manifest_on_a_server(server: FileServer, tmp_path):
    first, second = (tar_of(tmp_path / f"{k}.tar", pairs(k)).read_bytes() for k in "ab")
    manifest(server, {"0.tar": first})
    name = server.url("m/")
    assert open_data(name).splits() == ["train"]
    assert not [asked for asked in server.log if asked.path.endswith(".tar")]  # nothing is fetched to name the splits
    found = read(name, "train")
    assert [r.id for r in found.records] == ["a"]
    note_with(found.notes, "when packed: a note")
    manifest(server, {"0.tar": second})  # the same address, other bytes: the manifest tells
    assert [r.id for r in read(server.url(f"m/{MANIFEST}"), "train").records] == ["b"]
    server.files["/m/other.json?key=1"] = server.files[f"/m/{MANIFEST}"]
    assert [r.id for r in read(server.url("m/other.json?key=1"), "train").records] == ["b"]
    manifest(server, {"0.tar": first}, sha256="0" * 64)
    refused(name, "sha256 is", split="train")
    server.add(f"m/{MANIFEST}", b"[]")
    refused(name, "no list of shards", split="train")


def test_a_manifest_is_kept_for_when_the_server_is_gone(tmp_path):
    with serving() as server:
        manifest(server, {"0.tar": tar_of(tmp_path / "a.tar", pairs("a")).read_bytes()})
        name = server.url("m")
        whole = read(name, "train")
    found = read(name, "train")
    assert found.records == whole.records
    note_with(found.notes, "cannot be reached; the copy of an earlier run is used")
    refused(name.replace("/m", "/other"), "cannot be reached")


FETCH = """
import sys
from gradscope.data.shard_fetch import Shard, ShardFetcher
lines = []
print(*ShardFetcher(say=lines.append)([Shard(where=where) for where in sys.argv[1:]]))
"""


def test_two_processes_fetch_each_shard_once(server: FileServer, tmp_path):
    addresses = [server.url(f"p/{k}.tar") for k in range(6)]
    for k in range(6):
        server.add(f"p/{k}.tar", secrets.token_bytes(3_000_000))
    both = [subprocess.Popen([sys.executable, "-c", FETCH, *addresses], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=120)[0] for process in both]
    assert paths[0] == paths[1]
    for k, path in enumerate(paths[0].split()):
        assert Path(path).read_bytes() == server.files[f"/p/{k}.tar"].content
        received = [asked for asked in server.log if asked.path == f"/p/{k}.tar" and asked.status == 200]
        assert len(received) <= 3  # asked for its size by each process at most, and fetched by one


def test_shards_of_an_object_store(tmp_path):
    store = fsspec.filesystem("memory")
    bytes_ = {k: tar_of(tmp_path / f"{k}.tar", pairs(k)).read_bytes() for k in "ab"}
    folder = f"bucket-{secrets.token_hex(4)}/x"
    for k, b in bytes_.items():
        store.pipe(f"/{folder}/{k}.tar", b)
    assert [r.id for r in read(f"memory://{folder}/{{a,b}}.tar").records] == ["a", "b"]
    assert [r.id for r in read(f"memory://{folder}").records] == ["a", "b"]
    store.rm(f"/{folder}/a.tar")
    assert [r.id for r in read(f"memory://{folder}/{{a,b}}.tar").records] == ["a", "b"]  # from the copies
    refused(f"memory://{folder}/c.tar", "does not exist")
    refused("memory://empty-bucket", "has neither")
    refused("nonsense://x/a.tar", "nonsense", "fsspec knows")


def test_a_store_that_stopped_goes_on(tmp_path):
    store = fsspec.filesystem("memory")
    bytes_ = secrets.token_bytes(50_000)
    where = f"memory://part-{secrets.token_hex(4)}/a.tar"
    store.pipe(where.removeprefix("memory:/"), bytes_)
    place = copy_of(Shard(where=where))
    place.parent.mkdir(parents=True)
    part = place.with_name("a.tar.part")
    fetch = ShardFetcher(say=say_nothing, patience=QUICK)
    part.write_bytes(bytes_[:20_000])
    part.with_suffix(".version").write_text(str(store.ukey(where.removeprefix("memory:/"))))
    seen: list[tuple[int, int]] = []
    assert ShardFetcher(say=say_nothing, advance=lambda done, total: seen.append((done, total)))([Shard(where=where)]) == [place]
    assert place.read_bytes() == bytes_
    assert seen == [(50_000, 50_000)]
    other = place.with_name("b.tar")
    store.pipe(where.replace("a.tar", "b.tar").removeprefix("memory:/"), bytes_)
    other.with_name("b.tar.part").write_bytes(b"of another version")
    other.with_name("b.tar.part").with_suffix(".version").write_text("old")
    fetch([Shard(where=where.replace("a.tar", "b.tar"))])
    assert other.read_bytes() == bytes_
    with pytest.raises(ValueError, match="did not arrive as promised"):
        fetch([Shard(where=where, sha256="0" * 64)])


def test_the_index_is_light():
    """Names and indexes are read by commands that print at once."""
    heavy = "{'torch', 'webdataset', 'fsspec', 'httpx2'}"
    code = f"import sys, gradscope.data.shards, gradscope.data.pack; assert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pictures_are_shown_in_the_pictures_own_words(tmp_path):
    """A message names the shard, the place and the member."""
    tar = tar_of(tmp_path / "t.tar", [("a.jpg", b"nothing"), ("a.txt", b"x")])
    record = read(tar).records[0]
    with pytest.raises(ValueError, match=r"t\.tar/@512\+7/a\.jpg' cannot be decoded"), Image.open(io.BytesIO(picture())):
        load_rgb(record.image)
    assert shard_index.FORMAT in next((tmp_path / "cache" / "shard_indexes").glob("*.jsonl")).read_text()
