"""Caption files: every format, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradscope.data.captions import read_captions

TWO = ["café", "赤い椅子"]
PAIRS = list(zip(["x.jpg", "y.jpg"], TWO, strict=True))


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps([{"filename": "x.jpg", "caption": TWO[0]}, {"filename": "y.jpg", "caption": TWO[1]}])),
        ("a.json", json.dumps([{"image": "x.jpg", "caption": TWO[0]}, {"image": "y.jpg", "caption": TWO[1]}])),
        ("a.json", json.dumps([{"id": "x.jpg", "captions": [TWO[0], "short"]}, {"id": "y.jpg", "captions": TWO[1:]}])),
        ("a.jsonl", "\n".join(json.dumps({"example_id": i, "description": t}) for i, t in PAIRS)),
        ("a.csv", f"id,caption\nx.jpg,{TWO[0]}\r\ny.jpg,{TWO[1]}\n"),
        ("a.csv", f"Caption ;ID\n{TWO[0]};x.jpg\n{TWO[1]};y.jpg\n"),
        ("a.csv", f"id|text\nx.jpg|{TWO[0]}\ny.jpg|{TWO[1]}\n"),
        ("a.tsv", f"filepath\ttitle\nx.jpg\t{TWO[0]}\ny.jpg\t{TWO[1]}"),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str) -> None:
    found = read_captions(write(tmp_path, name, content))
    assert list(found.texts) == TWO
    assert found.ids == (("x.jpg", "y.jpg") if "id" in content.casefold() else ("x", "y"))  # an id column, or stems
    assert (found.name, found.n_rows, found.n_empty, len(found.sha256)) == ("a", 2, 0, 64)


def test_plain_lists_and_lines_are_numbered(tmp_path: Path) -> None:
    for path in (write(tmp_path, "a.json", json.dumps(TWO)), write(tmp_path, "b.txt", "\r\n".join(TWO))):
        found = read_captions(path)
        assert list(found.texts) == TWO
        assert found.ids == ("1", "2")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt", "a.json"])
def test_encodings(tmp_path: Path, name: str) -> None:
    content = {
        "a.csv": "caption\n" + "\n".join(TWO),
        "a.jsonl": "\n".join(json.dumps(t, ensure_ascii=False) for t in TWO),
        "a.txt": "\n".join(TWO),
        "a.json": json.dumps(TWO, ensure_ascii=False),
    }[name]
    assert list(read_captions(write(tmp_path, name, content.encode("utf-8"))).texts) == TWO
    assert list(read_captions(write(tmp_path, name, content.encode("utf-8-sig"))).texts) == TWO
    path = write(tmp_path, name, content.encode("utf-16"))
    with pytest.raises(ValueError, match=r"line 1: it starts like UTF-16.*--encoding"):
        read_captions(path)
    assert list(read_captions(path, encoding="utf-16").texts) == TWO
    latin = content.replace(TWO[1], "naïve").encode("latin-1")
    line = latin[: latin.index(b"\xe9")].count(b"\n") + 1
    with pytest.raises(ValueError, match=rf"{name} line {line}: byte 0xe9.*--encoding"):
        read_captions(write(tmp_path, name, latin))
    with pytest.raises(ValueError, match="unknown text encoding"):
        read_captions(path, encoding="utf-99")


def test_words_that_look_like_missing_values_stay_text(tmp_path: Path) -> None:
    words = ["None", "NA", "null", "42", "nan"]
    found = read_captions(write(tmp_path, "a.csv", "caption\n" + "\n".join(words) + "\n"))
    assert list(found.texts) == words


def test_empty_captions_are_dropped_and_counted(tmp_path: Path) -> None:
    found = read_captions(write(tmp_path, "a.csv", "id,caption\n1,one\n2,\n3,  \n4,two\n"))
    assert found.texts == ("one", "two")
    assert found.ids == ("1", "4")
    assert (found.n_rows, found.n_empty) == (4, 2)
    found = read_captions(write(tmp_path, "b.txt", "one\n\ntwo\n"))
    assert found.ids == ("1", "3")
    assert found.n_empty == 1


def test_further_captions_and_repeated_ids_are_counted(tmp_path: Path) -> None:
    rows = [{"id": 7, "captions": ["a", "b", "c"]}, {"id": 7, "captions": ["d"]}, {"id": 8, "captions": []}]
    found = read_captions(write(tmp_path, "a.json", json.dumps(rows)))
    assert found.texts == ("a",)
    assert (found.n_rows, found.n_further, found.n_repeated_ids, found.n_empty) == (3, 3, 1, 1)
    assert any("2 rows joined into 1 records" in note for note in found.notes)


def test_quotes_new_lines_and_long_captions(tmp_path: Path) -> None:
    long = "word " * 100_000
    found = read_captions(write(tmp_path, "a.csv", f'id,caption\n1,"a ""red"", large\nchair"\n2,"{long}"\n'))
    assert found.texts == ('a "red", large\nchair', long)
    found = read_captions(write(tmp_path, "a.jsonl", json.dumps({"caption": "a\u2028b"}, ensure_ascii=False) + "\n\n"))
    assert found.texts == ("a\u2028b",)


def test_caption_key(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", json.dumps([{"id": 1, "caption": "short", "dense": "long"}]))
    assert read_captions(path).texts == ("short",)
    found = read_captions(path, caption_key="Dense")
    assert (found.texts, found.key) == (("long",), "dense")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[\n{"caption": "x"},\n{"caption":\n null}]', r"line 3 \(record 2\): 'caption' is a null"),
        ("a.json", '[{"caption": ["x", 3]}]', "line 1 .*entries that are not strings"),
        ("a.json", "[4]", r"line 1 \(record 1\): a number"),
        ("a.json", '{"caption": "x"}', "JSON record at its top; a list"),
        ("a.json", '{"caption": "x"}\n{"caption": "y"}', "line 2: not valid JSON .*jsonl"),
        ("a.json", '[{"caption": "x"', "line 1: not valid JSON"),
        ("a.json", '[{"words": "x"}]', "no key any of caption.* among words; .*--caption-key"),
        ("a.jsonl", '{"caption": "x"}\n{"caption": 5}\n', "line 2: 'caption' is a number"),
        ("a.jsonl", '{"caption": "x"}\n{"capt', "line 2: not valid JSON"),
        ("a.csv", "file;words\n1;x\n", "no column .*separator semicolon its columns are file, words; .*--caption-key"),
        ("a.csv", "id,caption\n1,a,b\n", "line 2: 3 fields, but the header has 2"),
        ("a.csv", 'id,caption\n1,"open\n2,x\n', "unpaired quote"),
        ("a.csv", "id,caption\n", "holds no records"),
        ("a.csv", "", "has no header"),
        ("a.csv", "id,Caption,caption\n1,a,b\n", "two columns have the same name"),
        ("a.jsonl", '{"caption": "x"}\n{"text": "y"}\n', "line 2: no key 'caption', which other records have, but 'text'"),
        ("a.txt", "", "holds no records"),
        ("a.txt", " \n\n", "all 2 captions are empty"),
        ("a.json", "[]", "holds no records"),
        ("a.parquet", "x", "cannot be read as Parquet"),
        ("a.doc", "x", "no caption format"),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_captions(write(tmp_path, name, content))
    assert "\n" not in str(caught.value)


def test_names_paths_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'docci'"):
        read_captions("doci")
    with pytest.raises(ValueError, match=r"no file or folder 'missing\.json'"):
        read_captions("missing.json")
    with pytest.raises(ValueError, match=r"has neither train\.jsonl .*it holds nothing"):
        read_captions(str(tmp_path))
    with pytest.raises(ValueError, match="holds strings without keys"):
        read_captions(write(tmp_path, "a.txt", "x\n"), caption_key="caption")
    with pytest.raises(ValueError, match="belongs to files of your own"):
        read_captions("docci", caption_key="caption")


def test_splits_of_a_file_are_chosen_not_mixed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "id,split,caption\n1,train,one\n2,test,two\n3,dev,three\n")
    assert (read_captions(path).texts, read_captions(path).split) == (("two",), "test")
    assert read_captions(path, split="train+val").texts == ("one", "three")
    with pytest.raises(ValueError, match="no split 'qual'; name one of train, test, val"):
        read_captions(path, split="qual")
    path = write(tmp_path, "b.csv", "id,split,caption\n1,train,one\n2,more,two\n")
    with pytest.raises(ValueError, match="no split 'test'; name one of train, more with --split"):
        read_captions(path)


def test_a_named_set_is_looked_for_then_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSCOPE_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="given is no folder"):
        read_captions("docci", data_dir=tmp_path / "given")
    (tmp_path / "given").mkdir()
    with pytest.raises(ValueError) as caught:
        read_captions("docci", data_dir=tmp_path / "given")
    for part in ("given", "env", str(Path("cache", "data")), "docci_descriptions.jsonlines", "data fetch docci"):
        assert part in str(caught.value)
    (tmp_path / "env" / "docci").mkdir(parents=True)
    splits = ["train", "test", "qual_dev", "qual_test"]
    lines = [json.dumps({"example_id": f"{s}_0", "split": s, "image_file": "i.jpg", "description": f"a {s}"}) for s in splits]
    write(tmp_path / "env" / "docci", "docci_descriptions.jsonlines", "\n".join(lines))
    with pytest.raises(ValueError, match=r"gives the picture .*i\.jpg' to 2 records"):
        read_captions("docci")
    write(
        tmp_path / "env" / "docci",
        "docci_descriptions.jsonlines",
        "\n".join(line.replace("i.jpg", f"{n}.jpg") for n, line in enumerate(lines)),
    )
    found = read_captions("docci")
    assert (found.name, found.texts, found.ids) == ("docci", ("a test", "a qual_test"), ("test_0", "qual_test_0"))
    assert read_captions("docci", split="train").texts == ("a train",)
    assert any("published are 5,000" in note for note in found.notes)
