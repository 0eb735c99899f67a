"""A plain PyTorch loop with mixed precision, accumulation and clipping. The probe finds the embeddings, the scale and the optimizer.

python examples/plain_loop.py runs/plain
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradscope


class DualEncoder(nn.Module):
    """Any module that returns two matrices of embeddings and a scale, as a tuple or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.GELU(), nn.Linear(64, 32))
        self.token_embedding = nn.Embedding(200, 64)
        self.text = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.visual(pixels), dim=-1)
        text = F.normalize(self.text(self.token_embedding(ids).mean(1)), dim=-1)
        return image, text, self.logit_scale.exp()


def contrastive_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * image.float() @ text.float().T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def main(output: str) -> None:
    torch.manual_seed(0)
    model = DualEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    words = torch.randn(200, 3, 8, 8)  # each "word" has a look, so that there is something to learn

    with gradscope.Probe(model, scaler=scaler, output=output, every=2):  # the one line
        for _ in range(40):
            for _ in range(2):  # two micro-batches a step
                ids = torch.randint(0, 200, (16, 6))
                with torch.autocast("cpu", torch.bfloat16):
                    embeddings = model(words[ids].mean(1) + 0.1 * torch.randn(16, 3, 8, 8), ids)
                scaler.scale(contrastive_loss(*embeddings) / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/plain")
