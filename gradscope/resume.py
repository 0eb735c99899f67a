"""What may continue a run: the same recipe and the same training data, or nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradscope.recipe import Recipe, resolve
from gradscope.runlog import Run

#: Where the work is done, not what is done: another number of processes may also divide the parameters otherwise, and another machine
#: may have no room for a cache of pictures, which are the same to the bit without it.
MAY_DIFFER = ("train.shard", "data.cache")


def check_same_recipe(run: Run, recipe: Recipe) -> None:
    """Raises ValueError naming the settings that differ from the run's, of the first table that has any, with old and new values."""
    before = resolve(run.recipe, {})
    for table in dataclasses.fields(Recipe):
        old, new = getattr(before, table.name), getattr(recipe, table.name)
        pairs = {f"{table.name}.{key.name}": (getattr(old, key.name), getattr(new, key.name)) for key in dataclasses.fields(old)}
        changed = [f"{name} was {a!r} and is now {b!r}" for name, (a, b) in pairs.items() if a != b and name not in MAY_DIFFER]
        if changed:
            raise ValueError(
                f"'{run.path}' continues with the same recipe only, but {', '.join(changed)}; drop the change, or start a new run with "
                "--output"
            )


def check_same_data(run: Run, facts: dict[str, Any]) -> None:
    """Raises ValueError if the file's records differ from the run's, or what the policies on pictures leave of them."""
    before, now = run.provenance["data"], facts["data"]
    a, b = before["train_sha256"], now["train_sha256"]
    if a != b:
        raise ValueError(
            f"--resume needs the same training data, but the sha256 of its records was {a[:12]}... and is now {b[:12]}...; "
            "restore the files, or start a new run with --output"
        )
    if before.get("used_sha256", now["used_sha256"]) != now["used_sha256"]:  # another number of records is another shuffle
        raise ValueError(
            f"--resume needs the same training data, but {before['records']} records of '{before['name']}' were usable and now "
            f"{now['records']} are, or others (or validation's are); restore the pictures, or start a new run with --output"
        )
