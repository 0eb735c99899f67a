"""`gradscope data check` on folders with known faults, and its numbers against loops over the records."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_files import pairs, tar_of
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.data.check import QUANTILES, check_pictures, find_duplicates, token_lengths
from gradscope.data.check_sets import Piece, check_data
from gradscope.data.identity import items, normalised
from gradscope.data.images import other_case
from gradscope.data.picture_facts import picture_facts
from gradscope.types import Record, Segment


@contextmanager
def silent(title: str):
    yield lambda done, total: None


def words(texts):
    return [len(text.split()) + 2 for text in texts]


def picture(path: Path, seed: int, size=(12, 10), mode: str = "RGB", **settings) -> Path:
    shape = {"RGB": (size[1], size[0], 3), "RGBA": (size[1], size[0], 4), "L": (size[1], size[0])}[mode]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8), mode).save(path, **settings)
    return path


def write_split(folder: Path, split: str, rows: list[tuple[str, str, list[str]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": i, "image": image, "captions": captions}) for i, image, captions in rows]
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def clean(tmp_path) -> Path:
    """Two splits of four records, nothing wrong with them."""
    folder = tmp_path / "clean"
    for part, split in enumerate(("train", "test")):
        rows = []
        for k in range(4 * part, 4 * part + 4):
            picture(folder / f"images/{k}.png", k, size=(10 + k, 20))
            rows.append((f"r{k}", f"images/{k}.png", [f"a picture of {k} red boats " + "and more " * k]))
        write_split(folder, split, rows)
    return folder


def run(*arguments: object):
    return CliRunner().invoke(app, ["data", "check", *map(str, arguments)], env={"COLUMNS": "200"})


# ---- numbers


@pytest.mark.parametrize("seed", range(8))
def test_token_lengths_are_those_of_a_loop(seed):
    draw = random.Random(seed)
    records = [
        Record(id=str(k), image=None, captions=tuple("w " * draw.randrange(0, 300) for _ in range(draw.randrange(1, 4))))
        for k in range(400)
    ]
    found = token_lengths([(r.id, c) for r in records for c in r.captions], words, [77, 248, 20])
    lengths = sorted(len(c.split()) + 2 for r in records for c in r.captions)
    assert found.captions == len(lengths)
    for name, level in QUANTILES.items():
        within = [n for n in lengths if sum(m <= n for m in lengths) >= level * len(lengths) - 1e-9]
        assert found.quantiles[name] == min(within), name
    assert found.longer == {c: sum(n > c for n in lengths) for c in (20, 77, 248)}
    assert sorted(n for _, n in found.longest) == [n for n in lengths if n > 20]
    assert [n for _, n in found.longest] == sorted((n for _, n in found.longest), reverse=True)
    by_id = {r.id: [len(c.split()) + 2 for c in r.captions] for r in records}
    assert all(n in by_id[identity] for identity, n in found.longest)


@pytest.mark.parametrize("seed", range(8))
def test_duplicates_are_those_of_all_pairs(tmp_path, seed):
    draw = random.Random(seed)
    paths = []
    for k in range(8):
        paths.append(tmp_path / f"{k}.bin")
        paths[-1].write_bytes(bytes([draw.randrange(2)]) * draw.choice([3, 4]))
    texts = ["A dog", "a  DOG", "a dog", "cat", "", " ", "bird", "ﬁn", "fin"]
    records = [
        Record(
            id=str(draw.randrange(12)),
            image=draw.choice([*map(str, paths), f"{tmp_path}/./0.bin", str(tmp_path / "none"), None]),
            captions=tuple(draw.choices(texts, k=draw.randrange(1, 4))),
        )
        for _ in range(10)
    ]
    found = find_duplicates(records, items(records, source="", contents="whole"))

    def pairs(groups):
        return sorted(tuple(sorted(pair)) for group in groups for pair in combinations(group, 2))

    def shared(a, b, form):
        return len({form(c) for c in a.captions if c.strip()} & {form(c) for c in b.captions if c.strip()})

    every = list(combinations(records, 2))
    assert pairs(found.id) == sorted((a.id, b.id) for a, b in every if a.id == b.id)
    same_path = [tuple(sorted((a.id, b.id))) for a, b in every if a.image and b.image and Path(a.image) == Path(b.image)]
    assert pairs(found.path) == sorted(same_path)
    once = {}
    for r in records:
        if r.image is not None and Path(r.image).is_file():
            once.setdefault(Path(r.image), r)
    same = [(once[a].id, once[b].id) for a, b in combinations(once, 2) if a.read_bytes() == b.read_bytes()]
    assert pairs(found.content) == sorted(tuple(sorted(pair)) for pair in same)
    for groups, form in ((found.caption, str), (found.caption_normalised, normalised)):
        want = [tuple(sorted((a.id, b.id))) for a, b in every for _ in range(shared(a, b, form))]
        assert pairs(groups) == sorted(want)
    assert found.surplus()["id"] == len(records) - len({r.id for r in records})


def test_facts_of_pictures(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    paths = {
        "plain": picture(tmp_path / "plain.jpg", 0, (30, 20)),
        "rotated": picture(tmp_path / "rotated.jpg", 1, (40, 20), exif=exif),
        "alpha": picture(tmp_path / "alpha.png", 2, (10, 50), "RGBA"),
        "gray": picture(tmp_path / "gray.png", 3, (5, 6), "L"),
        "animated": tmp_path / "animated.gif",
    }
    frames = [Image.new("RGB", (8, 9), colour).convert("P") for colour in ("red", "green", "blue")]
    frames[0].save(paths["animated"], save_all=True, append_images=frames[1:])
    found = check_pictures([Record(id=n, image=str(p), captions=("x",)) for n, p in paths.items()], workers=2)
    assert (found.listed, found.decoded, found.missing, found.unreadable) == (5, 5, (), {})
    assert (found.rotated, found.alpha) == (1, 1)
    assert found.animated == 1
    assert found.modes["RGB"] == 2
    assert (found.modes["RGBA"], found.modes["L"]) == (1, 1)
    assert sum(found.modes.values()) == 5
    assert found.sides == {"shorter side": (5, 10, 20), "longer side": (6, 30, 50)}


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", "half"])
def test_unreadable_pictures_have_a_reason_with_the_path(tmp_path, content):
    whole = picture(tmp_path / "x.jpg", 0, (300, 300))
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2] if content == "half" else content)
    facts = picture_facts(str(whole))
    assert "x.jpg" in facts.reason
    assert facts.mode == ""


def test_names_that_differ_in_case(tmp_path):
    picture(tmp_path / "Photos" / "IMG_1.JPG", 0, format="JPEG")
    assert other_case(str(tmp_path / "photos" / "img_1.jpg")) == str(tmp_path / "Photos" / "IMG_1.JPG")
    assert other_case(str(tmp_path / "Photos" / "img_1.jpg")) == str(tmp_path / "Photos" / "IMG_1.JPG")
    assert other_case(str(tmp_path / "Photos" / "img_2.jpg")) is None
    assert other_case("nowhere/at/all.jpg") is None


def test_content_is_compared_between_files_of_one_size_only_and_finds_all(tmp_path):
    """What the check reads of files is enough: its overlap equals that of reading everything."""
    draw = random.Random(5)
    sides = []
    for part in range(2):
        records = []
        for k in range(30):
            path = tmp_path / f"{part}-{k}"
            path.write_bytes(bytes([draw.randrange(3)]) * draw.randrange(1, 6))
            records.append(Record(id=f"{part}{k}", image=str(path), captions=(f"{part} {k}",)))
        sides.append(records)
    pieces = [Piece(source="s", label=name, split=name, records=tuple(r)) for name, r in zip(("train", "test"), sides, strict=True)]
    report = check_data("x", pieces, tokenize=words, contexts=[77], pictures=True, workers=1, progress=silent)
    want = [b.id for b in sides[1] if any(Path(a.image).read_bytes() == Path(b.image).read_bytes() for a in sides[0])]
    (found,) = report.overlaps
    assert (found.evaluated, found.trained, list(found.ids)) == ("test", "train", want)
    assert found.counts["content"] == len(want)


# ---- the command


def test_what_was_left_out_is_not_called_nothing(tmp_path):
    tar_of(tmp_path / "one.tar", [*pairs("abc"), ("d.txt", b"a caption of no picture")])
    result = run(tmp_path / "one.tar")
    assert result.exit_code == 0, result.output
    assert "nothing found that would change a result beyond what the notes above say" in result.output
    assert "all: 1 of 4" in result.output


def test_clean_data_leave_with_zero(clean, tmp_path):
    result = run(clean, "--output", tmp_path / "out/found.json")
    assert result.exit_code == 0, result.output
    assert "nothing found that would change a result\n" in result.output
    found = json.loads((tmp_path / "out/found.json").read_text())
    assert found["clean"] is True
    assert [s["records"] for s in found["splits"]] == [4, 4]
    assert found["splits"][0]["pictures"]["modes"] == {"RGB": 4}
    assert found["overlaps"][0]["counts"]["any"] == 0


def test_tokens_are_those_of_open_clip(clean, tmp_path):
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    emoji, numbers = "\U0001f600" * 200, " ".join(str(n) for n in range(1000, 1044))
    (clean / "test.jsonl").unlink()
    write_split(
        clean, "train", [("smiles", "images/0.png", [emoji]), ("numbers", "images/1.png", [numbers]), ("x", "images/2.png", ["a"])]
    )
    run(clean, "--output", tmp_path / "found.json")
    lengths = json.loads((tmp_path / "found.json").read_text())["splits"][0]["lengths"]
    want = {"smiles": len(tokenizer.encode(emoji)) + 2, "numbers": len(tokenizer.encode(numbers)) + 2}
    assert len(numbers.split()) < 50
    assert dict(lengths["longest"]) == {i: n for i, n in want.items() if n > 77}
    assert "numbers" in dict(lengths["longest"])
    assert lengths["longer"]["77"] == sum(n > 77 for n in want.values())
    assert lengths["quantiles"]["max"] == max(want.values())


def test_an_encoder_brings_its_own_tokens_and_context(clean, small_encoder, tmp_path):
    result = run(clean, "--encoder", small_encoder, "--output", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    assert "cut at 128" in result.output
    lengths = json.loads((tmp_path / "found.json").read_text())["splits"][0]["lengths"]
    assert set(lengths["longer"]) == {"77", "128", "248"}


def test_every_fault_is_found_and_named(clean, tmp_path):
    rows = [json.loads(line) for line in (clean / "train.jsonl").read_text().splitlines()]
    train = [(row["id"], row["image"], row["captions"]) for row in rows]
    (clean / "images/8.png").write_bytes((clean / "images/0.png").read_bytes())
    (clean / "images/9.png").write_bytes((clean / "images/1.png").read_bytes()[:60])
    train += [
        ("copy", "images/8.png", ["another text"]),
        ("broken", "images/9.png", ["a broken picture"]),
        ("case", "images/2.PNG", ["a name in capitals"]),
        ("gone", "images/gone.png", ["a picture that is gone"]),
        ("twice", "images/3.png", ["ANOTHER  text"]),
    ]
    write_split(clean, "train", train)
    with (clean / "test.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "leak", "image": "images/1.png", "captions": ["a leaked picture"]}) + "\n")
    result = run(clean, "--output", tmp_path / "found.json")
    assert result.exit_code == 1, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    train_found = found["splits"][0]
    assert train_found["pictures"]["missing"] == [str(clean / "images/2.PNG"), str(clean / "images/gone.png")]
    assert train_found["pictures"]["other_case"] == {str(clean / "images/2.PNG"): str(clean / "images/2.png")}
    assert list(train_found["pictures"]["unreadable"]) == [str(clean / "images/9.png")]
    duplicates = train_found["duplicates"]
    assert duplicates["path"] == [["r3", "twice"]]
    assert duplicates["content"] == [["r0", "copy"]]
    assert duplicates["caption"] == []
    assert duplicates["caption_normalised"] == [["copy", "twice"]]
    assert found["overlaps"][0]["ids"] == ["leak"]
    assert found["findings"] == [
        "train: pictures not on disk: 2 of 8 (with a file that differs in case only: 1)",
        "train: unreadable pictures: 1 of 8",
        "train: records that repeat the picture file of an earlier one: 1",
        "train: records that repeat the picture content of an earlier one: 1",
        "train: records that repeat the caption of an earlier one: 1",
        "records of test that are in train too: 1 of 5 (by id 0, file 1, content 1, caption 0)",
    ]
    assert "there is 2.png" in result.output
    assert "9.png" in result.output


def test_pictures_that_are_all_missing_are_said_once(clean):
    for path in (clean / "images").iterdir():
        path.unlink()
    result = run(clean)
    assert result.exit_code == 1
    assert result.output.count("no picture is on disk") == 2  # once a split
    assert "train: none of the 4 pictures is on disk" in result.output
    result = run(clean, "--captions-only")
    assert result.exit_code == 0, result.output
    assert "missing" not in result.output


def test_against_another_data_set(clean, tmp_path):
    other = tmp_path / "other"
    picture(other / "p/copy.png", 5, size=(15, 20))
    write_split(other, "train", [("z", "p/copy.png", ["new words"])])
    picture(other / "p/new.png", 99, size=(15, 20))
    write_split(other, "val", [("y", "p/new.png", ["newer words"])])
    result = run(clean, "--split", "test", "--against", f"{other}:train", "--output", tmp_path / "found.json")
    assert result.exit_code == 1, result.output
    (found,) = json.loads((tmp_path / "found.json").read_text())["overlaps"]
    assert (found["ids"], found["counts"]["content"], found["counts"]["file"]) == (["r5"], 1, 0)
    assert run(clean, "--split", "train", "--against", f"{other}:train").exit_code == 0
    assert run(clean, "--split", "test", "--against", f"{other}:val").exit_code == 0
    assert run(clean, "--split", "test", "--against", other).exit_code == 1


def test_parts_of_pictures_are_looked_at_too(tmp_path):
    segments = (
        Segment(caption="a part", box=(0, 0, 2, 2)),
        Segment(caption="a long part " * 40, image=str(picture(tmp_path / "crop.png", 1, mode="L"))),
        Segment(caption=" ", image=str(tmp_path / "gone.png")),
    )
    whole = Record(id="x", image=str(picture(tmp_path / "x.png", 0)), captions=("whole",), segments=segments)
    piece = Piece(source="s", label="train", split="train", records=(whole,))
    (found,) = check_data("x", [piece], tokenize=words, contexts=[77], pictures=True, workers=1, progress=silent).splits
    assert found.segment_lengths.longer == {77: 1}
    assert found.segment_lengths.longest == (("x", 122),)
    assert found.lengths.captions == 1
    assert found.pictures.modes == {"RGB": 1, "L": 1}
    assert found.pictures.missing == (str(tmp_path / "gone.png"),)
    assert found.empty == ("x",)


def test_sharegpt4v_trained_on_its_own_test_records(tmp_path):
    """E08: all 1,200 records of a list are trained on, its first 1,000 are evaluated."""
    rows = [{"filename": f"sam/{k}.jpg", "caption": f"The picture shows {k} things."} for k in range(1200)]
    (tmp_path / "all.json").write_text(json.dumps(rows))
    (tmp_path / "first.json").write_text(json.dumps(rows[:1000]))
    (tmp_path / "rest.json").write_text(json.dumps(rows[1000:]))
    result = run(tmp_path / "first.json", "--captions-only", "--against", tmp_path / "all.json")
    assert result.exit_code == 1, result.output
    assert "1,000 of 1,000 (by id 0, file 0, content 0, caption 1,000)" in result.output
    assert run(tmp_path / "first.json", "--captions-only", "--against", tmp_path / "rest.json").exit_code == 0


@pytest.mark.parametrize("flags", [["--split", "tset"], ["--against", "nowhere:train"], ["--encoder", "no"], ["--data-dir", "."]])
def test_bad_input_is_one_sentence(clean, flags):
    result = run(clean, *flags)
    assert isinstance(result.exception, ValueError)
    assert "\n" not in str(result.exception)
