"""Zero accounting: runs one batch in several precisions and says of every zero of the full-parameter gradient why it is one.

    found = account(model, closure, dtype=torch.float16, loss_scale=65536.0)
    found.total().zeros                      # table A, by cause
    found.total().invisible                  # table B

Passes (``gradscope.zeros.counterfactual`` says how a closure is written and what is left untouched):
    the pass itself          in ``dtype``, loss times ``loss_scale``; what is counted is the unscaled gradient, as the optimizer sees it
    multiplied               the same graph, loss times 2^k, with the largest k for which every gradient stays finite
    references               a copy in the next wider dtypes: float32 and float64 behind half precision, float64 behind float32

Causes, their order and their definitions are those of ``gradscope.metrics.zero_causes``. How it can mislead: one batch, and the
gradient of this process alone; a tensor under its own factor might come back where the common 2^k, bounded by the largest, cannot.
Cost: one forward pass and about nine backward passes, and for each reference one of both and a copy of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscope.metrics.zero_causes import (
    CAUSES,
    INVISIBLE,
    count_causes,
    eps_dominated,
    is_key_bias,
    name_parts,
    squared_underflow,
    stale,
)
from gradscope.zeros.counterfactual import Closure, Measured, measure, reference, wider
from gradscope.zeros.evidence import Evidence, Masks, alive_entries, evidence_of

#: Of a pass that can be counted.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counted entries of some tensors. ``zeros`` by cause sum to the number of entries without a gradient.

    ``invisible`` is table B; a count is missing where there is no Adam to ask. Details of table A: ``key_bias`` of the structural
    zeros are the bias of attention keys; ``comes_back`` of the dtype underflow are non-zero under the factor 2^k. ``contradicted``
    entries were announced as structural and have a gradient all the same; ``non_finite`` ones are inf or nan, and are no zeros.
    """

    entries: int = 0
    zeros: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    invisible: Mapping[str, int] = field(default_factory=dict)
    key_bias: int = 0
    comes_back: int = 0
    contradicted: int = 0
    non_finite: int = 0

    @property
    def zero_entries(self) -> int:
        return sum(self.zeros.values())

    def __add__(self, other: Tally) -> Tally:
        keys = {**self.invisible, **other.invisible}
        return Tally(
            entries=self.entries + other.entries,
            zeros={cause: self.zeros[cause] + other.zeros[cause] for cause in CAUSES},
            invisible={key: self.invisible.get(key, 0) + other.invisible.get(key, 0) for key in keys},
            key_bias=self.key_bias + other.key_bias,
            comes_back=self.comes_back + other.comes_back,
            contradicted=self.contradicted + other.contradicted,
            non_finite=self.non_finite + other.non_finite,
        )


@dataclass(frozen=True, kw_only=True)
class TensorTally:
    """One parameter, or the query, key or value part of one."""

    name: str
    group: str
    tally: Tally


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The answer of ``account``. ``exponent`` is the k of 2^k, None where no factor kept all gradients finite."""

    loss: float
    dtype: torch.dtype
    loss_scale: float
    exponent: int | None
    references: tuple[torch.dtype, ...]
    tensors: tuple[TensorTally, ...]
    notes: tuple[str, ...]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(t.group for t in self.tensors))

    def total(self, group: str | None = None) -> Tally:
        """The sum over all tensors, or over those of a group."""
        return sum((t.tally for t in self.tensors if group in (None, t.group)), Tally())


def top_level(name: str) -> str:
    """The first part of a parameter's name."""
    return name.split(".", 1)[0]


def account(
    model: nn.Module,
    closure: Closure,
    *,
    dtype: torch.dtype = torch.float32,
    loss_scale: float = 1.0,
    structural: Masks | None = None,
    optimizer: Optimizer | None = None,
    eps: float = 1e-8,
    references: Sequence[torch.dtype] | None = None,
    group: Callable[[str], str] = top_level,
) -> Accounting:
    """Counts the zeros of the gradient of one batch by cause, and the non-zero entries that nobody sees.

    Args:
        model: any module whose parameters shall be counted; not sharded.
        closure: forward pass -> loss []; called once per forward pass.
        dtype: float16 or bfloat16 (autocast), float32 or float64.
        loss_scale: the loss is multiplied by it before backward and the gradient divided afterwards, as a GradScaler does.
        structural: parameter name -> bool [rows] or [its shape], True where this batch cannot reach. Without an entry here, the
            rows of an ``nn.Embedding`` that are zero in every pass count as structural.
        optimizer: an Adam, for eps and the second moment as the coming step would form it. Without one, or before its first step,
            sqrt(v_hat) is |g|, as the first step of any Adam has it.
        eps: Adam's, where no optimizer is given.
        references: wider dtypes, the narrowest first; by default all of float32 and float64 that are wider. () for none.
        group: parameter name -> the group to sum by.

    Raises:
        ValueError: no such dtype or loss scale, no finite loss, nothing that trains, a reentrant checkpoint, a closure that does not
            use its ``Pass``, a mask that fits nothing, references in no order.
    """
    _check(dtype, loss_scale)
    ladder = wider(dtype) if references is None else tuple(references)
    if any(step not in wider(before) for before, step in zip((dtype, *ladder), ladder, strict=False)):
        raise ValueError(f"references must be wider than {dtype}, the narrowest first; got {list(ladder)}")
    structural = structural or {}
    unknown = [name for name in structural if name not in dict(model.named_parameters())]
    if unknown:
        raise ValueError(f"structural names '{unknown[0]}', which is no parameter of the model; use names of named_parameters()")
    found = measure(model, closure, dtype, loss_scale)
    alive = [alive_entries(reference(model, closure, step)) for step in ladder]
    evidence = evidence_of(model, found, alive, structural)
    adam = _Adam(optimizer=optimizer, eps=eps)
    tensors = tuple(
        TensorTally(name=piece, group=group(name), tally=tally)
        for name, parameter in model.named_parameters()
        for piece, tally in _tallies(name, parameter, found.gradient.get(name), evidence, adam)
    )
    total = sum((t.tally for t in tensors), Tally())
    return Accounting(
        loss=found.loss,
        dtype=dtype,
        loss_scale=loss_scale,
        exponent=found.exponent,
        references=ladder,
        tensors=tensors,
        notes=tuple(_notes(found, total, adam, model)),
    )


def _check(dtype: torch.dtype, loss_scale: float) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; give one of {', '.join(map(str, DTYPES))}")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"the loss scale must be a positive number, got {loss_scale:g}; GradScaler starts at 65536")


# ---- counting


@dataclass(frozen=True, kw_only=True)
class _Adam:
    """sqrt(v_hat) as the coming step would form it."""

    optimizer: Optimizer | None
    eps: float

    def knows(self, parameter: nn.Parameter) -> bool:
        if self.optimizer is None:
            return True
        group, state = self._group(parameter), self.optimizer.state.get(parameter, {})
        return group is not None and {"betas", "eps"} <= set(group) and (not state or {"exp_avg_sq", "step"} <= set(state))

    def root(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, float]:
        """Of the gradient's shape, and the eps that it is held against."""
        group = self._group(parameter)
        if self.optimizer is None or group is None:
            return gradient.abs(), self.eps
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):  # decay is part of what Adam remembers
            gradient = gradient + group["weight_decay"] * parameter.detach() * (-1 if group.get("maximize") else 1)
        state = self.optimizer.state.get(parameter, {})
        if not state:
            return gradient.abs(), group["eps"]
        beta = group["betas"][1]
        second = beta * state["exp_avg_sq"] + (1 - beta) * gradient * gradient
        if "max_exp_avg_sq" in state:  # amsgrad
            second = torch.maximum(second, state["max_exp_avg_sq"])
        return (second / (1 - beta ** (state["step"] + 1))).sqrt(), group["eps"]

    def _group(self, parameter: nn.Parameter) -> dict | None:
        groups = self.optimizer.param_groups if self.optimizer else []
        return next((group for group in groups if any(p is parameter for p in group["params"])), None)


def _tallies(
    name: str, parameter: nn.Parameter, gradient: Tensor | None, evidence: Evidence, adam: _Adam
) -> Iterator[tuple[str, Tally]]:
    """A parameter's pieces by name. All counts of a piece travel to the host together."""
    rows = len(parameter) if parameter.ndim else 1
    if gradient is None:
        cause = "unused" if parameter.requires_grad else "frozen"
        for piece, part in name_parts(name, rows).items():
            entries = parameter.numel() * (part.stop - part.start) // max(rows, 1)
            yield piece, Tally(entries=entries, zeros={**dict.fromkeys(CAUSES, 0), cause: entries})
        return
    root, eps = adam.root(parameter, gradient.float()) if adam.knows(parameter) else (None, 0.0)
    for piece, part in name_parts(name, rows).items():
        own = {cause: _part(mask, part) for cause, mask in evidence.of(name).items()}
        yield piece, _tally(torch.atleast_1d(gradient)[part], own, is_key_bias(piece), _part(root, part), eps)


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else torch.atleast_1d(tensor)[rows]


def _tally(gradient: Tensor, evidence: dict[str, Tensor | None], key_bias: bool, root: Tensor | None, eps: float) -> Tally:
    zero = gradient == 0
    announced = evidence.pop("structural")
    whole = torch.ones_like(zero) if key_bias else None
    counts = count_causes(zero, {"structural": announced, "key_bias": whole, **evidence})
    counts["contradicted"] = (
        torch.zeros_like(counts["unexplained"]) if announced is None else (announced & ~zero & gradient.isfinite()).sum()
    )
    counts["non_finite"] = (~torch.isfinite(gradient)).sum()
    counts["squared_underflow"] = squared_underflow(gradient)
    if root is not None:
        counts |= {"eps_dominated": eps_dominated(gradient, root, eps), "stale": stale(gradient, root)}
    return _as_tally(gradient.numel(), dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True)))


def _as_tally(entries: int, counts: dict[str, int]) -> Tally:
    zeros = {cause: counts.get(cause, 0) for cause in CAUSES}
    zeros["structural"] += counts["key_bias"]
    zeros["dtype_underflow"] += counts["comes_back"]
    return Tally(
        entries=entries,
        zeros=zeros,
        invisible={key: counts[key] for key in INVISIBLE if key in counts},
        **{key: counts[key] for key in ("key_bias", "comes_back", "contradicted", "non_finite")},
    )


def _notes(found: Measured, total: Tally, adam: _Adam, model: nn.Module) -> Iterator[str]:
    """What a reader would otherwise not know."""
    if found.exponent is None:
        yield "no factor keeps all gradients finite, so nothing is known of saturation underflow"
    if total.non_finite:
        what = f"{total.non_finite:,} entries of the gradient are inf or nan and count as non-zero"
        yield f"{what}; a GradScaler would skip this step and lower its scale"
    if total.contradicted:
        yield f"{total.contradicted:,} entries announced as structural have a gradient: the mask does not belong to this batch or model"
    unknown = [name for name, p in model.named_parameters() if p.requires_grad and not adam.knows(p)]
    if unknown:
        yield f"{len(unknown)} trainable parameters are in no Adam of the optimizer, the first {unknown[0]}: no eps, no second moment"
