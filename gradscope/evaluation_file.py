"""A retrieval result as a rich table and as a JSON file that states its protocol."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from gradscope.data.source import DataSource
from gradscope.evaluate import Embedded
from gradscope.metrics.recall import Retrieval

NAMES = {"i2t": "image to text", "t2i": "text to image"}


def retrieval_table(result: Retrieval, title: str) -> Table:
    """Rows are metrics, columns the two directions; recalls in percent with their 95 % intervals over images."""
    sizes = {row.direction: (row.n_queries, row.n_candidates) for row in result.rows}
    table = Table(title=title, caption="95 % bootstrap intervals over images; expected value under ties", title_justify="left")
    table.add_column("metric")
    for direction, name in NAMES.items():
        queries, candidates = sizes[direction]
        table.add_column(f"{name}\n{queries} queries, {candidates} candidates", justify="right")
    cells = {(row.metric, row.direction): _cell(row) for row in result.rows}
    for metric in dict.fromkeys(row.metric for row in result.rows):
        table.add_row(metric.replace("_", " "), *(cells[metric, direction] for direction in NAMES))
    return table


def _cell(row: Any) -> str:
    if row.metric.startswith("R@"):
        return f"{100 * row.value:.2f} % [{100 * row.low:.2f}, {100 * row.high:.2f}]"
    digits = 1 if row.metric == "median_rank" else 4
    return f"{row.value:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"


def write_evaluation(output: Path | None, encoder: str, source: DataSource, split: str, result: Retrieval, embedded: Embedded) -> Path:
    """The JSON beside the table; default name eval-DATA-SPLIT.json, in the encoder's folder if it is one. Returns the path."""
    from gradscope.provenance import provenance

    if output is None:
        name = f"eval-{Path(source.name).name}-{split}.json"
        output = Path(encoder) / name if Path(encoder).is_dir() else Path(f"{encoder.replace('/', '-').replace(':', '-')}-{name}")
    facts = provenance(data={"name": source.name, "split": split, "sha256": source.fingerprint(split)})
    content = {
        "schema": "gradscope.evaluation",
        "version": 1,
        "encoder": encoder,
        "metrics": [asdict(row) for row in result.rows],
        "resamples": result.resamples,
        "tied_share": {"i2t": result.i2t.tied_share, "t2i": result.t2i.tied_share},
        "truncated_captions": embedded.truncated,
        "provenance": facts,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(output)
    return output


def write_hits(path: Path, result: Retrieval) -> None:
    """Per query, for paired tests: the chance of a hit at 1 (0, 1, or between under ties) and the image it belongs to."""
    import numpy as np

    from gradscope.metrics.recall import hit_probability

    arrays: dict[str, Any] = {}
    for counts in (result.i2t, result.t2i):
        arrays[f"hit1_{counts.direction}"] = hit_probability(counts, 1)
        arrays[f"image_{counts.direction}"] = counts.image.numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
