"""Precision audit of the loss path: the same batches in every precision and loss scale, and in words what is lost from where on.

Each batch goes through ``gradscope.metrics.loss_path`` once per objective and setting; the truth is float64 in residual form. ``audit``
reads pairs that are given, ``positive_sweep`` makes its own: random captions and images at one positive cosine, negatives at chance.

Source: paper facts, section 7.1 (what "exactly zero" can mean); the sweep over settings is our own measurement.
How to read: fp32 and bf16 go on teaching far below the loss they can print, fp16 does not; where the pull is lost, the gradient is not
merely small but points elsewhere, and no loss scale brings it back.
How it can mislead: the audit stops at the embeddings. bf16 and fp16 towers round on both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.loss_path import PRECISIONS, LossPath, PairLoss, exact_pass, measure
from gradscope.registry import unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame, Series
    from rich.table import Table

Advance = Callable[[int, int], None]

#: From where on a share or a relative error counts as a loss, and from where on the rounding of a logit does.
SHARE, ROUNDING = 0.01, 0.1
#: The positive cosines of the sweep: a loss from 1e-3 to 1e-16 at scale 100.
COSINES = (0.22, 0.28, 0.32, 0.36, 0.50)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A precision and its loss scale; written ``fp16`` or ``fp16@65536``."""

    precision: str
    loss_scale: float = 1.0

    def __str__(self) -> str:
        return self.precision if self.loss_scale == 1 else f"{self.precision}@{self.loss_scale:g}"


DEFAULT_SETTINGS = (*(Setting(precision=name) for name in PRECISIONS), Setting(precision="fp16", loss_scale=65536.0))


def read_settings(text: str) -> tuple[Setting, ...]:
    """``"fp32,fp16@65536"`` -> settings, in order. Raises ValueError for what is no setting, or for one given twice."""
    found: list[Setting] = []
    for word in (part.strip() for part in text.split(",")):
        name, at, scale = word.partition("@")
        if name not in PRECISIONS:
            raise ValueError(unknown_name("precision", name, list(PRECISIONS)))
        found.append(Setting(precision=name, loss_scale=_loss_scale(scale, word) if at else 1.0))
    if len(set(found)) < len(found):
        raise ValueError(f"'{text}' names a precision twice; give each setting once.")
    return tuple(found)


def audit(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    *,
    objectives: Mapping[str, PairLoss],
    batches: Sequence[Tensor],
    settings: Sequence[Setting] = DEFAULT_SETTINGS,
    advance: Advance | None = None,
) -> DataFrame:
    """One row per objective, batch and setting.

    Args:
        image, text: unit rows of N pairs, [N, D] each, fp32 or float64.
        scale: the multiplier after exp.
        objectives: label -> ``pair_loss`` of an objective.
        batches: index tensors [width].

    Returns:
        Columns objective, setting, batch, width, scale, true_loss_log10 and true_norm (float64, residual form), and the fields of
        ``LossPath``.

    Raises:
        ValueError: see ``gradscope.metrics.loss_path.measure``.
    """
    import pandas as pd

    rows, total = [], len(objectives) * len(batches)
    for label, objective in objectives.items():
        for number, batch in enumerate(batches):
            for values in _one_batch(image[batch], text[batch], scale, objective, settings):
                rows.append({"objective": label, "batch": number, "width": len(batch), "scale": float(scale), **values})
            if advance:
                advance(len(rows) // len(settings), total)
    return pd.DataFrame(rows)


def positive_sweep(
    scale: float,
    *,
    objectives: Mapping[str, PairLoss],
    settings: Sequence[Setting] = DEFAULT_SETTINGS,
    cosines: Sequence[float] = COSINES,
    width: int = 64,
    dim: int = 512,
    batches: int = 8,
    seed: int = 0,
    advance: Advance | None = None,
) -> DataFrame:
    """``audit`` on made-up pairs, at each positive cosine; the column ``positive_cosine`` says which. Equal seeds give equal noise."""
    import pandas as pd

    frames = []
    for done, cosine in enumerate(cosines, 1):
        image, text = made_pairs(cosine, pairs=width * batches, dim=dim, seed=seed)
        frame = audit(image, text, scale, objectives=objectives, settings=settings, batches=torch.arange(len(image)).split(width))
        frames.append(frame.assign(positive_cosine=cosine))
        if advance:
            advance(done, len(cosines))
    return pd.concat(frames, ignore_index=True)


def made_pairs(cosine: float, *, pairs: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random unit captions, and images at exactly ``cosine`` from their own: fp32 rows [N, D] twice.

    Raises:
        ValueError: the cosine is not within -1 ... 1, or ``dim`` is under 2.
    """
    if not -1 <= cosine <= 1 or dim < 2:
        raise ValueError(f"made-up pairs need a cosine within -1 and 1 and at least 2 dimensions; got {cosine} and {dim}.")
    generator = torch.Generator().manual_seed(seed)
    text, noise = torch.randn(2, pairs, dim, generator=generator, dtype=torch.float64)
    text = F.normalize(text, dim=1)
    aside = F.normalize(noise - (noise * text).sum(dim=1, keepdim=True) * text, dim=1)
    return (cosine * text + math.sqrt(1 - cosine**2) * aside).float(), text.float()


def medians(frame: DataFrame) -> DataFrame:
    """The median over batches of every column, one row per objective, condition and setting, in order of appearance."""
    keys = [name for name in ("objective", "scale", "width", "positive_cosine", "setting") if name in frame]
    return frame.drop(columns=["batch", "precision"]).groupby(keys, sort=False).median().reset_index()


#: What can be lost, in the order in which it is told: words, and the columns it shows in.
LOSSES: dict[str, Callable[[Any], bool]] = {
    "entries that are inf or nan (the loss scale is too large)": lambda row: row["non_finite"] > 0,
    "no gradient at all": lambda row: row["zero_share"] == 1,
    "exact zeros": lambda row: SHARE <= row["zero_share"] < 1,
    "pairs without a pull": lambda row: row["pull_lost"] >= SHARE,
    "a gradient off by 1 % or more": lambda row: row["zero_share"] < 1 and row["gradient_error"] >= SHARE,
    "logits off by 0.1 or more": lambda row: row["logit_rounding"] >= ROUNDING,
    "a printed loss of 0": lambda row: row["loss"] == 0 and math.isfinite(row["true_loss_log10"]),
}


def lost(row: Series[Any]) -> list[str]:
    """The keys of ``LOSSES`` that hold for one line of ``medians``."""
    return [words for words, holds in LOSSES.items() if holds(row)]


def sentences(summary: DataFrame) -> list[str]:
    """What ``medians`` say: per objective which settings lose nothing, what each other loses and from where on, and the remedy."""
    said = []
    for objective, part in summary.groupby("objective", sort=False):
        by = {str(setting): rows for setting, rows in part.groupby("setting", sort=False)}
        whole = [setting for setting, rows in by.items() if not any(lost(row) for _, row in rows.iterrows())]
        if whole:
            said.append(f"{objective}: nothing that matters is lost in {', '.join(whole)}.")
        said += [f"{objective}, {setting}: {_onsets(rows)}." for setting, rows in by.items() if setting not in whole]
        if (part["pull_lost"] >= SHARE).any():
            said.append(f"{objective}: no loss scale brings a lost pull back; --loss-form residual does, on fp32 logits.")
    return said


def _onsets(rows: DataFrame) -> str:
    """What one setting loses; where there are several conditions, from which true loss on, going down."""
    rows = rows.sort_values("true_loss_log10", ascending=False)
    found: dict[str, str] = {}
    for _, row in rows.iterrows():
        for words in lost(row):
            found.setdefault(words, ten_to(row["true_loss_log10"]))
    if len(rows) == 1:
        return "; ".join(found)
    return "; ".join(
        f"from a loss of {at} on: {', '.join(words for words, first in found.items() if first == at)}"
        for at in dict.fromkeys(found.values())
    )


def table(summary: DataFrame, title: str) -> Table:
    """The medians as a table: one line per objective, condition and setting."""
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    several, swept = summary["objective"].nunique() > 1, "positive_cosine" in summary
    keys = [*(["objective"] if several else []), *(["cosine"] if swept else []), "setting"]
    for head in (*keys, "true loss", "printed", "gradient", "zeros", "no pull", "off", "logits off"):
        drawn.add_column(head, justify="left" if head in ("objective", "setting") else "right")
    for (_, *condition), part in summary.groupby(["objective", *(["positive_cosine"] if swept else [])], sort=False):
        drawn.add_section()
        for _, row in part.iterrows():
            cells = [row["objective"]] if several else []
            cells += [f"{value:.2f}" for value in condition]
            cells += [row["setting"], ten_to(row["true_loss_log10"]), f"{row['loss']:.1e}", f"{row['gradient_norm']:.1e}"]
            cells += [*(percent(row[key]) for key in ("zero_share", "pull_lost", "gradient_error")), f"{row['logit_rounding']:.1g}"]
            drawn.add_row(*cells)
    return drawn


def ten_to(log10: float) -> str:
    """A number in e-notation from its log10, also where it is below the smallest float."""
    return f"{10**log10:.1e}" if not log10 < -300 else f"1e{log10:.0f}"


def percent(share: float) -> str:
    """A share in words that never rounds something to 0 % or to 100 %."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{share:.0%}".replace("%", " %")


def _one_batch(
    image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss, settings: Sequence[Setting]
) -> list[dict[str, Any]]:
    truth = exact_pass(image, text, scale, objective)
    best = measure(image, text, scale, objective, precision="fp64", exact=truth)
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in truth.gradient))
    rows = []
    for s in settings:
        made: LossPath = measure(image, text, scale, objective, precision=s.precision, loss_scale=s.loss_scale, exact=truth)
        rows.append({"setting": str(s), "true_loss_log10": best.log10_loss_true, "true_norm": norm, **asdict(made)})
    return rows


def _loss_scale(text: str, word: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"'{word}' is no setting; the loss scale after @ is a number above 0, as in fp16@65536.")
    return value
