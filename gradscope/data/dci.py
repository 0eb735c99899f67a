"""The registered data set ``dci``: pictures of SA-1B with a short and a long caption and captions of their parts.

How it can mislead: "DCI" names several galleries.
    1,999   GOAL's test list (HN-CLIP, StructXLIP): read as split "test" where that list is on disk. "train" is then what
            GOAL's list of training segments names, with these segments, if that is on disk too (HN-CLIP counts 5,445; the list of
            GOAL's first release has 5,446); else every other annotation with the wanted caption, about 150 more.
    112     the authors' own split "test" (splits.json): read as "test" where GOAL's list is not on disk; their "valid" is "val"
    7,602   every long caption: the data set ``long-dci``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gradscope.data import data_sets
from gradscope.data.dci_annotations import ANNOTATIONS, RELEASE, all_annotations, annotation, captioned, record_id
from gradscope.data.info import DataInfo, Download, data_set_folder
from gradscope.data.published import (
    base_name,
    check_choice,
    dropped_empty,
    first_there,
    read_json,
    read_json_list,
    root_folder,
    slashed,
    text_in,
)
from gradscope.data.segment_lists import GOAL_LISTS, segments_of
from gradscope.data.source import DataSource, Reader
from gradscope.types import Record, Segment

CAPTIONS = ("long", "short", "both")
TEST_LISTS = ("dci_test_captions.json", "DCI_test.json")
#: GOAL's training lists: with the pictures' captions (the current release), or the parts alone (its first).
TRAIN_LISTS = ("DCI_segment_sim_bbox_del_org.json", "DCI_segment_only_sim_max_del_org.json")
#: Split names here -> those of splits.json.
OFFICIAL = {"train": "train", "val": "valid", "test": "test"}

CITATION = (
    "@misc{urbanek2023picture, title={A Picture is Worth More Than 77 Text Tokens: Evaluating CLIP-Style Models on Dense Captions}, "
    "author={Jack Urbanek and Florian Bordes and Pietro Astolfi and Mary Williamson and Vasu Sharma and Adriana Romero-Soriano}, "
    "year={2023}, eprint={2312.08578}, archivePrefix={arXiv}, primaryClass={cs.CV}}"
)
ARCHIVE = Download(
    to="dci.tar.gz",
    url="https://dl.fbaipublicfiles.com/densely_captioned_images/dci.tar.gz",
    sha256="9caff10cb6324c801d9020638f49925f04de87d897ca8614c599f3c43bef3aeb",  # as published in the authors' download script
    unpack=True,
    makes=f"{RELEASE}/annotations",
)
GOAL_TEST = Download(
    to="DCI_test.json",
    url=f"{GOAL_LISTS}/DCI_test.json",
    sha256="35227d8dfe02eccfff44947ecd0c265fb20ce3c03a59c85f062356b7c15165ae",  # of the file in that commit
    size=1704117,
)
PHOTOS = (
    "accept the licence at https://ai.meta.com/datasets/segment-anything-downloads/, download sa_000138.tar alone and put its .jpg "
    f"files into {RELEASE}/photos"
)
LAYOUT = (
    f"{RELEASE}/annotations/  one .json for each picture",
    "or annotations/  the same without the outer folder",
)
PHOTO_LAYOUT = (
    f"{RELEASE}/photos/  the pictures, sa_*.jpg",
    "or photos/  the same without the outer folder",
)


@data_sets.register("dci")
@dataclass(frozen=True, kw_only=True)
class Dci:
    """
    Args:
        folder: folder of the data set; "" searches the data folders.
        caption: "long", "short" or "both" (long first; each then counts as a caption of its own).
        image_root: folder of the pictures; "" is ``photos`` beside the annotations.
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="DCI, Densely Captioned Images: 7,805 pictures of SA-1B, each with a short and (7,602 of them) a long caption. "
        "Protocols: 1,999 = GOAL's test list, if it is on disk; 112 = the authors' own test split, else",
        homepage="https://github.com/facebookresearch/DCI",
        licence="CC BY-NC (annotations); pictures under the SA-1B licence",
        citation=CITATION,
        layout=(
            *LAYOUT,
            "or DCI_test.json  GOAL's test list of 1,999 captions, enough by itself for split test",
            "or dci_test_captions.json  the same list under another name",
            *PHOTO_LAYOUT,
            f"also {RELEASE}/splits.json  the authors' lists train, valid, test; needed where GOAL's test list is not there",
            f"also {TRAIN_LISTS[0]}  GOAL's training segments, which name its training pictures",
        ),
        how=f"`gradscope data fetch dci` gets the annotations and GOAL's lists; for the pictures {PHOTOS}",
        counts={"test": 1999},
        downloads=(ARCHIVE, GOAL_TEST, Download(to=TRAIN_LISTS[0], url=f"{GOAL_LISTS}/{TRAIN_LISTS[0]}")),
    )

    folder: str = ""
    caption: str = "long"
    image_root: str = ""

    def open(self) -> DataSource:
        check_choice("dci", "caption", self.caption, CAPTIONS)
        folder = data_set_folder("dci", self.folder, (*ANNOTATIONS, *TEST_LISTS), self.info)
        annotations = first_there(folder, ANNOTATIONS)
        base = annotations.parent if annotations else folder
        listed = first_there(folder, TEST_LISTS) or first_there(base, TEST_LISTS)
        images = root_folder(self.image_root, base / "photos")
        readers, expected = self._readers(annotations, listed, images)
        return DataSource(name="dci", folder=folder, readers=readers, expected=expected)

    def _readers(self, annotations: Path | None, listed: Path | None, images: Path) -> tuple[dict[str, Reader], dict[str, int]]:
        if listed and annotations:
            segments = first_there(listed.parent, TRAIN_LISTS)
            train = partial(_segmented, annotations, segments) if segments else partial(_all_but_listed, annotations, listed)
            test = partial(_listed_with_annotations, annotations, listed)
            chosen: dict[str, Reader] = {"train": partial(train, images, self.caption), "test": partial(test, images, self.caption)}
            return chosen, {"train": 5445, "test": 1999}
        if listed:
            if self.caption != "long":
                raise ValueError(f"--caption {self.caption} needs the annotations of DCI; '{listed}' holds the long captions only")
            return {"test": partial(_listed_alone, listed, images)}, {"test": 1999}
        assert annotations is not None, "data_set_folder saw annotations or a list"
        splits = annotations.parent / "splits.json"
        if not splits.is_file():
            raise ValueError(
                f"{annotations.parent} has annotations but neither splits.json nor GOAL's test list; fetch one of them (see `gradscope "
                "data info dci`), or use the data set long-dci, which needs none"
            )
        return {name: partial(_official, annotations, name, images, self.caption) for name in OFFICIAL}, {"test": 112}


def _official(annotations: Path, split: str, images: Path, caption: str) -> tuple[list[Record], list[str]]:
    file = annotations.parent / "splits.json"
    splits = read_json(file)
    names = splits.get(OFFICIAL[split]) if isinstance(splits, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"'{file}' has no list of annotation files under '{OFFICIAL[split]}'; fetch it again")
    return captioned([annotation(annotations / base_name(name)) for name in names], images, caption)


def _all_but_listed(annotations: Path, listed: Path, images: Path, caption: str) -> tuple[list[Record], list[str]]:
    held_out = {image for image, _ in _list(listed)}
    everything = all_annotations(annotations)
    kept = [record for record in everything if record.image not in held_out]
    records, notes = captioned(kept, images, caption)
    return records, [*notes, f"{len(everything) - len(kept):,} annotations held out of training: {listed.name} names their pictures"]


def _segmented(annotations: Path, segments: Path, images: Path, caption: str) -> tuple[list[Record], list[str]]:
    """GOAL's training pictures with GOAL's segments."""
    parts: dict[str, tuple[Segment, ...]] = {}
    for number, item in enumerate(read_json_list(segments), 1):
        where = f"'{segments}', record {number}"
        image = _whole_picture(item, where)
        parts[image] = (*parts.get(image, ()), *segments_of(item, where))
    by_image = {record.image: record for record in all_annotations(annotations)}
    found = [replace(by_image[image], segments=own) for image, own in parts.items() if image in by_image]
    records, notes = captioned(found, images, caption)
    without = len(parts) - len(found)
    return records, [*notes, *([f"{without:,} pictures of {segments.name} have no annotation and are left out"] if without else [])]


def _whole_picture(item: Any, where: str) -> str:
    """In the first release a crop is named .../sa_1.jpg_results/sa_1_max_2.png after its picture sa_1.jpg."""
    if isinstance(item, Mapping) and "original_filename" in item:
        return base_name(text_in(item, "original_filename", where))
    folders = slashed(text_in(item, "filename", where)).split("/")
    if len(folders) < 2 or not folders[-2].endswith("_results"):
        raise ValueError(f"{where}: the crop must lie in a folder called after its picture, sa_*.jpg_results; got '{item['filename']}'")
    return folders[-2].removesuffix("_results")


def _listed_alone(listed: Path, images: Path) -> tuple[list[Record], list[str]]:
    rows = _list(listed)
    kept = [(image, text) for image, text in rows if text.strip()]
    records = [Record(id=record_id(image), image=str(images / image), captions=(text,)) for image, text in kept]
    return records, dropped_empty(len(rows) - len(kept))


def _listed_with_annotations(annotations: Path, listed: Path, images: Path, caption: str) -> tuple[list[Record], list[str]]:
    """The list's own text is the long caption; short captions and segments come from the annotation of the same picture."""
    by_image = {record.image: record for record in all_annotations(annotations)}
    blank = Record(id="", image=None, captions=("", ""))
    rows = _list(listed)
    found = [replace(by_image.get(image, blank), id=record_id(image), image=image) for image, _ in rows]
    texts = [replace(record, captions=(text, record.captions[1])) for record, (_, text) in zip(found, rows, strict=True)]
    without = sum(image not in by_image for image, _ in rows)
    records, notes = captioned(texts, images, caption)
    return records, [*notes, *([f"{without:,} pictures of {listed.name} have no annotation"] if without else [])]


def _list(file: Path) -> list[tuple[str, str]]:
    """(picture's file name, caption) of GOAL's list; its folders are those of the authors' machine."""
    rows = []
    for number, item in enumerate(read_json_list(file), 1):
        where = f"'{file}', record {number}"
        rows.append((base_name(text_in(item, "filename", where)), text_in(item, "caption", where)))
    return rows
