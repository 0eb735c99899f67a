"""Names of geometries on figures: short, distinct, with the encoder where it differs between curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradscope.geometry_file import CaptionGeometry

NOT_A_RESULT = "encoder 'tiny' is out of domain here: not a result"


def labels(geometries: Sequence[CaptionGeometry]) -> list[str]:
    """One distinct label per geometry, in order."""
    several = len({g.encoder for g in geometries}) > 1
    plain = [g.name.removesuffix("_captions").replace("_", " ") + (f" ({g.encoder})" if several else "") for g in geometries]
    seen: Counter[str] = Counter()
    found = []
    for label in plain:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return found


def footnote(geometries: Sequence[CaptionGeometry]) -> str:
    """The encoder, and a plain word where the numbers are not a result."""
    encoders = ", ".join(dict.fromkeys(g.encoder for g in geometries))
    return f"encoder: {encoders}" if not any(g.out_of_domain for g in geometries) else NOT_A_RESULT
