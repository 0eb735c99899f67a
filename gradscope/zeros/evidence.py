"""What several passes over one batch say together of each entry of the gradient: masks by parameter name, of the parameter's shape or
of a shape that broadcasts to it. Their definitions are those of ``gradscope.metrics.zero_causes``.

How it can mislead: whether an entry is zero in EVERY pass is known only if there was more than one, and it says something of a unit
only if some other part of the model had a gradient; otherwise nothing is called dead, and no row is inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradscope.metrics.zero_causes import dead_entries, rows_as_entries
from gradscope.zeros.counterfactual import Measured

Masks = Mapping[str, Tensor]

#: The layers of torch whose units can be told dead: their rows are units, their columns the units below.
_LAYERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    announced: Masks
    inferred: Masks  # what the batch seems not to reach
    dead: Masks
    next_wider: Masks
    comes_back: Masks  # of those, non-zero under 2^k
    beyond: Masks

    def of(self, name: str) -> dict[str, Tensor | None]:
        """In the order of the causes, the details named before what they are part of."""
        announced = self.announced.get(name)
        return {
            "structural": self.inferred.get(name) if announced is None else announced,
            "dead_unit": self.dead.get(name),
            "comes_back": self.comes_back.get(name),
            "dtype_underflow": self.next_wider.get(name),
            "saturation_underflow": self.beyond.get(name),
        }


def alive_entries(gradient: Mapping[str, Tensor | None]) -> Masks:
    return {name: g != 0 for name, g in gradient.items() if g is not None}


def evidence_of(model: nn.Module, found: Measured, alive: Sequence[Masks], structural: Masks) -> Evidence:
    """From the pass that is counted, the non-zero entries of the references (the narrowest first), and the announced rows."""
    own = alive_entries(found.gradient)
    passes = [own, found.multiplied, *alive]
    witnesses = [p for p in passes[1:] if p]
    silent = {name: ~torch.stack([p[name] for p in passes if name in p]).any(0) for name in own} if witnesses else {}
    if all(mask.all() for mask in silent.values()):
        silent = {}
    parameters = dict(model.named_parameters())
    return Evidence(
        announced={name: rows_as_entries(mask, parameters[name]) for name, mask in structural.items()},
        inferred=_unreached(model, silent),
        dead=_dead(model, silent),
        next_wider=alive[0] if alive else {},
        comes_back={name: mask & alive[0][name] for name, mask in found.multiplied.items() if name in alive[0]} if alive else {},
        beyond=_either(found.multiplied, *alive[1:]),
    )


def _either(*masks: Masks) -> Masks:
    names = {name for mask in masks for name in mask}
    return {name: torch.stack([mask[name] for mask in masks if name in mask]).any(0) for name in names}


def _unreached(model: nn.Module, silent: Masks) -> Masks:
    """Silent rows of embedding tables, and silent places of convolution kernels; nothing where the whole tensor is silent."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept: dict[type, tuple[int, ...]] = {nn.Embedding: (0,), nn.EmbeddingBag: (0,), nn.modules.conv._ConvNd: (2, 3, 4)}
    found = {}
    for module in model.modules():
        name = names.get(id(module._parameters.get("weight")), "")
        dims = next((dims for kind, dims in kept.items() if isinstance(module, kind)), None)
        if dims is not None and name in silent and not silent[name].all():
            found[name] = silent[name].all(dim=[d for d in range(silent[name].ndim) if d not in dims], keepdim=True)
    return found


def _dead(model: nn.Module, silent: Masks) -> Masks:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if not isinstance(module, _LAYERS):
            continue
        joined = "in_proj_" if isinstance(module, nn.MultiheadAttention) else ""
        # Not by getattr: a parametrised weight would be computed anew, and spectral normalisation would move on by one step.
        own = [names.get(id(module._parameters.get(f"{joined}{part}")), "") for part in ("weight", "bias")]
        masks = dead_entries(silent.get(own[0]), silent.get(own[1]), out_dim=1 if getattr(module, "transposed", False) else 0)
        found |= {name: mask for name, mask in zip(own, masks, strict=True) if mask is not None}
    return found
