"""Which rows of the text tables a batch can reach at all, whatever the loss: an exact zero anywhere else is no sign of saturation.

A causal tower that pools at one position sees nothing behind it. A tower that pools the last position, or attends both ways, sees its
padding too. CoCa's class token sees what its mask shows it, which in the released models is shifted by one. Hugging Face towers mask
padding, and number positions from behind their padding id (RoBERTa) or from 0 (BERT).

How it can mislead: tables with other rules (relative positions) are not listed, so their unreached rows still count as zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.encoders.stretch import position_parameter
from gradscope.encoders.tokens import text_tower

_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
_OTHER_TOWER = re.compile(r"vision|visual|image|audio")


def unreached_rows(model: Any, ids: Tensor, words: Tensor | None) -> dict[int, Tensor]:
    """id() of a parameter -> bool [its rows]: True where no caption of ``ids`` [B, L] gets there.

    ``words`` bool [B, L]: positions whose outputs are used on their own (token terms), or None.
    """
    from open_clip.hf_model import HFTextEncoder

    text = text_tower(model)
    seen = ids != text.config.pad_token_id if isinstance(text, HFTextEncoder) else _seen(model, text, ids)
    if words is not None:
        seen = seen | _up_to_the_last(words, text)
    if isinstance(text, HFTextEncoder):
        return _hf_rows(text.transformer, ids, seen)
    positions = text.positional_embedding
    used = torch.zeros(len(positions), dtype=torch.bool, device=ids.device)
    used[: ids.shape[1]] = seen.any(0)
    used[ids.shape[1] :] = getattr(text, "cls_emb", None) is not None
    trained, first = position_parameter(text)  # where the first rows are frozen, only the others are a parameter
    return {id(text.token_embedding.weight): _without(ids[seen], text.token_embedding), id(trained): ~used[first:]}


def _seen(model: Any, text: Any, ids: Tensor) -> Tensor:
    """bool [B, L]: positions that open_clip's text transformer lets into the pooled output."""
    position = torch.arange(ids.shape[1], device=ids.device)
    if getattr(text, "cls_emb", None) is not None:
        keep = ids != text.pad_id
        return keep if text.correct_cls_mask else torch.cat([torch.ones_like(keep[:, :1]), keep[:, :-1]], dim=1)
    pool, end = (model.text_pool_type, model.text_eos_id) if text is model else (text.pool_type, text.eos_id)
    if text.attn_mask is None or pool not in ("argmax", "eos", "first"):
        return torch.ones_like(ids, dtype=torch.bool)
    at = {"argmax": ids, "eos": (ids == end).int(), "first": torch.zeros_like(ids)}[pool].argmax(1)
    return position <= at[:, None]


def _up_to_the_last(words: Tensor, text: Any) -> Tensor:
    """A causal word sees all before it."""
    causal = getattr(text, "attn_mask", None) is not None
    return words.flip(1).cumsum(1).flip(1) > 0 if causal else words


def _hf_rows(transformer: nn.Module, ids: Tensor, seen: Tensor) -> dict[int, Tensor]:
    rows: dict[int, Tensor] = {}
    for name, module in transformer.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if module is transformer.get_input_embeddings():  # type: ignore[operator]
            rows[id(module.weight)] = _without(ids[seen], module)
        elif name.endswith("position_embeddings"):
            start = 0 if module.padding_idx is None else module.padding_idx + 1
            rows[id(module.weight)] = _without(seen.any(0).nonzero().flatten() + start, module)
        elif name.endswith("token_type_embeddings"):
            rows[id(module.weight)] = _without(ids.new_zeros(1), module)
    return rows


def _without(found: Tensor, table: nn.Embedding) -> Tensor:
    """bool [rows]: True everywhere but at the rows ``found``."""
    rows = torch.ones(table.num_embeddings, dtype=torch.bool, device=found.device)
    rows[found] = False
    return rows


def reachable_rows(model: nn.Module) -> Callable[[Tensor], dict[str, Tensor]]:
    """token ids [N, L] -> parameter name -> bool [rows]: rows of ``model`` that these ids cannot reach, for anybody's model.

    A model that knows (``structural_rows``) is asked. In others, rows of the largest text table whose id does not occur, and rows of
    text position tables beyond L; padding counts as reached, and a table that is not recognised has no rows: too few, never too many.
    """
    own = getattr(model, "structural_rows", None)
    if own is not None:
        return own
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and not _OTHER_TOWER.search(name)}
    words = max(tables.values(), key=lambda table: table.num_embeddings, default=None)
    positions = [table for name, table in tables.items() if "position" in name and table is not words]

    def rows(ids: Tensor) -> dict[str, Tensor]:
        if words is None:
            return {}
        found = {words: _without(ids.flatten(), words)}
        found |= {table: torch.arange(table.num_embeddings, device=ids.device) >= ids.shape[1] + 2 for table in positions}
        return {names[id(table.weight)]: unreached for table, unreached in found.items() if id(table.weight) in names}

    return rows


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put in front, so that curves continue across modes."""
    return _WRAPPERS.sub("", name)
