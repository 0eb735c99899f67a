"""Each registered public data set on a miniature of its published layout: right names, right fields, a few tiny pictures.

The miniatures follow the published files and loaders; where a field was seen in two forms, both are here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradscope.data import data_sets
from gradscope.data.info import on_disk
from gradscope.data.segment_lists import segment_records
from gradscope.data.source import open_data
from gradscope.encoders.load import load_encoder
from gradscope.evaluate import evaluate

PUBLIC = ("dci", "docci", "long-dci", "sharegpt4v", "urban1k", "vg-paragraphs")


def picture(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def write_lines(path: Path, values: list[dict]) -> Path:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    return path


# --- miniatures -----------------------------------------------------------------------------------------------------------------


def docci(folder: Path) -> Path:
    counts = {"train": 3, "test": 4, "qual_dev": 2, "qual_test": 2}
    rows = [
        {
            "example_id": f"{split}_{k:05}",
            "split": split,
            "image_file": f"{split}_{k:05}.jpg",
            "description": f"A {split} picture, number {k}, of a café.",
        }
        for split, count in counts.items()
        for k in range(count)
    ]
    for k, row in enumerate(rows):
        picture(folder / "images" / row["image_file"], k)
    write_lines(folder / "docci_descriptions.jsonlines", rows)
    return folder


def annotation(k: int, *, long: str | None = None, bounds: object = None) -> dict:
    bounds = bounds or {"topLeft": {"x": 1, "y": 2}, "bottomRight": {"x": 11, "y": 12}}
    masks = {
        "0": {"idx": 0, "mask_quality": 0, "label": "wheel", "caption": "A round wheel.", "bounds": bounds, "outer_mask": "iVBORw0"},
        "1": {"idx": 1, "mask_quality": 1, "label": "blur", "bounds": bounds, "outer_mask": "iVBORw0"},
        "2": {"idx": 2, "mask_quality": 2, "bounds": bounds, "outer_mask": "iVBORw0"},
    }
    return {
        "image": f"sa_{1543972 + k}.jpg",
        "short_caption": f"Short caption {k}.",
        "extra_caption": f"A much longer caption of picture {k}. It goes on." if long is None else long,
        "mask_data": masks,
        "mask_keys": ["0", "1", "2"],
    }


def dci(folder: Path, *, lists: bool = False) -> Path:
    """Seven annotations, number 5 without a long caption; file names that do not name the picture."""
    base = folder / "densely_captioned_images"
    for k in range(7):
        bounds = [[1, 2], [11, 12]] if k == 1 else None
        write_json(base / "annotations" / f"{112956 + k}-data.json", annotation(k, long="" if k == 5 else None, bounds=bounds))
        picture(base / "photos" / f"sa_{1543972 + k}.jpg", k)
    names = [f"{112956 + k}-data.json" for k in range(7)]
    write_json(base / "splits.json", {"train": names[:3] + names[5:], "valid": names[3:4], "test": names[4:5]})
    if lists:
        rows = [{"filename": f"../DCI/photos/sa_{1543972 + k}.jpg", "caption": f"Listed caption {k}."} for k in (0, 2)]
        write_json(folder / "dci_test_captions.json", rows)
    return folder


def urban1k(folder: Path) -> Path:
    for k in (1, 2, 10):
        picture(folder / "Urban1k" / "image" / f"{k}.jpg", k)
        (folder / "Urban1k" / "caption").mkdir(exist_ok=True)
        (folder / "Urban1k" / "caption" / f"{k}.txt").write_text(f"A street, number {k}.\n", encoding="utf-8")
    return folder


def vg_paragraphs(folder: Path) -> Path:
    """Image 12 comes twice with two paragraphs, 14 twice with the same; 15 is listed without a paragraph."""
    rows = [(11, "VG_100K"), (12, "VG_100K_2"), (13, "VG_100K"), (14, "VG_100K_2"), (12, "VG_100K_2"), (14, "VG_100K_2")]
    texts = ["One.", "Two.", "Three.", "Four.", "Two again.", "Four."]
    paragraphs = [
        {"url": f"https://cs.stanford.edu/people/rak248/{place}/{i}.jpg", "image_id": i, "paragraph": text}
        for (i, place), text in zip(rows, texts, strict=True)
    ]
    write_json(folder / "paragraphs_v1.json", paragraphs)
    for split, ids in (("train", [12, 11, 14, 15]), ("val", [13]), ("test", [13])):
        write_json(folder / f"{split}_split.json", ids)
    for i, place in rows:
        picture(folder / place / f"{i}.jpg", i)
    return folder


def sharegpt4v_row(k: int, image: str | None = None) -> dict:
    answer = f"The image shows thing {k}.\nIt is large. It is red."
    turns = [{"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": answer}]
    return {"id": f"{k:012}", "image": image or f"sam/images/sa_{k}.jpg", "conversations": turns}


def sharegpt4v(folder: Path) -> Path:
    """1,000 test records and five more, one of them a picture of the test set, one with a Windows path."""
    rows = [sharegpt4v_row(k) for k in range(1005)]
    rows[1002]["image"] = rows[7]["image"]
    rows[1003]["image"] = "coco\\train2017\\000000000009.jpg"
    write_json(folder / "share-captioner_coco_lcs_sam_1246k_1107.json", rows)
    for row in (*rows[:3], *rows[1000:]):
        picture(folder / row["image"].replace("\\", "/"))
    picture(folder / "llava/llava_pretrain/images/00000/000000010.jpg")
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "dci": dci,
    "docci": docci,
    "long-dci": dci,
    "sharegpt4v": sharegpt4v,
    "urban1k": urban1k,
    "vg-paragraphs": vg_paragraphs,
}


# --- the contract ---------------------------------------------------------------------------------------------------------------


def test_all_public_sets_are_registered():
    assert set(PUBLIC) <= set(data_sets.names())
    assert set(PUBLIC) == set(MAKERS)


@pytest.mark.parametrize("name", PUBLIC)
def test_info_and_settings_are_complete(name):
    component = data_sets[name]
    info = component.info
    assert info.title
    assert info.licence
    assert info.citation
    assert info.layout
    assert info.counts
    assert info.homepage.startswith("https://")
    assert set(info.default_split.split("+")) <= set(info.counts)
    for download in info.downloads:
        assert bool(download.url) != bool(download.hub)
        assert bool(download.hub) == bool(download.hub_file)
        assert download.sha256 is None or re.fullmatch("[0-9a-f]{64}", download.sha256)
        assert not Path(download.to).is_absolute()
        assert ".." not in Path(download.to).parts
    text = inspect.getdoc(component)
    for setting in dataclasses.fields(component):
        assert f"{setting.name}:" in text, setting.name


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("given", [True, False])
def test_absent_files_are_named_with_the_way_to_get_them(name, given, tmp_path):
    with pytest.raises(ValueError, match=f"data set '{name}' is not on disk: looked for") as raised:
        open_data(name, **({"folder": str(tmp_path)} if given else {}))
    message = str(raised.value)
    assert "\n" not in message
    assert f"gradscope data info {name}" in message
    assert f"gradscope data fetch {name}" in message
    assert not given or str(tmp_path) in message


@pytest.mark.parametrize("name", PUBLIC)
def test_wrong_settings_are_refused(name, tmp_path):
    folder = MAKERS[name](tmp_path)
    with pytest.raises(ValueError, match=f"unknown setting of data set '{name}' 'flavour'"):
        open_data(name, folder=str(folder), flavour="x")
    with pytest.raises(ValueError, match=r"--image-root '.*nowhere' is not a folder"):
        open_data(name, folder=str(folder), image_root=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["dci", "sharegpt4v"])
def test_wrong_captions_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"unknown caption of data set '{name}' 'lang'. Did you mean 'long'"):
        open_data(name, folder=str(MAKERS[name](tmp_path)), caption="lang")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_split_reads_counts_and_names_real_pictures(name, tmp_path):
    """Sizes that differ from the published ones are said; the folder may be the data folder or the set's own in it."""
    own = MAKERS[name](tmp_path / name)
    source = open_data(name, folder=str(tmp_path))
    assert open_data(name, folder=str(own)).fingerprint(source.splits()[0]) == source.fingerprint(source.splits()[0])
    for split in source.splits():
        read = source.read(split)
        assert all(record.captions and all(c.strip() for c in record.captions) for record in read.records)
        if name != "sharegpt4v":
            assert all(Path(record.image).is_file() for record in read.records)
        if source.expected.get(split, len(read.records)) != len(read.records):
            assert any(f"published are {source.expected[split]:,}" in note for note in read.notes)
    assert source.read(data_sets[name].info.default_split).records


@pytest.mark.parametrize("name", PUBLIC)
def test_the_stated_layout_is_what_is_read(name, tmp_path):
    """What ``data info`` calls complete opens, and the miniature of the release is complete by it."""
    MAKERS[name](tmp_path / name)
    found = on_disk(name, data_sets[name].info, tmp_path)
    assert (found.state, found.missing) == ("yes", ())


@pytest.mark.parametrize("name", PUBLIC)
def test_annotations_are_enough_to_read(name, tmp_path):
    """Geometry of captions needs no pictures."""
    folder = MAKERS[name](tmp_path)
    for file in [p for p in folder.rglob("*") if p.suffix == ".jpg"]:
        file.unlink()
    assert open_data(name, folder=str(folder)).read(data_sets[name].info.default_split).records


@pytest.mark.parametrize("name", PUBLIC)
def test_evaluated_end_to_end(name, tmp_path, small_encoder):
    source = open_data(name, folder=str(MAKERS[name](tmp_path)))
    records = source.records("train" if name in ("sharegpt4v", "vg-paragraphs", "dci") else source.default_split)
    records = [record for record in records if Path(record.image).is_file()]
    result, embedded = evaluate(load_encoder(str(small_encoder)), records, resamples=10)
    assert embedded.image.shape[0] == len(records) > 1
    assert embedded.text.shape[0] == sum(len(record.captions) for record in records)
    cosine = embedded.text.double() @ embedded.image.double().T  # random pictures and weights: no ties
    hits = cosine.argmax(dim=1) == embedded.image_of_text
    recall = next(row.value for row in result.rows if (row.direction, row.metric) == ("t2i", "R@1"))
    assert recall == pytest.approx(hits.double().mean().item())


@pytest.mark.parametrize("name", PUBLIC)
def test_damaged_files_are_named(name, tmp_path):
    folder = MAKERS[name](tmp_path)
    files = [p for p in folder.rglob("*") if p.suffix in (".json", ".jsonlines", ".txt")]
    for file in files:
        file.write_bytes(b'{"image": "a.jpg"\xff')
    with pytest.raises(ValueError, match=r"is not UTF-8 .*fetch it again") as raised:
        open_data(name, folder=str(folder)).read(data_sets[name].info.default_split)
    assert any(str(file) in str(raised.value) for file in files)


# --- DOCCI ----------------------------------------------------------------------------------------------------------------------


def test_docci_protocols(tmp_path):
    source = open_data("docci", folder=str(docci(tmp_path)))
    assert source.splits() == ["train", "test", "qual_dev", "qual_test"]
    assert source.default_split == "test+qual_test"
    assert [len(source.records(split)) for split in ("train", "test", "qual_dev", "qual_test", "test+qual_test")] == [3, 4, 2, 2, 6]
    first = source.records("test")[0]
    assert (first.id, first.captions) == ("test_00000", ("A test picture, number 0, of a café.",))
    assert first.image == str(tmp_path / "images" / "test_00000.jpg")
    assert data_sets["docci"].info.counts == {"train": 9647, "test": 5000, "qual_dev": 100, "qual_test": 100}


@pytest.mark.parametrize("name", ["docci_test_captions.json", "docci_test.json"])
def test_docci_from_the_list_of_goal(name, tmp_path):
    """qual_test comes first in that file, its folders are the authors', and nothing is lost."""
    stems = [f"qual_test_{k:05}" for k in range(3)] + [f"test_{k:05}" for k in range(5)]
    write_json(tmp_path / name, [{"filename": f"chage/path/dataset\\images/{s}.jpg", "caption": f"Of {s}."} for s in stems])
    source = open_data("docci", folder=str(tmp_path))
    assert source.splits() == ["test", "qual_test"]
    assert [r.id for r in source.records(source.default_split)] == stems[3:] + stems[:3]
    assert source.records("test")[0].image == str(tmp_path / "images" / "test_00000.jpg")
    with pytest.raises(ValueError, match="no split 'train'; it has test, qual_test"):
        source.read("train")


def test_docci_ids_are_the_same_in_both_files(tmp_path):
    full = open_data("docci", folder=str(docci(tmp_path / "a")))
    rows = [{"filename": f"x/{r.id}.jpg", "caption": r.captions[0]} for r in full.records(full.default_split)]
    listed = open_data("docci", folder=str(write_json(tmp_path / "b" / "docci_test.json", rows).parent))
    assert [(r.id, r.captions) for r in listed.records(listed.default_split)] == [
        (r.id, r.captions) for r in full.records(full.default_split)
    ]


def test_docci_training_list_of_goal(tmp_path):
    folder = docci(tmp_path)
    part = {"filename": "chage/path/crops/train_00001_max_3.jpg", "caption": "a cup", "bbox_coordinates": box(1, 2, 5, 9)}
    rows = [{"original_filename": f"chage/path/train_{k:05}.jpg", "original_caption": f"Of {k}.", "segment": [part]} for k in (2, 1)]
    write_json(folder / "docci_segment_sim_bbox_del_org.json", rows)
    read = open_data("docci", folder=str(folder)).read("train_goal")
    assert [(r.id, r.captions) for r in read.records] == [("train_00002", ("Of 2.",)), ("train_00001", ("Of 1.",))]
    assert read.records[0].image == str(folder / "images" / "train_00002.jpg")
    assert [(s.caption, s.box, s.image) for s in read.records[0].segments] == [("a cup", (1, 2, 5, 9), None)]
    assert read.notes == ("split 'train_goal' of docci has 2 records, published are 9,450",)


def test_docci_counts_what_it_leaves_out(tmp_path):
    rows = [
        {"example_id": "test_0", "split": "test", "image_file": "test_0.jpg", "description": " "},
        {"example_id": "test_1", "split": "test", "image_file": "test_1.jpg", "description": "NA"},
        {"example_id": "new_0", "split": "new", "image_file": "new_0.jpg", "description": "x"},
    ]
    write_lines(tmp_path / "docci_descriptions.jsonlines", rows)
    read = open_data("docci", folder=str(tmp_path)).read("test")
    assert [r.captions for r in read.records] == [("NA",)]
    assert "1 records left out: empty captions" in read.notes
    assert any(note.startswith("1 records of docci_descriptions.jsonlines belong to no split of DOCCI (new)") for note in read.notes)


def test_docci_missing_field_names_the_line(tmp_path):
    write_lines(tmp_path / "docci_descriptions.jsonlines", [{"example_id": "a", "split": "test", "image_file": "a.jpg"}])
    with pytest.raises(ValueError, match=r"line 1: a string under 'description' is needed; it holds example_id, split, image_file"):
        open_data("docci", folder=str(tmp_path)).read("test")


# --- DCI ------------------------------------------------------------------------------------------------------------------------


def test_dci_pairs_come_from_the_content(tmp_path):
    source = open_data("dci", folder=str(dci(tmp_path)))
    assert source.splits() == ["train", "val", "test"]
    train = source.read("train")
    assert [r.id for r in train.records] == ["sa_1543972", "sa_1543973", "sa_1543974", "sa_1543978"]
    assert "1 records left out: no long caption" in train.notes
    first = train.records[0]
    assert first.captions == ("A much longer caption of picture 0. It goes on.",)
    assert first.image == str(tmp_path / "densely_captioned_images" / "photos" / "sa_1543972.jpg")
    assert [r.id for r in source.records("val")] == ["sa_1543975"]


def test_dci_segments(tmp_path):
    """Quality 0 gives label and caption, 1 the label, 2 nothing; both published forms of the bounds."""
    for record in open_data("dci", folder=str(dci(tmp_path))).records("train")[:2]:
        assert [s.caption for s in record.segments] == ["wheel: A round wheel.", "blur"]
        assert [s.box for s in record.segments] == [(1, 2, 11, 12)] * 2


def test_dci_captions(tmp_path):
    folder = str(dci(tmp_path))
    short = open_data("dci", folder=folder, caption="short").read("train")
    assert [r.captions for r in short.records][:1] == [("Short caption 0.",)]
    assert len(short.records) == 5
    assert not any("left out" in note for note in short.notes)
    both = open_data("dci", folder=folder, caption="both").read("train")
    assert both.records[0].captions == ("A much longer caption of picture 0. It goes on.", "Short caption 0.")
    assert both.records[3].captions == ("Short caption 5.",)
    assert "1 records have one of the two captions only" in both.notes


def test_dci_with_the_list_of_goal(tmp_path):
    """The list decides what is tested and what is not trained on; its text is the long caption."""
    folder = str(dci(tmp_path, lists=True))
    source = open_data("dci", folder=folder)
    assert source.splits() == ["train", "test"]
    test, train = source.read("test"), source.read("train")
    assert [(r.id, r.captions) for r in test.records] == [
        ("sa_1543972", ("Listed caption 0.",)),
        ("sa_1543974", ("Listed caption 2.",)),
    ]
    assert [len(r.segments) for r in test.records] == [2, 2]
    assert [r.id for r in train.records] == ["sa_1543973", "sa_1543975", "sa_1543976", "sa_1543978"]
    assert "2 annotations held out of training: dci_test_captions.json names their pictures" in train.notes
    assert next(r.captions for r in open_data("dci", folder=folder, caption="both").records("test")) == (
        "Listed caption 0.",
        "Short caption 0.",
    )


@pytest.mark.parametrize("release", [1, 2])
def test_dci_with_the_training_segments_of_goal(release, tmp_path):
    """First the parts alone, named after their pictures; later nested below the pictures' captions."""
    folder = dci(tmp_path, lists=True)
    crops = [
        {
            "caption": f"A part of {k}",
            "filename": f"chage/path/sa_{1543972 + k}.jpg_results/sa_{1543972 + k}_max_37.png",
            "similarity_score": 28.7,
            "bbox_coordinates": {"x1": 1, "y1": 2, "x2": 5, "y2": 9, "width": 4, "height": 7},
        }
        for k in (1, 3, 900)
    ]
    name = "DCI_segment_only_sim_max_del_org.json"
    if release == 2:
        name = "DCI_segment_sim_bbox_del_org.json"
        photos = [crop["filename"].split("/")[-2].removesuffix("_results") for crop in crops]
        crops = [
            {"original_filename": f"x/{photo}", "original_caption": "c", "segment": [crop]}
            for photo, crop in zip(photos, crops, strict=True)
        ]
    write_json(folder / name, crops)
    train = open_data("dci", folder=str(folder)).read("train")
    assert [r.id for r in train.records] == ["sa_1543973", "sa_1543975"]
    assert [(s.caption, s.box) for s in train.records[0].segments] == [("A part of 1", (1, 2, 5, 9))]
    assert f"1 pictures of {name} have no annotation and are left out" in train.notes
    assert any("published are 5,445" in note for note in train.notes)


def test_dci_from_the_list_alone(tmp_path):
    rows = [{"filename": f"../DCI/photos/sa_{k}.jpg", "caption": f"Caption {k}."} for k in range(4)]
    write_json(tmp_path / "DCI_test.json", rows)
    source = open_data("dci", folder=str(tmp_path))
    assert source.splits() == ["test"]
    assert [r.id for r in source.records("test")] == ["sa_0", "sa_1", "sa_2", "sa_3"]
    with pytest.raises(ValueError, match="--caption short needs the annotations of DCI"):
        open_data("dci", folder=str(tmp_path), caption="short")


def test_dci_without_any_split_is_refused(tmp_path):
    folder = dci(tmp_path)
    (folder / "densely_captioned_images" / "splits.json").unlink()
    with pytest.raises(ValueError, match=r"neither splits\.json nor GOAL's test list"):
        open_data("dci", folder=str(folder))


def test_dci_missing_annotation_is_named(tmp_path):
    folder = dci(tmp_path)
    (folder / "densely_captioned_images" / "annotations" / "112957-data.json").unlink()
    with pytest.raises(ValueError, match=r"112957-data\.json' does not exist, though splits\.json names it"):
        open_data("dci", folder=str(folder)).read("train")


def test_dci_reads_a_changed_annotation_again(tmp_path):
    folder = dci(tmp_path)
    source = open_data("dci", folder=str(folder))
    before = source.records("val")[0].captions
    file = folder / "densely_captioned_images" / "annotations" / "112959-data.json"
    write_json(file, annotation(3, long="Corrected."))
    assert before != source.records("val")[0].captions == ("Corrected.",)


def test_long_dci_is_every_long_caption(tmp_path):
    """From the folder of DCI, found by that name too, and from TULIP's table: the same pairs."""
    dci(tmp_path / "dci")
    source = open_data("long-dci", folder=str(tmp_path))
    records = source.records("test")
    assert [r.id for r in records] == [f"sa_{1543972 + k}" for k in (0, 1, 2, 3, 4, 6)]
    table = tmp_path / "table"
    table.mkdir()
    quoted = "".join(f'{r.id}.jpg\t"{r.captions[0]}\nSecond ""line"""\n' for r in records)
    (table / "dci_long.csv").write_text("filepath\ttitle\n" + quoted + "sa_1.jpg\t\nsa_2.jpg\tNA\n", encoding="utf-8")
    read = open_data("long-dci", folder=str(table)).read("test")
    assert [r.id for r in read.records] == [*(r.id for r in records), "sa_2"]
    assert read.records[0].captions == (records[0].captions[0] + '\nSecond "line"',)
    assert "1 records left out: empty captions" in read.notes


def test_long_dci_table_of_another_kind_is_refused(tmp_path):
    (tmp_path / "dci_long.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="needs the columns filepath and title, separated by tabs; it has a,b"):
        open_data("long-dci", folder=str(tmp_path)).read("test")


# --- Urban-1k, Visual Genome, ShareGPT4V ----------------------------------------------------------------------------------------


def test_urban1k_pairs_by_stem(tmp_path):
    folder = urban1k(tmp_path)
    base = folder / "Urban1k"
    (base / "caption" / "3.txt").write_text("\n", encoding="utf-8")
    (base / "caption" / "4.txt").write_text("\nOnly a caption.\nSecond line.\n", encoding="utf-8")
    picture(base / "image" / "9.jpg")
    read = open_data("urban1k", folder=str(folder)).read("test")
    assert [r.id for r in read.records] == ["1", "2", "4", "10"]
    assert read.records[2].captions == ("Only a caption.",)
    assert read.records[2].image == str(base / "image" / "4.jpg")  # not there; the caller names what is missing
    assert "1 records left out: empty captions" in read.notes
    assert "1 pictures have no caption file and are not read: 9" in read.notes


def test_vg_paragraphs(tmp_path):
    source = open_data("vg-paragraphs", folder=str(vg_paragraphs(tmp_path)))
    assert source.splits() == ["train", "val", "test"]
    train = source.read("train")
    assert [(r.id, r.captions) for r in train.records] == [("12", ("Two.", "Two again.")), ("11", ("One.",)), ("14", ("Four.",))]
    assert train.records[0].image == str(tmp_path / "VG_100K_2" / "12.jpg")
    assert "2 paragraphs of split 'train' repeat an image; they are joined to its record (1 have several)" in train.notes
    assert "1 image ids of train_split.json have no paragraph and are left out" in train.notes


def test_vg_pictures_in_one_folder(tmp_path):
    """Some keep all pictures in VG_100K."""
    folder = vg_paragraphs(tmp_path)
    (folder / "VG_100K_2" / "12.jpg").rename(folder / "VG_100K" / "12.jpg")
    assert open_data("vg-paragraphs", folder=str(folder)).records("train")[0].image == str(folder / "VG_100K" / "12.jpg")


def test_vg_repeated_ids_in_a_split(tmp_path):
    folder = vg_paragraphs(tmp_path)
    write_json(folder / "train_split.json", [11, "11", 12])
    read = open_data("vg-paragraphs", folder=str(folder)).read("train")
    assert [r.id for r in read.records] == ["11", "12"]
    assert "1 image ids come again in train_split.json and are read once" in read.notes
    write_json(folder / "val_split.json", [{"id": 3}])
    with pytest.raises(ValueError, match="must be a list of image ids"):
        open_data("vg-paragraphs", folder=str(folder)).read("val")


def test_vg_without_splits_is_refused(tmp_path):
    folder = vg_paragraphs(tmp_path)
    for file in folder.glob("*_split.json"):
        file.unlink()
    with pytest.raises(ValueError, match=r"none of train_split\.json, val_split\.json, test_split\.json; get them from https"):
        open_data("vg-paragraphs", folder=str(folder))


def test_sharegpt4v_never_trains_on_the_first_thousand(tmp_path):
    source = open_data("sharegpt4v", folder=str(sharegpt4v(tmp_path)))
    test, train = source.read("test"), source.read("train")
    assert len(test.records) == 1000
    assert not any("published" in note for note in test.notes)
    assert [r.id for r in train.records] == [
        "sam/images/sa_1000.jpg",
        "sam/images/sa_1001.jpg",
        "coco/train2017/000000000009.jpg",
        "sam/images/sa_1004.jpg",
    ]
    assert not {r.id for r in test.records} & {r.id for r in train.records}
    assert "1 records left out of training: their picture is among the first 1,000, the test set" in train.notes
    assert test.records[3].captions == ("The image shows thing 3. It is large. It is red.",)


def test_sharegpt4v_captions_and_root(tmp_path):
    folder, root = sharegpt4v(tmp_path), tmp_path / "elsewhere"
    root.mkdir()
    both = open_data("sharegpt4v", folder=str(folder), caption="both", image_root=str(root)).records("test")[5]
    assert both.captions == ("The image shows thing 5. It is large. It is red.", "The image shows thing 5")
    assert both.image == str(root / "sam/images/sa_5.jpg")
    assert open_data("sharegpt4v", folder=str(folder), caption="short").records("test")[5].captions == ("The image shows thing 5",)


def test_sharegpt4v_without_an_answer_is_named(tmp_path):
    folder = sharegpt4v(tmp_path)
    row = sharegpt4v_row(0)
    row["conversations"] = row["conversations"][:1]
    write_json(folder / "share-captioner_coco_lcs_sam_1246k_1107.json", [row])
    with pytest.raises(ValueError, match="record 1: 'conversations' must hold a question and an answer"):
        open_data("sharegpt4v", folder=str(folder)).read("test")


# --- lists of segments ----------------------------------------------------------------------------------------------------------


def box(x1: float, y1: float, x2: float, y2: float) -> dict:
    return {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "width": x2 - x1, "height": y2 - y1}


def structxlip() -> list[dict]:
    segments = [
        {
            "similarity_score": 0.87,
            "filename": "/abs/else/crop_1.jpg",
            "caption": "a red door",
            "filename_structure_cropped": "maps/crop_1.png",
            "bbox_coordinates": box(1, 2, 10, 12),
        },
        {"similarity_score": 0.5, "filename": "crop_2.jpg", "caption": "a roof", "bbox_coordinates": box(0, 0, 0, 0)},
    ]
    house = {
        "original_filename": "/abs/else/house.jpg",
        "original_caption": "A house.",
        "original_filename_structure": "maps/house.png",
        "segment": segments,
    }
    return [house, {"original_filename": "tree.jpg", "original_caption": "A tree.", "segment": []}]


def test_nested_segments(tmp_path):
    """Pictures of another machine are found by name; what is not there keeps its path."""
    for name in ("house.jpg", "crop_1.jpg"):
        picture(tmp_path / name)
    records, notes = segment_records(structxlip(), tmp_path, "list.json")
    house, tree = records
    assert (house.id, house.image, house.captions) == ("house", str(tmp_path / "house.jpg"), ("A house.",))
    assert [(s.caption, s.box, s.image) for s in house.segments] == [
        ("a red door", (1, 2, 10, 12), str(tmp_path / "crop_1.jpg")),
        ("a roof", None, str(tmp_path / "crop_2.jpg")),
    ]
    assert house.aux["structure"] == str(tmp_path / "maps" / "house.png")
    assert house.aux["segment_structures"] == [str(tmp_path / "maps" / "crop_1.png"), None]
    assert house.aux["segment_scores"] == [0.87, 0.5]
    assert tree.segments == ()
    assert tree.aux == {}
    assert notes == [f"2 pictures found by their file name in {tmp_path}; the list names other folders"]


def test_flat_lists(tmp_path):
    rows = [
        {"filename": "a/1.jpg", "caption": "One."},
        {"filename": "b\\1.jpg", "caption": "Another one."},
        {"filename": "c/2.png", "caption": "Crop.", "similarity_score": 20.5, "bbox_coordinates": box(3, 4, 5, 6)},
        {"filename": "c/3.png", "caption": " "},
    ]
    records, notes = segment_records(rows, tmp_path, "list.json")
    assert [r.id for r in records] == ["a/1.jpg", "b/1.jpg", "2"]  # file names where they are unique
    assert [r.image for r in records] == [str(tmp_path / name) for name in ("a/1.jpg", "b/1.jpg", "c/2.png")]
    assert records[2].aux == {"box": (3, 4, 5, 6)}
    assert notes == ["1 records of list.json left out: empty captions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_caption": None}, "record 1: a string under 'original_caption' is needed"),
        ({"original_filename": ""}, "record 1: '' is not the name of a picture"),
        ({"segment": {"a": 1}}, "record 1: 'segment' must be a list"),
        ({"segment": ["a"]}, "record 1: 'segment' must be a list of segments"),
        ({"segment": [{"filename": "x.jpg"}]}, "record 1, segment 1: a string under 'caption' is needed"),
        ({"segment": [{"caption": "c", "bbox_coordinates": {"x1": 1}}]}, "'bbox_coordinates' needs the numbers x1, y1, x2, y2"),
        ({"segment": [{"caption": "c", "bbox_coordinates": box(5, 0, 5, 9)}]}, "has no area; x2 must lie right of x1"),
        ({"segment": [{"caption": "c", "bbox_coordinates": box(0, 0, float("nan"), 9)}]}, "has no area"),
    ],
)
def test_wrong_segments_are_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        segment_records([structxlip()[0] | change], tmp_path, "list.json")


def test_box_is_what_the_crop_shows(tmp_path):
    """Twin: cut the picture by the box that was read, compare with a crop cut by hand at random corners."""
    rng = np.random.default_rng()
    pixels = rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)
    for _ in range(20):
        left, top = int(rng.integers(0, 30)), int(rng.integers(0, 20))
        right, bottom = int(rng.integers(left + 1, 41)), int(rng.integers(top + 1, 31))
        item = structxlip()[0] | {"segment": [{"caption": "c", "bbox_coordinates": box(left, top, right, bottom)}]}
        (record,), _ = segment_records([item], tmp_path, "list.json")
        cut = np.asarray(Image.fromarray(pixels).crop([int(v) for v in record.segments[0].box]))
        assert np.array_equal(cut, pixels[top:bottom, left:right])
