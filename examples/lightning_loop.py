"""Lightning: the probe is a callback.

python examples/lightning_loop.py runs/lightning
"""

from __future__ import annotations

import logging
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from plain_loop import DualEncoder, contrastive_loss
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gradscope.adapters.lightning import ProbeCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = DualEncoder()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return contrastive_loss(*self.encoder(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(output: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    ids = torch.randint(0, 200, (320, 6))
    pixels = torch.randn(200, 3, 8, 8)[ids].mean(1)
    trainer = Trainer(
        max_epochs=2,
        callbacks=[ProbeCallback(output=output, every=2)],  # the one line
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(pixels, ids), batch_size=16, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
