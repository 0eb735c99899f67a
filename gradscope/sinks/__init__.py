"""Dashboards that a run is sent to beside its own files: TensorBoard, W&B, MLflow. One file, one sink.

A sink is a frozen dataclass with two class variables, ``module`` (what must be importable) and ``extra`` (the extra of this package
that installs it); called with a ``Destination`` it opens, or continues, that run there and returns a ``Sink``.
What is sent, under which names: ``gradscope.sinks.points``. Counting, failures and resumes: ``gradscope.sinks.feed``.

How it can mislead: a dashboard holds copies, a short list of them by default, and smooths curves; the run directory is the record.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradscope.registry import Registry
from gradscope.sinks.points import Point

sinks: Registry = Registry("sink", "gradscope.sinks")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The run that a sink opens.

    Args:
        path: its run directory; files of the sink belong in there.
        recipe: its settings as nested dicts, to be shown beside the curves.
        id: what the sink called this run when it was first opened; "" if it never was.
    """

    path: Path
    recipe: Mapping[str, Any]
    id: str = ""


class Sink(Protocol):
    """One opened run of one dashboard; ``where`` tells the user how to see it."""

    id: str
    where: str

    def write(self, points: Sequence[Point]) -> None:
        """Sends the points, in order; may raise whatever its library raises."""

    def close(self, done: bool) -> None:
        """Sends what is still held back; ``done`` says whether the run reached its end."""


def parse(names: str) -> list[str]:
    """ "tensorboard,wandb" -> ["tensorboard", "wandb"]. Raises ValueError for an unknown name, or one given twice."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        sinks[name]
    if len(set(found)) < len(found):
        raise ValueError(f"sinks '{names}' name one of them twice; name each once.")
    return found


def require(names: str) -> None:
    """Raises ValueError, naming the extra to install, if the library of a named sink is missing."""
    for name in parse(names):
        opener = sinks[name]
        if importlib.util.find_spec(opener.module) is None:
            raise ValueError(f"sink '{name}' needs a library that is not installed; pip install 'gradscope[{opener.extra}]'.")
