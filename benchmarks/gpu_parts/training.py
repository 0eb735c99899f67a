"""Training on one GPU: ours beside open_clip's own ``train_one_epoch``, bf16 autocast, AdamW, on batches in pinned memory.

    open_clip    its loop as it is: torch's default AdamW, ClipLoss, one number fetched at the end of an epoch
    ours         the statements of this package's loop: embed, term, total, backward, norm, one host transfer of the step's numbers,
                 which are looked at before the update, fused AdamW, clamp; InfoNCE, and HN with the live margin
    no wait      the same without that transfer: what it costs to look at every step

MFU = FLOPs of forward and backward (counted by torch, products and attention only) / seconds / the bf16 peak of the run. Memory is
that of a step beside weights, gradients and the optimizer's state. How it can mislead: no picture is decoded, so a real run may be
slower than either; what is computed twice is counted once.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.encoders.dual import DualEncoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.optim import make_optimizer, trainable
from gradscope.recipe import Train
from gradscope.types import Batch

from .models import Model, make_batch, make_model
from .setting import Arm, Row, Setting, compare

REFERENCE = "open_clip train_one_epoch"
SIZES = (("ViT-B-16", 128), ("ViT-L-14", 128), ("ViT-B-16", 512), ("ViT-L-14", 256))
CONTEXT = 248
STEPS = 4
SETTINGS = Train(lr=1e-5, weight_decay=0.2, beta2=0.98, eps=1e-6)


def training(setting: Setting, peak: float) -> Iterator[Row]:
    """Rows of ``compare`` with images_per_s and mfu; ``peak`` in TFLOP/s."""
    for name, count in (("tiny", 4),) if setting.tiny else SIZES:
        if not setting.clock.allows(f"training: {name}, batch {count}"):
            continue
        try:
            yield from _case(setting, peak, name, count)
        except torch.cuda.OutOfMemoryError:
            yield {"case": f"{name}, batch {count}", "arm": "all", "note": "out of memory before the first step"}
        setting.tidy()


def _case(setting: Setting, peak: float, name: str, count: int) -> Iterator[Row]:
    model = make_model(setting, name, CONTEXT)
    batch = make_batch(setting, model, count)
    flops = count_flops(setting, model) * count
    steps = 1 if setting.tiny else STEPS
    case = f"{name}, {model.context} tokens, batch {count}"
    turns = arms(setting, model, batch, steps)
    for row in compare(setting, case, turns, REFERENCE, ours=[name for name in turns if name.startswith("ours")]):
        if "seconds" in row:
            row["seconds"] /= steps
            row["images_per_s"] = count / row["seconds"]
            row["mfu"] = flops / row["seconds"] / (peak * 1e12)
        yield row


def count_flops(setting: Setting, model: Model) -> float:
    """Of one pair's forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    images, ids = (t.to(setting.device) for t in make_batch(setting, model, 2))
    with FlopCounterMode(display=False) as counter, torch.autocast(setting.device.type, torch.bfloat16):
        out = model.module(images, ids)
        (out["image_features"].sum() + out["text_features"].sum()).backward()
    model.module.zero_grad(set_to_none=True)
    return counter.get_total_flops() / 2


def arms(setting: Setting, model: Model, batch: tuple[Tensor, Tensor], steps: int) -> dict[str, Arm]:
    return {
        REFERENCE: TheirEpoch(setting, model, [batch] * steps),
        "ours, InfoNCE": _repeated(OurStep(setting, model, Clip(objective=InfoNCE())), batch, steps),
        "ours, HN": _repeated(OurStep(setting, model, Clip(objective=HN())), batch, steps),
        "ours, InfoNCE, no wait": _repeated(OurStep(setting, model, Clip(objective=InfoNCE()), look=False), batch, steps),
    }


def _repeated(step: OurStep, batch: tuple[Tensor, Tensor], steps: int) -> Arm:
    def arm() -> None:
        for _ in range(steps):
            step(*batch)

    return arm


class OurStep:
    """One step of our loop, without its data and its log."""

    def __init__(self, setting: Setting, model: Model, framework: Clip, *, look: bool = True) -> None:
        import open_clip

        tokenizer = open_clip.SimpleTokenizer(context_length=model.context)
        self.encoder = DualEncoder(model.copied(), tokenizer, model.config, model.name).to(setting.device).train()
        self.optimizer = make_optimizer(self.encoder, SETTINGS)
        self.framework, self.device, self.look = framework, setting.device, look

    def __call__(self, images: Tensor, ids: Tensor) -> None:
        batch = self.moved(images, ids)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            embeddings = self.encoder.embed(batch)
        terms = self.framework(embeddings, None, batch.texts["full"])
        total = total_loss(terms)
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trainable(self.encoder).values() if p.grad is not None])
        numbers = torch.stack([total.detach(), norm, self.encoder.scale().detach()])
        if self.look and not all(map(math.isfinite, numbers.tolist())):
            raise FloatingPointError(f"loss, norm and scale are {numbers.tolist()}")
        self.optimizer.step()
        self.encoder.clamp_scale(100.0)

    def moved(self, images: Tensor, ids: Tensor) -> Batch:
        count = len(ids)
        return Batch(
            ids=("",) * count,
            images={"full": images.to(self.device, non_blocking=True)},
            texts={"full": ids.to(self.device, non_blocking=True)},
            lengths=torch.full((count,), ids.shape[1]),
            captions=("",) * count,
        )


class Held:
    """Batches in the hand, as ``train_one_epoch`` wants a loader."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.dataloader = batches, self
        self.num_batches, self.num_samples = len(batches), sum(len(ids) for _, ids in batches)

    def set_epoch(self, epoch: int) -> None:
        """One epoch is all there is."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


class TheirEpoch:
    """open_clip's trainer over some batches."""

    def __init__(self, setting: Setting, model: Model, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        from open_clip import ClipLoss

        self.module: Any = model.copied()
        self.optimizer = torch.optim.AdamW(_groups(self.module), lr=SETTINGS.lr, betas=(0.9, SETTINGS.beta2), eps=SETTINGS.eps)
        self.data, self.loss = {"train": Held(batches)}, ClipLoss()
        self.args = Namespace(
            device=str(setting.device), precision="amp_bf16", distill=False, accum_freq=1, skip_scheduler=True, horovod=False,
            grad_clip_norm=None, rank=0, local_rank=0, distributed=False, world_size=1, log_every_n_steps=10**6, wandb=False,
            save_logs=False, tensorboard=False, log_local=False, batch_size=len(batches[0][1]),
        )  # fmt: skip

    def __call__(self) -> None:
        from open_clip_train.train import train_one_epoch

        train_one_epoch(self.module, self.data, self.loss, 0, self.optimizer, None, None, None, self.args)


def _groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, as both trainers have it."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    decayed, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
