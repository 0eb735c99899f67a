"""Finds the embeddings and the scale of a dual encoder in what somebody else's module returns or is given.

Known forms, tried in this order:
    names      image_features, text_features, logit_scale (open_clip with ``output_dict``); image_embeds, text_embeds (Hugging Face
               CLIP, SigLIP and CLAP: audio_embeds); query_embeds, passage_embeds; any of them as keys, attributes or arguments
    order      a tuple of two float matrices of one shape and then a scale (open_clip's default; a loss called with positions)
A scale that is not handed over is exp(``logit_scale``) of the module, as CLIP defines it (CLAP: of ``logit_scale_t``).

How it can mislead: two matrices in the right order need not be what the loss compares. The probe therefore checks the gradient that
passes by against the one its own loss would give (quantity ``hooks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FIRST = ("image_features", "image_embeds", "audio_features", "audio_embeds", "query_embeds")
SECOND = ("text_features", "text_embeds", "passage_embeds")
SCALE = ("logit_scale", "scale")
LOG_SCALE = ("logit_scale", "log_scale", "logit_scale_t")
TOKEN_IDS = ("input_ids", "text", "texts", "token_ids")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows [N, D] of both towers, and the scale after exp (a number, or a tensor of one) or None where only the module has it."""

    image: Tensor
    text: Tensor
    scale: Tensor | float | None
    token_ids: Tensor | None = None


def in_output(output: Any) -> Found | None:
    """What a model returned, or None if it holds no two matrices of embeddings."""
    named = _named(output)
    first, second = _first(named, FIRST), _first(named, SECOND)
    if first is not None and second is not None:
        return Found(image=first, text=second, scale=_scale(named))
    if isinstance(output, (tuple, list)):
        return by_order(output)
    return None


def in_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Found | None:
    """What a loss module was called with."""
    return in_output(dict(kwargs)) or by_order(args)


def token_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The int64 matrix [N, L] among a model's inputs, by name or as the only one."""
    for name in TOKEN_IDS:
        if _is_ids(kwargs.get(name)):
            return kwargs[name]
    found = [value for value in (*args, *kwargs.values()) if _is_ids(value)]
    return found[0] if len(found) == 1 else None


def scale_of(module: nn.Module) -> Tensor | None:
    """exp of the module's logit scale, with gradient; None if it has none."""
    inner: Any = module
    while any(hasattr(inner, name) for name in ("module", "_orig_mod")):
        inner = getattr(inner, "module", None) or inner._orig_mod
    for name in LOG_SCALE:
        value = getattr(inner, name, None)
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.float().exp().squeeze()
    return None


def unit_rows(rows: Tensor) -> bool:
    """Whether rows [N, D] have length 1 within the rounding of their dtype; a host sync."""
    tolerance = 64 * torch.finfo(rows.dtype).eps
    lengths = torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float64)
    return bool(((lengths - 1).abs() < tolerance).all())


def are_logits(seen: Found) -> bool:
    """Whether these are logits per image and per text: square, each the other's transpose. A host sync, for square ones only."""
    rows, columns = seen.image.shape
    return rows == columns and torch.allclose(seen.image.detach(), seen.text.detach().T)


def _named(output: Any) -> Mapping[str, Any]:
    if isinstance(output, Mapping):
        return output
    names = (*FIRST, *SECOND, *SCALE)
    return {name: getattr(output, name) for name in names if getattr(output, name, None) is not None}


def _first(named: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
    return next((named[name] for name in names if _is_rows(named.get(name))), None)


def _scale(named: Mapping[str, Any]) -> Tensor | float | None:
    return next((_as_scale(named[name]) for name in SCALE if named.get(name) is not None), None)


def by_order(values: Sequence[Any]) -> Found | None:
    """Two float matrices of one shape, and then perhaps a scale."""
    if len(values) < 2 or not (_is_rows(values[0]) and _is_rows(values[1]) and values[0].shape == values[1].shape):
        return None
    return Found(image=values[0], text=values[1], scale=_as_scale(values[2]) if len(values) > 2 else None)


def _as_scale(value: Any) -> Tensor | float | None:
    """As it is: every forward pass comes by here, and an operation would cost more than all the rest."""
    if isinstance(value, Tensor):
        return value if value.numel() == 1 and value.is_floating_point() else None
    return float(value) if isinstance(value, (int, float)) else None


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
