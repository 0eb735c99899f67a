"""Items and their overlap against brute force over the records, and the contamination cases of ShareGPT4V and Long-DCI in small."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from gradscope.data.identity import ABSENT, as_bytes, base_name, file_digest, items, load_items, normalised, save_items
from gradscope.data.overlap import overlap
from gradscope.types import Record


def record(identity: str, image: Path | str | None = None, *captions: str) -> Record:
    return Record(id=identity, image=None if image is None else str(image), captions=captions or (f"a caption of {identity}",))


def plain(caption: str) -> str:
    """The twin of ``normalised``, character by character."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", caption).casefold())
    words, word = [], ""
    for character in text + " ":
        if character.isspace():
            words, word = words + [word] * bool(word), ""
        else:
            word += character
    return " ".join(words)


def same(one: Record, other: Record, same_source: bool) -> tuple[bool, bool, bool, bool]:
    """(id, file, content, caption) of two records, from the files themselves."""

    def known(r: Record) -> tuple[str | None, bytes | None]:
        there = r.image is not None and Path(r.image).is_file()
        return (None if r.image is None else Path(r.image).name.lower()), (Path(r.image).read_bytes() if there else None)

    (name, data), (other_name, other_data) = known(one), known(other)
    names_differ = name is not None and other_name is not None and name != other_name
    contents_differ = data is not None and other_data is not None and data != other_data
    by_id = same_source and one.id == other.id and not names_differ and not contents_differ
    by_content = data is not None and data == other_data
    by_file = by_content and name == other_name
    texts = {plain(c) for c in one.captions} & {plain(c) for c in other.captions} - {""}
    return by_id, by_file, by_content, bool(texts)


@pytest.mark.parametrize("seed", range(12))
def test_overlap_is_that_of_all_pairs(tmp_path, seed):
    draw = random.Random(seed)
    pictures = []
    for k in range(14):
        path = tmp_path / f"{k % 3}" / draw.choice([f"{k % 5}.jpg", f"{k % 5}.JPG", f"p{k}.jpg"])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([draw.randrange(3)]) * draw.choice([5, 6, 200_000]))
        pictures.append(path)
    pictures += [tmp_path / "absent.jpg", None]
    texts = ["A Dog.", "a  dog.", "a cat", "ﬁne", "fine", "", "STRASSE", "straße", "one"]
    sides = [
        [record(str(draw.randrange(8)), draw.choice(pictures), *draw.choices(texts, k=draw.randrange(1, 4))) for _ in range(n)]
        for n in (17, 23)
    ]
    for source in ("x", "y"):
        found = overlap(items(sides[0], source="x"), items(sides[1], source=source))
        for row, one in enumerate(sides[0]):
            pairs = [same(one, other, source == "x") for other in sides[1]]
            want = tuple(any(level) for level in zip(*pairs, strict=True))
            got = (found.by_id[row], found.by_file[row], found.by_content[row], found.by_caption[row])
            assert tuple(map(bool, got)) == want, (one, want, got)
            assert found.any[row] == any(want)
        assert found.counts()["any"] == sum(any(any(same(a, b, source == "x")) for b in sides[1]) for a in sides[0])
        absent = sum(r.image is None or not Path(r.image).is_file() for r in sides[0])
        assert found.uncompared == absent


@pytest.mark.parametrize("caption", ["  A\tDog\u00a0 ", "ＡＢＣ", "Straße", "İstanbul", "a\u2028b", "ΣΑΣ", "", " "])
def test_normalised_captions(caption):
    assert normalised(caption) == plain(caption)


def test_what_normalising_makes_equal_and_what_it_does_not():
    assert normalised("Straße\n ﬁne") == normalised("STRASSE fine")
    assert normalised("a dog") != normalised("a dog.")


@pytest.mark.parametrize("size", [0, 1, 65_536, 131_072, 131_073, 400_000])
def test_digests_of_files(tmp_path, size):
    data = np.random.default_rng(size).bytes(size)
    path = tmp_path / "x"
    path.write_bytes(data)
    read = data if size <= 131_072 else data[:65_536] + data[-65_536:]
    for contents, part in (("ends", read), ("whole", data)):
        assert file_digest(str(path), contents) == hashlib.blake2b(f"{size}/".encode() + part, digest_size=16).digest()
    assert file_digest(str(tmp_path / "none"), "whole") == ABSENT


def test_ends_miss_what_differs_in_the_middle_and_whole_does_not(tmp_path):
    data = bytearray(400_000)
    (tmp_path / "a").write_bytes(data)
    data[200_000] = 1
    (tmp_path / "b").write_bytes(data)
    one, other = [record("1", tmp_path / "a")], [record("2", tmp_path / "b", "another")]
    assert overlap(items(one, source=""), items(other, source="")).counts()["content"] == 1
    assert overlap(items(one, source="", contents="whole"), items(other, source="", contents="whole")).counts()["any"] == 0
    with pytest.raises(ValueError, match="make both alike"):
        overlap(items(one, source=""), items(other, source="", contents="whole"))


def test_only_files_of_the_sizes_asked_for_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"123")
    table = items([record("1", tmp_path / "a"), record("2", tmp_path / "b")], source="", among={3})
    assert table.sizes.tolist() == [2, 3]
    assert [digest == ABSENT for digest in as_bytes(table.digests)] == [True, False]


def test_a_table_comes_back_from_disk(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    table = items([record("é", tmp_path / "a.jpg", "one", "two"), record("2", None, "")], source="docci")
    save_items(tmp_path / "items.npz", table)
    back = load_items(tmp_path / "items.npz")
    assert (back.source, back.contents, len(back)) == ("docci", "ends", 2)
    for name in ("ids", "names", "sizes", "digests", "captions", "caption_rows"):
        np.testing.assert_array_equal(getattr(back, name), getattr(table, name))
    assert back.caption_rows.tolist() == [0, 0]


def test_an_empty_table(tmp_path):
    save_items(tmp_path / "none.npz", items([], source="x"))
    none, some = load_items(tmp_path / "none.npz"), items([record("1")], source="x")
    assert overlap(none, some).counts()["any"] == 0
    assert overlap(some, none).counts()["any"] == 0


@pytest.mark.parametrize("content", [None, b"", b"not a table", b"PK\x03\x04"])
def test_what_is_no_table_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(ValueError, match="table of training items"):
        load_items(tmp_path / "t.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    np.save(tmp_path / "array.npy", np.zeros(2))
    save_items(tmp_path / "cut.npz", items([record(str(k)) for k in range(99)], source=""))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-200])
    for name in ("other.npz", "array.npy", "cut.npz"):
        with pytest.raises(ValueError, match="not a table"):
            load_items(tmp_path / name)


def test_ids_that_are_row_numbers_of_two_files_do_not_count(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").write_bytes(name.encode())
    train, test = [record("0", tmp_path / "a.jpg")], [record("0", tmp_path / "b.jpg", "another caption")]
    assert overlap(items(test, source="mine"), items(train, source="mine")).counts()["any"] == 0
    assert overlap(items(test, source="mine"), items([record("0")], source="mine")).counts()["id"] == 1
    assert overlap(items(test, source="mine"), items([record("0")], source="other")).counts()["id"] == 0


@pytest.mark.parametrize("path", ["C:\\photos\\IMG_1.JPG", "a/b/img_1.jpg", "img_1.jpg"])
def test_base_names_of_any_system(path):
    assert base_name(path) == "img_1.jpg"


def test_sharegpt4v_trained_on_its_own_test_records(tmp_path):
    """E08: 1,200 records are trained on and the first 1,000 evaluated, from two files that know nothing of each other."""
    records = []
    for k in range(1200):
        path = tmp_path / f"{k:06}.jpg"
        path.write_bytes(f"picture {k}".encode())
        records.append(record(f"sam/{k}", path, f"The image shows {k} things."))
    trained = items(records, source="sharegpt4v.json")
    evaluated = items(records[:1000], source="first1000.json")
    counts = overlap(evaluated, trained).counts()
    assert counts == {"id": 0, "file": 1000, "content": 1000, "caption": 1000, "any": 1000, "name_only": 0}
    assert overlap(evaluated, trained).sentence().startswith("1,000 of 1,000 evaluated items were in training (by id 0, file 1,000")
    assert overlap(evaluated, items(records[1000:], source="sharegpt4v.json")).counts()["any"] == 0
    # Without pictures on disk, ids of the same data set and captions remain.
    bare = [record(r.id, "elsewhere/" + Path(r.image).name, *r.captions) for r in records]
    found = overlap(items(bare[:1000], source="s"), items(bare, source="s"))
    assert found.counts() == {"id": 1000, "file": 0, "content": 0, "caption": 1000, "any": 1000, "name_only": 0}
    assert found.uncompared == 1000


def test_long_dci_in_small(tmp_path):
    """5,445 of 7,444 at a tenth: long captions are new, pictures are DCI's, some only under DCI's names."""
    trained, evaluated, seen = [], [], []
    (tmp_path / "dci").mkdir()
    (tmp_path / "long").mkdir()
    for k in range(744):
        name = f"sa_{k}.jpg"
        in_training = k < 545
        (tmp_path / "long" / name).write_bytes(f"picture {k}".encode())
        evaluated.append(record(f"{k}", tmp_path / "long" / name, f"long caption {k}"))
        if in_training:
            (tmp_path / "dci" / name).write_bytes(f"picture {k}".encode())
            trained.append(record(f"sa_{k}", tmp_path / "dci" / name, f"short caption {k}"))
        seen.append(in_training)
    (tmp_path / "dci" / "sa_600.jpg").write_bytes(b"another photo of that name")
    trained.append(record("sa_600", tmp_path / "dci" / "sa_600.jpg", "short caption 600"))
    found = overlap(items(evaluated, source="long-dci"), items(trained, source="dci"))
    np.testing.assert_array_equal(found.any, seen)
    assert found.counts() == {"id": 0, "file": 545, "content": 545, "caption": 0, "any": 545, "name_only": 1}
    assert "1 share nothing but a file name" in found.sentence()


def test_a_path_is_one_source_however_it_is_written(tmp_path, monkeypatch) -> None:
    """Relative in one folder and the same words in another are two data sets; relative and absolute to one place are one."""
    record = Record(id="1", image=None, captions=("x",))
    other = Record(id="1", image=None, captions=("y",))
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
        (place / "list.jsonl").touch()
    monkeypatch.chdir(places[0])
    trained = items([record], source="list.jsonl")
    assert overlap(items([other], source=str(places[0] / "list.jsonl")), trained).by_id.all()
    assert overlap(items([other], source="../a/./list.jsonl"), trained).by_id.all()
    monkeypatch.chdir(places[1])
    assert not overlap(items([other], source="list.jsonl"), trained).any.any()
    assert items([record], source="dci").source == "dci"
