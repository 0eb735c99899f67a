"""What figures of geometries share: short, distinct names (with the encoder where it differs), and the mark of a non-result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradscope.geometry_file import CaptionGeometry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def labels(geometries: Sequence[CaptionGeometry]) -> list[str]:
    """One distinct label per geometry, in order."""
    several = len({g.encoder for g in geometries}) > 1
    plain = [g.name.replace("_", " ") + (f" ({g.encoder})" if several else "") for g in geometries]
    seen: Counter[str] = Counter()
    found = []
    for label in plain:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return found


def encoders(geometries: Sequence[CaptionGeometry]) -> str:
    """The line under the axis that says whose cosines these are."""
    return "encoder: " + ", ".join(dict.fromkeys(g.encoder for g in geometries))


def mark_foreign(figure: Figure, geometries: Sequence[CaptionGeometry]) -> None:
    """A plain word above the figure where its numbers are not a result."""
    foreign = [name for name, g in zip(labels(geometries), geometries, strict=True) if g.out_of_domain]
    if foreign:
        figure.suptitle(f"{', '.join(foreign)}: 'tiny' is out of domain,\nnot a result", fontsize=7.5, color="#B00020")
