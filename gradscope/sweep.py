"""A grid of runs: every combination of the swept settings, several seeds, each trained and evaluated, resumable.

    objective.gamma=0,.25,.5                                            one setting
    train.batch_size+train.accumulate+train.accumulate_mode=16+8+narrow,128+1+none     settings that move together
A run that has finished is left alone, one that was cut off is resumed, so the same command can be given again until it is done.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.recipe import Recipe, Train, parse_value, resolve
from gradscope.runlog import Run, is_run


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One point of the grid: its settings, seed, folder and resolved recipe."""

    settings: dict[str, Any]
    seed: int
    path: Path
    recipe: Recipe


def parse_over(text: str) -> list[dict[str, Any]]:
    """ "a.b=1,2" -> [{"a.b": 1}, {"a.b": 2}]; "a.b+c.d=1+x,2+y" moves two settings together. Raises ValueError."""
    keys, equals, values = text.partition("=")
    names = [key.strip() for key in keys.split("+")]
    if not equals or not values or any("." not in name for name in names):
        raise ValueError(f"--over takes table.key=value,value,...; got '{text}'")
    points = []
    for value in values.split(","):
        parts = value.split("+")
        if len(parts) != len(names):
            raise ValueError(f"--over {keys} sets {len(names)} settings at once, but '{value}' has {len(parts)} values")
        points.append(dict(zip(names, map(parse_value, parts), strict=True)))
    return points


def arms(tables: Mapping[str, Any], over: Sequence[str], seeds: int, output: Path) -> list[Arm]:
    """The whole grid, each recipe checked before anything runs. Seeds are the recipe's own, +1, +2, ..."""
    train = tables.get("train", {})
    first = resolve({"train": {"seed": train.get("seed", Train().seed)}} if isinstance(train, Mapping) else tables, {}).train.seed
    _refuse_repeats(over)
    grid = []
    for combination in itertools.product(*map(parse_over, over)):
        settings = {key: value for point in combination for key, value in point.items()}
        for seed in range(first, first + seeds):
            recipe = resolve(tables, {**settings, "train.seed": seed})
            words = [f"{key.split('.')[-1]}={str(value).replace('/', '-')}" for key, value in settings.items()]  # one folder an arm
            grid.append(Arm(settings=settings, seed=seed, path=output / ",".join([*words, f"seed={seed}"]), recipe=recipe))
    if len({arm.path for arm in grid}) < len(grid):
        raise ValueError("--over gives two arms one folder (a value's / becomes -); rename one of the values")
    return grid


def _refuse_repeats(over: Sequence[str]) -> None:
    """A setting swept twice, a value given twice or a swept seed would train one run where the grid promises several."""
    points = [parse_over(text) for text in over]
    keys = [key for part in points for key in part[0]]
    for key in keys:
        if key == "train.seed":
            raise ValueError("--over train.seed has no effect; use --seeds N, counted up from the recipe's train.seed")
        if keys.count(key) > 1:
            raise ValueError(f"--over sets {key} twice; name each setting once")
    for text, part in zip(over, points, strict=True):
        if any(part.count(point) > 1 for point in part):
            raise ValueError(f"--over {text} holds the same value twice; drop one")


def run_arm(arm: Arm, split: str) -> None:
    """Trains (or resumes) one arm and evaluates its last checkpoint on ``split``; does nothing where both are done."""
    from gradscope.cpu_speed import cpu_speed
    from gradscope.data.image_cache import picture_reader
    from gradscope.encoders.load import load_encoder, resolve_device
    from gradscope.evaluate import evaluate
    from gradscope.evaluation_file import Evaluation, evaluation_content, write_hits, write_json
    from gradscope.gallery import protocol_of, read_gallery
    from gradscope.resume import check_same_recipe
    from gradscope.train import train

    if is_run(arm.path):
        check_same_recipe(Run(arm.path), arm.recipe)  # a finished run of another recipe is not this arm
    if not (is_run(arm.path) and Run(arm.path).done):
        train(arm.recipe, arm.path, resume=is_run(arm.path), quiet=True)
    target = arm.path / f"eval-{split}.json"
    if target.is_file():
        return
    data = arm.recipe.data
    workers = arm.recipe.train.workers
    gallery = read_gallery(data, split, workers=workers)
    device = resolve_device(arm.recipe.train.device)
    encoder = load_encoder(str(arm.path), device)
    read = picture_reader(gallery.records, encoder.config["preprocess_cfg"], decode=data.decode, cache=data.cache, workers=workers)
    with cpu_speed(device, encoder.longest_sequence):
        result, embedded = evaluate(
            encoder, gallery.records, workers=workers, decode=data.decode, on_too_long=data.on_too_long, read=read
        )
    write_hits(target.with_suffix(".npz"), result)
    write_json(target, evaluation_content(Evaluation(protocol=protocol_of(str(arm.path), gallery, embedded), result=result)))


def sweep(grid: Sequence[Arm], split: str, advance: Callable[[int, int], None] | None = None) -> Any:
    """Runs a grid in order; returns a frame with a row per arm, direction and metric."""
    _refuse_unknown_split(grid, split)
    for done, arm in enumerate(grid):
        if advance:
            advance(done, len(grid))
        run_arm(arm, split)
    if advance:
        advance(len(grid), len(grid))
    return collect(grid, split)


def _refuse_unknown_split(grid: Sequence[Arm], split: str) -> None:
    """Before anything trains: each data set must have the split that is evaluated. Raises ValueError naming those it has."""
    from gradscope.data.source import open_data

    for data in {arm.recipe.data for arm in grid}:
        open_data(data.name, **data.settings()).read(split)


def collect(grid: Sequence[Arm], split: str) -> Any:
    """The evaluations of a finished grid as a frame: the swept settings, width, seed, direction, metric, value, low, high."""
    import pandas as pd

    rows = []
    for arm in grid:
        content = json.loads((arm.path / f"eval-{split}.json").read_text(encoding="utf-8"))
        for metric in content["metrics"]:
            kept = {key: metric[key] for key in ("direction", "metric", "value", "low", "high", "n_queries", "n_candidates")}
            rows.append({**arm.settings, "width": arm.recipe.width, "seed": arm.seed, **kept, "path": str(arm.path)})
    return pd.DataFrame(rows)
