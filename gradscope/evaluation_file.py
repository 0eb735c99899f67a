"""Retrieval results as rich tables, as a JSON file that states its protocol, and as one CSV line per query."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gradscope.compare import Comparison, Flip, caption_numbers
from gradscope.contamination import Contamination
from gradscope.data.caption_rows import RECORD_SUFFIXES
from gradscope.data.shard_names import file_label
from gradscope.data.source import DataSource
from gradscope.evaluate import Details, Embedded
from gradscope.metrics.hardness_recall import DEFINITION
from gradscope.metrics.recall import MetricRow, Retrieval, expected_rank, hit_probability
from gradscope.metrics.winners import winners
from gradscope.paths import shown_name
from gradscope.protocol import Protocol

NAMES = {"i2t": "image to text", "t2i": "text to image"}
INTERVALS = "95 % bootstrap intervals over images"

QUERY_COLUMNS = (
    "direction", "id", "caption_number", "caption", "rank", "best_rank", "tied", "hit_at_1", "truth_score",
    "winner_id", "winner_caption_number", "winner_caption", "winner_score",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything about one encoder on one gallery."""

    protocol: Protocol
    result: Retrieval
    details: Details | None = None
    contamination: Contamination | None = None


# ---- tables


def retrieval_table(result: Retrieval, title: str, protocol: Protocol | None = None) -> Table:
    """Rows are metrics, columns the two directions; recalls in percent with their 95 % intervals over images."""
    sizes = {row.direction: (row.n_queries, row.n_candidates) for row in result.rows}
    under = [INTERVALS, *(protocol.sentences() if protocol else ["expected value under ties"])]
    table = Table(title=title, caption="\n".join(under), title_justify="left", caption_justify="left")
    table.add_column("metric")
    for direction, name in NAMES.items():
        queries, candidates = sizes[direction]
        table.add_column(f"{name}\n{queries} queries, {candidates} candidates", justify="right")
    for metric in dict.fromkeys(row.metric for row in result.rows):
        table.add_row(metric.replace("_", " "), *_cells(result.rows, metric))
    return table


def _cells(rows: Iterable[MetricRow], metric: str) -> list[str]:
    """Both directions; empty where a metric has one only."""
    found = {row.direction: _cell(row) for row in rows if row.metric == metric}
    return [found.get(direction, "") for direction in NAMES]


def _cell(row: MetricRow) -> str:
    if "R@" in row.metric:
        return _percent(row.value, row.low, row.high)
    digits = 1 if row.metric == "median_rank" else 4
    return f"{row.value:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"


def _percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:.2f} % [{100 * low:.2f}, {100 * high:.2f}]"


def hardness_table(details: Details) -> Table:
    """R@1 by bins of rising hardness, both directions one below the other."""
    table = Table(title="R@1 by hardness", title_justify="left", caption=DEFINITION, caption_justify="left")
    for name in ("direction", "hardest cosine", "queries", "R@1"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    digits = _digits([(b.low_cosine, b.high_cosine) for b in details.hardness])
    for b in details.hardness:
        span = f"{b.low_cosine:.{digits}f} to {b.high_cosine:.{digits}f}"
        table.add_row(NAMES[b.direction], span, f"{b.n_queries:,}", _percent(b.value, b.low, b.high))
    return table


def _digits(spans: list[tuple[float, float]]) -> int:
    """Three, or as many as tell the two edges of every bin apart (a narrow cone has them at 0.9996 and 0.9999), at most nine."""
    unequal = [(low, high) for low, high in spans if low != high]
    return next((k for k in range(3, 9) if all(f"{low:.{k}f}" != f"{high:.{k}f}" for low, high in unequal)), 9)


def curve_table(details: Details) -> Table:
    """Expected R@1 in random smaller galleries."""
    caption = "exact expectation over random smaller galleries (negatives drawn without replacement)"
    table = Table(title="R@1 by gallery size", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("gallery", justify="right")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    for size in sorted({point.size for point in details.curve}):
        found = {p.direction: _percent(p.value, p.low, p.high) for p in details.curve if p.size == size}
        table.add_row(f"{size:,}", *(found.get(direction, "") for direction in NAMES))
    return table


def contamination_table(evaluation: Evaluation) -> Table:
    """R@1, R@5 and R@10 of the whole gallery, without the seen items, and with them as distractors only."""
    found = evaluation.contamination
    assert found is not None
    under = found.sentence if found.removed else f"{found.sentence}\nnone left without them: every item was trained on"
    table = Table(title=f"Trained on {found.trained_on}", title_justify="left", caption=under, caption_justify="left")
    table.add_column("metric")
    for name in NAMES.values():
        table.add_column(name, justify="right")
    parts = {"all": evaluation.result.rows, "seen items removed": found.removed, "seen items not asked": found.queries_only}
    for label, rows in parts.items():
        if rows:
            sizes = {row.direction: (row.n_queries, row.n_candidates) for row in rows}
            table.add_row(f"{label}: queries, candidates", *(f"{q:,}, {c:,}" for q, c in (sizes[d] for d in NAMES)))
            for metric in ("R@1", "R@5", "R@10"):
                table.add_row(f"{label}: {metric}", *_cells(rows, metric))
    return table


def comparison_table(comparison: Comparison, a: str, b: str, title: str) -> Table:
    """Paired rows; the difference is first minus second."""
    caption = f"{INTERVALS}, paired; p: exact sign test on the images whose hits differ\na: {a}\nb: {b}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("metric", "a", "b", "a - b, points", "a better : worse", "p"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for row in comparison.rows:
        difference = f"{100 * row.difference:+.2f} [{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
        recalls = (f"{100 * row.a:.2f} %", f"{100 * row.b:.2f} %")
        table.add_row(
            f"{NAMES[row.direction]} R@{row.k}", *recalls, difference, f"{row.better:,} : {row.worse:,}", f"{row.p_value:.2g}"
        )
    return table


def flip_lines(comparison: Comparison, examples: int) -> list[str]:
    """How many queries flip each way at 1, with the first few of each kind in words."""
    lines = []
    for direction, name in NAMES.items():
        for won, lost in (("a", "b"), ("b", "a")):
            flips = [f for f in comparison.flips if (f.direction, f.won) == (direction, won)]
            lines.append(f"{name}: {len(flips):,} queries that {won} gets and {lost} misses")
            lines += [f"  {_flip(flip, lost)}" for flip in flips[:examples]]
    return lines


def _flip(flip: Flip, loser: str) -> str:
    query = flip.id if flip.caption_number < 0 else f"caption {flip.caption_number} of {flip.id}"
    words = f' "{flip.caption[:80]}{"..." if len(flip.caption) > 80 else ""}"' if flip.caption else ""
    return f"{query}{words}: rank {flip.rank_a:g} under a, {flip.rank_b:g} under b; {loser} puts {flip.instead} first"


# ---- files


def evaluation_content(evaluation: Evaluation) -> dict[str, Any]:
    """The JSON of an evaluation."""
    from gradscope.provenance import provenance

    protocol, result = evaluation.protocol, evaluation.result
    data = {"name": protocol.data, "split": protocol.split, "sha256": protocol.sha256}
    content: dict[str, Any] = {
        "schema": "gradscope.evaluation",
        "version": 1,
        "encoder": protocol.encoder,
        "protocol": protocol.facts(),
        "metrics": [asdict(row) for row in result.rows],
        "resamples": result.resamples,
        "tied_share": {"i2t": result.i2t.tied_share, "t2i": result.t2i.tied_share},
        "non_finite": {"i2t": result.i2t.non_finite, "t2i": result.t2i.non_finite},
        "truncated_captions": protocol.truncated,
    }
    if evaluation.details:
        content["hardness"] = {"definition": DEFINITION, "bins": [asdict(b) for b in evaluation.details.hardness]}
        content["gallery_curve"] = [asdict(point) for point in evaluation.details.curve]
    if evaluation.contamination:
        content["contamination"] = asdict(evaluation.contamination)
    return {**content, "provenance": provenance(data=data)}


def comparison_content(comparison: Comparison, a: Protocol, b: Protocol) -> dict[str, Any]:
    """The JSON of a comparison."""
    from gradscope.provenance import provenance

    data = {"name": a.data, "split": a.split, "sha256": a.sha256}
    sides = {"a": a.facts(), "b": b.facts()}
    return {
        "schema": "gradscope.comparison",
        "version": 1,
        **sides,
        **asdict(comparison),
        "provenance": provenance(data=data),
    }


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def default_path(encoder: str, data: str, split: str, label: str = "") -> Path:
    """eval-DATA-SPLIT[-LABEL].json, in the encoder's folder if it is one. A split may be called anything: slashes become hyphens."""
    name = f"eval-{data_label(data, split)}{f'-{label}' if label else ''}.json"
    return Path(encoder) / name if Path(encoder).is_dir() else Path(f"{encoder.replace('/', '-').replace(':', '-')}-{name}")


def data_label(data: str, split: str) -> str:
    """DATA-SPLIT for the names of files; a list of records goes without its ending."""
    label, plain = file_label(data), split.replace("/", "-").replace("\\", "-")
    kind = Path(label).suffix
    return f"{label.removesuffix(kind) if kind.lower() in RECORD_SUFFIXES else label}-{plain}"


def comparison_path(a: str, b: str, data: str, split: str) -> Path | None:
    """compare-DATA-SPLIT-with-B.json beside the first model, where that is a folder or a file; None where it has no place on disk."""
    place = Path(a) if Path(a).is_dir() else Path(a).parent if Path(a).is_file() else None
    stem = f"{Path(a).stem}-" if Path(a).is_file() else ""
    other = Path(b).stem if Path(b).is_file() else Path(b).name.replace(":", "-")
    return None if place is None else place / f"{stem}compare-{data_label(data, split)}-with-{other}.json"


def not_over_other_data(path: Path, sha256: str) -> Path:
    """``path``, or with the first digits of the data's sha256 in its name where the file that is there holds other data's numbers:
    two data sets whose files are called alike would overwrite each other."""
    try:
        there = json.loads(path.read_text(encoding="utf-8"))["provenance"]["data"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return path
    return path if there == sha256 else path.with_name(f"{path.stem}-{sha256[:8]}{path.suffix}")


def write_evaluation(output: Path | None, encoder: str, source: DataSource, split: str, result: Retrieval, embedded: Embedded) -> Path:
    """The JSON of an evaluation of all records of a split; default name as in ``default_path``. Returns the path."""
    protocol = Protocol(
        encoder=encoder,
        data=shown_name(source.name),
        split=split,
        sha256=source.fingerprint(split),
        images=len(embedded.ids),
        captions=len(embedded.text),
        expected=len(source.records(split)),
        missing=0,
        bad=0,
        context=embedded.context,
        truncated=embedded.truncated,
        preprocessing=embedded.preprocessing,
        precision=embedded.precision,
    )
    path = default_path(encoder, source.name, split) if output is None else output
    return write_json(path, evaluation_content(Evaluation(protocol=protocol, result=result)))


def write_queries(path: Path, embedded: Embedded, result: Retrieval) -> None:
    """One CSV line per query of both directions: the rank of the truth, its score, and who won (columns QUERY_COLUMNS).

    ``rank`` is the expected place, ``best_rank`` the place if every tie went the truth's way, ``tied`` the negatives that tie with it.
    Empty cells name no winner: no score of the query is finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(QUERY_COLUMNS)
        writer.writerows(_query_lines(embedded, result))
    partial.replace(path)


def _query_lines(embedded: Embedded, result: Retrieval) -> Iterable[tuple[Any, ...]]:
    owner = embedded.image_of_text.cpu().numpy()
    number = caption_numbers(owner)
    found = winners(embedded.image, embedded.text, embedded.image_of_text)

    def image(row: int) -> tuple[Any, ...]:
        return ("", "", "") if row < 0 else (embedded.ids[row], "", "")

    def text(row: int) -> tuple[Any, ...]:
        string = embedded.captions[row] if embedded.captions else ""
        return ("", "", "") if row < 0 else (embedded.ids[owner[row]], int(number[row]), string)

    for counts, won in zip((result.i2t, result.t2i), found, strict=True):
        rank, hit = expected_rank(counts), hit_probability(counts, 1)
        query, candidate = (image, text) if counts.direction == "i2t" else (text, image)
        for q in range(counts.n_queries):
            places = (float(rank[q]), int(counts.greater[q]) + 1, int(counts.ties[q]), float(hit[q]), float(won.truth_score[q]))
            yield counts.direction, *query(q), *places, *candidate(int(won.winner[q])), float(won.winner_score[q])


def write_hits(path: Path, result: Retrieval) -> None:
    """Per query, for paired tests: the chance of a hit at 1 (0, 1, or between under ties) and the image it belongs to."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for counts in (result.i2t, result.t2i):
        arrays[f"hit1_{counts.direction}"] = hit_probability(counts, 1)
        arrays[f"image_{counts.direction}"] = counts.image.numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
