"""Figure 4: the loss goes silent, the gradient goes with it, and retrieval still has errors to learn from.

Drawn from one run with dual readings: on every measured batch, at the same parameters, both objectives' true loss and the norm
of both full-parameter gradients (the measurement of the HN-CLIP paper, its section on gradient analysis).

    (a) log10 loss per measured batch, and per epoch the share of batches below 1e-3
    (b) log10 gradient norm per measured batch, per-epoch median (line) and quartiles (band), exact zeros at the bottom edge
    (c) held-out retrieval error 1 - R@1 in percent, both directions, 95 % intervals, beside the median InfoNCE loss per epoch

How it can mislead: both curves of (a) and (b) belong to the trajectory of the run they were measured on. Training with HN
drives InfoNCE down too, so InfoNCE's share along the HN run is not what an InfoNCE run would show. Give that run as well: it is
drawn thin and labelled as its own. Loss and norm are of one softmax (see the stamp "width" in the readings), not of the
accumulated batch. A large HN loss means active, not learning; only (c) shows learning.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gradscope.figures import figures
from gradscope.figures.style import COLUMN_INCHES, OBJECTIVE_COLOURS, new_figure, paper_style
from gradscope.runlog import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TERMS = ("infonce", "hn")
LABELS = {"infonce": "InfoNCE", "hn": "HN"}
DIRECTION_LABELS = {"i2t": "image→text", "t2i": "text→image"}
OWN_COLOUR = "#7A3300"  # the overlaid InfoNCE run: InfoNCE's colour, darker
PAPER_FLOOR = -10  # the paper's traces stop at 1e-10; ours are stored as log10 and need no floor
THRESHOLD = -3
NUMBERS = ["step", "epoch", "value", "low", "high", "n"]
COLUMNS = ["panel", "trajectory", "series", "term", "direction", *NUMBERS]


@figures.register("4")
def figure4(run: Run, overlay: Run | None = None) -> tuple[Figure, pd.DataFrame]:
    """Figure 4 of one run with dual readings, optionally with an InfoNCE run drawn thin over it.

    Args:
        run: trained with --log-grads; usually the HN run.
        overlay: an InfoNCE run of the same data; the two may be given in either order.

    Returns:
        The figure (column width), and every number in it: one row per mark, columns ``COLUMNS``.

    Raises:
        ValueError: naming the setting that would record what is missing, or if neither of two runs was trained with InfoNCE.
    """
    from matplotlib.ticker import MaxNLocator

    run, overlay = _ordered(run, overlay)
    bands = _epochs(run)
    if overlay is not None:
        _refuse_other_steps(run, bands, overlay, _epochs(overlay))
    frame = _data(run, overlay)
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 5.6 if overlay is None else 5.95)
        a, b, c = figure.subplots(3, 1, sharex=True, height_ratios=[1.25, 1.15, 1])
        a.set_xlim(0, bands["last"].max() + 0.5)
        for axis in (a, b, c):
            _shade(axis, bands)
        _draw_losses(a, frame[frame["panel"] == "a"], bands, _width(run))
        _draw_norms(b, frame[frame["panel"] == "b"], bands)
        _draw_errors(c, frame[frame["panel"] == "c"], bands)
        c.set_xlabel("optimizer step (bands: epochs)")
        c.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        figure.legend(handles=_legend(frame), loc="outside upper center", ncols=2, columnspacing=1.2)
    return figure, frame


def trained_with(run: Run) -> str:
    """The objective a run was trained with. Raises ValueError if its recipe does not say."""
    name = run.recipe.get("objective", {}).get("name")
    if name not in TERMS:
        raise ValueError(f"the recipe of {run.path} has objective.name {name!r}; Figure 4 compares infonce and hn.")
    return name


def _ordered(run: Run, overlay: Run | None) -> tuple[Run, Run | None]:
    """The run whose trajectory the dual readings follow first, the InfoNCE run second."""
    if overlay is None:
        return run, None
    if trained_with(run) == trained_with(overlay) == "infonce":
        raise ValueError(f"both {run.path} and {overlay.path} were trained with infonce; give an HN run and an InfoNCE run, or one.")
    if trained_with(overlay) == "infonce":
        return run, overlay
    if trained_with(run) == "infonce":
        return overlay, run
    raise ValueError(f"neither {run.path} nor {overlay.path} was trained with infonce; the second run should be.")


def _refuse_other_steps(run: Run, bands: pd.DataFrame, overlay: Run, others: pd.DataFrame) -> None:
    """An overlaid run may have stopped earlier, but its epochs must start at the same steps."""
    if not others["first"].equals(bands["first"].reindex(others.index)):
        raise ValueError(
            f"{overlay.path} and {run.path} do not share steps per epoch, or the first is longer; overlay runs of equal data, "
            "batch size and epochs."
        )


# ---------------------------------------------------------------- numbers


def _data(run: Run, overlay: Run | None) -> pd.DataFrame:
    parts = [_losses(run, term) for term in TERMS] + [_norms(run, term) for term in TERMS]
    parts += [_ratio_and_cosine(run), _errors(run), _loss_medians(run)]
    if overlay is not None:
        parts += [_losses(overlay, "infonce"), _errors(overlay)]
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _losses(run: Run, term: str) -> pd.DataFrame:
    trace = _named(run.reading("loss", "log10_true", term), run, "a", "log10_loss", term)
    below = run.reading("saturation", "below_1e-3", term).groupby("epoch")["value"]
    shares = below.agg(value="mean", n="count").reset_index()  # a reading that is NaN is neither below nor counted
    return pd.concat([trace, _named(shares, run, "a", "share_below_1e-3", term)])


def _loss_medians(run: Run) -> pd.DataFrame:
    return _named(_quartiles(run.reading("loss", "log10_true", "infonce")), run, "c", "log10_loss_quartiles", "infonce")


def _norms(run: Run, term: str) -> pd.DataFrame:
    norm = run.reading("gradient", "log10_norm", term)
    zeros = run.reading("zeros", "all_zero.parameters", term)
    return pd.concat(
        [
            _named(norm, run, "b", "log10_norm", term),
            _named(_quartiles(norm), run, "b", "log10_norm_quartiles", term),
            _named(zeros, run, "b", "all_zero", term),
        ]
    )


def _ratio_and_cosine(run: Run) -> pd.DataFrame:
    """The ratio as a difference of log10 norms, so that it cannot overflow; nan where both norms are zero."""
    both = [run.reading("gradient", "log10_norm", term).set_index("step") for term in ("hn", "infonce")]
    ratio = both[0].assign(value=both[0]["value"] - both[1]["value"]).reset_index()
    return pd.concat(
        [
            _named(_quartiles(ratio), run, "b", "log10_norm_ratio_quartiles", "pair"),
            _named(run.reading("gradient", "cosine", "pair"), run, "b", "cosine", "pair"),
        ]
    )


def _errors(run: Run) -> pd.DataFrame:
    """100 - R@1 in percent; a recall's upper limit is the error's lower one."""
    evals = run.evals
    chosen = evals[(evals["split"] == "val") & (evals["metric"] == "R@1")]
    if chosen.empty:
        splits = ", ".join(sorted(set(evals["split"]))) or "none"
        raise ValueError(
            f"{run.path} has no R@1 on the split val (evaluated: {splits}); train it with a data set that has one, or "
            "with --set data.val_share=0.05; in a loop of your own call probe.log_recall after each evaluation."
        )
    chosen = chosen[chosen["dataset"] == chosen["dataset"].iloc[0]]  # the first data set validated on
    recall = chosen[["value", "low", "high"]].astype(float)  # a loop that is not ours may log no interval
    error = {"value": 100 * (1 - recall["value"]), "low": 100 * (1 - recall["high"]), "high": 100 * (1 - recall["low"])}
    kept = chosen[["step", "epoch", "direction"]].assign(n=chosen["n_queries"], **error)
    return _named(kept, run, "c", "error_percent", trained_with(run))


def _quartiles(frame: pd.DataFrame) -> pd.DataFrame:
    """Per epoch: the median, and quartiles as order statistics; -inf (an exact zero) takes its place in the order."""
    rows = []
    for epoch, group in frame.groupby("epoch"):
        ordered = np.sort(group["value"].dropna().to_numpy(dtype=float))
        if len(ordered):
            low, high = (ordered[int(np.ceil(q * len(ordered))) - 1] for q in (0.25, 0.75))
            rows.append({"epoch": epoch, "value": np.median(ordered), "low": low, "high": high, "n": len(ordered)})
    return pd.DataFrame(rows, columns=["epoch", "value", "low", "high", "n"])


def _named(frame: pd.DataFrame, run: Run, panel: str, series: str, term: str) -> pd.DataFrame:
    words = {"panel": panel, "trajectory": trained_with(run), "series": series, "term": term}
    missing = np.full(len(frame), np.nan)
    numbers = {name: frame[name].to_numpy(float) if name in frame else missing for name in NUMBERS}
    direction = (frame["direction"].to_numpy() if "direction" in frame else missing).astype(object)
    return pd.DataFrame({**words, "direction": direction, **numbers})


def _width(run: Run) -> str:
    """What the stamps of the loss readings say about the softmax, for the title; nothing if they do not agree."""
    stamps = run.readings_of("loss")["stamps"].unique()
    widths = {match[0] for stamp in stamps if (match := re.search(r"width \d+", str(stamp)))}
    return f", {widths.pop()}" if len(widths) == 1 else ""


def _epochs(run: Run) -> pd.DataFrame:
    """First and last step of every epoch, indexed by epoch."""
    return run.steps.groupby("epoch")["step"].agg(["min", "max"]).set_axis(["first", "last"], axis=1)


# ---------------------------------------------------------------- drawing


def _draw_losses(axis: Axes, frame: pd.DataFrame, bands: pd.DataFrame, width: str) -> None:
    traces = frame[frame["series"] == "log10_loss"]
    for (trajectory, term), trace in _by_curve(traces):
        _trace(axis, trace, **_look(frame, trajectory, term))
    low = _power_axis(axis, traces["value"], at_most=THRESHOLD - 0.5, at_least=THRESHOLD + 0.5)
    _level(axis, THRESHOLD, "$10^{-3}$", "0.25")
    if low < PAPER_FLOOR:
        _level(axis, PAPER_FLOOR, "floor of\npaper's plot", "0.5")
    axis.set_ylabel("loss (nat)")
    shares = frame[frame["series"] == "share_below_1e-3"]
    _print_shares(axis, shares, bands)
    rows = len(_by_curve(shares))
    axis.set_title(f"(a) loss; % under $10^{{-3}}${width}", loc="left", pad=5 + 7.5 * rows)
    lost = int((~np.isfinite(traces["value"])).sum())
    if lost:
        axis.text(0.01, 0.02, f"gaps: {lost} losses are not finite", fontsize=6, va="bottom", transform=axis.transAxes)


def _level(axis: Axes, level: float, word: str, colour: str) -> None:
    """A dashed line, named in the margin on the right, which the second axis of (c) keeps free: no curve runs there."""
    axis.axhline(level, color=colour, linewidth=0.6, linestyle=(0, (4, 2)), zorder=1)
    look = {"color": colour, "fontsize": 5.5, "ha": "left", "va": "center", "linespacing": 1.0}
    axis.text(1.015, level, word, transform=axis.get_yaxis_transform(), **look).set_in_layout(False)  # type: ignore[arg-type]


def _print_shares(axis: Axes, shares: pd.DataFrame, bands: pd.DataFrame) -> None:
    """One row of percentages per curve above the panel, each over its epoch, in points above the axis."""
    every = int(np.ceil(len(bands) / 12))  # more than twelve numbers do not fit
    for row, ((trajectory, term), share) in enumerate(reversed(_by_curve(shares))):
        look = _look(shares, trajectory, term)
        values = share.set_index("epoch")["value"]
        for epoch in [epoch for epoch in bands.index[::every] if epoch in values.index]:
            word = f"{100 * values[epoch]:.0f}" + (" %" if len(bands) <= 6 else "")
            _above(axis, float(bands.loc[epoch].mean()), row, word, "center", look["color"])
        _above(axis, axis.get_xlim()[0], row, look["short"] + "  ", "right", look["color"])


def _above(axis: Axes, x: float, row: int, word: str, align: str, colour: str) -> None:
    place = {"xy": (x, 1), "xycoords": axis.get_xaxis_transform(), "xytext": (0, 3 + 7.5 * row), "textcoords": "offset points"}
    note = axis.annotate(word, **place, color=colour, ha=align, fontsize=6.3, annotation_clip=False)  # type: ignore[arg-type]
    note.set_in_layout(False)  # the title's padding keeps the room free


def _draw_norms(axis: Axes, frame: pd.DataFrame, bands: pd.DataFrame) -> None:
    norms = frame[frame["series"] == "log10_norm"]
    low = _power_axis(axis, norms["value"])
    words = []
    for (trajectory, term), trace in _by_curve(norms):
        look = _look(frame, trajectory, term)
        _trace(axis, trace, **{**look, "alpha": 0.35})
        _draw_quartiles(axis, _series(frame, "log10_norm_quartiles", term), bands, look["color"], low)
        zero = _series(frame, "all_zero", term)
        at = zero.loc[zero["value"] == 1, "step"]
        if len(at):  # an empty unclipped line would still claim room
            axis.plot(at, np.full(len(at), low), "|", color=look["color"], markersize=6, clip_on=False, zorder=4)
        words.append(f"{LABELS[term]} {len(at)}/{len(zero)}")
    axis.set_ylabel("gradient norm")
    axis.set_title("(b) gradient norm: median, quartiles", loc="left")
    lost = int(norms["value"].isna().sum())
    gaps = [f"gaps: {lost} norms are not finite"] if lost else []
    lines = [f"exactly zero (ticks at the edge): {', '.join(words)}", *gaps, *_pair_words(frame)]
    axis.set_xlabel("\n".join(lines), fontsize=6, linespacing=1.3)


def _pair_words(frame: pd.DataFrame) -> list[str]:
    cosine = _series(frame, "cosine", "pair")["value"]
    defined = cosine.dropna()
    undefined = f", undefined in {len(cosine) - len(defined)}" if len(defined) < len(cosine) else ""
    spread = f"mean {defined.mean():.2f}, sd {defined.std():.2f}" if len(defined) > 1 else "fewer than two values"
    words = f"cosine of the two gradients: {spread}{undefined}"
    ratio = _series(frame, "log10_norm_ratio_quartiles", "pair").set_index("epoch")["value"]
    if ratio.empty:
        return [words, "norm HN/InfoNCE: undefined throughout"]
    parts = [f"{_power(ratio[epoch])} (epoch {epoch:.0f})" for epoch in dict.fromkeys((ratio.index[0], ratio.index[-1]))]
    return [words, f"norm HN/InfoNCE, median: {', '.join(parts)}"]


def _draw_quartiles(axis: Axes, quartiles: pd.DataFrame, bands: pd.DataFrame, colour: str, bottom: float) -> None:
    for epoch, *values in quartiles[["epoch", "low", "value", "high"]].to_numpy(dtype=float):
        ends = bands.loc[int(epoch)].to_numpy() + np.array([-0.5, 0.5])
        low, middle, high = np.maximum(values, bottom)
        axis.fill_between(ends, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
        axis.plot(ends, [middle, middle], color=colour, linewidth=1.4, zorder=3)


def _draw_errors(axis: Axes, frame: pd.DataFrame, bands: pd.DataFrame) -> None:
    errors = frame[frame["series"] == "error_percent"]
    trajectories = list(dict.fromkeys(errors["trajectory"]))
    spread = 0.012 * bands["last"].max()  # neighbours' intervals side by side, not on top of each other
    for place, ((trajectory, direction), group) in enumerate(errors.groupby(["trajectory", "direction"], sort=False)):
        bars = [group["value"] - group["low"], group["high"] - group["value"]]
        look = _error_look(str(trajectory), str(direction), own=trajectory != trajectories[0])
        axis.errorbar(group["step"] + spread * (place - 1), group["value"], yerr=bars, elinewidth=0.5, clip_on=False, **look)
    axis.set_ylabel("error at 1 (%)")
    axis.set_title("(c) held-out error, 95 % intervals", loc="left")
    axis.margins(y=0.12)
    _draw_loss_medians(axis, frame[frame["series"] == "log10_loss_quartiles"], bands)


def _error_look(trajectory: str, direction: str, *, own: bool) -> dict[str, Any]:
    """Of a curve of (c) and of its legend alike; an overlaid run is hollow and thin."""
    return {
        "color": OWN_COLOUR if own else OBJECTIVE_COLOURS[trajectory],
        "linestyle": "-" if direction == "t2i" else (0, (3, 1.5)),
        "marker": "o" if direction == "t2i" else "s",
        "markerfacecolor": "white" if own else None,
        "markersize": 2.6,
        "linewidth": 0.7 if own else 1.2,
        "label": f"(c) {LABELS[trajectory]}, {DIRECTION_LABELS[direction]}",
    }


def _draw_loss_medians(axis: Axes, medians: pd.DataFrame, bands: pd.DataFrame) -> None:
    other = axis.twinx()
    middles = bands.loc[medians["epoch"]].mean(axis=1)
    look = {"color": OBJECTIVE_COLOURS["infonce"], "linestyle": ":", "marker": "x", "markersize": 3, "linewidth": 0.8}
    other.plot(middles, medians["value"], **look)  # type: ignore[arg-type]
    _power_axis(other, medians["value"], room=1.5)
    other.spines["right"].set_visible(True)
    other.tick_params(axis="y", colors=OBJECTIVE_COLOURS["infonce"])
    other.set_ylabel("InfoNCE loss (median)", color=OBJECTIVE_COLOURS["infonce"])


def _legend(frame: pd.DataFrame) -> list[Any]:
    from matplotlib.lines import Line2D

    curves = frame[frame["series"] == "log10_loss"]
    handles = []
    for (trajectory, term), _ in _by_curve(curves):
        look = _look(frame, trajectory, term)
        handles.append(Line2D([], [], **{key: look[key] for key in ("color", "linewidth", "linestyle", "label")}))
    errors = frame[frame["series"] == "error_percent"][["trajectory", "direction"]].drop_duplicates()
    blank = Line2D([], [], linestyle="", label=" ")
    handles += [blank] * (len(errors) - len(handles))  # columns are filled one by one: (c) has the second for itself
    first = frame["trajectory"].iloc[0]
    return handles + [Line2D([], [], **_error_look(*pair, own=pair[0] != first)) for pair in errors.itertuples(index=False)]


def _look(frame: pd.DataFrame, trajectory: str, term: str) -> dict[str, Any]:
    """Colour by objective; the overlaid InfoNCE run is thin and dotted."""
    own = trajectory != frame["trajectory"].iloc[0]
    return {
        "color": OWN_COLOUR if own else OBJECTIVE_COLOURS[term],
        "linewidth": 0.6 if own else 0.9,
        "linestyle": (0, (1.5, 0.8)) if own else "-",
        "label": f"{LABELS[term]} on its own run" if own else f"{LABELS[term]} along the {LABELS[trajectory]} run",
        "short": "own run" if own else LABELS[term],
    }


def _trace(axis: Axes, trace: pd.DataFrame, *, short: str, alpha: float = 1.0, **look: Any) -> None:
    """A line through the finite values; it breaks where a value is not finite."""
    finite = trace["value"].where(np.isfinite(trace["value"]))
    marker = "." if len(trace) == 1 else look.pop("marker", "")  # a single measurement has no line
    axis.plot(trace["step"], finite, alpha=alpha, marker=marker, **look)


def _power_axis(axis: Axes, values: pd.Series, *, at_most: float = np.inf, at_least: float = -np.inf, room: float = 0.4) -> float:
    """Limits and ticks for log10 values; returns the lower edge, ``at_most`` so high (the upper one is ``at_least`` so high)."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (-1.0, 0.0)
    low, high = min(low - room, at_most), max(high + room, at_least)
    axis.set_ylim(low, high)
    if high - low < 2:  # whole decades would be too few
        axis.yaxis.set_major_locator(FixedLocator(_between(low, high)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:.0f}}}$"))
    return low


def _between(low: float, high: float) -> list[float]:
    """log10 of 1, 2 and 5 times the powers of ten within the limits."""
    ticks = [decade + np.log10(digit) for decade in range(int(np.floor(low)), int(np.ceil(high)) + 1) for digit in (1, 2, 5)]
    return [float(tick) for tick in ticks if low <= tick <= high]


def _plain(exponent: float) -> str:
    """A power of ten as a number, with its decade apart where the zeros would have to be counted."""
    if -3 <= exponent < 4:
        return f"{10**exponent:g}"
    decade = int(np.floor(exponent + 1e-9))
    return rf"${10 ** (exponent - decade):.0f}\times10^{{{decade}}}$"


def _power(exponent: float) -> str:
    """A ratio given as log10: a plain number of two digits up to a hundred either way."""
    if not np.isfinite(exponent):
        return "∞" if exponent > 0 else "0"
    return f"{10**exponent:#.2g}".rstrip(".") if -2 < exponent < 1.99 else f"$10^{{{exponent:.1f}}}$"


def _shade(axis: Axes, bands: pd.DataFrame) -> None:
    for first, last in bands.to_numpy()[1::2]:
        axis.axvspan(first - 0.5, last + 0.5, color="0.95", zorder=0, linewidth=0)


def _by_curve(frame: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    return [((str(key[0]), str(key[1])), group) for key, group in frame.groupby(["trajectory", "term"], sort=False)]


def _series(frame: pd.DataFrame, series: str, term: str) -> pd.DataFrame:
    return frame[(frame["series"] == series) & (frame["term"] == term)]
