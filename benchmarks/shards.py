"""What reading pictures out of tar files costs, beside files of their own and beside WebDataset's own stream.

    python benchmarks/shards.py --output runs/shards

Photo-like JPEGs are made, and packed by ``gradscope data pack``'s own code. Arms, each over all pictures, on one thread:
    files          the bytes of each file, in a shuffled order
    members        the same bytes out of the tar files, each by its place, in the same shuffled order
    webdataset     WebDataset's stream over the tar files, in their order (it has no other), samples grouped by key
    files, decoded; members, decoded      as the first two, then decoded and resized to 224 (the "fast" path of training)
Notes: seconds to read records the first time (one pass over the headers) and from the kept index, per 1,000 records.

How to read it: a ratio of 1 says that tar files cost nothing against files. How it can mislead: everything lies in the page cache; on a
disk that seeks, neighbours in one tar are read faster in order than in a shuffled one, and a million small files are worse than both.
WebDataset's stream reads texts too and shuffles, in training, through a buffer.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from image_path import PREPROCESS, photo
from side_by_side import Arm, machine, report, say_machine, side_by_side

from gradscope.console import progress
from gradscope.data.members import content
from gradscope.data.pack import Packer, Sizes
from gradscope.data.pixels import pixel_path
from gradscope.data.source import open_data

CAPTION = "a picture of shapes, with light that varies slowly over it and a grain that no two of them share, number {}"


def make_files(folder: Path, count: int, side: int, seed: int) -> Path:
    """Pictures with a .txt beside each."""
    folder.mkdir(parents=True)
    with progress("pictures") as advance:
        for i in range(count):
            photo(side * 4 // 3, side, np.random.default_rng((seed, i))).save(folder / f"{i:06}.jpg", quality=90)
            (folder / f"{i:06}.txt").write_text(CAPTION.format(i), encoding="utf-8")
            advance(i + 1, count)
    return folder


def make_shards(files: Path, output: Path, per_shard: int) -> Path:
    source = open_data(str(files))
    Packer(sizes=Sizes(records=per_shard), say=lambda line: None)(source, source.splits(), output)
    return output


def whole(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - the fastest way there is
        return file.read()


def stream(shards: Path) -> int:
    """Bytes of the pictures that WebDataset yields."""
    from webdataset import WebDataset

    return sum(len(sample["jpg"]) for sample in WebDataset([str(tar) for tar in sorted(shards.glob("*.tar"))], shardshuffle=False))


def arms(files: Sequence[str], members: Sequence[str], shards: Path, passes: int) -> dict[str, Arm]:
    pixels = pixel_path(PREPROCESS, "fast")
    return {
        "files": lambda: sum(len(whole(path)) for _ in range(passes) for path in files),
        "members": lambda: sum(len(content(path)) for _ in range(passes) for path in members),
        "webdataset": lambda: sum(stream(shards) for _ in range(passes)),
        "files, decoded": lambda: [pixels(path) for path in files][-1],
        "members, decoded": lambda: [pixels(path) for path in members][-1],
    }


def shuffled_images(name: Path, seed: int) -> list[str]:
    images = [str(record.image) for record in open_data(str(name)).read("all").records]
    random.Random(seed).shuffle(images)
    return images


def opening(shards: Path, cache: Path) -> dict[str, float]:
    """Seconds per 1,000 records: of tar files that nothing is known of, and of those with a kept index."""
    before = os.environ.get("GRADSCOPE_CACHE")
    os.environ["GRADSCOPE_CACHE"] = str(cache)
    try:
        found = {}
        for what in ("first", "again"):
            start = time.perf_counter()
            records = open_data(f"{shards}/{_pattern(shards)}").read("all").records
            found[what] = 1000 * (time.perf_counter() - start) / len(records)
    finally:
        os.environ.pop("GRADSCOPE_CACHE")
        os.environ.update({"GRADSCOPE_CACHE": before} if before else {})
    return found


def _pattern(shards: Path) -> str:
    """All tar files by name, so that the manifest beside them is not used; their own indexes are moved away."""
    for index in shards.glob("*.index.jsonl"):
        index.rename(index.with_suffix(".away"))
    return f"all-{{000000..{len(list(shards.glob('*.tar'))) - 1:06}}}.tar"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pictures out of tar files.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/shards"), help="folder for CSV and JSON")
    parser.add_argument("--pictures", type=int, default=400, help="JPEGs to make")
    parser.add_argument("--side", type=int, default=480, help="pixels of the shorter side")
    parser.add_argument("--per-shard", type=int, default=100, help="records of a tar")
    parser.add_argument("--passes", type=int, default=10, help="times a round reads the bytes")
    parser.add_argument("--rounds", type=int, default=7, help="times each arm runs")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures, their order and the order of the arms")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if min(given.pictures, given.passes, given.rounds, given.per_shard) < 1 or given.side < 8:
        raise ValueError("give at least 1 picture of 8 pixels, 1 record in a shard, 1 pass and 1 round")
    torch.set_num_threads(1)
    facts = machine()
    say_machine(facts)
    with tempfile.TemporaryDirectory() as place:
        files = make_files(Path(place) / "files", given.pictures, given.side, given.seed)
        shards = make_shards(files, Path(place) / "shards", given.per_shard)
        works = arms(shuffled_images(files, given.seed), shuffled_images(shards, given.seed), shards, given.passes)
        if not works["files"]() == works["members"]() == works["webdataset"]():
            raise ValueError("the arms read different bytes; the pack is wrong")
        reading = {name: works[name] for name in ("files", "members", "webdataset")}
        decoding = {name: works[name] for name in ("files, decoded", "members, decoded")}
        frame = side_by_side(reading, reference="files", rounds=given.rounds, seed=given.seed)
        decoded = side_by_side(decoding, reference="files, decoded", rounds=given.rounds, seed=given.seed)
        notes = {f"seconds for 1,000 records, {k}": f"{v:.3f}" for k, v in opening(shards, Path(place) / "cache").items()}
    title = f"{given.pictures} JPEGs of {given.side * 4 // 3} x {given.side}, {given.per_shard} in a tar"
    report(frame, title=f"{title}: bytes", output=given.output, name="bytes", facts=facts, notes=notes)
    report(decoded, title=f"{title}: pixels", output=given.output, name="pixels", facts=facts)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"shards: {error}", file=sys.stderr)
        sys.exit(2)
