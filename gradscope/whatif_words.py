"""The table of a what-if in words: for each objective, from which scale on, and at which widths, it stops teaching.

It stops teaching in a cell of the grid where at least half of the batches have a true loss under 1e-3 nat. Three more things are said
where they occur: cells that would still teach but in which at least half of the gradient's entries are exactly zero; cells in which it
overflows; and cells in which in at least nine rows of ten a negative's logit is above the positive's: a margin can do that to any row.
Source of the columns: ``gradscope.whatif``. How it can mislead: "from scale 50 on" knows only the scales of the grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame, Series
    from rich.table import Table

#: Objective, precision, loss scale.
Arm = tuple[str, str, float]
#: Share of batches, of zero entries, of anchors.
STOPPED, ZEROED, VIOLATED = 0.5, 0.5, 0.9

RULE = "Stops teaching: at least half of the batches have a true loss under 1e-3 nat."


def sentences(table: DataFrame) -> list[str]:
    """One sentence per objective (columns of ``gradscope.whatif.what_if``), or one for each precision and loss scale that differs;
    objectives of which the same is to be said share it."""
    by_words: dict[tuple[str, str], list[str]] = {}
    for (objective, precision, loss_scale), arm in arms(table):
        by_words.setdefault((objective, "; ".join(_clauses(arm))), []).append(_setting(table, precision, loss_scale))
    differing = [objective for objective, _ in by_words]
    said: dict[str, list[str]] = {}
    for (objective, words), settings in by_words.items():
        which = f" ({'; '.join(settings)})" if differing.count(objective) > 1 else ""
        said.setdefault(words, []).append(f"{objective}{which}")
    return [f"{', '.join(named)}: {words}." for words, named in said.items()]


def arms(table: DataFrame) -> list[tuple[Arm, DataFrame]]:
    """The rows of each objective in each precision and loss scale, in the order of the table."""
    keys = table[["objective", "precision", "loss_scale"]]
    found = dict.fromkeys((str(o), str(p), float(k)) for o, p, k in keys.itertuples(index=False))
    return [(arm, table[(keys == arm).all(axis=1)]) for arm in found]


def arm_name(table: DataFrame, arm: Arm) -> str:
    """What to call an arm: precision and loss scale only where the table has several."""
    setting = _setting(table, arm[1], arm[2])
    return f"{arm[0]}, {setting}" if setting else arm[0]


def pivots(table: DataFrame) -> list[Table]:
    """Rich tables with a row per arm and scale and a column per width: share of batches under 1e-3; log10 of the median gradient
    norm; and, where there are any, the share of exact zeros."""
    tables = [
        _pivot(table, "Batches with a true loss under 1e-3, %, by width", table["below_1e-3"].map(_percent)),
        _pivot(
            table,
            "log10 of the gradient norm at the embeddings, median batch",
            (table["log10_gradient"].round(1) + 0.0).map("{:.1f}".format),
        ),
    ]
    if (table["zero_share"] >= 0.005).any():
        tables.append(_pivot(table, "Exactly zero entries of that gradient, %", table["zero_share"].map(_percent)))
    return tables


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share == share else "-"


def _pivot(table: DataFrame, title: str, cells: Series[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    widths = list(dict.fromkeys(table["width"]))
    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 0))
    drawn.add_column("objective", min_width=16)
    for column in ("scale", *(str(width) for width in widths)):
        drawn.add_column(column, justify="right", no_wrap=True)
    for arm, part in arms(table):
        for number, (scale, line) in enumerate(part.groupby("scale", sort=False)):
            by_width = dict(zip(line["width"], cells[line.index], strict=True))
            drawn.add_row("" if number else arm_name(table, arm), f"{scale:g}", *(by_width[width] for width in widths))
    return drawn


def _setting(table: DataFrame, precision: str, loss_scale: float) -> str:
    """ "fp16", or "fp16@65536" with a loss scale; nothing where the table has one setting only."""
    if len(table[["precision", "loss_scale"]].drop_duplicates()) == 1:
        return ""
    return precision if loss_scale == 1 else f"{precision}@{loss_scale:g}"


def _clauses(arm: DataFrame) -> list[str]:
    """What is to be said of one arm, the verdict first."""
    lost = int(arm["non_finite"].sum())
    said = [f"the loss is not finite in {lost:,} of {int(arm['batches'].sum()):,} batches"] if lost else []
    stopped = arm["below_1e-3"] >= STOPPED
    floorless = bool(arm["below_1e-3"].isna().all()) and not lost
    if floorless:
        said.append("its loss has no floor at 0 and its pull never fades, so it never stops, not even where nothing is left to learn")
    elif stopped.any():
        said.append(f"stops teaching {_where(arm, stopped)}")
    elif not lost:
        said.append("stops nowhere in the grid")
    overflows = arm["overflow"] * arm["batches"] > arm["non_finite"]  # where the loss itself is lost, no loss scale is to blame
    further = {
        "would teach, but half of its gradient or more is exactly 0": (arm["zero_share"] >= ZEROED) & ~stopped,
        "its gradient overflows in some batches (a gradient scaler would skip them and halve the loss scale)": overflows,
        "in nearly every row a negative is above the positive (active, which is not yet learning)": arm["violated"] >= VIOLATED,
    }
    return said + [f"{words} {_where(arm, cells)}" for words, cells in further.items() if cells.any()]


def _where(arm: DataFrame, cells: Series[bool]) -> str:
    """The cells of an arm that are marked; widths of one description are named together."""
    if cells.all():
        return "everywhere in the grid"
    scales, widths = sorted(arm["scale"].unique()), list(dict.fromkeys(arm["width"]))
    by_words: dict[str, list[int]] = {}
    for width in widths:
        here = sorted(arm.loc[cells & (arm["width"] == width), "scale"])
        if here:
            by_words.setdefault(_scales(here, scales), []).append(width)
    return ", ".join(f"{words} (width {_widths(some, widths)})" for words, some in by_words.items())


def _scales(some: list[float], every: list[float]) -> str:
    """ "from scale 50 on" where the rest of the grid's scales follow, else the scales one by one."""
    if some == every:
        return "at every scale" if len(every) > 1 else f"at scale {every[0]:g}"
    if len(some) > 1 and some == every[-len(some) :]:
        return f"from scale {some[0]:g} on"
    return f"at scale {_list([f'{scale:g}' for scale in some])}"


def _widths(some: list[int], every: list[int]) -> str:
    """ "8 to 64" where they are neighbours in the grid, else one by one."""
    start = every.index(some[0])
    if len(some) > 2 and some == every[start : start + len(some)]:
        return f"{some[0]:,} to {some[-1]:,}"
    return _list([f"{width:,}" for width in some])


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
