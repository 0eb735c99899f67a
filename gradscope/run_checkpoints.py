"""Which checkpoints of a run an evaluation means: the last, the best on validation, or both.

How it can mislead: "best" was chosen on validation recall, so its numbers on the VALIDATION split are too high; on a test split they
are fair. Published tables that pick the best epoch on the test split itself are not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gradscope.registry import unknown_name
from gradscope.runlog import Run, is_run

CHOICES = ("last", "best", "both")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """``load`` is what ``load_encoder`` takes, ``name`` what to write beside the numbers and ``note`` what to say of it there;
    ``suffix`` tells output files apart."""

    load: str
    name: str
    note: str = ""
    suffix: str = ""


def chosen_checkpoints(encoder: str, choice: str) -> list[Chosen]:
    """One entry per checkpoint to evaluate, the last one first. An encoder that is no run has only itself.

    Raises:
        ValueError: unknown choice, "best" or "both" of something that is no run, or a best that was not kept.
    """
    if choice not in CHOICES:
        raise ValueError(unknown_name("value of --checkpoint", choice, list(CHOICES)))
    if not is_run(encoder):
        if choice != "last":
            raise ValueError(f"--checkpoint {choice} needs a run directory; '{encoder}' is none. Leave it out, or give a run.")
        return [Chosen(load=encoder, name=encoder)]
    last = Chosen(load=encoder, name=encoder)
    if choice == "last":
        return [last]
    if choice == "both" and _marked(Path(encoder)) is None:
        return [Chosen(load=encoder, name=f"{encoder}, last", note="best on validation was the start, before any update")]
    best = _best(Path(encoder))
    if choice == "best":
        return [best]
    checkpoints = Run(encoder).checkpoints()
    if checkpoints and Path(best.load) == checkpoints[-1]:
        return [Chosen(load=encoder, name=f"{encoder}, last", note="the last checkpoint is also the best on validation")]
    return [Chosen(load=encoder, name=f"{encoder}, last"), best]


def _best(run: Path) -> Chosen:
    name = _marked(run)
    if name is None:
        raise ValueError(f"run '{run}' was best on validation before its first step: evaluate what it started from, or the last.")
    folder = run / "checkpoints" / name
    if not folder.is_dir():
        raise ValueError(f"the best checkpoint of run '{run}', {name}, is not on disk; use --checkpoint last.")
    return Chosen(load=str(folder), name=f"{run}, best", note=f"best on validation: {name}", suffix="-best")


def _marked(run: Path) -> str | None:
    """The name of the checkpoint that is marked as best; None where the start was."""
    file = run / "checkpoints" / "best.json"
    if not file.is_file():
        raise ValueError(f"run '{run}' marks no best checkpoint ({file.name} is missing); use --checkpoint last.")
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' is damaged ({error}); use --checkpoint last.") from error
    return None if name is None else str(name)


def stored_training_items(encoder: str) -> Path | None:
    """The table of the items a run (or the run of a checkpoint) was trained on, if it kept one. Stretched runs (RUN@248) count."""
    from gradscope.encoders.stretch import parse_stretch

    path = Path(encoder.removeprefix("local-dir:"))
    if not path.exists():
        path = Path(parse_stretch(str(path))[0])
    runs = [path, *(folder.parent for folder in path.parents if folder.name == "checkpoints")]
    return next((file for file in (run / "arrays" / "train_items.npz" for run in runs if is_run(run)) if file.is_file()), None)
