"""Rows of the run log -> named points on curves: the same names for every sink, stable, and few unless all are asked for.

    steps      train/<column>                             train/loss, train/scale, ...
    readings   <quantity>/<term>/<key>                    saturation/infonce/rows_below_1e-3.i2t; without the term where there is none
    evals      eval/<data set>.<split>/<direction>.<metric>     eval/scenes.val/i2t.R_at_1

The short list is ``STEPS``, ``READINGS`` and ``METRICS``: loss, saturation, residual, zeros, norms and the update, some fifty curves
of a run that reads both objectives; everything else is in the run directory. The x axis is the optimizer step.
Lists travel as histograms where their bins are known (``HISTOGRAMS``), else not at all, and are named at the end.

How it can mislead: a non-finite value is passed on as it is, and what a dashboard draws for it is the dashboard's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscope.metrics import octaves

STEPS = ("loss", "scale", "lr", "grad_norm", "loss_scale", "skipped", "images_per_s", "probe_seconds")
METRICS = ("R@1",)

#: Keys of the short list by quantity; a key that has directions or towers is meant with each of them.
READINGS: dict[str, tuple[str, ...]] = {
    "loss": ("log10_true",),
    "saturation": ("below_1e-3", "rows_below_1e-3", "effective_rows"),
    "residual": ("log10_mean",),
    "gap": ("q50", "violated_with_margin"),
    "captions": ("near_duplicates", "margin_logits"),
    "zeros": ("entries_reached.parameters", "positive_zero", "loss_zero_gradient_not"),
    "gradient": ("log10_norm", "log10_ratio", "cosine"),
    "accumulation": ("log10_norm",),
    "optimizer": ("eps_dominated", "stale", "update_ratio"),
    "sketch": ("counts", "log10_q50"),
    "geometry": ("modality_gap",),
    "false_negatives": ("same_string",),
}

_ENDINGS = (".i2t", ".t2i", ".image", ".text")
_NOT_VALUES = ("attempt", "step", "samples")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./-]+")  # what all three allow


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts [n] between edges [n + 1]."""

    edges: np.ndarray
    counts: np.ndarray

    def trimmed(self) -> Histogram:
        """Without the empty bins at both ends; one bin where all are empty."""
        full = np.flatnonzero(self.counts)
        first, last = (full[0], full[-1]) if len(full) else (0, 0)
        return Histogram(edges=self.edges[first : last + 2], counts=self.counts[first : last + 1])


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of one curve."""

    name: str
    step: int
    value: float | Histogram


def _sizes(counts: Sequence[float]) -> Histogram:
    """A signed sketch over log10 of the size: on the linear axis of a dashboard its decades would all sit at zero."""
    negative, _, positive = octaves.split(counts)
    return Histogram(edges=np.log10(octaves.edges()[octaves.OCTAVES + 1 :]), counts=negative + positive)


def _cosines(counts: Sequence[float]) -> Histogram:
    return Histogram(edges=np.linspace(-0.2, 1.0, 61), counts=np.asarray(counts, dtype=float))


#: (quantity, key without its tower) -> how its list becomes a histogram, and what the name says then.
HISTOGRAMS: dict[tuple[str, str], tuple[Callable[[Sequence[float]], Histogram], str]] = {
    ("sketch", "counts"): (_sizes, "log10_size"),
    ("captions", "histogram"): (_cosines, "cosines"),
}


def points(table: str, rows: Iterable[Mapping[str, Any]], everything: bool) -> tuple[list[Point], set[str]]:
    """The points of some rows of one table, and the names of lists that were asked for but have no known bins."""
    made = [point for row in rows for point in _BY_TABLE[table](row, everything)]
    return [point for point in made if isinstance(point, Point)], {name for name in made if isinstance(name, str)}


def _step_points(row: Mapping[str, Any], everything: bool) -> Sequence[Point | str]:
    names = [name for name in row if name not in _NOT_VALUES] if everything else [name for name in STEPS if name in row]
    return [
        Point(name=f"train/{_plain(name)}", step=int(row["step"]), value=float(row[name])) for name in names if row[name] is not None
    ]


def _reading_points(row: Mapping[str, Any], everything: bool) -> Sequence[Point | str]:
    quantity, key, value = str(row["quantity"]), str(row["key"]), row["value"]
    stem, ending = next(((key.removesuffix(e), e) for e in _ENDINGS if key.endswith(e)), (key, ""))
    listed = READINGS.get(quantity, ())
    if value is None or not (everything or key in listed or stem in listed):
        return []
    if isinstance(value, list | tuple | np.ndarray):
        if (quantity, stem) not in HISTOGRAMS:
            return [f"{quantity}/{stem}"]
        make, word = HISTOGRAMS[quantity, stem]
        value, key = make(list(value)), word + ending
    else:
        value = float(value)
    words = [quantity, str(row["term"]), key] if row["term"] else [quantity, key]
    return [Point(name="/".join(map(_plain, words)), step=int(row["step"]), value=value)]


def _eval_points(row: Mapping[str, Any], everything: bool) -> Sequence[Point | str]:
    if not (everything or row["metric"] in METRICS):
        return []
    data = str(row["dataset"]).replace("\\", "/").rstrip("/").split("/")[-1]  # a data set of one's own is named by its path
    place = f"eval/{_plain(data)}.{_plain(str(row['split']))}"
    name = f"{place}/{_plain(str(row['direction']))}.{_plain(str(row['metric']).replace('@', '_at_'))}"
    columns = {"": row["value"], ".low": row["low"], ".high": row["high"]} if everything else {"": row["value"]}
    return [
        Point(name=name + ending, step=int(row["step"]), value=float(value)) for ending, value in columns.items() if value is not None
    ]


def _plain(word: str) -> str:
    return _NOT_IN_NAMES.sub("-", word).strip("-") or "-"


_BY_TABLE: dict[str, Callable[[Mapping[str, Any], bool], Sequence[Point | str]]] = {
    "steps": _step_points,
    "readings": _reading_points,
    "evals": _eval_points,
}
