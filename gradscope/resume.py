"""What may continue a run: the same recipe and the same training data, or nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradscope.recipe import Recipe, resolve
from gradscope.runlog import Run


def check_same_recipe(run: Run, recipe: Recipe) -> None:
    """Raises ValueError naming the first setting that differs from the run's, with its old and new value."""
    before = resolve(run.recipe, {})
    for table in dataclasses.fields(Recipe):
        old, new = getattr(before, table.name), getattr(recipe, table.name)
        for key in dataclasses.fields(old):
            a, b = getattr(old, key.name), getattr(new, key.name)
            if a != b:
                raise ValueError(
                    f"'{run.path}' continues with the same recipe only, but {table.name}.{key.name} was {a!r} and is now {b!r}; "
                    "drop the change, or start a new run with --output"
                )


def check_same_data(run: Run, facts: dict[str, Any]) -> None:
    a, b = run.provenance["data"]["train_sha256"], facts["data"]["train_sha256"]
    if a != b:
        raise ValueError(
            f"--resume needs the same training data, but the sha256 of its records was {a[:12]}... and is now {b[:12]}...; "
            "restore the files, or start a new run with --output"
        )
