"""77 text positions -> 248: the first 20 kept bit for bit, each further one spread over four.

    P'[k]          = P[k]                                           k = 0 ... 19
    P'[20 + 4i + r] = ((4 - r) P[20 + i] + r P[21 + i]) / 4          i = 0 ... L - 22, r = 0 ... 3
    P'[last 4]      = P[L-1] + (r / 4) (P[L-1] - P[L-2])             r = 0 ... 3: the tail is extrapolated

for a table of L rows; L = 77 gives 248. Source: Long-CLIP (Zhang et al., 2024), section 3.1; GOAL and StructXLIP use the same table.

Two variants. One table: all rows train (GOAL, StructXLIP). Frozen: the first 20 rows never change (Long-CLIP, SmartCLIP, FineLIP). They
are then a buffer and only the other rows are a parameter, so that no gradient, weight decay or momentum can reach them. Saved
weights hold one whole table under its usual name in either case.

How it can mislead: positions beyond 77 are interpolations until they are trained; recall on long captions before training says little.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradscope.encoders.layouts import KEPT

SPREAD = 4
_SUFFIX = re.compile(r"(?P<name>.+)@(?P<length>[1-9]\d*)(?P<frozen>frozen20)?")
_TABLE = "positional_embedding"


def parse_stretch(name: str) -> tuple[str, int, bool]:
    """ "ViT-B-16:openai@248frozen20" -> ("ViT-B-16:openai", 248, True); a name without suffix has length 0."""
    found = _SUFFIX.fullmatch(name)
    if found is None:
        return name, 0, False
    return found["name"], int(found["length"]), found["frozen"] is not None


def stretch_positions(table: Tensor) -> Tensor:
    """[L, W] -> [20 + 4 (L - 20), W], see above. Raises ValueError for L below 22."""
    if len(table) < KEPT + 2:
        raise ValueError(
            f"a position table of {len(table)} rows cannot be stretched: the first {KEPT} are kept and two more are needed"
        )
    rest = table[KEPT:]  # [L - 20, W]
    after = torch.cat([rest[1:], (2 * rest[-1] - rest[-2]).unsqueeze(0)])  # the row that would follow the last: P[L-1] + the last step
    steps = torch.arange(SPREAD, dtype=table.dtype, device=table.device).view(1, SPREAD, 1)
    spread = ((SPREAD - steps) * rest.unsqueeze(1) + steps * after.unsqueeze(1)) / SPREAD
    return torch.cat([table[:KEPT], spread.flatten(0, 1)])


def stretch_text_tower(model: Any, length: int, name: str) -> None:
    """Stretches an open_clip model in place: table, causal mask and context length.

    Raises:
        ValueError: ``length`` is not what the rule gives for this model, or the text tower is of another make.
    """
    tower = _text_tower(model, name)
    rows = len(tower.positional_embedding)
    possible = KEPT + SPREAD * (rows - KEPT)
    if length != possible:
        raise ValueError(f"encoder '{name}' has {rows} text positions, which stretch to {possible}; got @{length}")
    table = stretch_positions(tower.positional_embedding.detach())
    tower.positional_embedding = nn.Parameter(table)
    tower.register_buffer("attn_mask", torch.full((length, length), float("-inf")).triu_(1), persistent=False)
    for module in {model, tower}:
        module.context_length = length
    if hasattr(tower, "num_pos"):
        tower.num_pos = length


def freeze_first_positions(model: Any, name: str) -> None:
    """The first 20 rows become a buffer. ``state_dict`` and ``load_state_dict`` keep speaking of one whole table."""
    tower = _text_tower(model, name)
    parametrize.register_parametrization(tower, _TABLE, _KeptRows(tower.positional_embedding.detach()[:KEPT].clone()), unsafe=True)
    tower.register_state_dict_post_hook(_write_whole_table)
    tower.register_load_state_dict_pre_hook(_read_whole_table)


def has_frozen_positions(model: Any) -> bool:
    return parametrize.is_parametrized(getattr(model, "text", model), _TABLE)


def position_parameter(tower: Any) -> tuple[nn.Parameter, int]:
    """The parameter behind a text tower's position table, and the position of its first row (20 where the first are frozen)."""
    if parametrize.is_parametrized(tower, _TABLE):
        return tower.parametrizations[_TABLE].original, KEPT
    return tower.positional_embedding, 0


class _KeptRows(nn.Module):
    """Trained rows [L - 20, W] -> the whole table [L, W]."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, trained: Tensor) -> Tensor:
        return torch.cat([self.kept, trained])

    def right_inverse(self, table: Tensor) -> Tensor:
        return table[len(self.kept) :].clone()


_KEPT_KEY = f"parametrizations.{_TABLE}.0.kept"
_TRAINED_KEY = f"parametrizations.{_TABLE}.original"


def _write_whole_table(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    kept, trained = state.pop(prefix + _KEPT_KEY), state.pop(prefix + _TRAINED_KEY)
    state[prefix + _TABLE] = torch.cat([kept, trained])


def _read_whole_table(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    if prefix + _TABLE in state:
        table = state.pop(prefix + _TABLE)
        state[prefix + _KEPT_KEY], state[prefix + _TRAINED_KEY] = table[:KEPT], table[KEPT:]


def _text_tower(model: Any, name: str) -> Any:
    """CLIP keeps its text tower in itself, CustomTextCLIP under ``text``."""
    tower = getattr(model, "text", model)
    usual = isinstance(getattr(tower, _TABLE, None), Tensor) and getattr(tower, "attn_mask", None) is not None
    if not usual or getattr(tower, "cls_emb", None) is not None:
        raise ValueError(f"encoder '{name}' has no causal text tower with a table of positions; only such towers can be stretched")
    return tower
