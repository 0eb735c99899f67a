"""Pretrain ``tiny``: symmetric InfoNCE at batch 128 with the logit scale fixed at 100 from the first step.

    python analyses/tiny_encoder/train.py --work runs/tiny_encoder    # resumes by itself; see README.md

Every batch mixes dense scenes with simple pictures in one softmax. Stage 1 (48 dense, 80 simple) learns from breadth. In stage 2
(80 dense, 48 simple) a cone term keeps a common direction, for otherwise the dense rows spread as they are told apart:

    cone = weight * sum over {dense texts, dense images} of relu(target - mean pairwise cosine)^2

fp32 throughout.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pool import Pool, make_pool
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from vocabulary import write_merges

from gradscope.encoders.tiny_model import FOLDER, build_model, load_config


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the weights depend on."""

    steps: int = 3800
    stage_1: int = 2011  # its last step
    dense_1: int = 48  # rows of a batch of 128 that are dense scenes, per stage
    dense_2: int = 80
    cone_weight: float = 10.0  # stage 2
    cone_target: float = 0.65
    dense_chunks: int = 32
    simple_chunks: int = 32
    lr: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.05
    scale: float = 100.0
    seed: int = 0


BATCH = 128


def mean_cosine(rows: torch.Tensor) -> torch.Tensor:
    """Mean cosine over all pairs of different unit rows, in O(n)."""
    n = len(rows)
    return (rows.sum(0).square().sum() - n) / (n * (n - 1))


def encode_text(model, tokens: torch.Tensor) -> torch.Tensor:
    """``model.encode_text`` on ids cut to their own longest caption: under a causal mask the same numbers, less work."""
    length = int(tokens.argmax(-1).max()) + 1
    tokens = tokens[:, :length]
    x = model.token_embedding(tokens) + model.positional_embedding[:length]
    x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:length, :length]))
    return x[torch.arange(len(x)), tokens.argmax(-1)] @ model.text_projection


def to_input(images: np.ndarray) -> torch.Tensor:
    """uint8 [n, H, W, 3] to the normalised float32 [n, 3, H, W] of the preprocess configuration."""
    config = load_config()["preprocess_cfg"]
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine to zero; ``step`` counts from 1."""
    if step <= recipe.warmup:
        return recipe.lr * step / recipe.warmup
    part = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, part)))


def rows_of_step(recipe: Recipe, step: int, pool: Pool, count: int) -> np.ndarray:
    """The pool rows of one step: consecutive slices of one random order per pass, a function of (seed, step) alone."""
    per_pass = len(pool) // count
    order = np.random.default_rng([recipe.seed, (step - 1) // per_pass]).permutation(len(pool))
    start = (step - 1) % per_pass * count
    return order[start : start + count]


def optimizer_of(model, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors and embeddings of positions do not, the scale is not trained."""
    model.logit_scale.requires_grad_(False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in named if p.ndim < 2 or "positional" in name]
    decayed = [p for name, p in named if not (p.ndim < 2 or "positional" in name)]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), eps=1e-8)


def train_step(model, optimizer, recipe: Recipe, step: int, pools: dict[str, Pool]) -> tuple[float, float]:
    """One update; the loss and the dense rows' in-batch accuracy before it."""
    dense = recipe.dense_1 if step <= recipe.stage_1 else recipe.dense_2
    counts = {"dense": dense, "simple": BATCH - dense}
    parts = [pools[half].take(rows_of_step(recipe, step, pools[half], count)) for half, count in counts.items()]
    images = model.encode_image(to_input(np.concatenate([part[0] for part in parts])), normalize=True)
    texts = F.normalize(torch.cat([encode_text(model, torch.from_numpy(part[1]).long()) for part in parts]), dim=-1)
    logits = recipe.scale * images @ texts.T
    target = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    total = loss
    if step > recipe.stage_1:
        spread = [F.relu(recipe.cone_target - mean_cosine(rows[:dense])) for rows in (texts, images)]
        total = loss + recipe.cone_weight * (spread[0] ** 2 + spread[1] ** 2)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)
    optimizer.step()
    optimizer.zero_grad()
    right = (logits.argmax(-1) == target)[:dense].float().mean()
    return float(loss.detach()), float(right)


def export(model, folder: Path) -> None:
    """The shipped weights: fp16, but the scale in fp32 so that it is 100 and not 100.04."""
    state = {name: t.detach().half().contiguous() for name, t in model.state_dict().items()}
    state["logit_scale"] = model.logit_scale.detach().float()
    part = folder / "open_clip_model.part"
    save_file(state, part, metadata={"format": "pt"})
    part.rename(folder / "open_clip_model.safetensors")


def save(path: Path, model, optimizer, step: int, seconds: float) -> None:
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}, part)
    part.rename(path)


def train(recipe: Recipe, work: Path, every_seconds: float) -> None:
    """Train from the last checkpoint in ``work`` (or from scratch) to the end, and export there."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    chunks = {"dense": recipe.dense_chunks, "simple": recipe.simple_chunks}
    make_pool(work.parent / "pool", chunks)
    pools = {half: Pool(work.parent / "pool", half, count) for half, count in chunks.items()}
    torch.manual_seed(recipe.seed)
    model = build_model()
    optimizer = optimizer_of(model, recipe)
    first, seconds = 1, 0.0
    if (work / "last.pt").exists():
        state = torch.load(work / "last.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"] + 1, state["seconds"]
    for name in ("open_clip_config.json", "bpe.txt.gz"):
        shutil.copy(FOLDER / name, work / name)
    (work / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
    log = (work / "log.jsonl").open("a")
    started, saved, recent = time.monotonic() - seconds, time.monotonic(), []
    for step in range(first, recipe.steps + 1):
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention is twice as slow at these sizes
            recent.append(train_step(model, optimizer, recipe, step, pools))
        if step % 25 == 0:
            loss, right = np.mean(recent, axis=0)
            recent = []
            log.write(json.dumps({"step": step, "loss": loss, "dense_accuracy": right, "s": time.monotonic() - started}) + "\n")
            log.flush()
        if step == recipe.steps or time.monotonic() - saved > every_seconds:
            save(work / "last.pt", model, optimizer, step, time.monotonic() - started)
            export(model, work)
            saved = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/tiny_encoder"), help="checkpoints, log and export go here")
    parser.add_argument("--every-seconds", type=float, default=120.0, help="time between checkpoints")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    work, every = options.pop("work"), options.pop("every_seconds")
    work.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "bpe.txt.gz").exists():
        write_merges(FOLDER / "bpe.txt.gz")
    train(Recipe(**options), work, every)


if __name__ == "__main__":
    main()
