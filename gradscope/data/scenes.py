"""The embedded data set ``scenes``: procedural pictures with long captions, made from a seed as ordinary files.

``materialise`` writes train/val/test as JSONL beside JPEG files, so that the usual loader, decoder and tokenizer are exercised
and everything runs offline. Each split is made of families of four near-twins (see ``scenes_grammar``): in a gallery of
2,000 it is the twins that decide R@1, while a random batch of 16 rarely holds two relatives.

Same seed and sizes: byte-identical JSONL, and the same pixels with the same Pillow.
How it can mislead: it is a toy of one closed grammar; nothing measured on it is a result about real captions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from gradscope.data.scenes_drawing import render
from gradscope.data.scenes_grammar import Scene, make_family, make_scene, scenes_of_split
from gradscope.data.scenes_words import describe

__all__ = ["VERSION", "Scene", "describe", "folder_name", "make_family", "make_scene", "materialise", "render"]

#: Raise it whenever the same seed would give other scenes, words or pixels.
VERSION = 1
FAMILY_SIZE = 4


def folder_name(*, seed: int, sizes: dict[str, int]) -> str:
    """``scenes-<seed>-<fingerprint>``; the fingerprint covers the generator version and the sizes."""
    text = json.dumps({"version": VERSION, "family_size": FAMILY_SIZE, "sizes": sizes}, sort_keys=True)
    return f"scenes-{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def materialise(
    root: Path,
    *,
    seed: int = 0,
    train: int = 4000,
    val: int = 400,
    test: int = 2000,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Make the data set under ``root`` if it is not there yet, and return its folder.

    The folder holds ``train.jsonl``, ``val.jsonl``, ``test.jsonl`` (id, image, captions, aux), ``images/<split>/*.jpg`` and
    ``provenance.json``. It appears in one rename, so it is complete whenever it exists; a second process waits for the first.

    Args:
        progress: called with (pictures done, pictures in all).

    Raises:
        ValueError: if a size is not positive.
    """
    sizes = {"train": train, "val": val, "test": test}
    for split, size in sizes.items():
        if size < 1:
            raise ValueError(f"scenes split '{split}' needs at least 1 picture, {size} were asked for; give a positive size.")
    root = Path(root)
    folder = root / folder_name(seed=seed, sizes=sizes)
    if folder.exists():
        return folder
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.exists():
            _build(folder, seed, sizes, progress)
    return folder


def _build(folder: Path, seed: int, sizes: dict[str, int], progress: Callable[[int, int], None] | None) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        done, total = 0, sum(sizes.values())
        digests = {}
        for split, size in sizes.items():
            (temporary / "images" / split).mkdir(parents=True)
            lines = []
            for number, (family, scene) in enumerate(scenes_of_split(seed, split, size, family_size=FAMILY_SIZE)):
                lines.append(_write_one(temporary, seed, split, number, family, scene))
                done += 1
                if progress is not None:
                    progress(done, total)
            text = "".join(f"{line}\n" for line in lines).encode()
            (temporary / f"{split}.jsonl").write_bytes(text)
            digests[f"{split}.jsonl"] = hashlib.sha256(text).hexdigest()
        provenance = {
            "name": "scenes",
            "generator_version": VERSION,
            "seed": seed,
            "sizes": sizes,
            "family_size": FAMILY_SIZE,
            "licence": "CC0-1.0, procedural",
            "sha256": digests,
        }
        (temporary / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_one(folder: Path, seed: int, split: str, number: int, family: int, scene: Scene) -> str:
    image = f"images/{split}/{number:05d}.jpg"
    render(scene).save(folder / image, quality=92, subsampling=0)
    caption = describe(scene, Random(f"words {seed} {split} {number}"))
    record = {
        "id": f"{split}-{number:05d}",
        "image": image,
        "captions": [caption],
        "aux": {"family": f"{split}-{family}", "signature": scene.signature()},
    }
    return json.dumps(record, ensure_ascii=False)
