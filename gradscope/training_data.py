"""What a run trains and validates on: the records of a recipe after its policies, each departure from the file counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.data.identity import ItemTable, items, load_items, save_items
from gradscope.data.source import DataSource, held_out, open_data
from gradscope.data.usable import Usable, usable
from gradscope.paths import shown_name
from gradscope.recipe import Data, Recipe
from gradscope.run_checkpoints import stored_training_items
from gradscope.types import Record

VALIDATION = "val"


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Records to train and to validate on, in file order; ``notes`` are counted facts to show before the run."""

    source: DataSource
    split: str
    sha256: str  # of all records of the split, before any policy
    train: Sequence[Record]
    validation: Sequence[Record]
    held_out: bool  # validation was taken out of train
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """What provenance keeps: enough to say on resume whether the data are the same."""
        data = {
            "name": shown_name(self.source.name),
            "split": self.split,
            "train_sha256": self.sha256,
            "records": len(self.train),
            "used_sha256": self._used(),
            "notes": list(self.notes),
        }
        return {"data": data, "validation": {"records": len(self.validation), "held_out_of_train": self.held_out}}

    def _used(self) -> str:
        """sha256 over the ids that the policies left, in order: the shuffle and the validation depend on them."""
        return hashlib.sha256(json.dumps([[r.id for r in part] for part in (self.train, self.validation)]).encode()).hexdigest()


def training_data(recipe: Recipe) -> TrainingData:
    """Reads the training split and the split "val", or holds out ``val_share`` of train by image id: where there is no split "val",
    and where it is trained on ("train+val").

    Raises:
        ValueError: no such data or split, or pictures that are missing or bad where the recipe does not allow for it.
    """
    settings = recipe.data
    source = open_data(settings.name, **settings.settings())
    split = source.split_or_only(settings.train_split)
    found = source.read(split)
    kept = _usable(found.records, settings, recipe.train.workers)
    notes = [*found.notes, *kept.notes]
    own = VALIDATION in source.splits() and VALIDATION not in split.split("+")
    if own:
        validation = source.read(VALIDATION)
        kept_validation = _usable(validation.records, settings, recipe.train.workers)
        notes += [f"validation: {note}" for note in (*validation.notes, *kept_validation.notes)]
        parts: tuple[Sequence[Record], Sequence[Record]] = kept.records, kept_validation.records
    else:
        parts = held_out(kept.records, settings.val_share, recipe.train.seed)
    return TrainingData(
        source=source,
        split=split,
        sha256=found.fingerprint(),
        train=parts[0],
        validation=parts[1],
        held_out=not own,
        notes=tuple(notes),
    )


def keep_items(data: TrainingData, folder: Path, start: str, say: Callable[[str], None]) -> None:
    """Writes what identifies the training records to ``folder``/train_items.npz, once a run, so that a later evaluation can count
    those among its own. Reads up to 128 KiB of each picture.

    Args:
        start: the encoder that is fine-tuned; where it is a run, what that run was trained on counts too.
        say: receives a line on those.
    """
    from gradscope.console import progress

    path = folder / "train_items.npz"
    if path.is_file():
        return
    with progress("noting what is trained on") as advance:
        table = items(data.train, source=data.source.name, advance=advance)
    earlier = stored_training_items(start)
    if earlier:
        before = load_items(earlier)
        table = _joined(table, before)
        say(f"note: {len(before)} items that '{start}' was trained on count as training items of this run too")
    folder.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_items(partial, table)
    partial.replace(path)


def _joined(table: ItemTable, before: ItemTable) -> ItemTable:
    """Both tables under the first one's name. An id means something in its own data set only: where ``before`` is of another, its
    ids are blanked, and its items are known by file, content and caption."""
    ids = before.ids if before.source == table.source else np.zeros_like(before.ids)
    return dataclasses.replace(
        table,
        ids=np.concatenate([table.ids, ids]),
        names=np.concatenate([table.names, before.names]),
        sizes=np.concatenate([table.sizes, before.sizes]),
        digests=np.concatenate([table.digests, before.digests]),
        captions=np.concatenate([table.captions, before.captions]),
        caption_rows=np.concatenate([table.caption_rows, before.caption_rows + len(table)]),
    )


def _usable(records: Sequence[Record], settings: Data, workers: int) -> Usable:
    from gradscope.console import progress

    with progress("checking pictures") as advance:
        return usable(
            records, allow_missing=settings.allow_missing, on_bad_image=settings.on_bad_image, workers=workers, advance=advance
        )
