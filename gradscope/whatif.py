"""What an objective would still teach at another scale, softmax width, margin, precision or loss scale: read off stored embeddings.

For every cell of the grid the loss is formed again on batches of unit rows and its gradient taken at the rows themselves. Batches are
drawn without replacement from one seeded permutation: all arms see the same ones, and a batch of 32 holds two of the batches of 16.

    below_1e-3        share of batches whose true loss (float64, from the very logits) is under 1e-3 nat
    stops teaching    at least half of the batches are below 1e-3

Source: paper facts, section 7.7 to 7.9; the numbers of a batch are those of ``gradscope.metrics.loss_path``.
How to read: the same rows at width 16 and 128 differ by the width alone; what the loss regains there, no margin is needed for.
How it can mislead: the rows are those of the weights at hand. It says what the objective would teach NEXT, not where training with it
would end. Gradients are those at the unit rows, the part along a row included, which normalising takes away again. A large loss under
a margin is active, which is not yet learning. A decoupled loss has no floor at 0, so nothing is ever below 1e-3: see its file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscope.metrics.loss_path import PRECISIONS, Pass, one_pass, own_values, pair_loss
from gradscope.metrics.softmax import effective_number, negatives, per_direction
from gradscope.objectives import objectives
from gradscope.objectives.objective import Objective
from gradscope.objectives.siglip import SigLIP, best_bias
from gradscope.paired_rows import draw_batches
from gradscope.registry import unknown_name

if TYPE_CHECKING:
    import pandas as pd

Advance = Callable[[int, int], None]

OBJECTIVES = ("infonce", "hn", "siglip", "dcl", "hardness_weighted")
#: Margins of hn that need no other encoder's rows.
MARGINS = ("live", "fixed", "centred")
#: A batch below this true loss is saturated; log10 nat.
LOG10_SATURATED = -3
ROW_SATURATED = 1e-3
WIDEST_BY_DEFAULT = 1024
#: Pairs that the batches of one width hold together by default: what keeps 1,024 x 1,024 cells to seconds per objective.
MOST_PAIRS = 8192
#: What tells two cells of the grid apart.
CELL = ("objective", "precision", "loss_scale", "scale", "width")
_MEANS = ("residual", "residual_median", "rows_below_1e-3", "violated", "effective_rows")
#: SigLIP's best bias is found on the first batches of an arm, up to so many cells.
_BIAS_CELLS = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One objective with its settings. ``best_bias``: its bias is set anew for each scale and width, where the loss is smallest."""

    label: str
    objective: Objective
    best_bias: bool = False


def make_arms(
    names: Sequence[str] = OBJECTIVES,
    *,
    gammas: Sequence[float] = (0.25, 0.5),
    margins: Sequence[str] = MARGINS,
    betas: Sequence[float] = (0.5,),
    bias: float | None = None,
) -> tuple[Arm, ...]:
    """Each objective at each of the settings that it has.

    Args:
        names: of ``gradscope.objectives``.
        gammas, margins: of hn; margins are some of ``MARGINS``.
        betas: of hardness_weighted.
        bias: of siglip; None takes the one at which the loss is smallest.

    Raises:
        ValueError: unknown objective or margin, a negative or non-finite number, or one twice.
    """
    if bias is not None and not math.isfinite(bias):
        raise ValueError(f"a bias must be a finite number; got {bias:g}.")
    for margin in margins:
        if margin not in MARGINS:
            raise ValueError(f"margin '{margin}' cannot be read off stored embeddings; choose from {', '.join(MARGINS)}.")
    _check_numbers("gamma", gammas, 0.0)
    _check_numbers("beta", betas, 0.0)
    settings: dict[str, Sequence[Any]] = {"gamma": gammas, "margin": margins, "beta": betas, "bias": () if bias is None else (bias,)}
    arms = [arm for name in names for arm in _arms_of(name, settings)]
    labels = [arm.label for arm in arms]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{', '.join(twice)} is asked for twice; name each objective and each number once.")
    return tuple(arms)


def _arms_of(name: str, settings: dict[str, Sequence[Any]]) -> Iterator[Arm]:
    """The settings that the component has, in its own order of fields."""
    component = objectives[name]
    own = [f.name for f in dataclasses.fields(component) if settings.get(f.name)]
    for values in itertools.product(*(settings[key] for key in reversed(own))):
        chosen = dict(zip(reversed(own), values, strict=True))
        words = [f"{v:g}" if isinstance(v, float) else v for v in chosen.values() if v != "live"]
        objective = component(**chosen)
        yield Arm(label=" ".join([name, *words]), objective=objective, best_bias=isinstance(objective, SigLIP) and "bias" not in chosen)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is varied beside the scale. ``widths`` empty: powers of two from 8 up to 1,024 or the number of pairs.

    ``batches``: at most so many per width; None takes 32, or as many as ``MOST_PAIRS`` pairs fill where that is fewer.

    ``order``, of the scale and the product, is one of ``gradscope.metrics.loss_path.ORDERS``; it matters in fp16, for infonce and hn.
    """

    arms: tuple[Arm, ...] = field(default_factory=make_arms)
    widths: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    loss_scales: tuple[float, ...] = (1.0,)
    order: str = "scale last"
    batches: int | None = None
    seed: int = 0

    def widths_for(self, pairs: int) -> tuple[int, ...]:
        return self.widths or tuple(2**k for k in range(3, 11) if 2**k <= min(pairs, WIDEST_BY_DEFAULT)) or (pairs,)

    def batches_for(self, width: int) -> int:
        return max(1, min(32, MOST_PAIRS // width)) if self.batches is None else self.batches


def what_if(
    image: Tensor, text: Tensor, scale: float | Sequence[float], grid: Grid | None = None, *, advance: Advance | None = None
) -> pd.DataFrame:
    """The table of the grid: a row per objective, precision, loss scale, scale and width (``CELL``), with

        batches, left_out          batches measured; rows of the set that are in none of them
        non_finite                 batches whose printed loss is not finite
        loss                       mean over batches, as printed in the precision
        log10_loss, below_1e-3     median over batches of log10 of the true loss; share of batches under 1e-3 (nan: no floor)
        residual, residual_median  mean and median over anchors, averaged over batches
        rows_below_1e-3            share of anchors whose residual is under 1e-3
        violated                   share of anchors with a negative whose logit, margin included, is above the positive's
        effective_rows             (sum r)^2 / sum r^2 of the residuals, per direction and batch: 1 ... width
        log10_gradient             median over batches of log10 |gradient| at the rows; -inf where it is exactly 0, nan on overflow
        overflow                   share of batches whose gradient has an entry that is not finite: the loss scale is too large
        zero_share, pull_lost      share of exactly zero entries of that gradient; of pairs whose pull alone is exactly zero
        bias                       of siglip, else nan

    Args:
        image, text: unit rows [N, D] of paired items, fp32 or float64.
        scale: one or several multipliers.
        grid: by default all objectives in fp32.
        advance: called with (measurements done, of how many).

    Raises:
        ValueError: rows that are not N unit pairs, an empty grid, a width over N, or a setting that is not allowed.
    """
    return summarise(each_batch(image, text, scale, grid, advance=advance))


def each_batch(
    image: Tensor, text: Tensor, scale: float | Sequence[float], grid: Grid | None = None, *, advance: Advance | None = None
) -> pd.DataFrame:
    """The same before it is summarised: a row per cell and batch. Arguments and errors as ``what_if``."""
    import pandas as pd

    grid = grid or Grid()
    scales = (float(scale),) if isinstance(scale, int | float) else tuple(float(s) for s in scale)
    _check(image, text, scales, grid)
    plan = [(width, draw_batches(len(image), width, grid.batches_for(width), grid.seed)) for width in grid.widths_for(len(image))]
    total = len(scales) * len(grid.arms) * sum(len(batches) for _, batches in plan)
    rows: list[dict[str, Any]] = []
    done = 0
    for (width, batches), s, arm in itertools.product(plan, scales, grid.arms):
        objective = _settled(arm, [(image[b], text[b]) for b in batches], s)
        cell = {"objective": arm.label, "scale": s, "width": width, "left_out": len(image) - width * len(batches)}
        cell["bias"] = objective.bias if isinstance(objective, SigLIP) else float("nan")
        for number, rows_of in enumerate(batches):
            rows += [{**cell, "batch": number, **found} for found in _batch(image[rows_of], text[rows_of], s, objective, grid)]
            done += 1
            if advance:
                advance(done, total)
    return pd.DataFrame(rows)


def summarise(batches: pd.DataFrame) -> pd.DataFrame:
    """A row per batch -> a row per cell, in the order of appearance; the columns of ``what_if``."""
    import numpy as np
    import pandas as pd

    lines = []
    for key, part in batches.groupby(list(CELL), sort=False):
        log10 = part["log10_loss"]
        line = dict(zip(CELL, key, strict=True))
        line |= {"batches": len(part), "left_out": part["left_out"].iloc[0], "non_finite": int((~np.isfinite(part["loss"])).sum())}
        line |= {"loss": part["loss"].mean(skipna=False), "log10_loss": log10.median(skipna=False)}
        line["below_1e-3"] = float("nan") if log10.isna().any() else float((log10 < LOG10_SATURATED).mean())
        line |= {name: part[name].mean(skipna=False) for name in _MEANS}
        line["log10_gradient"] = part["log10_gradient"].median(skipna=False)
        line["overflow"] = float((part["non_finite_share"] > 0).mean())
        line |= {name: part[name].mean() for name in ("zero_share", "pull_lost")}
        lines.append({**line, "bias": part["bias"].iloc[0]})
    return pd.DataFrame(lines)


def _settled(arm: Arm, batches: Sequence[tuple[Tensor, Tensor]], scale: float) -> Objective:
    """The objective of an arm, with the bias that suits the arm's batches where it is to have one."""
    if not (arm.best_bias and isinstance(arm.objective, SigLIP)):
        return arm.objective
    width = len(batches[0][0])
    some = batches[: max(1, _BIAS_CELLS // width**2)]
    logits = [arm.objective.scores(i.double(), t.double(), torch.tensor(scale, dtype=torch.float64)).logits for i, t in some]
    return dataclasses.replace(arm.objective, bias=best_bias(logits))


def _batch(image: Tensor, text: Tensor, scale: float, objective: Objective, grid: Grid) -> Iterator[dict[str, Any]]:
    """One batch under one objective, in every precision and loss scale."""
    path = replace(pair_loss(objective, order=grid.order), rows=None)  # row sums are the audit's
    for precision, loss_scale in itertools.product(grid.precisions, grid.loss_scales):
        made = one_pass(image, text, scale, path, precision=precision, loss_scale=loss_scale)
        found = own_values(made, path)
        numbers = {
            "loss": found["loss"],
            "log10_loss": found["log10_loss_true"],
            "residual": found["residual"],
            **_rows(made, objective),
            "log10_gradient": found["gradient_norm"].log10(),
            "non_finite_share": found["non_finite"],
            "zero_share": found["zero_share"],
            "pull_lost": found["pull_lost"],
        }
        yield {"precision": precision, "loss_scale": loss_scale, **{name: float(value) for name, value in numbers.items()}}


def _rows(made: Pass, objective: Objective) -> dict[str, Tensor]:
    """What is left of each anchor's pull, in a few numbers; nan where a residual is."""
    r = objective.residual(made.logits)  # [2N]
    hardest = torch.cat([negatives(m).amax(dim=1) for m in per_direction(made.logits).values()])
    undefined = 0.0 * r.mean()
    return {
        "residual_median": r.quantile(0.5),
        "rows_below_1e-3": (r < ROW_SATURATED).double().mean() + undefined,
        "violated": (hardest > made.logits.diagonal().double().repeat(2)).double().mean() + undefined,
        "effective_rows": torch.stack([effective_number(side) for side in r.chunk(2)]).mean(),
    }


def _check(image: Tensor, text: Tensor, scales: Sequence[float], grid: Grid) -> None:
    if image.ndim != 2 or image.shape != text.shape or len(image) < 2:
        shapes = f"{list(image.shape)} and {list(text.shape)}"
        raise ValueError(f"what-if needs two or more pairs, as two matrices [N, D] of one shape; got {shapes}.")
    off = max(float((rows.norm(dim=1) - 1).abs().max()) for rows in (image, text))
    if not off < 1e-2:
        raise ValueError(f"rows must be finite and of length 1; some are off by {off:.3g}. Normalise them, and leave out nan.")
    check_grid(scales, grid)


def check_grid(scales: Sequence[float], grid: Grid) -> None:
    """What can be refused before any row is there. Raises ValueError for an empty grid or a setting that is not allowed."""
    _check_numbers("scale", scales, 0.0, above=True)
    _check_numbers("loss scale", grid.loss_scales, 0.0, above=True)
    if grid.widths:
        _check_numbers("width", grid.widths, 2)
    for precision in grid.precisions:
        if precision not in PRECISIONS:
            raise ValueError(unknown_name("precision", precision, list(PRECISIONS)))
    if not (grid.arms and grid.precisions) or (grid.batches is not None and grid.batches < 1):
        raise ValueError("the grid is empty; give at least one objective, precision and batch.")
    for arm in grid.arms:
        pair_loss(arm.objective, order=grid.order)


def _check_numbers(name: str, numbers: Sequence[float], least: float, *, above: bool = False) -> None:
    if not numbers:
        raise ValueError(f"no {name} is given; give at least one.")
    for number in numbers:
        if not least <= number < float("inf") or (above and number == least):
            allowed = f"above {least:g}" if above else f"{least:g} or more"
            raise ValueError(f"a {name} must be a finite number, {allowed}; got {number:g}.")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"a {name} is given twice; name each once.")
