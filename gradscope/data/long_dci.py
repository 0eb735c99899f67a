"""The registered data set ``long-dci``: every long caption of DCI as one test gallery (TULIP).

Read from the folder of DCI, or from TULIP's ``dci_long.csv`` (tabs; columns filepath and title, as its maker script writes them).

How it can mislead: it is no held-out set. DCI has 7,805 pictures, 203 without a long caption, so 7,602 pairs; HN-CLIP reports
7,444 = 5,445 + 1,999, which appears to be every training pair of DCI beside GOAL's test pairs. A model fine-tuned on DCI has seen
most of this gallery; give its recall on the pairs it has not seen beside it.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from gradscope.data import data_sets
from gradscope.data.dci import ARCHIVE, CITATION, LAYOUT, PHOTO_LAYOUT, PHOTOS, Dci
from gradscope.data.dci_annotations import ANNOTATIONS, all_annotations, captioned, record_id
from gradscope.data.info import DataInfo, data_set_folder
from gradscope.data.published import base_name, dropped_empty, first_there, read_text, root_folder, slashed
from gradscope.data.source import DataSource, Reader
from gradscope.types import Record

LONG_TABLE = "dci_long.csv"


@data_sets.register("long-dci")
@dataclass(frozen=True, kw_only=True)
class LongDci:
    """
    Args:
        folder: folder of DCI, or one with TULIP's dci_long.csv; "" searches the data folders for either.
        image_root: folder of the pictures; "" is ``photos`` beside the annotations.
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="Long-DCI: all long captions of DCI as one test gallery. Published sizes: 7,602 (TULIP's construction), 7,444 (HN-CLIP, "
        "5,445 + 1,999). Whatever was trained on DCI has seen most of these pairs: 5,445 of 7,444 appear to be training pairs",
        homepage="https://huggingface.co/datasets/mderakhshani/Long-DCI",
        licence="CC BY-NC (annotations of DCI); pictures under the SA-1B licence",
        citation="Ivona Najdenkoska, Mohammad Mahdi Derakhshani, Yuki M. Asano, Nanne van Noord, Marcel Worring, Cees G. M. Snoek: "
        "TULIP: Token-length Upgraded CLIP. arXiv:2410.10034; and of DCI: " + CITATION,
        layout=(*LAYOUT, f"or {LONG_TABLE}  TULIP's table (tabs; filepath, title)", *PHOTO_LAYOUT),
        how=f"`gradscope data fetch long-dci` gets the annotations of DCI; for the pictures {PHOTOS}",
        counts={"test": 7602},
        downloads=(ARCHIVE,),
    )

    folder: str = ""
    image_root: str = ""

    def open(self) -> DataSource:
        folder = self._found()
        annotations = first_there(folder, ANNOTATIONS)
        images = root_folder(self.image_root, (annotations.parent if annotations else folder) / "photos")
        reader: Reader
        if (folder / LONG_TABLE).is_file():
            reader = partial(_long_table, folder / LONG_TABLE, images)
        else:
            assert annotations is not None, "data_set_folder saw one of them"
            reader = partial(_all_long, annotations, images)
        return DataSource(name="long-dci", folder=folder, readers={"test": reader}, expected=self.info.counts)

    def _found(self) -> Path:
        """A folder of its own, or that of ``dci``."""
        try:
            return data_set_folder("long-dci", self.folder, (LONG_TABLE, *ANNOTATIONS), self.info)
        except ValueError as error:
            try:
                return data_set_folder("dci", self.folder, ANNOTATIONS, Dci.info)
            except ValueError:
                raise error from None


def _all_long(annotations: Path, images: Path) -> tuple[list[Record], list[str]]:
    return captioned(all_annotations(annotations), images, "long")


def _long_table(file: Path, images: Path) -> tuple[list[Record], list[str]]:
    """TULIP's table. Nothing is read as a missing value."""
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""), delimiter="\t")
    if not {"filepath", "title"} <= set(reader.fieldnames or ()):
        raise ValueError(
            f"'{file}' needs the columns filepath and title, separated by tabs; it has {', '.join(reader.fieldnames or ())}"
        )
    rows = [(slashed(row["filepath"] or ""), row["title"] or "") for row in reader]
    kept = [(image, text) for image, text in rows if text.strip()]
    records = [Record(id=record_id(image), image=_there(images, file.parent, image), captions=(text,)) for image, text in kept]
    return records, dropped_empty(len(rows) - len(kept))


def _there(images: Path, folder: Path, name: str) -> str:
    """TULIP's loader joins the path to the table's folder; the release keeps pictures in ``photos``."""
    beside = folder / name
    return str(beside if beside.exists() else images / base_name(name))
