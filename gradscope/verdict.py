"""What a run says: saturated or not, since when, at which width, why, what is left. Reads run logs; never imports torch.

Shares are over measured batches (one softmax each), by epoch, along the run's OWN trajectory: a run that trains HN also reads
InfoNCE, and HN training itself drives InfoNCE down, so such a share does not describe an InfoNCE run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.judgement import LEAST, NOT_TRAINED, ONE_CANDIDATE, saturation_state, turned, window
from gradscope.metrics.crossing import Crossing, crossing
from gradscope.runlog import Run
from gradscope.types import DIRECTIONS

#: A run is called guessing if the median InfoNCE loss of the window that is judged is at least this share of ln(width).
CHANCE = 0.95
TERMS = ("infonce", "hn")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run's readings in brief. Dicts are keyed by term, tuples run over epochs 1, 2, ..."""

    path: Path
    trained: str
    gamma: float
    width: int
    every: int  # steps from one probed step to the next; with a budget, the most of them
    measured: tuple[int, ...]  # batches
    below: dict[str, tuple[float, ...]]  # share of measured batches with a true loss under 1e-3
    crossings: dict[tuple[str, str], Crossing]  # (term, threshold)
    zeros: dict[str, dict[str, float]]  # mean over all measured batches, by term and key
    residual: dict[str, tuple[float, ...]]  # median over batches of the mean residual, both directions
    effective_rows: dict[str, tuple[float, ...]]  # median over batches, mean of both directions
    margin: tuple[float | None, float]  # last epoch, medians: the margin's constant part (logits), if read; share of anchors it beats
    ratio: tuple[float, ...]  # median of norm HN / norm InfoNCE; empty where the second backward was not taken
    cosine: tuple[float, float] | None  # mean and sd between the two gradients, over the batches where both are non-zero
    cosine_undefined: int  # measured batches where it is not defined

    judged: tuple[float, float, int]  # shares of batches and anchors under 1e-3 in the window that is judged, and its batches
    at_chance: bool = False  # the InfoNCE loss of the window that is judged is that of guessing
    budget: str = ""  # that thinned the cadence
    turned: bool = False  # the gradient at the embeddings is not that of the objective as read
    divided: bool = False  # parameters, among ranks: their gradient is not read

    @property
    def saturated(self) -> bool:
        return self.state == "SATURATED"

    @property
    def state(self) -> str:
        """The word of ``gradscope.judgement``."""
        if self.turned:
            return NOT_TRAINED
        batches, anchors, judged = self.judged
        return saturation_state(batches, anchors, judged=judged)


ZERO_KEYS = (
    "all_zero.parameters",
    "naive_norm_zero",
    "loss_zero_gradient_not",
    "positive_zero.i2t",
    "positive_zero.t2i",
    "entries.parameters",
    "structural.parameters",
    "entries_reached.parameters",
    "entries.logits",
    "entries.embeddings",
)


def summarise(path: Path) -> Summary:
    """Reads a run made with --log-grads. Raises ValueError, naming the setting, if its readings are missing."""
    run = Run(path)
    trained = run.recipe["objective"]["name"]
    crossings = {}
    for term in TERMS:
        trace = run.reading("loss", "log10_true", term).sort_values("step")
        for threshold in ("1e-3", "1e-5"):
            crossings[term, threshold] = crossing(trace["step"].tolist(), trace["value"].tolist(), float(threshold))
    rows, pairs, undefined = run.readings, None, 0
    ratio: tuple[float, ...] = ()
    if not rows[(rows["quantity"] == "gradient") & (rows["term"] == "pair")].empty:
        ratio = tuple(10**value for value in _by_epoch(run, "gradient", "log10_ratio", "pair", "median"))
        cosines = run.reading("gradient", "cosine", "pair")["value"].astype(float)
        pairs, undefined = (float(cosines.mean()), float(cosines.std())), int(cosines.isna().sum())
    return Summary(
        path=path,
        trained=trained,
        gamma=run.recipe["objective"]["gamma"],
        width=int(run.provenance["width"]),
        every=_every(run),
        budget=run.recipe["probe"].get("budget", ""),
        divided=run.recipe["train"].get("shard", "none") == "full",
        at_chance=_at_chance(run),
        turned=_turned(run, trained),
        measured=tuple(int(n) for n in _by_epoch(run, "saturation", "below_1e-3", trained, "count")),
        below={term: _by_epoch(run, "saturation", "below_1e-3", term, "mean") for term in TERMS},
        crossings=crossings,
        zeros={term: _zeros(run, term) for term in TERMS},
        residual={term: _geometric(_both(run, "residual", "log10_mean", term)) for term in TERMS},
        effective_rows={term: _both(run, "saturation", "effective_rows", term) for term in TERMS},
        margin=(_constant(run), _both(run, "gap", "violated_with_margin", "hn")[-1]),
        ratio=ratio,
        cosine=pairs,
        cosine_undefined=undefined,
        judged=_judged(run, trained),
    )


def _judged(run: Run, trained: str) -> tuple[float, float, int]:
    """Shares of measured batches and of anchors under 1e-3 in the window of the verdict, and the batches it holds."""
    below = run.reading("saturation", "below_1e-3", trained).sort_values("step")
    values = below["value"].astype(float).to_numpy()
    chosen, _ = window(below["epoch"].astype(float).to_numpy(), values)
    chosen &= np.isfinite(values)
    steps = set(below["step"][chosen])
    rows = [run.reading("saturation", f"rows_below_1e-3.{d}", trained) for d in DIRECTIONS]
    anchors = [frame.loc[frame["step"].isin(steps), "value"].astype(float).mean() for frame in rows]
    return float(values[chosen].mean()) if chosen.any() else math.nan, float(sum(anchors) / len(anchors)), int(chosen.sum())


def _turned(run: Run, trained: str) -> bool:
    """Of a weighted token term it cannot be told: its gradient is meant to be in the one that passes by."""
    hooks = run.readings_of("hooks")
    there = hooks[(hooks["key"] == "agreement") & (hooks["term"] == trained)]
    if there.empty or run.recipe["objective"].get("token_weight", 0.0) > 0:
        return False
    trace = run.reading("hooks", "agreement", trained).sort_values("step")
    values = trace["value"].astype(float).to_numpy()
    chosen, _ = window(trace["epoch"].astype(float).to_numpy(), values)
    return turned(values[chosen & np.isfinite(values)], _judged(run, trained)[0])


def _at_chance(run: Run) -> bool:
    """Nothing is said of one candidate, nor of too few batches: a sound run may start by guessing."""
    loss, width = run.reading("loss", "log10_true", "infonce").sort_values("step"), run.provenance["width"]
    values = loss["value"].astype(float).to_numpy()
    chosen, _ = window(loss["epoch"].astype(float).to_numpy(), values)
    chosen &= ~np.isnan(values)
    return bool(width > 1 and chosen.sum() >= LEAST and 10 ** np.median(values[chosen]) >= CHANCE * math.log(width))


def _by_epoch(run: Run, quantity: str, key: str, term: str, how: str) -> tuple[float, ...]:
    frame = run.reading(quantity, key, term)
    return tuple(frame.assign(value=frame["value"].astype(float)).groupby("epoch")["value"].agg(how))


def _every(run: Run) -> int:
    steps = sorted(run.reading("loss", "log10_true", "infonce")["step"])
    if not run.recipe["probe"].get("budget") or len(steps) < 2:
        return int(run.recipe["probe"]["every"])
    return int(max(after - before for before, after in itertools.pairwise(steps)))


def _constant(run: Run) -> float | None:
    """The set "loss" reads no captions."""
    rows = run.readings
    there = bool(((rows["quantity"] == "captions") & (rows["key"] == "margin_logits")).any())
    return _by_epoch(run, "captions", "margin_logits", "", "median")[-1] if there else None


def _both(run: Run, quantity: str, key: str, term: str) -> tuple[float, ...]:
    directions = [_by_epoch(run, quantity, f"{key}.{d}", term, "median") for d in ("i2t", "t2i")]
    return tuple((a + b) / 2 for a, b in zip(*directions, strict=True))


def _geometric(log10_values: tuple[float, ...]) -> tuple[float, ...]:
    """Medians and means over decades are taken of the logarithms: of an even number of values, the plain ones follow the larger."""
    return tuple(10**value for value in log10_values)


def _zeros(run: Run, term: str) -> dict[str, float]:
    rows = run.readings
    chosen = rows[(rows["quantity"] == "zeros") & (rows["term"] == term) & rows["key"].isin(ZERO_KEYS)]
    means = chosen.assign(value=chosen["value"].astype(float)).groupby("key")["value"].mean()
    return {str(key): float(value) for key, value in means.items()}


def sentences(summary: Summary) -> list[str]:
    """The verdict on one run, a sentence a line: state, since when, which zeros, what is left."""
    term = summary.trained
    name = "InfoNCE" if term == "infonce" else f"HN (gamma {summary.gamma:g})"
    share = summary.below[term]
    by_epoch = ", ".join(f"{s:.0%} of {n}" for s, n in zip(share, summary.measured, strict=True))
    lines = [f"{name} at width {summary.width}: {_state(summary)} (batches under 1e-3 by epoch: {by_epoch})."]
    if summary.at_chance:
        lines.append(
            f"InfoNCE sits at chance, ln {summary.width} = {math.log(summary.width):.2f}, or above: the model is guessing. See whether "
            "images and captions belong together, captions repeat, or the learning rate is 0 or far too large."
        )
    every = "at every step" if summary.every == 1 else f"every {summary.every} steps"
    every += f" at the widest, budget {summary.budget}" if summary.budget else ""
    under3, under5 = summary.crossings[term, "1e-3"], summary.crossings[term, "1e-5"]
    lines.append(f"First measured under 1e-3: {_when(under3)}; under 1e-5: {_when(under5)} (read {every}).")
    lines += _zero_lines(summary.zeros[term], divided=summary.divided)
    lines.append(
        f"Residual left (probability on negatives, mean over anchors, median over batches, by epoch): "
        f"{', '.join(f'{r:.1e}' for r in summary.residual[term])}; carried by "
        f"{summary.effective_rows[term][-1]:.1f} of {summary.width} anchors."
    )
    if term == "hn":
        constant, beaten = summary.margin
        size = "was not read (--probe-set default does)" if constant is None else f"is {constant:.1f} logits"
        lines.append(
            f"The margin's constant part {size} and {beaten:.0%} of anchors are beaten once it is added: "
            "a loss that it keeps up is active, which is not yet learning."
        )
    return lines


def _state(summary: Summary) -> str:
    if summary.width == 1:
        return ONE_CANDIDATE
    if summary.turned:
        return summary.state
    batches, anchors, judged = summary.judged
    if judged < LEAST:
        more = f"; at least {LEAST} are needed: more steps" + (", or --probe-every 1" if summary.every > 1 else "")
        return summary.state + more
    return f"{summary.state}. {batches:.0%} of the last {judged} measured batches and {anchors:.0%} of their anchors are under 1e-3"


def _zero_lines(zeros: dict[str, float], *, divided: bool) -> list[str]:
    """What is known of zeros; the smaller probe sets read fewer of them, or none."""
    if "loss_zero_gradient_not" not in zeros and "entries.embeddings" in zeros:
        return [
            f"Zeros: at the embeddings {zeros['entries.embeddings']:.1%} of the entries are exactly 0; whole gradient exactly 0 "
            f"{_share(zeros.get('all_zero.parameters'))}. Whether the loss lost its pull was not read, since its softmax was read "
            "streamed: kernel dense does."
        ]
    if "loss_zero_gradient_not" not in zeros:
        return ["Zeros were not counted: --probe-set default counts them up to the embeddings, full over all parameters."]
    lost = (zeros["positive_zero.i2t"] + zeros["positive_zero.t2i"]) / 2
    lines = [
        f"Zeros. Of the measured batches: whole gradient exactly 0 {_share(zeros.get('all_zero.parameters'))}; "
        f"norm 0 by underflow alone {_share(zeros.get('naive_norm_zero'))}; "
        f"loss printed 0 while its gradient was not in {zeros['loss_zero_gradient_not']:.0%}. "
        f"Of their anchors, both directions: pull on the positive rounded to 0 in {lost:.0%}."
    ]
    if "all_zero.parameters" not in zeros:
        why = "not read, since the parameters were divided (--shard full)" if divided else "not counted: --probe-set full does"
        lines.append(f"The gradient over all parameters was {why}.")
    if "entries.parameters" in zeros:
        lines.append(
            f"Of all gradient entries {zeros['entries.parameters']:.1%} are exactly 0; {zeros['structural.parameters']:.1%} lie in "
            f"rows the batch cannot reach, and of the rest {zeros['entries_reached.parameters']:.2%} are 0."
        )
    return lines


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"in {value:.0%}"


def _when(found: Crossing) -> str:
    if found.first is None:
        return "never"
    again = f", left and re-entered {found.entries - 1} time{'s' if found.entries > 2 else ''}" if found.entries > 1 else ""
    return f"step {found.first}{again}"


def summary_table(summaries: Sequence[Summary]) -> Any:
    """A rich table: one row per run and epoch, readings of both objectives along that run's trajectory."""
    from rich import box
    from rich.table import Table

    single = len(summaries) == 1
    same_width = len({s.width for s in summaries}) == 1
    title = "Readings by epoch" + f" of {_run_name(summaries[0])}" * single + f", width {summaries[0].width}" * same_width
    caption = "Along each run's own trajectory. < 1e-3: share of measured batches with a loss below it; residual: median over them."
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **look)
    if not single:
        table.add_column("run", overflow="fold")  # of all columns the only one that may give way
    if not same_width:
        table.add_column("width", justify="right", no_wrap=True)
    figures = [f"{name}\n{what}" for what in ("< 1e-3", "residual") for name in ("InfoNCE", "HN")]
    for heading in ("epoch", *figures, "norm HN\n/ InfoNCE"):
        table.add_column(heading, justify="right", no_wrap=True)
    for s in summaries:
        for i in range(len(s.below["infonce"])):
            whose = [_run_name(s)] * (not single) + [str(s.width)] * (not same_width)
            table.add_row(*whose, str(i + 1), *_figures(s, i))
    return table


def _run_name(summary: Summary) -> str:
    return summary.path.resolve().name


def _figures(summary: Summary, epoch: int) -> list[str]:
    """The cells of one row of the table; ``epoch`` counts from 0."""
    shares = [f"{summary.below[term][epoch]:.0%}" for term in TERMS]
    residuals = [f"{summary.residual[term][epoch]:.1e}" for term in TERMS]
    return [*shares, *residuals, f"{summary.ratio[epoch]:.3g}" if summary.ratio else "not read"]


def print_summary(paths: Sequence[Path]) -> None:
    """The table and the sentences of each run, to stdout."""
    from gradscope.console import out

    summaries = [summarise(path) for path in paths]
    out.print(summary_table(summaries))
    for summary in summaries:
        for line in sentences(summary):
            out.print(line, soft_wrap=True, markup=False)
