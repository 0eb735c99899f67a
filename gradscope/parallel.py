"""The encoder of one rank: how its gradients become those of all ranks.

    none    DDP: each rank has all parameters; gradients are averaged while the backward runs
    full    FSDP2: each rank keeps 1/W of the parameters, gradients and moments; a block's are gathered for as long as it runs

Both wrap the embedding of a batch and nothing else: the loss is computed outside, on the rows of all ranks (``gradscope.joining``).
Before DDP wraps, parameters that are frozen, or that no embedding depends on (read off the graph of two blank records), are left out:
it waits for none that never comes, and need not search at each step. The scales are left out too and averaged here once a step: they
take part in the loss, not in the towers, and FSDP2 shards no scalar.

One process: nothing is wrapped, nothing is copied, and the bits are those of plain training.

How it can mislead: batch statistics (BatchNorm) are those of each rank's own rows, so such an encoder does not equal one process;
dropout draws other numbers on other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradscope.attach.towers import leaves
from gradscope.distributed import averaged, is_sharded, local, summed, world
from gradscope.encoders.dual import DualEncoder, blank_pixels, evaluating
from gradscope.encoders.freeze import image_tower, text_tower_parts
from gradscope.types import Batch, Embeddings


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What the loop embeds with. ``alone``: parameters whose gradient is averaged here, and not by the wrapper."""

    encoder: DualEncoder
    wrapper: Any = None
    alone: tuple[nn.Parameter, ...] = ()

    def embed(self, batch: Batch, *, tokens: bool = False, known: Mapping[str, Tensor] = {}) -> Embeddings:
        """This rank's rows through both towers, but for one whose rows are ``known`` (see ``DualEncoder.embed``)."""
        if isinstance(self.wrapper, DistributedDataParallel):
            return self.wrapper(batch, tokens, known)
        return self.encoder.embed(batch, tokens=tokens, known=known)

    def quiet(self) -> AbstractContextManager[Any]:
        """For all but the last forward and backward of a step: gradients add up on the rank and are not sent."""
        if isinstance(self.wrapper, DistributedDataParallel):
            return self.wrapper.no_sync()
        return nullcontext() if self.wrapper is None else _unsent(self.wrapper)

    def settle(self) -> None:
        """After the last backward of a step: the gradients that the wrapper leaves to us."""
        if self.wrapper is None:
            return
        grads = averaged([parameter.grad for parameter in self.alone])
        for parameter, gradient in zip(self.alone, grads, strict=True):
            parameter.grad = gradient


def replica(encoder: DualEncoder, shard: str, *, tokens: bool = False) -> Replica:
    """Wraps ``encoder`` in place for the processes of this run. An optimizer must be made afterwards: FSDP2 replaces the parameters.

    Raises:
        ValueError: sharding on one process, or of an encoder without blocks.
    """
    if world() == 1:
        if shard != "none":
            raise ValueError(f"--shard {shard} divides the parameters among several processes, and this is one; start it with torchrun")
        return Replica(encoder=encoder)
    scales = [p for p in (encoder.model.logit_scale, encoder.token_log_scale) if p is not None and p.requires_grad]
    wrapper = _ddp(encoder, tokens) if shard == "none" else _fsdp(encoder)
    return Replica(encoder=encoder, wrapper=wrapper, alone=tuple(scales))


# ---- DDP


class _Embedding(nn.Module):
    """DDP wraps a forward, and an encoder has several."""

    def __init__(self, encoder: DualEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: Batch, tokens: bool, known: Mapping[str, Tensor]) -> Embeddings:
        return self.encoder.embed(batch, tokens=tokens, known=known)


def _ddp(encoder: DualEncoder, tokens: bool) -> DistributedDataParallel:
    module = _Embedding(encoder)
    reached = _reached(encoder, tokens)
    left_out = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in reached]
    if not encoder.has_batch_norm():  # the other buffers are constants, which DDP would send ahead of every forward pass
        left_out += [name for name, _ in module.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, left_out)
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def _reached(encoder: DualEncoder, tokens: bool) -> set[int]:
    """id() of the parameters that the towers' rows depend on. In evaluation mode: nothing is drawn and no statistic moves."""
    ids = encoder.tokenize(["a", "b"]).ids.to(encoder.device)
    images = {"full": blank_pixels(encoder, 2)}
    batch = Batch(ids=("a", "b"), images=images, texts={"full": ids}, lengths=ids.new_zeros(2), captions=("a", "b"))
    with evaluating(encoder), torch.enable_grad():
        found = encoder.embed(batch, tokens=tokens)
    rows = [found.image, found.text, found.image_tokens, found.text_tokens]
    return set().union(*(leaves(part) for part in rows if part is not None))


# ---- FSDP2


def _fsdp(encoder: DualEncoder) -> DualEncoder:
    """Each block of both towers, then what is left. Embeddings are fp32 master weights here too; autocast is the loop's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    towers = image_tower(encoder.model), text_tower_parts(encoder.model)
    for tower in towers:
        if not tower.blocks:
            raise ValueError(
                f"--shard full divides an encoder by its blocks, and the {tower.name} tower {tower.kind} of '{encoder.name}' has none "
                "that gradscope can tell apart; use --shard none"
            )
    # It is about writing in place into what a forward returned, which nothing here does; it would come at every step.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(encoder.device.type, (world(),))
    scales = {p for p in (encoder.model.logit_scale, encoder.token_log_scale) if p is not None}
    for block in (block for tower in towers for block in tower.blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(encoder, mesh=mesh, ignored_params=scales)
    for method in ("embed_image", "embed_text", "embed_patches", "embed_words"):
        register_fsdp_forward_method(encoder, method)
    return encoder


@contextmanager
def _unsent(encoder: Any) -> Iterator[None]:
    encoder.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        encoder.set_requires_gradient_sync(True)


# ---- norms over what each rank holds


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """[] of the gradient of all parameters, the same on every rank: shards are added up, whole parameters counted once."""
    grads = [p.grad for p in parameters if p.grad is not None]
    shards = [local(g) for g in grads if is_sharded(g)]
    own = torch.nn.utils.get_total_norm([g for g in grads if not is_sharded(g)])
    if not any(map(is_sharded, parameters)):
        return own
    squares = summed(torch.nn.utils.get_total_norm(shards).square().to(own.device))
    return (squares + own.square()).sqrt()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | Tensor) -> None:
    """Multiplies each rank's part of the gradient by ``factor``."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)


def clip(parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> None:
    """As ``torch.nn.utils.clip_grads_with_norm_``, of which this is the sharded form."""
    if not any(map(is_sharded, parameters)):
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return
    scale_gradients(parameters, torch.clamp(largest / (norm + 1e-6), max=1.0))
