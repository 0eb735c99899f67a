"""The pretraining data, drawn once into memory-mapped arrays so that the trainer never waits.

Two halves, each in chunks of 4,096 pictures (uint8, 64 x 64) with token ids: ``dense`` scenes of the stream "pretrain", which
shares no layout with train, val or test, and ``simple`` pictures. A chunk is a pure function of its number, so an
interrupted run only redraws the missing ones.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image
from simple import make_simple

from gradscope.data.scenes import describe, make_scene, render
from gradscope.encoders.tiny_model import load_tokenizer

CHUNK = 4096
PIXELS = 64
LENGTHS = {"dense": 128, "simple": 40}


def draw(half: str, rng: Random) -> tuple[Image.Image, str]:
    """One picture of a half, with its caption."""
    if half == "simple":
        return make_simple(rng)
    scene = make_scene(rng, stream="pretrain")
    return render(scene), describe(scene, rng)


def write_chunk(job: tuple[Path, str, int]) -> None:
    """Draw one chunk unless it is there. Raises ValueError if a caption does not fit its length."""
    folder, half, number = job
    images_path, tokens_path = (folder / f"{half}-{number:04d}-{what}.npy" for what in ("images", "tokens"))
    if tokens_path.exists():
        return
    rng = Random(f"pool {half} {number}")
    tokenizer = load_tokenizer()
    images = np.empty((CHUNK, PIXELS, PIXELS, 3), np.uint8)
    tokens = np.zeros((CHUNK, LENGTHS[half]), np.int16)
    for row in range(CHUNK):
        image, text = draw(half, rng)
        images[row] = np.asarray(image.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC))
        ids = [tokenizer.sot_token_id, *tokenizer.encode(text), tokenizer.eot_token_id]
        if len(ids) > LENGTHS[half]:
            raise ValueError(f"a {half} caption has {len(ids)} tokens, {LENGTHS[half]} are allowed: {text}")
        tokens[row, : len(ids)] = ids
    for path, array in ((images_path, images), (tokens_path, tokens)):
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, array)
        part.rename(path)


def make_pool(folder: Path, chunks: dict[str, int]) -> None:
    """Draw all missing chunks with two processes."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(folder, half, number) for half, count in chunks.items() for number in range(count)]
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        for _ in workers.imap_unordered(write_chunk, jobs):
            pass


class Pool:
    """Random access to one half; images stay on disk until they are asked for."""

    def __init__(self, folder: Path, half: str, chunks: int) -> None:
        self.images = [np.load(folder / f"{half}-{n:04d}-images.npy", mmap_mode="r") for n in range(chunks)]
        self.tokens = np.concatenate([np.load(folder / f"{half}-{n:04d}-tokens.npy") for n in range(chunks)])

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 images [n, 64, 64, 3] and token ids [n, L] of the given rows."""
        return np.stack([self.images[row // CHUNK][row % CHUNK] for row in rows]), self.tokens[rows]
