"""What a tiny folder is worth on ``scenes``: recall on the test split, cone of the captions, saturation of narrow batches.

    python analyses/tiny_encoder/measure.py FOLDER --cache CACHE      # prints one JSON object

Recall uses strict ranks: a tie counts against the positive. Losses are symmetric InfoNCE at scale 100 in float64 over 2,000
random batches of training scenes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from train import encode_text, to_input

from gradscope.data.scenes import materialise
from gradscope.encoders.load import load_encoder
from gradscope.encoders.tiny_model import FOLDER

SCALE = 100.0


@torch.no_grad()
def embed(model, tokenizer, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Unit image rows, unit text rows (float64) and family names of one split."""
    records = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    images, texts = [], []
    for start in range(0, len(records), 200):
        part = records[start : start + 200]
        pixels = [np.asarray(Image.open(folder / r["image"]).resize((64, 64), Image.Resampling.BICUBIC)) for r in part]
        images.append(model.encode_image(to_input(np.stack(pixels))))
        texts.append(encode_text(model, tokenizer([r["captions"][0] for r in part])))
    unit = [F.normalize(torch.cat(rows).double(), dim=-1).numpy() for rows in (images, texts)]
    return unit[0], unit[1], [r["aux"]["family"] for r in records]


def recall(cosine: np.ndarray, k: int) -> float:
    """Share of rows whose diagonal is among the k best, ties against it."""
    return float(((cosine >= np.diag(cosine)[:, None]).sum(1) <= k).mean())


def batch_losses(images: np.ndarray, texts: np.ndarray, width: int, batches: int = 2000) -> np.ndarray:
    """Symmetric InfoNCE of random batches, from the negatives so that tiny losses do not round to zero."""
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(batches):
        rows = rng.choice(len(images), width, replace=False)
        logits = SCALE * images[rows] @ texts[rows].T
        both = []
        for z in (logits, logits.T):
            gap = z - np.diag(z)[:, None]
            np.fill_diagonal(gap, -np.inf)
            top = gap.max(1)
            both.append(np.logaddexp(0, top + np.log(np.exp(gap - top[:, None]).sum(1))).mean())
        losses.append(np.mean(both))
    return np.array(losses)


def report(folder: Path, cache: Path) -> dict[str, object]:
    """All numbers of the README."""
    torch.set_float32_matmul_precision("medium")
    encoder = load_encoder(str(folder))
    model, tokenizer = encoder.model, encoder.tokenizer.source
    data = materialise(cache)
    images, texts, families = embed(model, tokenizer, data, "test")
    cosine = images @ texts.T
    captions = texts @ texts.T
    np.fill_diagonal(captions, np.nan)
    relatives = np.array(families)[:, None] == np.array(families)[None]
    strangers = np.where(relatives & ~np.eye(len(texts), dtype=bool), -2.0, cosine)
    train = embed(model, tokenizer, data, "train")[:2]
    out: dict[str, object] = {f"r{k}_{name}": recall(m, k) for k in (1, 5) for name, m in (("i2t", cosine), ("t2i", cosine.T))}
    out |= {"r1_i2t_without_relatives": recall(strangers, 1), "r1_t2i_without_relatives": recall(strangers.T, 1)}
    out |= {"caption_mean": float(np.nanmean(captions)), "caption_hardest_mean": float(np.nanmax(captions, 1).mean())}
    out["caption_hardest_stranger_mean"] = float(np.where(relatives, -2, captions).max(1).mean())
    out["image_mean"] = float((images @ images.T)[~np.eye(len(images), dtype=bool)].mean())
    out["positive_mean"] = float(np.diag(cosine).mean())
    for width in (16, 32, 64, 128):
        losses = batch_losses(*train, width, 2000 if width < 64 else 300)
        out[f"width_{width}"] = {"share_below_1e-3": float((losses < 1e-3).mean()), "median": float(np.median(losses))}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="a folder with configuration, merges and weights")
    parser.add_argument("--cache", type=Path, required=True, help="where the data set scenes is kept")
    options = parser.parse_args()
    print(json.dumps(report(options.folder, options.cache), indent=2))


if __name__ == "__main__":
    main()
