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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.loss_path import PRECISIONS, PairLoss, compared, exact_pass, flushes_denormals, one_pass
from gradscope.paired_rows import seeded
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
        Columns objective, setting, batch, width, scale, true_loss_log10 and true_norm (float64, residual form), the fields of
        ``LossPath``, and denormals_flushed (this process counts numbers under 1.2e-38 as zeros).

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
    return pd.DataFrame(rows).assign(denormals_flushed=flushes_denormals(image.device))


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
    """``audit`` on made-up pairs, at each positive cosine; the column ``positive_cosine`` says which. Equal seeds give equal noise.

    Raises:
        ValueError: a cosine twice, or one that ``made_pairs`` refuses; an impossible setting.
    """
    import pandas as pd

    if len(set(cosines)) < len(cosines):
        raise ValueError("a positive cosine is given twice; name each once.")
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
    generator = seeded(seed)
    text, noise = torch.randn(2, pairs, dim, generator=generator, dtype=torch.float64)
    text = F.normalize(text, dim=1)
    aside = F.normalize(noise - (noise * text).sum(dim=1, keepdim=True) * text, dim=1)
    return (cosine * text + math.sqrt(1 - cosine**2) * aside).float(), text.float()


def medians(frame: DataFrame) -> DataFrame:
    """The median over batches of every column, one row per objective, condition and setting, in order of appearance.

    A nan in one batch is a nan here; ``non_finite`` is the largest of the batches, so that one overflow is not outvoted.
    """
    keys = [name for name in ("objective", "scale", "width", "positive_cosine", "setting") if name in frame]
    middle = {
        name: lambda part: part.median(skipna=False)
        for name in frame.columns.difference([*keys, "batch", "precision", "denormals_flushed"], sort=False)
    }
    return frame.groupby(keys, sort=False).agg({**middle, "non_finite": "max"}).reset_index()


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One thing that can be lost: in words, when it counts as lost, and its size."""

    words: str
    holds: Callable[[Any], bool]
    size: Callable[[Any], str] | None = None


#: In the order in which they are told.
LOSSES = (
    Loss(
        words="inf or nan entries: a loss scale too large", holds=lambda r: r["non_finite"] > 0, size=lambda r: percent(r["non_finite"])
    ),
    Loss(words="no gradient at all", holds=lambda r: r["zero_share"] == 1),
    Loss(words="exact zeros", holds=lambda r: SHARE <= r["zero_share"] < 1, size=lambda r: percent(r["zero_share"])),
    Loss(
        words="pairs without a pull",  # harmless while those that are done do not matter beside the others
        holds=lambda r: r["pull_lost"] >= SHARE and r["gradient_error"] >= SHARE,
        size=lambda r: percent(r["pull_lost"]),
    ),
    Loss(
        words="a wrong gradient",
        holds=lambda r: r["zero_share"] < 1 and SHARE <= r["gradient_error"] < math.inf,
        size=lambda r: f"off by {percent(r['gradient_error'])}",
    ),
    Loss(words="rounded logits", holds=lambda r: r["logit_rounding"] >= ROUNDING, size=lambda r: f"by up to {r['logit_rounding']:.2f}"),
    Loss(words="a printed loss of 0", holds=lambda r: r["loss"] == 0 and math.isfinite(r["true_loss_log10"])),
)
CAPTION = (
    f"off: |g - g64| / |g64| at the embeddings, called wrong from {100 * SHARE:.0f} % on. no pull: the positive's gradient is exactly "
    f"0, the negatives' is not. logits off: largest rounding, counted from {ROUNDING} on."
)


def lost(row: Series[Any]) -> list[Loss]:
    """What one line of ``medians`` has lost."""
    return [loss for loss in LOSSES if loss.holds(row)]


def sentences(summary: DataFrame) -> list[str]:
    """What ``medians`` say: per objective which settings lose nothing, what each other loses and from where on, and the remedy."""
    said = []
    for objective, part in summary.groupby("objective", sort=False):
        by = {str(setting): rows for setting, rows in part.groupby("setting", sort=False)}
        whole = [setting for setting, rows in by.items() if not any(lost(row) for _, row in rows.iterrows())]
        if whole:
            said.append(f"{objective}: nothing that matters is lost in {', '.join(whole)}.")
        said += [f"{objective}, {setting}: {_onsets(rows)}." for setting, rows in by.items() if setting not in whole]
        said += [f"{objective}: {words}" for words in _remedies(part)]
    return said


def _remedies(part: DataFrame) -> list[str]:
    """What brings back what the settings of one objective lose."""
    wrong = part["gradient_error"] >= SHARE
    half = part["setting"].str.startswith(("bf16", "fp16"))
    words = []
    if ((part["pull_lost"] >= SHARE) & wrong & ~half).any():
        words.append("no loss scale brings a lost pull back; the residual form of the loss does (--loss-form residual).")
    if (wrong & half).any():
        words.append("logits formed in fp32, outside autocast, lose what fp32 loses and no more.")
    if (part["non_finite"] > 0).any():
        words.append("a GradScaler would halve the loss scale that overflows, and skip those steps.")
    return words


def _onsets(rows: DataFrame) -> str:
    """What one setting loses and how much; where there are several conditions, from which true loss on, going down."""
    rows = rows.sort_values("true_loss_log10", ascending=False)
    found: dict[str, str] = {}
    for _, row in rows.iterrows():
        for loss in lost(row):
            found.setdefault(loss.words, ten_to(row["true_loss_log10"]))
    if len(rows) == 1:
        return ", ".join(f"{loss.words} ({loss.size(row)})" if loss.size else loss.words for loss in lost(row))
    return "; ".join(
        f"from a loss of {at} on {', '.join(words for words, first in found.items() if first == at)}"
        for at in dict.fromkeys(found.values())
    )


def table(summary: DataFrame, title: str) -> Table:
    """The medians as a table: one line per objective, condition and setting."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD, padding=0)
    several, swept = summary["objective"].nunique() > 1, "positive_cosine" in summary
    keys = [*(["objective"] if several else []), *(["cosine"] if swept else []), "setting"]
    for head in keys:
        drawn.add_column(head, no_wrap=head != "objective", min_width=len(head))
    for head in ("true\nloss", "printed", "norm", "zeros", "no\npull", "off", "logits\noff"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for (_, *condition), part in summary.groupby(["objective", *(["positive_cosine"] if swept else [])], sort=False):
        drawn.add_section()
        for number, (_, row) in enumerate(part.iterrows()):
            cells = [row["objective"]] if several else []
            cells += [f"{value:g}" for value in condition]
            cells = ["" if number else cell for cell in cells]  # named once
            cells += [row["setting"], ten_to(row["true_loss_log10"]), f"{row['loss']:.1e}", f"{row['gradient_norm']:.1e}"]
            cells += [*(percent(row[key]) for key in ("zero_share", "pull_lost", "gradient_error")), f"{row['logit_rounding']:.1g}"]
            drawn.add_row(*cells)
    return drawn


def ten_to(log10: float) -> str:
    """A number in e-notation from its log10, also where it is below the smallest float."""
    return f"{10**log10:.1e}" if not log10 < -300 else f"1e{log10:.0f}"


def percent(share: float) -> str:
    """A share in words that never rounds something to 0 % or to 100 %; a relative error may be over 100 %."""
    if math.isnan(share):
        return "nan"
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{share:.0%}".replace("%", " %")


def _one_batch(
    image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss, settings: Sequence[Setting]
) -> Iterator[dict[str, Any]]:
    truth = exact_pass(image, text, scale, objective)
    best = compared(truth, truth, objective, precision="fp64")
    for s in settings:
        made = one_pass(image, text, scale, objective, precision=s.precision, loss_scale=s.loss_scale)
        found = asdict(compared(made, truth, objective, precision=s.precision))
        yield {"setting": str(s), "true_loss_log10": best.log10_loss_true, "true_norm": best.gradient_norm, **found}


def _loss_scale(text: str, word: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"'{word}' is no setting; the loss scale after @ is a number above 0, as in fp16@65536.")
    return value
