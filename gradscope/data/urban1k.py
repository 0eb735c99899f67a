"""The registered data set ``urban1k``: 1,000 busy street scenes with long captions written by a model; a test set only.

``image/NAME.jpg`` belongs to ``caption/NAME.txt``; the caption is the file's first line with text, as in Long-CLIP's evaluation.

How it can mislead: there is no training part; "fine-tuned for Urban-1k" means fine-tuned on other data (HN-CLIP: ``vg-paragraphs``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from gradscope.data import data_sets
from gradscope.data.info import DataInfo, Download, data_set_folder
from gradscope.data.published import dropped_empty, first_there, read_text, root_folder
from gradscope.data.source import DataSource
from gradscope.types import Record

CAPTIONS = ("caption", "Urban1k/caption", "captions", "Urban1k/captions")
IMAGES = ("image", "images")
#: Endings by preference: the release holds .jpg.
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


@data_sets.register("urban1k")
@dataclass(frozen=True, kw_only=True)
class Urban1k:
    """
    Args:
        folder: folder of the data set; "" searches the data folders.
        image_root: folder of the pictures; "" is ``image`` beside ``caption``.
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="Urban-1k: 1,000 urban pictures of Visual Genome, one caption of about 100 words each, written by GPT-4V; test only",
        homepage="https://huggingface.co/datasets/BeichenZhang/Urban1k",
        licence="not stated",
        citation="Beichen Zhang, Pan Zhang, Xiaoyi Dong, Yuhang Zang, Jiaqi Wang: Long-CLIP: Unlocking the Long-Text Capability of "
        "CLIP. ECCV 2024, arXiv:2403.15378",
        layout=(
            "Urban1k/image/, Urban1k/caption/  1.jpg to 1000.jpg; 1.txt to 1000.txt, the captions of the pictures of that name",
            "or image/, caption/  the same without the outer folder",
        ),
        how="",
        counts={"test": 1000},
        downloads=(Download(to="Urban1k.zip", hub="BeichenZhang/Urban1k", hub_file="Urban1k.zip", unpack=True, makes="Urban1k/image"),),
    )

    folder: str = ""
    image_root: str = ""

    def open(self) -> DataSource:
        folder = data_set_folder("urban1k", self.folder, CAPTIONS, self.info)
        captions = first_there(folder, CAPTIONS)
        assert captions is not None, "data_set_folder saw one of them"
        images = root_folder(self.image_root, first_there(captions.parent, IMAGES) or captions.parent / IMAGES[0])
        return DataSource(name="urban1k", folder=folder, readers={"test": partial(_read, captions, images)}, expected=self.info.counts)


def _read(captions: Path, images: Path) -> tuple[list[Record], list[str]]:
    by_stem = {file.stem: file.name for file in _pictures(images)}
    files = sorted(captions.glob("*.txt"), key=lambda file: (len(file.stem), file.stem))  # 2 before 10
    texts = {file.stem: next((line.strip() for line in read_text(file).split("\n") if line.strip()), "") for file in files}
    records = [
        Record(id=stem, image=str(images / by_stem.get(stem, f"{stem}.jpg")), captions=(text,)) for stem, text in texts.items() if text
    ]
    extra = sorted(set(by_stem) - set(texts)) if texts else []
    notes = dropped_empty(len(texts) - len(records))
    if extra:
        notes.append(f"{len(extra):,} pictures have no caption file and are not read: {', '.join(extra[:3])}")
    return records, notes


def _pictures(folder: Path) -> list[Path]:
    """Least preferred ending first, so that the preferred one wins where a name has two."""
    if not folder.is_dir():
        return []
    found = [file for file in folder.iterdir() if file.suffix.lower() in ENDINGS]
    return sorted(found, key=lambda file: (-ENDINGS.index(file.suffix.lower()), file.name))
