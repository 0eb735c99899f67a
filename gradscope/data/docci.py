"""The registered data set ``docci``: 15k pictures by one photographer, each with a description of about 136 words.

Reads the released ``docci_descriptions.jsonlines`` or, where that is not there, the test list that GOAL released
(``docci_test.json``, also met as ``docci_test_captions.json``), whose pictures are matched by file name. GOAL's list of training
segments, where it is on disk, is split "train_goal": what GOAL and HN-CLIP (9,450) train on, of the 9,647 training pictures.

How it can mislead: two protocols are in use. 5,000 pictures is split "test"; 5,100 is "test+qual_test" (GOAL, HN-CLIP), the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from gradscope.data import data_sets
from gradscope.data.info import DataInfo, Download, data_set_folder
from gradscope.data.published import (
    base_name,
    dropped_empty,
    first_there,
    read_json_lines,
    read_json_list,
    root_folder,
    slashed,
    text_in,
)
from gradscope.data.segment_lists import GOAL_LISTS, segment_records
from gradscope.data.source import DataSource, Reader
from gradscope.types import Record

DESCRIPTIONS = ("docci_descriptions.jsonlines",)
TEST_LISTS = ("docci_test_captions.json", "docci_test.json")
TRAIN_LIST = "docci_segment_sim_bbox_del_org.json"
SPLITS = ("train", "test", "qual_dev", "qual_test")
#: Splits whose pictures GOAL's test list names.
LISTED = ("test", "qual_test")


@data_sets.register("docci")
@dataclass(frozen=True, kw_only=True)
class Docci:
    """
    Args:
        folder: folder of the data set; "" searches the data folders.
        image_root: folder of the pictures; "" is ``images`` beside the descriptions.
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="DOCCI, Descriptions of Connected and Contrasting Images: 15k pictures, one description of about 136 words each. "
        "Protocols: 5,100 = test+qual_test (GOAL, HN-CLIP; the default), 5,000 = --split test (FineLIP and others)",
        homepage="https://google.github.io/docci/",
        licence="CC BY 4.0 (annotations and images, Google LLC)",
        citation="@inproceedings{OnoeDocci2024, author={Yasumasa Onoe and Sunayana Rane and Zachary Berger and Yonatan Bitton and "
        "Jaemin Cho and Roopal Garg and Alexander Ku and Zarana Parekh and Jordi Pont-Tuset and Garrett Tanzer and Su Wang and "
        "Jason Baldridge}, title={{DOCCI: Descriptions of Connected and Contrasting Images}}, booktitle={arXiv:2404.19753}, "
        "year={2024}}",
        layout=(
            "docci_descriptions.jsonlines  example_id, split, image_file, description of every picture",
            "or docci_test_captions.json  GOAL's test list, enough for test and qual_test",
            "or docci_test.json  the same list under the name GOAL gives it",
            "images/  the pictures (train_00000.jpg, test_00000.jpg, qual_dev_00000.jpg, ...)",
            f"also {TRAIN_LIST}  GOAL's training pictures and segments: split train_goal",
        ),
        how="",
        counts={"train": 9647, "test": 5000, "qual_dev": 100, "qual_test": 100},
        default_split="test+qual_test",
        downloads=(
            Download(to="docci_descriptions.jsonlines", url="https://storage.googleapis.com/docci/data/docci_descriptions.jsonlines"),
            Download(
                to="docci_images.tar.gz",
                url="https://storage.googleapis.com/docci/data/docci_images.tar.gz",
                unpack=True,
                makes="images",
            ),
            Download(to=TRAIN_LIST, url=f"{GOAL_LISTS}/{TRAIN_LIST}"),
        ),
    )

    folder: str = ""
    image_root: str = ""

    def open(self) -> DataSource:
        folder = data_set_folder("docci", self.folder, (*DESCRIPTIONS, *TEST_LISTS), self.info)
        images = root_folder(self.image_root, folder / "images")
        file = first_there(folder, DESCRIPTIONS)
        found = file or first_there(folder, TEST_LISTS)
        assert found is not None, "data_set_folder saw one of them"
        splits = SPLITS if file else LISTED
        readers: dict[str, Reader] = {split: partial(_read, found, split, images) for split in splits}
        expected = {split: self.info.counts[split] for split in splits}
        if (folder / TRAIN_LIST).is_file():
            readers["train_goal"] = partial(_read_goal, folder / TRAIN_LIST, images)
            expected["train_goal"] = 9450
        return DataSource(name="docci", folder=folder, readers=readers, default_split=self.info.default_split, expected=expected)


def _read(file: Path, split: str, images: Path) -> tuple[list[Record], list[str]]:
    rows = list(_described(file) if file.name in DESCRIPTIONS else _listed(file))
    strange = Counter(of for of, _, _, _ in rows if of not in SPLITS)
    mine = [row[1:] for row in rows if row[0] == split]
    records = [
        Record(id=identity, image=str(images / slashed(image)), captions=(text,)) for identity, image, text in mine if text.strip()
    ]
    notes = dropped_empty(len(mine) - len(records))
    if strange:
        names = ", ".join(sorted(strange)[:5])
        notes.append(f"{strange.total():,} records of {file.name} belong to no split of DOCCI ({names}) and are not read")
    return records, notes


def _read_goal(file: Path, images: Path) -> tuple[list[Record], list[str]]:
    """Pictures lie in ``images`` whatever folder the list names; the crops were not released, so segments have boxes only."""
    records, notes = segment_records(read_json_list(file), images, f"'{file}'")
    whole = [
        replace(
            record,
            image=str(images / base_name(record.image or "")),
            segments=tuple(replace(segment, image=None) for segment in record.segments),
        )
        for record in records
    ]
    return whole, [note for note in notes if "left out" in note]


def _described(file: Path) -> Iterator[tuple[str, str, str, str]]:
    """(split, id, picture, description) of the released file."""
    for where, item in read_json_lines(file):
        yield (
            text_in(item, "split", where),
            text_in(item, "example_id", where),
            text_in(item, "image_file", where),
            text_in(item, "description", where),
        )


def _listed(file: Path) -> Iterator[tuple[str, str, str, str]]:
    """The same of GOAL's list: the split is the file name without its number, e.g. qual_test_00042.jpg."""
    for number, item in enumerate(read_json_list(file), 1):
        where = f"'{file}', record {number}"
        image = base_name(text_in(item, "filename", where))
        stem = image.rsplit(".", 1)[0]
        yield stem.rpartition("_")[0] or stem, stem, image, text_in(item, "caption", where)
