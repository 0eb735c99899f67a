"""open_clip's own ``train_one_epoch``, unchanged: the probe is given its loss module, which alone sees the whole softmax.

python examples/open_clip_loop.py runs/open_clip
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import open_clip
import torch
from open_clip_train.train import train_one_epoch
from torch import Tensor

import gradscope


class Pictures:
    """What open_clip's loop asks of its data: a loader that knows its size."""

    num_batches, num_samples = 48, 48 * 8

    @property
    def dataloader(self) -> Pictures:
        return self

    def set_epoch(self, epoch: int) -> None:
        torch.manual_seed(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.num_batches):
            yield torch.randn(8, 3, 32, 32), torch.randint(1, 100, (8, 16))


def main(output: str) -> None:
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 2}
    vision = {**tower, "image_size": 32, "patch_size": 16, "head_width": 16}
    model = open_clip.CLIP(32, vision, {**tower, "context_length": 16, "vocab_size": 100, "heads": 2}, output_dict=True)
    loss = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = argparse.Namespace(
        device="cpu", precision="fp32", distill=False, accum_freq=2, skip_scheduler=True, horovod=False, grad_clip_norm=1.0, rank=0,
        local_rank=0, distributed=False, world_size=1, log_every_n_steps=100, wandb=False, save_logs=False, tensorboard=False,
        log_local=False, batch_size=8,
    )  # fmt: skip

    with gradscope.Probe(model, loss=loss, output=output, every=2):  # the one line
        train_one_epoch(model, {"train": Pictures()}, loss, 0, optimizer, None, None, None, settings)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/open_clip")
