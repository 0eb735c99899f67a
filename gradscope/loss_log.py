"""Reads the loss log of another tool into the columns that rules look at.

    trainer_state.json   of a Hugging Face Trainer or sentence-transformers (its log_history)
    out.log              of open_clip; its parameter lines, or a params.txt beside it, give the softmax width
    .csv, .tsv           Lightning's metrics.csv, an export of W&B or TensorBoard, or plain columns
    .jsonl, .json        one object per line, or a list of objects

Columns are guessed by name and the guess is said; ``loss_column`` and ``step_column`` choose. Rows without a loss (evaluations) are
left out and counted, unless they hold what the row of their step lacks (Lightning logs one call in one row); of two rows with one step
the later counts. "nan" and "inf" are values, an empty cell is none. Numbers that the log rounds to a few decimals are recognised: a 0
among them need not be one. A learned scale may have been logged before exp, as CLIP holds it: see ``_scale``.

How it can mislead: tools average, smooth or sample the loss before they log it, and often not the loss of one softmax.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.judgement import unit_of
from gradscope.registry import unknown_name
from gradscope.run_tables import with_gaps
from gradscope.run_view import View

if TYPE_CHECKING:
    import pandas as pd

#: Names by falling preference, compared in lower case without "train/" and the like; then anything with "loss" in it.
LOSS = ("loss", "train_loss", "training_loss", "contrastive_loss", "clip_loss", "train_loss_step", "loss_step", "infonce_loss")
STEP = ("step", "global_step", "_step", "trainer/global_step", "iteration", "iter", "batch")
#: Our column -> what others call it.
OTHERS = {
    "epoch": ("epoch",),
    "lr": ("lr", "learning_rate", "lr-adamw", "lr-adam"),
    "grad_norm": ("grad_norm", "gradient_norm", "train/grad_norm", "grad_norm_total"),
    "scale": ("logit_scale", "train/scale", "train/logit_scale"),
    "loss_scale": ("loss_scale", "amp_scale", "train/loss_scale"),
    "skipped": ("skipped",),
}
#: What marks a column with "loss" in its name as something else.
NOT_TRAINED = re.compile(r"val|eval|test|scale|__min|__max|runtime|epoch")
WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "infinity": math.inf, "-infinity": -math.inf}

#: ln 100, where CLIP clamps its parameter, printed to two decimals.
LARGEST_LOG_SCALE = 4.61
OPEN_CLIP = "open_clip out.log"

_OPEN_CLIP = re.compile(r"Train Epoch: (?P<epoch>\d+) \[\s*(?P<samples>\d+)/(?P<total>\d+) (?P<rest>.*[Ll]oss: .*)$")
_OPEN_CLIP_PARAMETER = re.compile(r"(?m)\| INFO \|   (\w+): (\S+)\s*$")
_OPEN_CLIP_SCALE = re.compile(r"Logit Scale: (\S+)")
_OPEN_CLIP_LOSS = re.compile(r"(\w*[Ll]oss): (\S+) \(")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows as read: kind of log, one dict per row, and what the log says of the width."""

    kind: str
    rows: Sequence[Mapping[str, Any]]
    width: int | None = None
    notes: tuple[str, ...] = ()


def view_log(path: Path, *, loss_column: str | None = None, step_column: str | None = None, width: int | None = None) -> View:
    """A log of another tool as rules see it.

    Args:
        path: the file.
        loss_column, step_column: their names; None guesses.
        width: candidates per softmax, if known.

    Raises:
        ValueError: not a log, no such column, none that looks like a loss, or no row with one.
    """
    import pandas as pd

    table = read_table(path)
    frame, notes = _columns(table, path, loss_column, step_column)
    decimals = {name: n for name in ("loss", "grad_norm") if name in frame and (n := decimals_of(frame[name].tolist())) is not None}
    empty = pd.DataFrame()
    view = View(
        path=path,
        kind=table.kind,
        trained="",
        width=width or table.width,
        steps=frame,
        readings=empty,
        evals=empty,
        notes=(*table.notes, *notes),
        decimals=decimals,
    )
    return replace(view, notes=(*view.notes, *(view.rounding(name) for name in decimals if (frame[name] == 0).any())))


def decimals_of(values: Sequence[float | None]) -> int | None:
    """Digits after the point that all of the values are rounded to; None where they are not, or are too few to tell.

    Of ten and more different values at least four fifths need all of the digits, as values rounded to a grid do; or all of them are
    small multiples of it.
    """
    numbers = {value for value in values if value is not None and math.isfinite(value) and value != 0}
    digits = [max(0, -int(Decimal(repr(value)).normalize().as_tuple().exponent)) for value in numbers]
    most = max(digits, default=0)
    if not 2 <= most <= 6:
        return 1 if most == 1 and len(digits) >= 10 else None
    if max(numbers) < 20 * 10.0**-most:
        return most
    if len(digits) < 10:
        return None
    return most if digits.count(most) >= 0.8 * len(digits) else None


def read_table(path: Path) -> Table:
    """The rows of a log, by what the file looks like. Raises ValueError if it looks like none."""
    if not path.is_file():
        raise ValueError(
            f"'{path}' is neither a run nor a file; give a run directory, or a log: .csv, .jsonl, .json, open_clip's out.log"
        )
    text = _text(path)
    if not text.strip():
        raise ValueError(f"'{path}' has no rows yet; give a log with at least one training loss")
    if '"schema": "gradscope.' in text[:200]:
        raise ValueError(f"'{path}' is one table of a run; give the run directory '{path.parent}'")
    if _OPEN_CLIP.search(text[:1] and next((line for line in text.splitlines() if "Train Epoch:" in line), "")):
        return _open_clip(path, text)
    if text.lstrip()[:1] in ("{", "["):
        return _json(path, text)
    return _csv(path, text)


def _text(path: Path) -> str:
    """UTF-8 with or without its mark, or UTF-16 with its own, as Windows shells redirect."""
    content = path.read_bytes()
    try:
        return content.decode("utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"'{path}' is not text; export the log as .csv or .jsonl") from None


def _open_clip(path: Path, text: str) -> Table:
    rows = []
    for line in text.splitlines():
        found = _OPEN_CLIP.search(line)
        if not found:
            continue
        losses = {name.lower(): value for name, value in _OPEN_CLIP_LOSS.findall(found["rest"])}
        epoch, samples, total = int(found["epoch"]), int(found["samples"]), int(found["total"])
        # Its learning rate is printed to six decimals, so that 1e-7 reads 0: not taken over.
        scale = _OPEN_CLIP_SCALE.search(found["rest"])
        rows.append({"step": epoch * total + samples, "epoch": epoch, "logit_scale": scale and scale[1], **losses})
    params = path.parent / "params.txt"
    width, where = _open_clip_width(_OPEN_CLIP_PARAMETER.findall(text)), "its parameter lines"
    if width is None and params.is_file():
        lines = params.read_text(encoding="utf-8").splitlines()
        width, where = _open_clip_width([line.split(": ", 1) for line in lines if ": " in line]), "params.txt"
    notes = ("steps are counted in samples",) + ((f"softmax width {width} from {where}",) if width else ())
    return Table(kind=OPEN_CLIP, rows=rows, width=width, notes=notes)


def _open_clip_width(parameters: Iterable[Sequence[str]]) -> int | None:
    """Batch size times ranks times accumulation: open_clip's softmax spans all three. None where the batch size is not there."""
    pairs = {name: value.strip() for name, value in parameters}
    try:
        return int(pairs["batch_size"]) * int(pairs.get("world_size", 1)) * int(pairs.get("accum_freq", 1))
    except (KeyError, ValueError):
        return None


def _json(path: Path, text: str) -> Table:
    try:
        content = json.loads(text)
    except ValueError:
        rows, notes = _json_lines(path, text)
        return Table(kind="JSON lines", rows=rows, notes=notes)
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        return Table(kind="Hugging Face trainer_state.json", rows=_objects(path, content["log_history"]))
    if isinstance(content, list):
        return Table(kind="JSON list", rows=_objects(path, content))
    return Table(kind="JSON lines", rows=_objects(path, [content]))


def _json_lines(path: Path, text: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The rows, and words on a last line that is still being written."""
    rows: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if rows and number == text.count("\n") + 1:  # the writer was killed in the middle of it, or has not ended it yet
                return _objects(path, rows), ("the last line is not whole and was left out",)
            raise ValueError(f"'{path}' line {number} is not JSON; give one JSON object per line, or a .csv") from None
    return _objects(path, rows), ()


def _objects(path: Path, rows: Sequence[Any]) -> list[dict[str, Any]]:
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'\'{path}\' holds JSON that is not a list of objects; give rows such as {{"step": 1, "loss": 0.5}}')
    return list(rows)


def _csv(path: Path, text: str) -> Table:
    first = text.lstrip().split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    if first.count(separator) == 0 and "loss" in first.lower().split():
        text, separator = re.sub(r"[ \t]+", " ", re.sub(r"(?m)^[ \t]+|[ \t]+$", "", text)), " "
    if first.count(separator) == 0 and "loss" not in first.lower():
        raise ValueError(f"'{path}' is no log that is known: no JSON, no line of open_clip's, and no columns in its first line")
    reader = csv.DictReader(text.lstrip().splitlines(), delimiter=separator)
    names = [name.strip() for name in reader.fieldnames or ()]
    rows = [{name.strip(): _decimal(value, separator) for name, value in row.items() if name is not None} for row in reader]
    twice = sorted({name for name in names if names.count(name) > 1})
    notes = (f"several columns are called {', '.join(twice)}: the last of them was read",) if twice else ()
    lowered = {name.lower() for name in names}
    if {"wall time", "value"} <= lowered:
        tags = {name: "loss" if name.lower() == "value" else name.lower() for name in names}
        return Table(kind="TensorBoard export", rows=[{tags[name]: value for name, value in row.items()} for row in rows])
    return Table(kind="table of columns", rows=rows, notes=notes)


def _decimal(value: str | None, separator: str) -> str | None:
    """0,5 of a table with semicolons is a half; "1,000" of one with commas is a thousand."""
    if value is None or "," not in value:
        return value
    if separator == ",":
        return value.replace(",", "") if re.fullmatch(r"\s*-?\d{1,3}(,\d{3})+(\.\d*)?\s*", value) else value
    return value.replace(",", ".") if re.fullmatch(r"\s*-?\d*,\d+([eE][-+]?\d+)?\s*", value) else value


def _columns(table: Table, path: Path, loss_column: str | None, step_column: str | None) -> tuple[pd.DataFrame, list[str]]:
    """The frame of steps, and words on what was taken for what."""
    if not table.rows:
        raise ValueError(f"'{path}' has no rows yet; give a log with at least one training loss")
    names = list(dict.fromkeys(name for row in table.rows for name in row))
    loss, loss_words = _loss_column(path, names, loss_column)
    step = _named(path, names, step_column) if step_column else _first(names, STEP)
    guesses = {ours: _first(names, theirs) for ours, theirs in OTHERS.items()}
    chosen = {ours: name for ours, name in guesses.items() if name is not None and name not in (loss, step)}
    rows = [(number, row, value) for number, row in enumerate(table.rows, 1) if (value := _number(row.get(loss))) is not None]
    if not rows:
        raise ValueError(f"'{path}' has no number in its column '{loss}'; choose another with --loss-column: {', '.join(names)}")
    steps, step_words = _steps([row for _, row, _ in rows], [number for number, _, _ in rows], step, chosen.get("epoch"))
    kept = {
        at: {"step": at, "loss": value, **{ours: _number(row.get(name)) for ours, name in chosen.items()}}
        for at, (_, row, value) in zip(steps, rows, strict=True)
    }
    counted = step if step_words[0].startswith("step read") else None
    joined = _join(kept, [row for row in table.rows if _number(row.get(loss)) is None], counted, chosen)
    without, repeated = len(table.rows) - len(rows) - joined, len(rows) - len(kept)
    negative = sum(-math.inf < value < 0 for _, _, value in rows)
    words = [loss_words, *step_words]
    words += [word for ours, name in chosen.items() for word in _read_from(list(kept.values()), ours, name, table.kind)]
    words += [f"{joined} {unit_of(joined, 'rows')} without a loss joined to the one of the same step"] * bool(joined)
    words += [f"{without} {unit_of(without, 'rows')} without a loss left out"] * bool(without)
    words += [f"{repeated} {unit_of(repeated, 'rows')} replaced by a later one of the same step"] * bool(repeated)
    words += [
        f"{negative} {'loss is' if negative == 1 else 'losses are'} under 0, which no cross-entropy is: see --loss-column"
    ] * bool(negative)
    return with_gaps([kept[key] for key in sorted(kept)]), words


def _join(kept: dict[int, dict[str, Any]], rows: Sequence[Mapping[str, Any]], step: str | None, chosen: Mapping[str, str]) -> int:
    """Puts what rows without a loss hold where the row of the same step lacks it. Returns how many had something to give."""
    joined = 0
    for row in rows:
        at = _number(row.get(step)) if step else None
        known = kept.get(int(at)) if at is not None and math.isfinite(at) else None
        numbers = {ours: _number(row.get(name)) for ours, name in chosen.items()}
        new = {ours: value for ours, value in numbers.items() if known is not None and value is not None and known[ours] is None}
        if known is not None:
            known.update(new)
        joined += bool(new)
    return joined


def _read_from(rows: list[dict[str, Any]], ours: str, name: str, kind: str) -> list[str]:
    """Words on a column that was guessed."""
    if all(row[ours] is None for row in rows):
        return [f"no {ours}: column '{name}' holds no number for a step with a loss"]
    return [_scale(rows, name, kind) if ours == "scale" else f"{ours} read from column '{name}'"]


def _scale(rows: list[dict[str, Any]], name: str, kind: str) -> str:
    """Makes the scale the one after exp, and says what was assumed.

    A column of that name may hold CLIP's parameter, which is the logarithm of the scale and clamped at ln 100, or the scale itself,
    which starts at 14.3. open_clip prints the scale.
    """
    finite = [row["scale"] for row in rows if row["scale"] is not None and math.isfinite(row["scale"])]
    if kind == OPEN_CLIP or not finite:
        return f"scale read from column '{name}'"
    if "logit_scale" not in name.lower() or not all(0 <= value <= LARGEST_LOG_SCALE for value in finite):
        return f"scale read from column '{name}' as it is, taken to be after exp"
    for row in rows:
        row["scale"] = math.exp(row["scale"]) if row["scale"] is not None else None
    return f"scale read from column '{name}' through exp: no value is over ln 100 = {LARGEST_LOG_SCALE}, as in CLIP's parameter"


def _steps(rows: Sequence[Mapping[str, Any]], numbers: list[int], step: str | None, epoch: str | None) -> tuple[list[int], list[str]]:
    """The step of each row, and words on where it is from: its column, or the row's number."""
    if step is None:
        return numbers, ["no column of steps: rows are numbered"]
    read = [_number(row.get(step)) for row in rows]
    steps = [int(at) if at is not None and math.isfinite(at) else None for at in read]
    if epoch and _start_anew(steps, [_number(row.get(epoch)) for row in rows]):
        return numbers, [f"column '{step}' starts anew with every epoch: rows are numbered"]
    unread = sum(at is None for at in steps)
    if unread:
        return numbers, [f"column '{step}' has no whole number in {unread} of {len(steps)} rows: rows are numbered"]
    return [at for at in steps if at is not None], [f"step read from column '{step}'"]


def _start_anew(steps: Sequence[int | None], epochs: Sequence[float | None]) -> bool:
    """Whether the step falls where the epoch rises: a count within the epoch. (Of a resumed run both fall.)"""
    marks = [(at, epoch) for at, epoch in zip(steps, epochs, strict=True) if at is not None and epoch is not None]
    return any(b[0] < a[0] and b[1] > a[1] for a, b in itertools.pairwise(marks))


def _loss_column(path: Path, names: list[str], asked: str | None) -> tuple[str, str]:
    if asked:
        return _named(path, names, asked), f"loss read from column '{asked}', in nat"
    likely = [name for name in names if "loss" in name.lower() and not NOT_TRAINED.search(name.lower())]
    likely = likely or [name for name in names if re.search(r"epoch.*loss|loss.*epoch", name.lower()) and "val" not in name.lower()]
    best = _first(names, LOSS) or next((name for name in likely if "train" in name.lower()), None) or next(iter(likely), None)
    if best is None:
        raise ValueError(f"'{path}' has no column that looks like a training loss: {', '.join(names)}; choose one with --loss-column")
    others = [name for name in likely if name != best]
    more = f"; also there: {', '.join(others[:4])}{' ...' if len(others) > 4 else ''} (--loss-column)" if others else ""
    return best, f"loss read from column '{best}', taken to be in nat{more}"


def _named(path: Path, names: list[str], asked: str) -> str:
    if asked not in names:
        raise ValueError(f"'{path}': " + unknown_name("column", asked, names))
    return asked


def _first(names: list[str], wanted: Sequence[str]) -> str | None:
    """The column whose lower-case name, or its last part, is wanted first."""
    by_name = {name.lower(): name for name in reversed(names)}
    parts = {re.split(r"/| - ", name.lower())[-1].strip(): name for name in reversed(names) if not NOT_TRAINED.search(name.lower())}
    return next((found for word in wanted if (found := by_name.get(word) or parts.get(word))), None)


def _number(value: Any) -> float | None:
    """A float, words for non-finite values included; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    text = str(value).strip().lower()
    if text in WORDS:
        return WORDS[text]
    try:
        return float(text)
    except ValueError:
        return None
