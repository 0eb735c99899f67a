"""Freezing whole towers or all but their last blocks, and activation checkpointing that works with it.

    freeze(encoder, "image")                    nothing of the image tower trains
    freeze(encoder, "all-but-last-2")           of each tower the last two blocks and all behind them (norm, pooling, projection) train
    freeze(encoder, "image,all-but-last-2")     the image tower is frozen, of the text tower the last two blocks train

The scale stays as it is. What is frozen also rests in evaluation mode (``DualEncoder.train`` leaves it there): no dropout, no patch
dropout in front of the first block, and batch statistics that no longer move. A frozen tower has no graph, so it costs a forward
pass and no backward; a frozen first part costs no backward either, and stores no activations.

Checkpointing is torch's non-reentrant form around each block. (The reentrant form gives blocks behind a frozen part no gradient
at all, with a warning. open_clip 3.3 asks for the right form, but its call does not fit its own custom blocks and does nothing for
ResNets, so the blocks are wrapped here.)

How it can mislead: modules inside a checkpointed block run twice per step, so a forward hook of yours on one of them fires twice.
The probe's hooks sit on embeddings and logits and do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.stretch import position_parameter
from gradscope.encoders.tokens import FINAL_NORMS, text_tower

_LAST = re.compile(r"all-but-last-(\d+)")
_TOWERS = ("image", "text")
Part = nn.Module | nn.Parameter


@dataclass(frozen=True, kw_only=True)
class Tower:
    """One tower in parts. ``head`` is everything behind the last block: final norm, pooling, projection."""

    name: str
    modules: tuple[nn.Module, ...]
    loose: tuple[nn.Parameter, ...]  # parameters that belong to no module of ``modules``
    blocks: tuple[nn.Module, ...]  # () where the tower has none that can be told apart
    head: tuple[Part, ...]
    kind: str

    def parameters(self) -> list[nn.Parameter]:
        return [*_parameters(self.modules), *self.loose]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Parameters by part ("image", "text", "rest": the scale and what belongs to neither tower)."""

    what: str
    trainable: dict[str, int]
    frozen: dict[str, int]

    def __str__(self) -> str:
        parts = (f"{name} {self.trainable[name]:,} of {self.trainable[name] + self.frozen[name]:,}" for name in _TOWERS)
        return f"frozen '{self.what}': parameters that train: {', '.join(parts)}; frozen parts run in evaluation mode"


def freeze(encoder: DualEncoder, what: str) -> Frozen:
    """Freezes parts of ``encoder`` in place and says what is left. Parameters that were frozen before stay so.

    Args:
        what: "image", "text", "all-but-last-N", or several with commas.

    Raises:
        ValueError: another word, N larger than a tower has blocks, a tower without blocks, or nothing left to train.
    """
    whole, last = _parsed(what)
    towers = image_tower(encoder.model), text_tower_parts(encoder.model)
    kept: dict[str, tuple[Part, ...]] = {}
    for tower in towers:
        if tower.name in whole:
            kept[tower.name] = ()
        elif last is not None:
            kept[tower.name] = _last_part(tower, last, encoder.name)
    before = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    for tower in towers:
        if tower.name in kept:
            _freeze_but(tower, kept[tower.name])
    if not any(parameter.requires_grad for tower in towers for parameter in tower.parameters()):
        for parameter in before:
            parameter.requires_grad_(True)
        raise ValueError(f"--freeze {what} leaves nothing of encoder '{encoder.name}' to train; leave out one of its parts")
    for tower in towers:
        if tower.name in kept:
            encoder.rest(_outside(tower.modules, kept[tower.name]))
    return _counted(encoder, towers, what)


def checkpoint_activations(encoder: DualEncoder) -> int:
    """Blocks of both towers keep their inputs only and run again in the backward pass. Returns how many were wrapped.

    Raises:
        ValueError: a tower without blocks, or blocks with batch statistics, which a second run would move twice.
    """
    blocks: list[nn.Module] = []
    for tower in (image_tower(encoder.model), text_tower_parts(encoder.model)):
        moving = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for block in tower.blocks for m in block.modules())
        if moving or not tower.blocks:
            why = "batch statistics, which a second run would move twice" if moving else "no blocks that gradscope can run again"
            raise ValueError(
                f"activations of encoder '{encoder.name}' cannot be checkpointed: its {tower.name} tower {tower.kind} has {why}"
            )
        blocks += tower.blocks
    for block in blocks:
        if not isinstance(block.forward, _RunAgain):
            block.forward = _RunAgain(block.forward)
    return len(blocks)


@dataclass(frozen=True)
class _RunAgain:
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **settings: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **settings)
        return checkpoint(self.forward, *args, use_reentrant=False, **settings)


# ---- the towers of each family


def image_tower(model: Any) -> Tower:
    """The image tower in parts."""
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    visual = model.visual
    kind = type(visual).__name__
    blocks: tuple[nn.Module, ...] = ()
    head: tuple[Any, ...] = ()
    if isinstance(visual, VisionTransformer):
        blocks = tuple(visual.transformer.resblocks)
        head = (visual.ln_post, visual.proj, visual.attn_pool, getattr(visual, "attn_pool_contrastive", None))
    elif isinstance(visual, ModifiedResNet):
        blocks = (*visual.layer1, *visual.layer2, *visual.layer3, *visual.layer4)
        head = (visual.attnpool,)
    elif isinstance(visual, TimmModel):
        trunk = visual.trunk
        kind = f"timm {type(trunk).__name__}"
        if isinstance(trunk, TimmVisionTransformer | Eva):
            blocks = tuple(trunk.blocks)
            head = (trunk.norm, trunk.fc_norm, trunk.attn_pool, trunk.head, visual.head)
    return Tower(name="image", modules=(visual,), loose=(), blocks=blocks, head=_present(head), kind=kind)


def text_tower_parts(model: Any) -> Tower:
    """The text tower in parts."""
    from open_clip import CLIP
    from open_clip.hf_model import HFTextEncoder
    from open_clip.transformer import TextTransformer

    text = text_tower(model)
    blocks: tuple[nn.Module, ...] = ()
    head: tuple[Any, ...] = ()
    modules: tuple[nn.Module, ...] = (text,)
    loose: tuple[nn.Parameter, ...] = ()
    if isinstance(text, HFTextEncoder):
        inner = text.transformer
        stack = getattr(inner, "encoder", inner)
        blocks = tuple(next((getattr(stack, name) for name in ("layer", "block", "layers") if hasattr(stack, name)), ()))
        head = (*(getattr(inner, name, None) for name in FINAL_NORMS), getattr(inner, "pooler", None), text.proj)
    elif isinstance(text, TextTransformer | CLIP):
        blocks, head = tuple(text.transformer.resblocks), (text.ln_final, text.text_projection)
        if text is model:  # its parts lie beside the image tower
            own = (text.token_embedding, position_parameter(text)[0], text.transformer, *head)
            modules = tuple(part for part in own if isinstance(part, nn.Module))
            loose = tuple(part for part in own if isinstance(part, nn.Parameter))
    return Tower(name="text", modules=modules, loose=loose, blocks=blocks, head=_present(head), kind=type(text).__name__)


# ---- parts


def _parsed(what: str) -> tuple[set[str], int | None]:
    whole, numbers = set(), []
    for word in (part.strip() for part in what.split(",")):
        match = _LAST.fullmatch(word)
        if match:
            numbers.append(int(match[1]))
        elif word in _TOWERS:
            whole.add(word)
        else:
            raise ValueError(f"--freeze knows image, text and all-but-last-N (several with commas), got '{word}'")
    if len(numbers) > 1:
        raise ValueError(f"--freeze {what} names all-but-last-N more than once; one N holds for both towers")
    return whole, numbers[0] if numbers else None


def _last_part(tower: Tower, last: int, name: str) -> tuple[Part, ...]:
    if not tower.blocks:
        raise ValueError(
            f"all-but-last-{last} needs blocks, and the {tower.name} tower {tower.kind} of encoder '{name}' has none that gradscope "
            f"can tell apart; freeze '{tower.name}' as a whole"
        )
    if last > len(tower.blocks):
        raise ValueError(
            f"all-but-last-{last} asks for more blocks than the {tower.name} tower of encoder '{name}' has; "
            f"N is at most {len(tower.blocks)}"
        )
    return (*tower.blocks[len(tower.blocks) - last :], *tower.head)


def _freeze_but(tower: Tower, kept: Iterable[Part]) -> None:
    spared = {id(parameter) for parameter in _parameters(kept)}
    for parameter in tower.parameters():
        if id(parameter) not in spared:
            parameter.requires_grad_(False)


def _outside(modules: Iterable[nn.Module], kept: Iterable[Part]) -> list[nn.Module]:
    """The largest modules that neither are, nor hold, nor lie in a kept one."""
    spared = {id(module) for part in kept if isinstance(part, nn.Module) for module in part.modules()}
    found: list[nn.Module] = []
    for module in modules:
        if not any(id(inner) in spared for inner in module.modules()):
            found.append(module)
        elif id(module) not in spared:
            found += _outside(module.children(), kept)
    return found


def _parameters(parts: Iterable[Part]) -> list[nn.Parameter]:
    return [p for part in parts for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())]


def _present(parts: Iterable[Any]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part is not None)


def _counted(encoder: DualEncoder, towers: Iterable[Tower], what: str) -> Frozen:
    part = {id(parameter): tower.name for tower in towers for parameter in tower.parameters()}
    trainable, frozen = (dict.fromkeys((*_TOWERS, "rest"), 0) for _ in range(2))
    for parameter in encoder.parameters():
        counts = trainable if parameter.requires_grad else frozen
        counts[part.get(id(parameter), "rest")] += parameter.numel()
    return Frozen(what=what, trainable=trainable, frozen=frozen)
