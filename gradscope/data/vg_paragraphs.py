"""The registered data set ``vg-paragraphs``: Visual Genome pictures with one paragraph each (Krause et al., CVPR 2017).

``paragraphs_v1.json`` holds {image_id, paragraph, url}; ``train_split.json`` and its kin are lists of image ids. HN-CLIP trains on its
14,579 training paragraphs before it evaluates on Urban-1k.

How it can mislead: the paragraph file has more paragraphs than the authors' page counts images (19,561 and 19,551), because a few
images come twice; split files can repeat an id too. A repeated image is one record here, with each of its different paragraphs as a
caption, and counted in the notes: so 14,575 training images, not 14,579. Pictures are also in Urban-1k's source, Visual Genome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gradscope.data import data_sets
from gradscope.data.info import DataInfo, Download, data_set_folder
from gradscope.data.published import dropped_empty, read_json_list, root_folder, slashed, text_in
from gradscope.data.source import DataSource
from gradscope.types import Record

PARAGRAPHS = "paragraphs_v1.json"
SPLITS = ("train", "val", "test")
PICTURES = ("VG_100K", "VG_100K_2")
_SPLIT_PAGE = "https://cs.stanford.edu/people/ranjaykrishna/im2p"
_PICTURE_PAGE = "https://cs.stanford.edu/people/rak248/VG_100K_2"


@data_sets.register("vg-paragraphs")
@dataclass(frozen=True, kw_only=True)
class VgParagraphs:
    """
    Args:
        folder: folder of the data set; "" searches the data folders.
        image_root: folder that holds VG_100K and VG_100K_2; "" is the data set's folder.
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="Visual Genome paragraphs (Stanford image paragraphs): one paragraph for each of 19,551 pictures of Visual Genome",
        homepage=f"{_SPLIT_PAGE}/index.html",
        licence="not stated for the paragraphs; the pictures are Visual Genome's",
        citation="@inproceedings{krause2016paragraphs, title={A Hierarchical Approach for Generating Descriptive Image Paragraphs}, "
        "author={Krause, Jonathan and Johnson, Justin and Krishna, Ranjay and Fei-Fei, Li}, "
        "booktitle={Computer Vision and Pattern Recognition (CVPR)}, year={2017}}",
        layout=(
            f"{PARAGRAPHS}  image_id, paragraph, url of every paragraph",
            "train_split.json, val_split.json, test_split.json  lists of image ids",
            "VG_100K/, VG_100K_2/  the pictures of Visual Genome, IMAGE_ID.jpg",
        ),
        how="",
        counts={"train": 14575, "val": 2487, "test": 2489},
        downloads=(
            Download(
                to="paragraphs_v1.json.zip",
                url="http://visualgenome.org/static/data/dataset/paragraphs_v1.json.zip",
                unpack=True,
                makes=PARAGRAPHS,
            ),
            *(Download(to=f"{split}_split.json", url=f"{_SPLIT_PAGE}/{split}_split.json") for split in ("train", "val", "test")),
            Download(to="images.zip", url=f"{_PICTURE_PAGE}/images.zip", unpack=True, makes="VG_100K"),
            Download(to="images2.zip", url=f"{_PICTURE_PAGE}/images2.zip", unpack=True, makes="VG_100K_2"),
        ),
    )

    folder: str = ""
    image_root: str = ""

    def open(self) -> DataSource:
        folder = data_set_folder("vg-paragraphs", self.folder, (PARAGRAPHS,), self.info)
        splits = [split for split in SPLITS if (folder / f"{split}_split.json").is_file()]
        if not splits:
            names = ", ".join(f"{split}_split.json" for split in SPLITS)
            raise ValueError(f"'{folder}' holds {PARAGRAPHS} but none of {names}; get them from {self.info.homepage}")
        images = root_folder(self.image_root, folder)
        return DataSource(
            name="vg-paragraphs",
            folder=folder,
            readers={split: partial(_read, folder, split, images) for split in splits},
            expected={split: self.info.counts[split] for split in splits},
        )


def _read(folder: Path, split: str, images: Path) -> tuple[list[Record], list[str]]:
    listed = _ids(folder / f"{split}_split.json")
    wanted = set(listed)
    paragraphs: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    repeated = blank = 0
    for number, item in enumerate(read_json_list(folder / PARAGRAPHS), 1):
        where = f"'{folder / PARAGRAPHS}', record {number}"
        text = text_in(item, "paragraph", where)
        identity = str(item.get("image_id"))
        if identity not in wanted:
            continue
        if not text.strip():
            blank += 1
            continue
        repeated += identity in paragraphs
        known = paragraphs.setdefault(identity, [])
        known += [text] if text not in known else []
        places.setdefault(identity, _picture(item, identity, images))
    order = [identity for identity in dict.fromkeys(listed) if identity in paragraphs]
    records = [Record(id=i, image=places[i], captions=tuple(paragraphs[i])) for i in order]
    return records, [*dropped_empty(blank, "empty paragraphs"), *_notes(split, listed, paragraphs, repeated)]


def _notes(split: str, listed: list[str], paragraphs: Mapping[str, list[str]], repeated: int) -> list[str]:
    several = sum(len(texts) > 1 for texts in paragraphs.values())
    twice = sum(count - 1 for count in Counter(listed).values())
    without = len(set(listed)) - len(paragraphs)
    notes = []
    if repeated:
        notes.append(
            f"{repeated:,} paragraphs of split '{split}' repeat an image; they are joined to its record ({several:,} have several)"
        )
    if twice:
        notes.append(f"{twice:,} image ids come again in {split}_split.json and are read once")
    if without:
        notes.append(f"{without:,} image ids of {split}_split.json have no paragraph and are left out")
    return notes


def _ids(file: Path) -> list[str]:
    ids = read_json_list(file)
    wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, (int, str))), None)
    if wrong is not None:
        raise ValueError(f"'{file}' must be a list of image ids; it holds {wrong!r}")
    return [str(i) for i in ids]


def _picture(item: Mapping[str, Any], identity: str, images: Path) -> str:
    """In the folder that the url names; if it is not there and the other folder has it, there."""
    url = item.get("url")
    named = slashed(url).split("/")[-2] if isinstance(url, str) and slashed(url).count("/") > 1 else PICTURES[0]
    first = named if named in PICTURES else PICTURES[0]
    candidates = [images / folder / f"{identity}.jpg" for folder in dict.fromkeys((first, *PICTURES))]
    return str(next((path for path in candidates if path.exists()), candidates[0]))
