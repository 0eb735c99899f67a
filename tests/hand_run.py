"""Runs written by hand: the readings of a healthy run, any of them replaced; and toy loops that ``gradscope.Probe`` watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from gradscope.runlog import RunLog

WIDTH = 64
EVERYTHING = ("infonce", "hn")
#: reading -> value: what a run looks like that teaches. Keys ending in * stand for both directions.
HEALTHY: dict[tuple[str, str, str], Any] = {
    ("captions", "mean", ""): 0.6,
    ("captions", "hardest_mean", ""): 0.8,
    ("captions", "near_duplicates", ""): 0.05,
    ("captions", "exact_duplicates", ""): 0.2,
    ("captions", "truncated", ""): 1.0,
    ("captions", "margin_logits", ""): 8.0,
    ("gap", "violated.*", ""): 0.1,
    ("gap", "violated_with_margin.*", "hn"): 0.4,
    ("scale", "value", ""): 99.5,
    ("scale", "at_limit", ""): 0.2,
    ("optimizer", "eps_dominated", "total"): 0.12,
    ("optimizer", "stale", "total"): 0.02,
    ("optimizer", "step_q50", "total"): 0.15,
    ("optimizer", "update_ratio.image", "total"): 3e-5,
    ("optimizer", "update_ratio.text", "total"): 4e-5,
    ("accumulation", "norm", "total"): 0.4,
}
BY_TERM: dict[tuple[str, str], Any] = {
    ("loss", "trained"): 0.4,
    ("loss", "true"): 0.4,
    ("loss", "log10_true"): math.log10(0.4),
    ("saturation", "below_1e-3"): 0.0,
    ("saturation", "rows_below_1e-3.*"): 0.3,
    ("saturation", "effective_rows.*"): 14.0,
    ("residual", "log10_mean.*"): -0.7,
    ("zeros", "all_zero.parameters"): 0.0,
    ("zeros", "all_zero.logits"): 0.0,
    ("zeros", "naive_norm_zero"): 0.0,
    ("zeros", "loss_zero_gradient_not"): 0.0,
    ("zeros", "positive_zero.*"): 0.1,
    ("zeros", "structural.parameters"): 0.12,
    ("zeros", "entries_reached.parameters"): 3e-6,
    ("zeros", "unused.parameters"): 0.0,
    ("gradient", "norm"): 0.4,
    ("gradient", "log10_norm"): math.log10(0.4),
    ("gradient", "norm.image"): 0.3,
    ("gradient", "norm.text"): 0.2,
    ("hooks", "agreement"): 1.0,
    ("hooks", "factor"): 1.0,
}
RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "scenes"},
    "encoder": {"name": "tiny", "freeze": ""},
    "objective": {"name": "infonce", "gamma": 0.0, "margin": "none", "token_weight": 0.0, "duplicates": "keep"},
    "train": {
        "accumulate": 1,
        "accumulate_mode": "none",
        "lr": 1e-5,
        "grad_clip": 0.0,
        "precision": "fp32",
        "beta2": 0.999,
        "eps": 1e-8,
    },
    "probe": {"log_grads": True, "every": 2},
}


def readings(changes: Mapping[tuple[str, str, str], Any]) -> dict[tuple[str, str, str], Any]:
    """The healthy ones with ``changes``; * in a key stands for both directions, * as a term for both objectives."""
    every = {**HEALTHY, **{(quantity, key, term): v for (quantity, key), v in BY_TERM.items() for term in EVERYTHING}}
    for (quantity, key, term), value in changes.items():
        every |= {(quantity, key, t): value for t in (EVERYTHING if term == "*" else (term,))}
    return {
        (quantity, name, term): value
        for (quantity, key, term), value in every.items()
        for name in ([key.replace("*", d) for d in ("i2t", "t2i")] if key.endswith("*") else [key])
    }


def hand_run(
    path: Path,
    changes: Mapping[tuple[str, str, str], Any] | None = None,
    *,
    columns: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    evals: Sequence[tuple[int, float, float]] = ((0, 0.50, 0.45), (20, 0.52, 0.47), (40, 0.53, 0.48)),
    steps: int = 40,
    every: int = 2,
    probed: bool = True,
) -> Path:
    """A run of two epochs. A value may be a function of the step; None leaves the reading or column out.

    ``evals`` are (step, R@1, lower end of its interval); ``recipe`` takes dotted keys.
    """
    tables = {table: dict(values) for table, values in RECIPE.items()}
    for dotted, value in (recipe or {}).items():
        table, _, key = dotted.partition(".")
        tables.setdefault(table, {})[key] = value
    known = {"width": WIDTH, "truncated_captions": 3, "repeated_captions": 4, "data": {"records": 160}, **(facts or {})}
    row = {"loss": 0.4, "scale": 99.5, "lr": 1e-5, "grad_norm": 0.4, "loss_scale": 1.0, "skipped": 0, **(columns or {})}
    with RunLog.create(path, recipe_toml=tomli_w.dumps(tables), provenance=known) as log:
        for step in range(1, steps + 1):
            at = {name: _at(value, step) for name, value in row.items() if value is not None}
            log.write_steps([{"step": step, "samples": step * WIDTH, "epoch": 1 + (step > steps // 2), **at}])
            if probed and (step - 1) % every == 0:
                log.write_readings(_rows(step, readings(changes or {})))
        log.write_evals([_eval(step, value, low) for step, value, low in evals if step <= steps])
        log.finish()
    return path


def _at(value: Any, step: int) -> Any:
    return value(step) if isinstance(value, Callable) else value  # type: ignore[arg-type]


def _rows(step: int, values: Mapping[tuple[str, str, str], Any]) -> list[dict[str, Any]]:
    return [
        {"step": step, "quantity": q, "key": key, "term": term, "value": _at(value, step), "unit": "", "stamps": "towers fp32"}
        for (q, key, term), value in values.items()
        if value is not None
    ]


def _eval(step: int, value: float, low: float) -> dict[str, Any]:
    row = {"step": step, "epoch": 0, "dataset": "scenes", "split": "val", "direction": "i2t", "metric": "R@1", "value": value}
    return {**row, "low": low, "high": 2 * value - low, "n_queries": 400, "n_candidates": 400, "protocol": "test"}
