"""The registered data set ``sharegpt4v``: 1,246k pictures of COCO, LAION/CC/SBU and SA-1B with captions written by a model.

Reads ``share-captioner_coco_lcs_sam_1246k_1107.json``, whose records are {"id", "image", "conversations": [question, answer]}. As in
Long-CLIP's code: the first 1,000 records are the test set and training never includes them; line breaks of a caption become spaces;
the short caption is the text up to the first ". ".

How it can mislead: a picture of the first 1,000 that comes again later in the file is left out of training too, and counted. The
test set is near saturation (95 to 98 % recall is usual), and its captions come from the same model as those trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gradscope.data import data_sets
from gradscope.data.info import DataInfo, Download, data_set_folder
from gradscope.data.published import check_choice, dropped_empty, read_json_list, root_folder, slashed, text_in
from gradscope.data.source import DataSource
from gradscope.types import Record

FILE = "share-captioner_coco_lcs_sam_1246k_1107.json"
#: The first records of the file are the test set.
TEST = 1000
CAPTIONS = ("long", "short", "both")


@data_sets.register("sharegpt4v")
@dataclass(frozen=True, kw_only=True)
class ShareGpt4v:
    """
    Args:
        folder: folder of the data set; "" searches the data folders.
        image_root: folder that the file's picture paths start from; "" is ``data`` beside the file if there is one, else its folder.
        caption: "long", "short" (up to the first full stop) or "both" (long first; each then counts as a caption of its own).
    """

    info: ClassVar[DataInfo] = DataInfo(
        title="ShareGPT4V-PT: 1,246k pictures with captions by Share-Captioner. Test: the first 1,000 records; training: the others",
        homepage="https://huggingface.co/datasets/Lin-Chen/ShareGPT4V",
        licence="CC BY-NC 4.0 (captions; the authors add that OpenAI's terms of use apply); pictures under the terms of their sources",
        citation="Lin Chen, Jinsong Li, Xiaoyi Dong, Pan Zhang, Conghui He, Jiaqi Wang, Feng Zhao, Dahua Lin: ShareGPT4V: Improving "
        "Large Multi-Modal Models with Better Captions. ECCV 2024, arXiv:2311.12793",
        layout=(
            f"{FILE}  the records",
            "coco/train2017/, llava/llava_pretrain/images/, sam/images/  the pictures, as named in the file",
            "or data/coco/train2017/, data/llava/llava_pretrain/images/, data/sam/images/  the same in a folder data",
            "pictures elsewhere: name the folder above coco, llava and sam with --image-root",
        ),
        how="`gradscope data fetch sharegpt4v` gets the captions; the pictures come from COCO (train2017), LLaVA-Pretrain and SA-1B as "
        "described on the homepage",
        counts={"test": TEST},
        downloads=(Download(to=FILE, hub="Lin-Chen/ShareGPT4V", hub_file=FILE),),
    )

    folder: str = ""
    image_root: str = ""
    caption: str = "long"

    def open(self) -> DataSource:
        check_choice("sharegpt4v", "caption", self.caption, CAPTIONS)
        folder = data_set_folder("sharegpt4v", self.folder, (FILE,), self.info)
        images = root_folder(self.image_root, folder / "data" if (folder / "data").is_dir() else folder)
        readers = {split: partial(_read, folder / FILE, split, images, self.caption) for split in ("train", "test")}
        return DataSource(name="sharegpt4v", folder=folder, readers=readers, expected=self.info.counts)


def _read(file: Path, split: str, images: Path, caption: str) -> tuple[list[Record], list[str]]:
    items = read_json_list(file)
    start, end = (0, TEST) if split == "test" else (TEST, len(items))
    held_out = {_image(item, f"'{file}', record {n}") for n, item in enumerate(items[:TEST], 1)} if split == "train" else set()
    captions: dict[str, tuple[str, ...]] = {}
    empty = again = leaking = 0
    for number, item in enumerate(items[start:end], start + 1):
        where = f"'{file}', record {number}"
        image = _image(item, where)
        texts = _captions(_answer(item, where), caption)
        if image in held_out:
            leaking += 1
        elif image in captions:
            again += 1
        elif not texts:
            empty += 1
        else:
            captions[image] = texts
    records = [Record(id=image, image=str(images / image), captions=texts) for image, texts in captions.items()]
    notes = dropped_empty(empty)
    notes += [f"{again:,} records left out: their picture came earlier in the file"] if again else []
    notes += [f"{leaking:,} records left out of training: their picture is among the first {TEST:,}, the test set"] if leaking else []
    return records, notes


def _image(item: Any, where: str) -> str:
    return slashed(text_in(item, "image", where)).lstrip("/")


def _answer(item: Any, where: str) -> str:
    """The second turn of the conversation."""
    turns = item.get("conversations")
    if not isinstance(turns, Sequence) or isinstance(turns, str) or len(turns) < 2:
        raise ValueError(f"{where}: 'conversations' must hold a question and an answer")
    return text_in(turns[1], "value", f"{where}, answer")


def _captions(answer: str, wanted: str) -> tuple[str, ...]:
    long = answer.replace("\n", " ")
    short = long.split(". ")[0]
    if not short.strip():
        return ()
    return {"long": (long,), "short": (short,), "both": (long, short)}[wanted]
