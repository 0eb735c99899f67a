"""Two towers that are no model of anybody's: the probe is told what the loss compares, with the captions.

python examples/audio_text.py runs/audio
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import gradscope

SCALE = 20.0
SOUNDS = ("rain", "wind", "a dog", "a train", "birds", "footsteps", "a kettle", "traffic")
PLACES = ("in a yard", "at night", "far away", "behind a wall")


def main(output: str) -> None:
    torch.manual_seed(0)
    audio, text = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 32)), nn.EmbeddingBag(64, 32)
    towers = nn.ModuleList([audio, text])
    optimizer = torch.optim.AdamW(towers.parameters(), lr=3e-3)
    looks = torch.randn(len(SOUNDS) * len(PLACES), 40)

    with gradscope.Probe(towers, output=output, every=2) as probe:
        for _ in range(40):
            chosen = torch.randperm(len(looks))[:12]
            captions = [f"{SOUNDS[i // len(PLACES)]} {PLACES[i % len(PLACES)]}" for i in chosen.tolist()]
            ids = torch.stack([chosen // len(PLACES), 32 + chosen % len(PLACES)], dim=1)
            heard, said = audio(looks[chosen] + 0.1 * torch.randn(12, 40)), text(ids)

            probe.watch(heard, said, SCALE, captions=captions, token_ids=ids)  # after the forward pass, before the backward

            logits = SCALE * F.normalize(heard) @ F.normalize(said).T
            target = torch.arange(12)
            ((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/audio")
