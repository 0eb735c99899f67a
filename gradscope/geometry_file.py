"""The geometry of one caption set, as written to a folder and read back. Never imports torch.

    geometry.json    every number but the arrays, with provenance; written last, so its presence means the folder is complete
    histogram.csv    low, high, pairs, captions: counts of all pairwise cosines and of hardest-neighbour cosines per bin
    hardest.csv      index, id, neighbour_index, neighbour_id, cosine: one line per caption, in the source's order
How to read it: `load_geometry(folder)`.
How it can mislead: as `gradscope.metrics.geometry` says; ``warnings`` belong to the numbers.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
JSON_NAME, HISTOGRAM_NAME, HARDEST_NAME = "geometry.json", "histogram.csv", "hardest.csv"
_ARRAYS = ("counts", "hardest_counts", "edges", "ids", "hardest", "hardest_index")


@dataclass(frozen=True, kw_only=True)
class SimilarPair:
    """Two captions that are close to each other. ``shared_words`` are content words, in the first caption's order."""

    index: tuple[int, int]
    ids: tuple[str, str]
    cosine: float
    identical: bool  # the two strings are equal: a false negative, not a hard one
    captions: tuple[str, str]
    shared_words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WidthCurve:
    """`gradscope.metrics.batch_hardness.BatchHardness`, with the cosine that counts as near. None: the width exceeds N."""

    near: float
    widths: tuple[int, ...]
    expected_hardest: tuple[float | None, ...]
    standard_error: tuple[float | None, ...]
    near_chance: tuple[float | None, ...]
    anchors: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CaptionGeometry:
    """Everything measured about one caption set under one encoder. Cosines have no unit; shares lie in 0..1."""

    name: str
    encoder: str
    context: int  # tokens a caption may have
    out_of_domain: bool  # the encoder was not made for such captions: not a result
    warnings: tuple[str, ...]
    n: int  # captions measured, the N of all formulas
    n_pairs: int
    n_rows: int  # records in the source
    n_empty: int  # dropped: no caption
    n_further: int  # second and later captions of an image, not used
    n_repeated_ids: int
    n_excluded: int  # embedding was not finite
    n_truncated: int  # longer than the context
    n_duplicates: int  # captions whose string occurs more than once
    n_distinct: int  # different strings
    mean: float
    hardest_mean: float
    quantiles: Mapping[float, float]
    quantile_width: float  # a quantile is right to within this; 0: exact
    hardest_quantiles: Mapping[float, float]
    pair_shares: Mapping[float, float]  # share of pairs with cosine >= key
    hardest_shares: Mapping[float, float]  # share of captions whose hardest neighbour is >= key
    width_curve: WidthCurve
    top_pairs: tuple[SimilarPair, ...]
    bin_width: float
    dtype: str
    seconds: Mapping[str, float]
    provenance: Mapping[str, Any]
    counts: np.ndarray  # int64 [bins], all pairs
    hardest_counts: np.ndarray  # int64 [bins], one per caption
    edges: np.ndarray  # float64 [bins + 1]
    ids: tuple[str, ...]  # of every caption read, excluded ones too
    hardest: np.ndarray  # float64 [len(ids)], nan where excluded
    hardest_index: np.ndarray  # int64 [len(ids)], -1 where excluded

    def frame(self) -> Any:
        """hardest.csv as a pandas frame."""
        import pandas as pd

        columns = ("index", "id", "neighbour_index", "neighbour_id", "cosine")
        return pd.DataFrame(list(_hardest_lines(self)), columns=list(columns))


def save_geometry(geometry: CaptionGeometry, folder: Path) -> list[Path]:
    """Writes the three files into ``folder`` and returns their paths. A geometry of an earlier run there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / HISTOGRAM_NAME, folder / HARDEST_NAME, folder / JSON_NAME]
    paths[2].unlink(missing_ok=True)  # an interrupted rewrite must not leave the old summary beside new arrays
    bins = zip(geometry.edges[:-1], geometry.edges[1:], geometry.counts, geometry.hardest_counts, strict=True)
    lines = ((f"{low:.4f}", f"{high:.4f}", int(pairs), int(captions)) for low, high, pairs, captions in bins)
    _write_csv(paths[0], ("low", "high", "pairs", "captions"), lines)
    _write_csv(paths[1], ("index", "id", "neighbour_index", "neighbour_id", "cosine"), _hardest_lines(geometry))
    summary = {"schema": SCHEMA, **{f.name: getattr(geometry, f.name) for f in fields(geometry) if f.name not in _ARRAYS}}
    summary["width_curve"] = asdict(geometry.width_curve)
    summary["top_pairs"] = [asdict(pair) for pair in geometry.top_pairs]
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    scratch = paths[2].with_suffix(".tmp")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(paths[2])
    return paths


def load_geometry(path: str | Path) -> CaptionGeometry:
    """Reads a geometry folder, or its geometry.json.

    Raises:
        ValueError: no geometry there, another schema, or arrays that do not belong to the summary.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not (folder / JSON_NAME).is_file():
        raise ValueError(f"'{path}' holds no {JSON_NAME}; make one with `gradscope caption-geometry DATA` and give its folder.")
    summary = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    schema = summary.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"'{folder / JSON_NAME}' has schema {schema}, not {SCHEMA}; run caption-geometry again.")
    for key in ("quantiles", "hardest_quantiles", "pair_shares", "hardest_shares"):
        summary[key] = {float(q): value for q, value in summary[key].items()}
    summary["warnings"] = tuple(summary["warnings"])
    summary["top_pairs"] = tuple(SimilarPair(**_tuples(pair)) for pair in summary["top_pairs"])
    summary["width_curve"] = WidthCurve(**_tuples(summary["width_curve"]))
    geometry = CaptionGeometry(**summary, **_read_arrays(folder))
    if geometry.counts.sum() != geometry.n_pairs or geometry.hardest_counts.sum() != geometry.n:
        raise ValueError(f"the tables in '{folder}' do not belong to its {JSON_NAME}; run caption-geometry again.")
    return geometry


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def _read_arrays(folder: Path) -> dict[str, Any]:
    bins, rows = _read_csv(folder / HISTOGRAM_NAME), _read_csv(folder / HARDEST_NAME)
    return {
        "counts": np.array([int(line[2]) for line in bins], dtype=np.int64),
        "hardest_counts": np.array([int(line[3]) for line in bins], dtype=np.int64),
        "edges": np.array([float(line[0]) for line in bins] + [float(bins[-1][1])]),
        "ids": tuple(line[1] for line in rows),
        "hardest": np.array([float(line[4]) for line in rows]),
        "hardest_index": np.array([int(line[2]) for line in rows], dtype=np.int64),
    }


def _hardest_lines(geometry: CaptionGeometry) -> Any:
    for index, (own, neighbour, cosine) in enumerate(zip(geometry.ids, geometry.hardest_index, geometry.hardest, strict=True)):
        yield index, own, int(neighbour), geometry.ids[neighbour] if neighbour >= 0 else "", float(cosine)


def _write_csv(path: Path, header: tuple[str, ...], lines: Any) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(lines)


def _read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]
