"""Anyone's own files: every format and encoding read back as written, rows of one picture joined, layouts of folders told apart."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.data.own_files import OwnFiles
from gradscope.data.source import open_data
from gradscope.metrics.recall import retrieval
from gradscope.types import Segment

TWO = ["café", "赤い椅子"]
Rows = list[dict[str, object]]
FORMATS = ("json", "jsonl", "csv", "tsv", "parquet")


def encoded(rows: Rows, suffix: str) -> bytes:
    """Records as each format's own library writes them."""
    if suffix == "parquet":
        sink = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()
    if suffix in ("csv", "tsv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), delimiter="," if suffix == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    return (f"[{', '.join(lines)}]" if suffix == "json" else "\n".join(lines)).encode()


def write(path: Path, content: str | bytes | Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = encoded(content, path.suffix[1:])
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, split: str = "all", **keys: str):
    return open_data(str(path), **keys).read(split)


def refused(path: Path, *words: str, split: str = "all", **keys: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(path, split, **keys)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# What is written is what is read


caption = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.strip)
spiced = st.lists(
    st.sampled_from(['"', "'", ",", ";", "\t", "|", "\n", "\r\n", "\u2028", "\x85", "🪑", "a", " ", "NA", "\\"]), min_size=1
)
captions = st.lists(caption | spiced.map("".join).filter(str.strip), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(texts=captions)
def test_every_format_reads_back_what_was_written(texts: list[str]) -> None:
    rows: Rows = [{"file_name": f"p/{n}.jpg", "caption": text} for n, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        for suffix in FORMATS:
            found = read(write(Path(folder, f"a.{suffix}"), rows)).records
            assert [r.captions for r in found] == [(text,) for text in texts], suffix
            assert [r.image for r in found] == [str(Path(folder, "p", f"{n}.jpg")) for n in range(len(texts))]
            assert [r.id for r in found] == [str(n) for n in range(len(texts))]


@settings(max_examples=40, deadline=None)
@given(groups=st.lists(st.lists(caption, min_size=1, max_size=4, unique=True), min_size=1, max_size=5), draw=st.randoms())
def test_rows_in_any_order_join_into_the_lists_they_came_from(groups: list[list[str]], draw) -> None:
    spellings = ("a{}.jpg", "./a{}.jpg", "x/../a{}.jpg", ".//a{}.jpg")
    rows: Rows = [{"image": draw.choice(spellings).format(g), "caption": text} for g, texts in enumerate(groups) for text in texts]
    draw.shuffle(rows)
    expected: dict[str, list[str]] = {}
    for row in rows:
        expected.setdefault(str(row["image"]).split("/")[-1], []).append(str(row["caption"]))
    with tempfile.TemporaryDirectory() as folder:
        found = read(write(Path(folder, "a.jsonl"), rows))
    assert [(r.image.split("/")[-1], list(r.captions)) for r in found.records] == list(expected.items())
    joined = [note for note in found.notes if "joined" in note]
    assert joined == (
        [] if len(rows) == len(groups) else [f"{len(rows)} rows joined into {len(groups)} records, because they name the same picture"]
    )


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "tsv"])
def test_text_encodings(tmp_path: Path, suffix: str) -> None:
    text = encoded([{"image": f"{n}.jpg", "caption": c} for n, c in enumerate(TWO)], suffix).decode()
    path = tmp_path / f"a.{suffix}"
    for content in (text.encode(), text.encode("utf-8-sig")):
        assert [r.captions[0] for r in read(write(path, content)).records] == TWO
    refused(write(path, text.encode("utf-16")), "line 1", "UTF-16", "--encoding")
    assert [r.captions[0] for r in read(path, encoding="utf-16").records] == TWO
    latin = write(path, text.replace(TWO[1], "naïve").encode("latin-1"))
    line = 1 if suffix == "json" else 1 if suffix == "jsonl" else 2
    refused(latin, f"line {line}", "0xe9", "--encoding")
    assert [r.captions[0] for r in read(latin, encoding="latin-1").records] == ["café", "naïve"]
    refused(latin, "unknown text encoding 'utf-99'", encoding="utf-99")


def test_pairs_in_text_encodings(tmp_path: Path) -> None:
    for n, content in enumerate((TWO[0].encode(), TWO[0].encode("utf-8-sig"))):
        write(tmp_path / f"{n}.jpg", b"")
        write(tmp_path / f"{n}.txt", content)
    assert [r.captions[0] for r in read(tmp_path).records] == [TWO[0]] * 2
    write(tmp_path / "1.txt", TWO[0].encode("latin-1"))
    refused(tmp_path, "1.txt line 1", "0xe9", "--encoding")


def test_nothing_depends_on_the_locale(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{"image": f"{c}.jpg", "caption": c} for c in TWO])
    write(tmp_path / "a.jsonl", [{"image": f"{c}.jpg", "caption": c} for c in TWO])
    write(tmp_path / "pairs" / "x.jpg", b"")
    write(tmp_path / "pairs" / "x.txt", TWO[1])
    code = (
        "import sys; from gradscope.data.source import open_data\n"
        "for p in sys.argv[1:]: print(ascii([c for r in open_data(p).read('all').records for c in r.captions]))"
    )
    paths = [str(tmp_path / name) for name in ("a.csv", "a.jsonl", "pairs")]
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[:3] == [ascii(TWO), ascii(TWO), ascii(TWO[1:])]


# One picture, several rows


def scored(path: Path) -> tuple[list[str], dict[str, float]]:
    """R@1 of the matrix whose rows are two pictures and whose columns are captions c0..c5; c0..c2 belong to the first."""
    table = torch.tensor([[0.9, 0.8, 0.7, 0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.95, 0.6, 0.5]])
    records = read(path).records
    columns = [(number, int(text[1:])) for number, record in enumerate(records) for text in record.captions]
    pictures = ["a" if "c0" in record.captions else "b" for record in records]
    scores = torch.stack([torch.stack([table[0 if picture == "a" else 1, c] for _, c in columns]) for picture in pictures])
    found = retrieval(torch.eye(2), scores.T, torch.tensor([owner for owner, _ in columns]))  # identity @ scores
    return [r.id for r in records], {row.direction: row.value for row in found.rows if row.metric == "R@1"}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "names",
    [
        ["a.jpg"] * 3 + ["b.jpg"] * 3,
        ["a.jpg", "./a.jpg", "x/../a.jpg", "b.jpg", ".//b.jpg", "b.jpg"],
        ["{root}/a.jpg", "a.jpg", "{root}/./a.jpg", "b.jpg", "{root}/b.jpg", "b.jpg"],
        [".\\a.jpg", "a.jpg", "a.jpg", "sub\\b.jpg", "sub/b.jpg", "sub/b.jpg"],
        ["a.jpg", "link.jpg", "a.jpg", "b.jpg", "linked/b.jpg", "b.jpg"],
    ],
)
def test_several_rows_of_a_picture_score_as_one(tmp_path: Path, suffix: str, names: list[str]) -> None:
    write(tmp_path / "a.jpg", b"first")
    write(tmp_path / "b.jpg", b"second")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "a.jpg")
    (tmp_path / "linked").symlink_to(tmp_path)
    if any("sub" in name for name in names):
        write(tmp_path / "sub" / "b.jpg", b"second")
    rows: Rows = [{"image": name.format(root=tmp_path), "caption": f"c{n}"} for n, name in enumerate(names)]
    for with_ids in (False, True):
        path = write(tmp_path / f"rows.{suffix}", [{**({"id": f"r{n}"} if with_ids else {}), **row} for n, row in enumerate(rows)])
        ids, values = scored(path)
        assert values == {"i2t": 1.0, "t2i": 1.0}
        assert ids == (["r0", "r3"] if with_ids else ["a", "b"])
        assert any("6 rows joined into 2 records" in note for note in read(path).notes)


def test_captions_as_a_list_score_the_same(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json", [{"file": "a.jpg", "captions": ["c0", "c1", "c2"]}, {"file": "b.jpg", "captions": ["c3", "c4", "c5"]}]
    )
    assert scored(path) == (["a", "b"], {"i2t": 1.0, "t2i": 1.0})


def test_the_documented_format_is_one_record_per_picture(tmp_path: Path) -> None:
    rows: Rows = [{"id": 1, "image": "a.jpg", "captions": ["x"]}, {"id": 2, "image": "./a.jpg", "captions": ["y"]}]
    refused(write(tmp_path / "a.jsonl", rows), "a.jpg' to 2 records", "into one record")
    rows[1]["image"] = "b.jpg"
    rows[1]["aux"] = {"family": "f"}
    found = read(write(tmp_path / "a.jsonl", rows))
    assert found.notes == ()
    assert [(r.id, r.image, r.captions, dict(r.aux)) for r in found.records] == [
        ("1", str(tmp_path / "a.jpg"), ("x",), {}),
        ("2", str(tmp_path / "b.jpg"), ("y",), {"family": "f"}),
    ]


def test_repeated_captions_and_ids_made_of_stems(tmp_path: Path) -> None:
    rows: Rows = [
        {"image": i, "caption": c}
        for i, c in (("a/1.jpg", "x"), ("a/1.jpg", "x"), ("b/1.jpg", "y"), ("b/2.jpg", "z"), ("b/2.png", "w"))
    ]
    found = read(write(tmp_path / "a.csv", rows))
    assert [(r.id, r.captions) for r in found.records] == [("a/1", ("x",)), ("b/1", ("y",)), ("b/2.jpg", ("z",)), ("b/2.png", ("w",))]
    assert any("1 captions dropped that repeat" in note for note in found.notes)
    assert read(write(tmp_path / "b.csv", "image,caption,image_id\na.jpg,x,7\na.jpg,y,8\n")).records[0].id == "7"


# Captions that are empty, odd or of a wrong type


@pytest.mark.parametrize("suffix", FORMATS)
def test_empty_captions_never_shift_a_pair(tmp_path: Path, suffix: str) -> None:
    words = ["None", "", "NA", "null", " \t", "42", "nan"]
    found = read(write(tmp_path / f"a.{suffix}", [{"image": f"{w.strip() or n}.jpg", "caption": w} for n, w in enumerate(words)]))
    assert [(r.id, r.captions) for r in found.records] == [(w, (w,)) for w in words if w.strip()]
    assert any("2 empty captions dropped, 2 of 7 rows with them" in note for note in found.notes)


def test_nulls_of_a_table_are_empty_and_of_json_are_refused(tmp_path: Path) -> None:
    rows: Rows = [{"image": "a.jpg", "caption": "x"}, {"image": "b.jpg", "caption": None}, {"image": "c.jpg", "caption": "y"}]
    assert [r.id for r in read(write(tmp_path / "a.parquet", rows)).records] == ["a", "c"]
    refused(write(tmp_path / "a.jsonl", rows), "a.jsonl line 2", "'caption' is a null")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "b.jpg", "caption": 4}, ["line 2", "'caption' is a number"]),
        ({"image": "b.jpg", "caption": [["x"]]}, ["line 2", "not strings"]),
        ({"image": "b.jpg", "text": "x"}, ["line 2", "no key 'caption'", "but 'text'"]),
        ({"image": "b.jpg"}, ["line 2", "no key 'caption'", "among image"]),
        ({"filename": "b.jpg", "caption": "x"}, ["line 2", "no key 'image'", "but 'filename'"]),
        ({"image": None, "caption": "x"}, ["line 2", "'image' must be the path"]),
        ({"image": ["b.jpg"], "caption": "x"}, ["line 2", "'image' must be the path"]),
        ({"image": "b.jpg", "caption": "\ud83d"}, ["line 2", "half a character"]),
        ({"image": "b.jpg", "caption": "x", "id": None}, ["line 1", "'id' must be"]),
        ({"image": "b.jpg", "caption": "x", "split": "test"}, ["line 1", "'split' must be"]),
        ("x", ["line 2", "a string, but a record is needed"]),
        (
            {"image": "b.jpg", "caption": "x", "regions": [{"caption": "x", "box": [1, 2, 3]}]},
            ["line 2, region 1", "four finite numbers"],
        ),
        ({"image": "b.jpg", "caption": "x", "regions": [{"caption": "x", "box": [5, 5, 5, 9]}]}, ["line 2, region 1", "no area"]),
        ({"image": "b.jpg", "caption": "x", "regions": [{"caption": "x", "box": [0.1, 0, 0.5, 1]}]}, ["line 2, region 1", "in pixels"]),
        ({"image": "b.jpg", "caption": "x", "regions": [{"box": [0, 0, 5, 5]}]}, ["line 2, region 1", "no caption"]),
    ],
)
def test_wrong_records_are_named_by_line(tmp_path: Path, row: object, words: list[str]) -> None:
    lines = [json.dumps({"image": "a.jpg", "caption": "one"}), json.dumps(row)]
    refused(write(tmp_path / "a.jsonl", "\n".join(lines)), "a.jsonl line", *words)


# Columns, pictures, regions, splits


def test_columns_are_guessed_shown_and_overridden(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", " Description ;File_Name;Dense;other\nshort;a.jpg;long;z.jpg\n")
    found = read(path)
    assert found.notes == ("captions from 'description', images from 'file_name'",)
    assert (found.records[0].captions, found.records[0].image) == (("short",), str(tmp_path / "a.jpg"))
    found = read(path, caption_key="dense", image_key="OTHER")
    assert (found.records[0].captions, found.records[0].image) == (("long",), str(tmp_path / "z.jpg"))
    refused(path, "no column 'words'", "Description, File_Name, Dense, other", "--caption-key", caption_key="words")
    refused(path, "no key 'words'", "--image-key", image_key="words")
    both = write(tmp_path / "b.jsonl", [{"image": "a.jpg", "caption": "x", "long_caption": "y"}])
    assert "there are also 'long_caption': --caption-key" in read(both).notes[0]
    none = write(tmp_path / "c.jsonl", [{"caption": "x"}])
    assert "no key that names pictures (--image-key)" in read(none).notes[0]
    assert read(none).records[0].image is None
    refused(none, "--image-root was given", "--image-key", image_root=str(tmp_path))


def test_paths_of_another_machine_lead_to_pictures_under_the_root(tmp_path: Path) -> None:
    for name in ("1.jpg", "2.jpg", "part/3.jpg", "4.jpg"):
        write(tmp_path / "images" / name, b"")
    names = ["/data/me/1.jpg", "C:\\photos\\2.jpg", "placeholder/images/part/3.jpg", "x/4.jpg", "y/4.jpg", "/data/5.jpg", "6.jpg"]
    path = write(tmp_path / "a.json", [{"image": name, "caption": str(n)} for n, name in enumerate(names)])
    found = read(path, image_root=str(tmp_path / "images"))
    root = tmp_path / "images"
    expected = [
        root / "1.jpg",
        root / "2.jpg",
        root / "part/3.jpg",
        root / "x/4.jpg",
        root / "y/4.jpg",
        Path("/data/5.jpg"),
        root / "6.jpg",
    ]
    assert [r.image for r in found.records] == [str(p) for p in expected]
    assert [r.id for r in found.records] == ["1", "2", "3", "x/4", "y/4", "5", "6"]
    assert [r.id for r in read(path).records] == [r.id for r in found.records], "ids do not depend on what is on disk"
    assert any("3 pictures found under" in note for note in found.notes)
    assert any("2 pictures not looked for by file name" in note for note in found.notes)
    refused(path, "--image-root", "is no folder", image_root=str(tmp_path / "nothing"))


def test_regions_and_boxes(tmp_path: Path) -> None:
    regions = [
        {"caption": "a", "box": [1, 2, 30, 40]},
        {"phrase": "b", "bbox": [1, 2, 30, 40]},
        {"text": "c", "bbox": {"x1": 1, "y1": 2, "x2": 30, "y2": 40}},
        {"caption": "d", "box": {"x": 1, "y": 2, "width": 30, "height": 40}, "image": "crops/d.jpg"},
        {"caption": " ", "box": [1, 2, 30, 40]},
        {"caption": "e"},
    ]
    found = read(
        write(tmp_path / "a.jsonl", [{"image": "a.jpg", "caption": "x"}, {"image": "b.jpg", "caption": "y", "segments": regions}])
    )
    assert found.records[0].segments == ()
    corner, size = (1.0, 2.0, 30.0, 40.0), (1.0, 2.0, 31.0, 42.0)
    assert found.records[1].segments == (
        Segment(caption="a", box=corner),
        Segment(caption="b", box=size),
        Segment(caption="c", box=corner),
        Segment(caption="d", box=size, image=str(tmp_path / "crops" / "d.jpg")),
        Segment(caption="e"),
    )
    assert any("1 regions with an empty caption dropped" in note for note in found.notes)
    assert any("regions from 'segments'" in note for note in found.notes)
    assert read(write(tmp_path / "b.csv", "image,caption,regions\na.jpg,x,EMEA\n")).records[0].segments == ()


def test_nested_lists_of_segments(tmp_path: Path) -> None:
    box = {"x1": 1, "y1": 2, "x2": 30, "y2": 40, "width": 29, "height": 38}
    part = {"filename": "s.jpg", "caption": "part", "similarity_score": 0.5, "bbox_coordinates": box}
    path = write(tmp_path / "a.json", [{"original_filename": "x/a.jpg", "original_caption": "whole", "segment": [part]}])
    found = read(path)
    assert [(r.captions, [s.caption for s in r.segments]) for r in found.records] == [(("whole",), ["part"])]
    assert found.notes[0].startswith("captions from 'original_caption'")
    found = read(path, caption_key="original_caption", image_key="original_filename")
    assert [(r.captions, r.segments) for r in found.records] == [(("whole",), ())]


def test_splits_are_the_values_of_a_column(tmp_path: Path) -> None:
    rows: Rows = [{"image": f"{n}.jpg", "caption": str(n), "split": s} for n, s in enumerate(["test", "train", "validation", "train"])]
    source = open_data(str(write(tmp_path / "a.parquet", rows)))
    assert source.splits() == ["test", "train", "val"]
    assert [r.id for r in source.records("train")] == ["1", "3"]
    assert source.default_split == "test"
    assert [r.id for r in source.records("val+test")] == ["2", "0"]
    refused(tmp_path / "a.parquet", "no split 'dev2'", "test, train, val", split="dev2")
    assert source.fingerprint("train") != source.fingerprint("test")


def test_parquet_features_of_pictures(tmp_path: Path) -> None:
    rows: Rows = [{"image": {"bytes": b"x", "path": "a.jpg"}, "caption": ["one", "two"]}]
    found = read(write(tmp_path / "a.parquet", rows))
    assert (found.records[0].image, found.records[0].captions) == (str(tmp_path / "a.jpg"), ("one", "two"))
    refused(write(tmp_path / "b.parquet", [{"image": b"x", "caption": "x"}]), "holds the pictures themselves", "save them as files")
    refused(write(tmp_path / "c.parquet", "PAR1 text"), "cannot be read as Parquet")


def test_lines_of_text_are_captions_without_pictures(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.txt", "one\n\ntwo\u2028three\r\n"))
    assert [(r.id, r.image, r.captions[0]) for r in found.records] == [("1", None, "one"), ("3", None, "two\u2028three")]


# Folders


def pair(folder: Path, stem: str, text: str, suffix: str = ".jpg") -> None:
    write(folder / f"{stem}{suffix}", b"")
    write(folder / f"{stem}.txt", text)


def test_a_folder_of_split_files(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", [{"image": "images/1.jpg", "caption": "one"}])
    write(tmp_path / "validation.parquet", [{"image": "images/2.jpg", "caption": "two"}])
    write(tmp_path / "test.jsonl", [{"id": "x", "image": "images/3.jpg", "captions": ["three"]}])
    write(tmp_path / "notes.txt", "not a caption")
    source = open_data(str(tmp_path))
    assert source.splits() == ["train", "val", "test"]
    assert [source.records(s)[0].image for s in source.splits()] == [str(tmp_path / "images" / f"{n}.jpg") for n in (1, 2, 3)]
    write(tmp_path / "train.csv", "image,caption,split\n1.jpg,one,train\n2.jpg,two,validation\n")
    assert len(source.records("train")) == 2
    assert source.read("train").notes[-1].startswith("the column 'split' of train.csv (train, val) is not used")
    write(tmp_path / "test.json", "[]")
    refused(tmp_path, "two files for the split 'test': test.json and test.jsonl")


def test_a_folder_of_pairs(tmp_path: Path) -> None:
    pair(tmp_path, "b.1", "first line\n second line \n\n")
    pair(tmp_path / "deep" / "er", "a", "deep", ".PNG")
    pair(tmp_path / "deep", "b.1", "twin")
    pair(tmp_path, "empty", " \n")
    write(tmp_path / "alone.jpg", b"")
    write(tmp_path / "README.txt", "about")
    write(tmp_path / ".hidden.jpg", b"")
    found = read(tmp_path)
    assert [(r.id, r.captions[0]) for r in found.records] == [("b.1", "first line second line"), ("deep/b.1", "twin"), ("a", "deep")]
    assert [note.split(" (")[0] for note in found.notes[1:]] == [
        "1 empty captions dropped with their pictures",
        "1 pictures without a .txt left out",
        "1 .txt files without a picture left out",
    ]
    refused(tmp_path, "which have no keys", caption_key="x")
    write(tmp_path / "alone.png", b"")
    assert len(read(tmp_path).records) == 3
    write(tmp_path / "alone.txt", "whose?")
    refused(tmp_path, "'alone.txt'", "both 'alone.jpg' and 'alone.png'")


def test_pairs_in_folders_of_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pair(tmp_path / split / "part", "1", f"a {split}")
        pair(tmp_path / split, split, "another")
    source = open_data(str(tmp_path))
    assert source.splits() == ["train", "test"]
    assert [(r.id, r.captions[0]) for r in source.records("test")] == [("test/part/1", "a test"), ("test", "another")]
    (tmp_path / "loop").symlink_to(tmp_path)
    assert len(open_data(str(tmp_path)).records("train")) == 2
    pair(tmp_path / "more", "2", "outside")
    refused(tmp_path, "pairs in train/, test/ and 1 outside of them", "2.jpg", split="train")


def test_unclear_and_empty_places_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "neither train.jsonl nor test.jsonl", "holds nothing")
    with pytest.raises(ValueError, match=r"no file or folder '.*nowhere\.csv'.*holds nothing"):
        OwnFiles(path=str(tmp_path / "nowhere.csv")).open()
    write(tmp_path / "metadata.csv", "image,caption\n")
    refused(tmp_path, "holds metadata.csv", "to read 'metadata.csv', give its path", "neither train.jsonl")
    refused(tmp_path / "metadata.csv", "holds no records")
    refused(write(tmp_path / "a.doc", "x"), "ends in '.doc'")
    pair(tmp_path, "a", "text")
    write(tmp_path / "train.csv", [{"image": "1.jpg", "caption": "one"}])
    refused(tmp_path, "is two data sets: train.csv, and 1 pictures with a .txt")
    with pytest.raises(ValueError, match=r"setting of data set .*image_keys.*Did you mean 'image_key'"):
        open_data(str(tmp_path), image_keys="x")


def test_file_names_that_are_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    for name, content in ((b"\xff.jpg", b""), (b"\xff.txt", b"a caption")):
        (tmp_path / os.fsdecode(name)).write_bytes(content)
    refused(tmp_path, "the name of a file is not UTF-8", "xff", "rename it")


def test_spaces_and_capitals_in_a_header(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.csv", "File Path , Long  Caption\nx.jpg,one\n"))
    assert [(Path(r.image).name, r.captions) for r in found.records] == [("x.jpg", ("one",))]
