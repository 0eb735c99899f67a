"""gradscope diagnose: logs of other tools read as their own libraries write them, the view's windows, ranking, muting, what is said."""

from __future__ import annotations

import csv
import inspect
import json
import logging
import math
import random
import re
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hand_run import hand_run
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.diagnose import diagnose, look
from gradscope.judgement import unit_of
from gradscope.loss_log import decimals_of, read_table, view_log
from gradscope.quantities import needs, quantity_set
from gradscope.recording import SETS, TIERS, recorded_by
from gradscope.rules import SEVERITIES, rules, told
from gradscope.run_view import Series, Unmeasured
from gradscope.runlog import RunLog
from gradscope.types import NEED_CELLS

STEPS = 60
run = CliRunner().invoke


def ids(path: Path, **settings: object) -> list[str]:
    return [finding.id for finding in diagnose(look(path, **settings)).findings]  # type: ignore[arg-type]


def losses(of_step: object = 0.5, spread: float = 0.1) -> list[float]:
    """Sixty of them, within ``spread`` of a value or of a function of the step."""
    draw = np.random.default_rng(secrets.randbits(32))
    value = of_step if callable(of_step) else lambda step: of_step
    return [float(value(step) * draw.uniform(1 - spread, 1 + spread)) for step in range(1, STEPS + 1)]


def write_csv(path: Path, rows: list[dict], separator: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for row in rows for name in row)), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return path


# ---- logs as the tools themselves write them


def test_trainer_state_of_hugging_face(tmp_path: Path) -> None:
    """Written by transformers itself: losses every 10 steps, evaluations in between."""
    from transformers.trainer_callback import TrainerState

    values = losses()
    state = TrainerState()
    for step, value in enumerate(values, 1):
        log = {"epoch": step / 20, "grad_norm": 0.5, "learning_rate": 1e-5, "loss": value, "step": step * 10}
        state.log_history += [log, {"epoch": step / 20, "eval_loss": 9.0, "eval_runtime": 1.0, "step": step * 10}]
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    view = look(tmp_path / "trainer_state.json")
    assert view.kind == "Hugging Face trainer_state.json"
    assert view.steps["loss"].tolist() == pytest.approx(values)
    assert view.steps["step"].tolist() == [10 * step for step in range(1, STEPS + 1)]
    assert view.steps["lr"].tolist() == [1e-5] * STEPS
    assert view.column("loss").recent(6).values == pytest.approx(values[-6:])
    assert f"{STEPS} rows without a loss left out" in view.notes
    assert not diagnose(view).findings


def test_metrics_of_lightning(tmp_path: Path) -> None:
    """Written by Lightning's own logger: one row per logged step, an epoch's values in rows of their own."""
    from lightning.fabric.loggers import CSVLogger

    values = losses()
    logger = CSVLogger(root_dir=tmp_path, name="", version="", flush_logs_every_n_steps=1000)
    for step, value in enumerate(values):
        logger.log_metrics({"train_loss": value, "epoch": step // 20}, step=step)
        if step % 20 == 19:
            logger.log_metrics({"val_loss": 9.0, "epoch": step // 20}, step=step + 1000)
    logger.save()
    view = look(tmp_path / "metrics.csv")
    assert view.steps["loss"].tolist() == pytest.approx(values)
    assert view.column("loss").recent(6).where.endswith("epoch 2 (20 steps)")
    assert any("loss read from column 'train_loss'" in note for note in view.notes)
    assert not diagnose(view).findings


def open_clip_log(folder: Path, values: list[float], *, params: str = "") -> Path:
    """Through open_clip's own logging set-up, in the words of its training loop."""
    from open_clip_train.logger import setup_logging

    root = logging.root
    before = list(root.handlers), root.level
    setup_logging(str(folder / "out.log"), logging.INFO)
    logging.info("Running with a single process. Device cpu.")
    for step, value in enumerate(values):
        logging.info(
            f"Train Epoch: {step // 30} [{256 * (step % 30 + 1):>5}/7680 ({100 * (step % 30) / 30:.0f}%)] "
            f"Data (t): {0.1:.3f} Batch (t): {0.5:.3f}, {512:#g}/s, {512:#g}/s/gpu LR: {5e-7:5f} Logit Scale: {14.286:.3f} "
            f"Contrastive_loss: {value:#.5g} ({value:#.5g}) Loss: {value:#.5g} ({value:#.5g})"
        )
    logging.info("Eval Epoch: 1 [128 / 1000]\tClip Loss: 9.000000\t")
    for handler in [h for h in root.handlers if h not in before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[1])
    if params:
        (folder / "params.txt").write_text(params)
    return folder / "out.log"


def test_out_log_of_open_clip(tmp_path: Path) -> None:
    values = losses(0.7)
    path = open_clip_log(tmp_path, values, params="accum_freq: 2\nbatch_size: 64\nname: run: 1\nworld_size: 2\n")
    view = look(path)
    assert (view.kind, view.width) == ("open_clip out.log", 256)
    assert view.steps["loss"].tolist() == pytest.approx(values, rel=1e-4)
    assert view.steps["step"].tolist() == [256 * step for step in range(1, STEPS + 1)]
    assert "lr" not in view.steps, "printed to six decimals: 5e-7 would read 0.000001 or 0"
    assert not diagnose(view).findings
    (tmp_path / "params.txt").unlink()
    assert look(path).width is None


def test_the_folder_of_a_log_will_do(tmp_path: Path) -> None:
    open_clip_log(tmp_path, losses(), params="batch_size: 64\n")
    assert look(tmp_path).path == tmp_path / "out.log"
    write_csv(tmp_path / "metrics.csv", [{"step": 1, "loss": 1.0}])
    with pytest.raises(ValueError, match="not a run directory"):
        look(tmp_path)  # two logs: which one?


def test_an_open_clip_log_at_chance_and_one_that_prints_zero(tmp_path: Path) -> None:
    for name, value, expected in (("chance", math.log(256), ["GS016"]), ("zero", 0.0, ["GS002", "GS004"])):
        (tmp_path / name).mkdir()
        path = open_clip_log(tmp_path / name, [value] * STEPS, params="batch_size: 256\n")
        assert ids(path) == expected


@pytest.mark.parametrize(
    ("name", "rows", "column"),
    [
        ("plain.csv", lambda v, s: {"step": s, "loss": v}, "loss"),
        ("plain.tsv", lambda v, s: {"iteration": s, "contrastive_loss": v, "val_loss": 9.0}, "contrastive_loss"),
        (
            "wandb.csv",
            lambda v, s: {"Step": s, "run 1 - train/loss": v, "run 1 - train/loss__MIN": v, "run 1 - train/loss__MAX": 9.0},
            "",
        ),
        ("tensorboard.csv", lambda v, s: {"Wall time": 1e9 + s, "Step": s, "Value": v}, "loss"),
        (
            "history.jsonl",
            lambda v, s: {"_step": s, "train/clip_loss": v, "train/logit_scale": 100.0, "_runtime": 1.0},
            "train/clip_loss",
        ),
        ("list.json", lambda v, s: {"global_step": s, "train_loss": v, "eval_loss": 9.0}, "train_loss"),
    ],
)
def test_columns_are_guessed_and_said(name: str, rows: object, column: str, tmp_path: Path) -> None:
    values = losses()
    table = [rows(value, step) for step, value in enumerate(values, 1)]  # type: ignore[operator]
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps(table))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        write_csv(path, table, "\t" if name.endswith(".tsv") else ",")
    view = look(path)
    assert view.steps["loss"].tolist() == pytest.approx(values)
    assert view.steps["step"].tolist() == list(range(1, STEPS + 1))
    assert any(f"loss read from column '{column or 'run 1 - train/loss'}'" in note for note in view.notes)
    assert not diagnose(view).findings


def test_what_is_missing_repeated_or_not_finite_is_counted(tmp_path: Path) -> None:
    rows: list[dict] = [{"step": step, "loss": 0.5} for step in range(1, 41)]
    rows += [{"step": 40, "loss": 0.25}, {"step": 41, "loss": ""}, {"step": 42, "loss": "nan"}, {"step": 43, "loss": "inf"}]
    view = look(write_csv(tmp_path / "log.csv", rows))
    assert "1 row without a loss left out" in view.notes
    assert "1 row replaced by a later one of the same step" in view.notes
    assert view.steps.set_index("step").loc[40, "loss"] == 0.25
    assert math.isnan(view.steps["loss"].iloc[-2])
    assert math.isinf(view.steps["loss"].iloc[-1])
    assert ids(tmp_path / "log.csv") == ["GS025"]
    assert diagnose(view).findings[0].evidence[0].value == 2


def sparse_log(path: Path, cell: object = None, *, own_rows: bool = False) -> Path:
    """A healthy log with a gradient norm at every tenth step, ``cell`` (None: left out) at the 41st, and a scale at every third.

    ``own_rows``: norm and scale in rows of their own, as Lightning logs what two calls gave it.
    """
    rows: list[dict] = []
    for step, value in enumerate(losses(), 1):
        sparse = {"grad_norm": 0.4} if step % 10 == 0 else {"grad_norm": cell} if step == 41 and cell is not None else {}
        sparse |= {"logit_scale": 50.0} if step % 3 == 0 else {}
        parts = [{"loss": value}, sparse] if own_rows else [{"loss": value, **sparse}]
        rows += [{"step": step, **part} for part in parts if part]
    if path.suffix == ".csv":
        return write_csv(path, rows)
    whole = json.dumps({"log_history": rows}) if path.name == "trainer_state.json" else "".join(json.dumps(r) + "\n" for r in rows)
    path.write_text(whole)
    return path


@pytest.mark.parametrize("name", ["metrics.csv", "history.jsonl", "trainer_state.json"])
@pytest.mark.parametrize("own_rows", [False, True], ids=["one-row", "own-rows"])
def test_a_missing_cell_is_no_nan_and_a_written_one_is(name: str, own_rows: bool, tmp_path: Path) -> None:
    view = look(sparse_log(tmp_path / name, own_rows=own_rows), width=16)
    assert not diagnose(view).findings
    assert view.column("grad_norm").steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert view.column("scale").whole().values.tolist() == [50.0] * 20
    assert run(app, ["check", str(view.path), "--no-findings", "error"]).exit_code == 0
    for written in ("nan", math.nan, math.inf):
        found = diagnose(look(sparse_log(tmp_path / name, written, own_rows=own_rows))).findings
        assert [finding.id for finding in found] == ["GS025"]
        assert (found[0].evidence[0].value, found[0].evidence[0].where) == (1, "column grad_norm, first at step 41")


def test_rows_of_one_step_are_joined_and_counted(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5, "lr": ""}, {"step": 1, "loss": "", "lr": 1e-5}, {"step": 2, "loss": 0.5}, {"step": 3, "lr": 1.0}]
    view = look(write_csv(tmp_path / "log.csv", [*rows, {"step": 2, "val_loss": 1.0, "grad_norm": ""}]))
    assert "1 row without a loss joined to the one of the same step" in view.notes
    assert "2 rows without a loss left out" in view.notes
    assert "no grad_norm: column 'grad_norm' holds no number for a step with a loss" in view.notes
    assert view.column("lr").values.tolist() == [1e-5]


def test_out_log_with_lines_that_lack_the_scale(tmp_path: Path) -> None:
    path = open_clip_log(tmp_path, losses(0.7), params="batch_size: 64\n")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line if i % 3 else line.replace("Logit Scale: 14.286 ", "") for i, line in enumerate(lines)))
    view = look(path)
    assert 30 < len(view.column("scale").values) < STEPS
    assert not diagnose(view).findings


@pytest.mark.parametrize(
    ("name", "value", "read", "said"),
    [
        ("logit_scale", math.log(100), 100.0, "through exp: no value is over ln 100 = 4.61"),
        ("train/logit_scale", 2.66, math.exp(2.66), "through exp"),
        ("logit_scale", 14.286, 14.286, "as it is, taken to be after exp"),
        ("train/scale", 4.0, 4.0, "as it is, taken to be after exp"),
    ],
)
def test_which_scale_was_read_is_said(name: str, value: float, read: float, said: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [{"step": k, "loss": 0.5, name: "" if k % 2 else value} for k in range(40)])
    view = look(path)
    assert view.column("scale").values == pytest.approx([read] * 20)
    assert any(note.startswith(f"scale read from column '{name}' {said}") for note in view.notes)


def test_a_logarithm_of_the_scale_is_judged_as_the_scale_and_open_clip_prints_the_scale(tmp_path: Path) -> None:
    """From 10 to 90 in a saturated log: GS031 sees the growth; 2.3 to 4.5 would be none."""
    rows = [{"step": k, "loss": 1e-5, "logit_scale": math.log(10 + 80 * k / 59)} for k in range(60)]
    assert "GS031" in ids(write_csv(tmp_path / "log.csv", rows), width=16)
    path = open_clip_log(tmp_path, losses(0.7))
    path.write_text(path.read_text().replace("Logit Scale: 14.286", "Logit Scale: 4.000"))
    assert set(look(path).column("scale").values) == {4.0}


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("step,loss\n{}", "utf-16"),  # redirected by a Windows shell
        ("step loss\n{}", "utf-8"),
        ("  step   loss\n{}", "utf-8-sig"),
        ("step;loss;lr\n{}", "utf-8"),
        ("\n\nstep\tloss\n{}", "utf-8"),
    ],
    ids=["utf16", "spaces", "more-spaces", "decimal-commas", "blank-lines-first"],
)
def test_tables_as_other_programs_write_them(text: str, encoding: str, tmp_path: Path) -> None:
    values = losses()
    separator = next(mark for mark in ";,\t " if mark in text.strip())
    cell = (lambda value: f"{value}".replace(".", ",")) if separator == ";" else str
    rows = "".join(separator.join([str(step), cell(value)]) + "\n" for step, value in enumerate(values, 1))
    (tmp_path / "log.csv").write_bytes(text.format(rows).encode(encoding))
    view = look(tmp_path / "log.csv")
    assert view.steps["loss"].tolist() == pytest.approx(values)
    assert view.steps["step"].tolist() == list(range(1, STEPS + 1))


def test_steps_with_thousands_and_a_column_named_twice(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,loss\n" + "".join(f'"{step:,}",1.0,0.5\n' for step in range(990, 1030)))
    view = look(tmp_path / "log.csv")
    assert view.steps["step"].tolist() == list(range(990, 1030))
    assert view.steps["loss"].tolist() == [0.5] * 40
    assert "several columns are called loss: the last of them was read" in view.notes


def test_steps_that_start_anew_with_every_epoch_lose_no_row(tmp_path: Path) -> None:
    rows = [{"epoch": epoch, "batch": batch, "loss": 0.5} for epoch in range(3) for batch in range(20)]
    view = look(write_csv(tmp_path / "log.csv", rows))
    assert len(view.steps) == 60
    assert "column 'batch' starts anew with every epoch: rows are numbered" in view.notes


def test_a_resumed_log_counts_the_later_rows(tmp_path: Path) -> None:
    """Killed in epoch 2, resumed from the end of epoch 1: the steps after it come twice."""
    first = [{"epoch": step // 20, "step": step, "loss": 1.0} for step in range(55)]
    again = [{"epoch": step // 20, "step": step, "loss": 0.5} for step in range(40, 70)]
    view = look(write_csv(tmp_path / "log.csv", first + again))
    assert view.steps["loss"].tolist() == [1.0] * 40 + [0.5] * 30
    assert "15 rows replaced by a later one of the same step" in view.notes


def test_a_log_that_is_still_being_written(tmp_path: Path) -> None:
    whole = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(40))
    (tmp_path / "log.jsonl").write_text(whole + '{"step": 40, "lo')
    view = look(tmp_path / "log.jsonl")
    assert len(view.steps) == 40
    assert "the last line is not whole and was left out" in view.notes


def test_losses_under_zero_are_no_saturation(tmp_path: Path) -> None:
    view = look(write_csv(tmp_path / "log.csv", [{"step": step, "loss": -0.5} for step in range(40)]))
    assert not diagnose(view).findings
    assert any(note.startswith("40 losses are under 0") for note in view.notes)


PARAMETERS = "".join(
    f"2026-01-01,00:00:00 | INFO | {line}\n"
    for line in ("Params:", "  accum_freq: 2", "  batch_size: 32", "  logs: ./logs/", "  name: a b: c", "  world_size: 4")
)


def test_the_width_is_read_from_the_parameter_lines_of_open_clip(tmp_path: Path) -> None:
    log = open_clip_log(tmp_path, losses(0.5))
    log.write_text(PARAMETERS + log.read_text())
    view = look(log)
    assert view.width == 256
    assert "softmax width 256 from its parameter lines" in view.notes


def test_a_zero_of_a_log_of_four_decimals_is_no_zero(tmp_path: Path) -> None:
    """Neither the loss nor the gradient norm is said to be 0: what the log shows is that both are under 5e-5."""
    rows = [{"step": k, "loss": f"{2.7 * 0.93**k:.4f}", "grad_norm": f"{0.5 * 0.9**k:.4f}"} for k in range(300)]
    path = write_csv(tmp_path / "log.csv", rows)
    assert look(path).decimals == {"loss": 4, "grad_norm": 4}
    assert ids(path) == ["GS003"]
    said = " ".join(run(app, ["diagnose", str(path)]).output.split())
    assert "SATURATED loss under 5e-05 nat (median)" in said
    assert "the log rounds the loss to 4 decimals, so that its 0 is anything under 5e-05" in said


def test_a_log_of_two_decimals_tells_of_no_saturation(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [{"step": k, "loss": f"{2.7 * 0.93**k:.2f}"} for k in range(300)])
    assert ids(path) == []
    assert "not to be judged: the log rounds the loss to 2 decimals" in " ".join(run(app, ["diagnose", str(path)]).output.split())


@pytest.mark.parametrize(
    ("form", "decimals"), [("{:.3f}", 3), ("{:.6f}", 6), ("{:.5g}", None), ("{!r}", None), ("{:.8f}", None), ("{:.1e}", None)]
)
def test_decimals_are_those_of_the_format(form: str, decimals: int | None) -> None:
    draw = random.Random(secrets.randbits(32))
    values = [float(form.format(10 ** draw.uniform(-3, 1))) for _ in range(400)]
    assert decimals_of([*values, 0.0, math.nan, None]) == decimals
    assert decimals_of([0.5] * 100) is None, "one value is no grid"
    assert decimals_of([0.0, 0.0001, 0.0003] * 20) == 4, "few values next to the grid are"
    assert decimals_of([0.0] * 100) is None
    assert decimals_of([2**-23, 0.0, 2**-22]) is None, "multiples of an fp32 rounding"


@pytest.mark.parametrize(
    ("count", "units", "unit"),
    [(1, "measured batches", "measured batch"), (2, "steps", "steps"), (1, "rows", "row"), (1, "nat", "nat"), (0, "rows", "rows")],
)
def test_one_is_one(count: int, units: str, unit: str) -> None:
    assert unit_of(count, units) == unit


@pytest.mark.parametrize(
    ("below", "anchors", "steps", "said"),
    [
        (1.0, 1.0, 40, "SATURATED loss 0.4 nat (median), 100% of batches and 100% of anchors under 1e-3 (epoch 2: 10 measured"),
        (0.3, 0.4, 40, "partly saturated loss 0.4 nat (median), 30% of batches and 40% of anchors under 1e-3"),
        (0.0, 0.85, 40, "partly saturated loss 0.4 nat (median), 0% of batches and 85% of anchors under 1e-3"),
        (0.0, 0.2, 40, "not saturated loss 0.4 nat"),
        (1.0, 1.0, 9, "too few measured batches to judge (5)"),
    ],
)
def test_the_first_lines_say_the_state(below: float, anchors: float, steps: int, said: str, tmp_path: Path) -> None:
    readings = {("saturation", "below_1e-3", "*"): below, ("saturation", "rows_below_1e-3.*", "*"): anchors}
    path = hand_run(tmp_path / "run", readings, steps=steps)
    done = run(app, ["diagnose", str(path), "--json", str(tmp_path / "out.json")])
    assert f"(run; InfoNCE; width 64): {said}" in " ".join(done.output.split())
    state = json.loads((tmp_path / "out.json").read_text())["runs"][0]["state"]
    assert (state["anchors"], state["batches"]) == ((None, None) if steps == 9 else (pytest.approx(anchors), pytest.approx(below)))


def test_what_the_probe_said_of_a_failure_is_evidence(tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run", {("gap", "failed", ""): 1.0})
    (path / "console.log").write_text("step 1: 'gap' of the probe failed: ValueError: no such margin\n")
    finding = diagnose(look(path)).findings[0]
    assert finding.evidence[0].what == "failures of 'gap' (no such margin)"


def test_empty_files_and_folders_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("\n")
    with pytest.raises(ValueError, match="has no rows yet; give a log"):
        look(tmp_path / "empty.csv")
    with pytest.raises(ValueError, match=r"written by gradscope train or gradscope\.Probe\.$"):
        look(tmp_path)


def test_lines_of_older_open_clip_versions(tmp_path: Path) -> None:
    """The loss stood before the scale, and nothing behind it."""
    line = "Train Epoch: 0 [{:>5}/40000 (1%)] Loss: {:#.5g} (2.1) Data (t): 0.1 Batch (t): 0.9, 71.1/s LR: 0.000010 Logit Scale: 71.2\n"
    values = losses()
    (tmp_path / "out.log").write_text("".join("2023-01-01 | INFO | " + line.format(64 * k, v) for k, v in enumerate(values)))
    view = look(tmp_path / "out.log")
    assert view.kind == "open_clip out.log"
    assert view.steps["loss"].tolist() == pytest.approx(values, rel=1e-4)
    assert view.steps["scale"].tolist() == [71.2] * len(values)


@pytest.mark.parametrize(
    ("of_step", "settings", "expected"),
    [
        (1e-5, {}, ["GS003"]),
        (1e-5, {"width": 32}, ["GS001"]),
        (1e-5, {"width": 4096}, ["GS002"]),
        (0.0, {}, ["GS003", "GS004"]),
        (math.log(32), {"width": 32}, ["GS016"]),
        (math.log(32), {}, []),  # without the width nobody can know
        (lambda step: 0.3 if step < 30 else 3.0, {"width": 32}, ["GS029"]),
        (lambda step: 3.0 if step % 9 == 0 else 0.3, {"width": 32}, []),  # spikes
        (lambda step: 4.0 * 0.95**step + 0.1, {"width": 32}, []),
    ],
)
def test_what_a_loss_alone_tells(of_step: object, settings: dict, expected: list[str], tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [{"step": step, "loss": v} for step, v in enumerate(losses(of_step, 0.005), 1)])
    assert ids(path, **settings) == expected


def test_a_long_log_is_read_in_little_memory(tmp_path: Path) -> None:
    """100,000 steps; the loss is up from step 60,001 on."""
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{k},{0.3 if k <= 60_000 else 3.0}\n" for k in range(1, 100_001)))
    assert ids(tmp_path / "log.csv", width=32) == ["GS029"]


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [{"n": 5 * s, "loss": 1.0, "other": 2.0} for s in range(1, 9)])
    view = view_log(path, loss_column="other", step_column="n")
    assert view.steps["loss"].tolist() == [2.0] * 8
    assert view.steps["step"].tolist() == [5 * s for s in range(1, 9)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("log.csv", "step,acc\n1,2\n", "no column that looks like a training loss: step, acc"),
        ("log.csv", "step,loss\n", "has no rows yet"),
        ("trainer_state.json", '{"log_history": []}', "has no rows yet"),
        ("log.csv", "step,loss\n1,\n2,x\n", "no number in its column 'loss'"),
        ("notes.txt", "a quiet day\n", "is no log that is known"),
        ("log.jsonl", '{"loss": 1}\nnot json\n', "line 2 is not JSON"),
        ("log.json", "[1, 2]", "not a list of objects"),
        ("steps.jsonl", '{"schema": "gradscope.steps", "version": 1}\n', "give the run directory"),
    ],
)
def test_what_is_no_log_is_one_sentence(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        look(tmp_path / name)


def test_what_does_not_apply_is_refused(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [{"step": 1, "loss": 1.0}])
    with pytest.raises(ValueError, match=re.escape("unknown column 'los'. Did you mean 'loss'")):
        look(log, loss_column="los")
    with pytest.raises(ValueError, match="--width is for logs of other tools"):
        look(hand_run(tmp_path / "run"), width=16)
    with pytest.raises(ValueError, match="neither a run nor a file"):
        look(tmp_path / "nothing")
    with pytest.raises(ValueError, match="unknown rule 'GS999'"):
        diagnose(look(log), ["GS999"])
    with pytest.raises(ValueError, match="not a run directory"):
        look(tmp_path)
    (tmp_path / "bytes.log").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        read_table(tmp_path / "bytes.log")


# ---- windows


def test_windows_are_the_last_epoch_or_the_last_so_many() -> None:
    def series(epochs: list[float], values: list[float]) -> Series:
        steps = np.arange(1, len(values) + 1)
        return Series(name="x", unit="steps", missing="?", steps=steps, epochs=np.array(epochs), values=np.array(values))

    nan = math.nan
    two = series([1, 1, 1, 2, 2, 2], [0, 1, 2, 3, nan, 5])
    assert two.whole().values.tolist() == [0, 1, 2, 3, 5]
    assert two.recent(2).values.tolist() == [3, 5]
    assert two.recent(4).values.tolist() == [1, 2, 3, 5]
    assert "epoch 2 (2 steps)" in two.recent(2).where
    assert "end of the run (4 steps)" in two.recent(4).where
    with pytest.raises(Unmeasured, match="x has 5 steps, at least 6 are needed"):
        two.recent(6)
    assert two.recent(2).left_out == 1
    broken = series([1, 1, 1, 2, 2, 2], [0, 1, 2, nan, nan, nan])
    assert (broken.recent(2).values.tolist(), broken.recent(2).left_out) == ([1, 2], 3)
    unknown = series([nan] * 8, list(range(8)))
    assert unknown.recent(2).values.tolist() == [6, 7]
    with pytest.raises(Unmeasured, match="x is not in the log; \\?"):
        series([], []).recent()


def test_a_step_without_a_row_was_not_skipped(tmp_path: Path) -> None:
    """In a loop that is not ours only probed and skipped steps are written."""
    from gradscope.runlog import RunLog

    logged = {1: 0, 4: 1, 6: 0, 9: 1}
    with RunLog.create(tmp_path / "run", recipe_toml="", provenance={"width": 8, "loop": "not gradscope's"}) as log:
        log.write_steps([{"step": s, "samples": 8 * s, "epoch": 1 + (s > 5), "loss": None, "skipped": k} for s, k in logged.items()])
    every = look(tmp_path / "run").skipped()
    assert every.steps.tolist() == list(range(1, 10))
    assert every.values.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert every.epochs.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 2]


def test_a_row_may_count_several_skipped_steps(tmp_path: Path) -> None:
    """A fused optimizer tells of skipped steps at the next probed one only: 3 of 10 in each row are a third, not none."""
    from gradscope.runlog import RunLog

    with RunLog.create(tmp_path / "run", recipe_toml="", provenance={"width": 8, "loop": "not gradscope's"}) as log:
        log.write_steps([{"step": s, "samples": 8 * s, "epoch": 1, "loss": None, "skipped": 3} for s in range(10, 61, 10)])
    every = look(tmp_path / "run").skipped()
    assert every.steps.tolist() == list(range(8, 61))
    assert every.values.sum() == 18
    assert ids(tmp_path / "run") == ["GS012"]


def test_readings_at_fixed_weights_are_of_nothing_trained(tmp_path: Path) -> None:
    """As ``gradscope probe`` writes them: no rate, no update."""
    hn = {"objective.name": "hn", "objective.gamma": 0.5}
    beaten = {("gap", "violated_with_margin.*", "hn"): 1.0, ("captions", "margin_logits", ""): 40.0, ("loss", "true", "hn"): 25.0}
    path = hand_run(tmp_path / "run", beaten, recipe=hn, columns={"lr": None, "skipped": None})
    view = look(path)
    assert (view.trained, view.term) == ("", "infonce")
    assert not diagnose(view).findings


# ---- the command


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    changes = {("saturation", "below_1e-3", "*"): 1.0, ("loss", "trained", "*"): 0.0, ("zeros", "unused.parameters", "*"): 2.0}
    return hand_run(tmp_path / "broken", changes)


def test_findings_are_ranked_and_said_with_their_evidence(broken: Path, tmp_path: Path) -> None:
    healthy = hand_run(tmp_path / "healthy")
    done = run(app, ["diagnose", str(broken), str(healthy), "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert [done.output.index(word) for word in ("GS024 error", "GS001 warning", "GS004 note")] == sorted(
        done.output.index(word) for word in ("GS024 error", "GS001 warning", "GS004 note")
    )
    assert "1 error, 1 warning, 1 note" in done.output
    assert "nothing found" in done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["schema"], content["version"]) == ("gradscope.diagnosis", 1)
    first, second = content["runs"]
    assert [finding["id"] for finding in first["findings"]] == ["GS024", "GS001", "GS004"]
    assert not second["findings"]
    for row in (first, second):
        told = {f["id"] for f in row["findings"]} | set(row["silent"]) | set(row["unmeasured"])
        assert told == set(rules.names())


def test_muted_rules_are_left_out_and_said(broken: Path) -> None:
    done = run(app, ["diagnose", str(broken), "--mute", "GS024,gs001", "--mute", "GS004"])
    assert done.exit_code == 0
    assert "nothing found" in done.output
    assert "Muted: GS001, GS004, GS024." in done.output


def test_what_could_not_be_looked_at_is_said(tmp_path: Path) -> None:
    unread = str(hand_run(tmp_path / "run", probed=False, recipe={"probe.log_grads": False}))
    short, long = (" ".join(run(app, ["diagnose", unread, *more]).output.split()) for more in ([], ["--unmeasured"]))
    assert short.endswith("13 had too little to look at (--unmeasured lists them).")
    assert "--log-grads records it" not in short
    assert long.startswith(short)
    assert "--log-grads records it" in long


OWN = {"kind": "run", "own": True}
PROBE = {"kind": "run", "own": False}


@pytest.mark.parametrize(
    ("quantity", "key", "probe", "who", "words"),
    [
        ("saturation", "below_1e-3", {"log_grads": False, "set": "full"}, OWN, "--log-grads records it"),
        ("optimizer", "stale", {"log_grads": True, "set": "default"}, OWN, "--probe-set full records it"),
        ("zeros", "entries.parameters", {"log_grads": False, "set": "loss"}, OWN, "--log-grads and --probe-set full record it"),
        ("zeros", "all_zero.logits", {"log_grads": True, "set": "loss"}, OWN, "--probe-set default records it"),
        ("scale", "at_limit", {"log_grads": True}, OWN, "--scale learn records it"),
        ("saturation", "below_1e-3", {"log_grads": True}, OWN, ""),
        ("gradient", "norm.text", {"set": "default"}, PROBE, 'Probe(probe_set="full") records it'),
        ("zeros", "naive_norm_zero", {"set": "default"}, PROBE, 'Probe(probe_set="full") records it'),
        ("scale", "at_limit", {"set": "full"}, PROBE, "Probe(scale_max=...) records it"),
        ("captions", "mean", {"set": "full"}, PROBE, "probe.watch(..., captions=...) records it"),
        ("captions", "truncated", {"set": "full"}, PROBE, "probe.watch(..., captions=..., lengths=...) records it"),
        (
            "captions",
            "mean",
            {"set": "loss"},
            PROBE,
            'Probe(probe_set="default") and probe.watch(..., captions=...) record it',
        ),
        ("saturation", "below_1e-3", {}, {"kind": "JSON lines", "own": False}, "gradscope.Probe() in that loop records it"),
        ("optimizer", "stale", {}, {"kind": "JSON lines", "own": False}, 'gradscope.Probe(probe_set="full") in that loop records it'),
    ],
)
def test_the_setting_that_records_it_is_named(quantity: str, key: str, probe: dict, who: dict, words: str) -> None:
    assert recorded_by(quantity, key, {"probe": probe} if probe else {}, **who) == words


def test_the_set_loss_reads_hooks_of_what_is_trained() -> None:
    for trained, words in (("infonce", ""), ("other", 'Probe(probe_set="default") records it')):
        assert recorded_by("hooks", "agreement", {"objective": {"name": trained}, "probe": {"set": "loss"}}, **PROBE) == words


@pytest.mark.parametrize(("who", "words"), [(OWN, "--kernel dense records it"), (PROBE, 'Probe(kernel="dense")')])
def test_of_a_streamed_softmax_it_is_the_kernel(who: dict, words: str) -> None:
    full = {"probe": {"log_grads": True, "set": "full"}}
    assert words in recorded_by("false_negatives", "push_identical", full, **who, streamed=True)
    assert "kernel" not in recorded_by("zeros", "entries.logits", full, **who, streamed=True)


def test_the_quantities_that_need_cells_are_those_that_say_so() -> None:
    assert {name for name, quantity in quantity_set("full").items() if needs(quantity, "cells")} == set(NEED_CELLS)


@pytest.mark.parametrize(
    ("facts", "probe", "words"),
    [
        ({}, {"probe.every": 5}, "a longer run, or --probe-every 1, measures enough batches"),
        ({"loop": "not gradscope's"}, {"probe.every": 5}, "a longer run, or Probe(every=1), measures enough batches"),
        ({"loop": "not gradscope's"}, {"probe.every": 1}, "a longer run measures enough batches"),
    ],
)
def test_a_short_run_says_once_what_would_do(facts: dict, probe: dict, words: str, tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run", steps=4, every=1, facts=facts, recipe=probe)
    diagnosis = diagnose(look(path))
    reasons = [reason for reason in diagnosis.unmeasured.values() if "4 measured batches" in reason]
    assert len(reasons) > 10
    assert {reason.partition("; ")[2] for reason in reasons} == {words}, "one line of --unmeasured"


def test_the_sets_are_those_of_the_quantities() -> None:
    """Held twice, since rules reach no torch; and every argument and flag that is named is there."""
    from gradscope import quantities
    from gradscope.probe import Probe

    assert quantities.SETS == SETS
    assert {name: component.tier for name, component in quantities.quantities if name in TIERS} == TIERS
    assert {"probe_set", "scale_max"} <= set(inspect.signature(Probe).parameters)
    assert {"captions", "lengths"} <= set(inspect.signature(Probe.watch).parameters)
    assert Probe.log_recall


def test_one_line_for_each_setting(tmp_path: Path) -> None:
    readings = {
        ("optimizer", "eps_dominated", "total"): None,
        ("optimizer", "stale", "total"): None,
        ("captions", "exact_duplicates", ""): None,
    }
    path = hand_run(tmp_path / "run", readings, facts={"loop": "not gradscope's"}, recipe={"probe.set": "default"})
    said = [" ".join(line.split()) for line in run(app, ["diagnose", str(path), "--unmeasured"]).output.splitlines()]
    assert 'GS009, GS010 Probe(probe_set="full") records it' in said
    assert "GS018 probe.watch(..., captions=...) records it" in said


def test_recall_that_a_loop_told_needs_no_interval(tmp_path: Path) -> None:
    """probe.log_recall gives none: a poor recall at a solved loss is found all the same."""
    log = hand_run(tmp_path / "run", columns={"loss": 0.01}, facts={"loop": "not gradscope's"}, evals=[])
    rows = [
        {"step": step, "epoch": 1, "dataset": "own", "split": "val", "direction": d, "metric": "R@1", "value": 0.03, "low": None}
        for step in (20, 40)
        for d in ("i2t", "t2i")
    ]
    (log / "DONE").unlink()
    with RunLog.reopen(log, step=40, provenance={"width": 64, "loop": "not gradscope's"}) as more:
        more.write_evals([{**row, "high": None, "n_queries": None, "n_candidates": None, "protocol": "own"} for row in rows])
    found = diagnose(look(log)).findings
    assert [finding.id for finding in found] == ["GS028"]
    assert all(math.isfinite(evidence.value) for evidence in found[0].evidence)


def test_the_width_is_asked_for_where_it_would_help(tmp_path: Path) -> None:
    """As many more rules look once it is given."""
    path = write_csv(tmp_path / "log.csv", [{"step": step, "loss": value} for step, value in enumerate(losses(), 1)])
    more = len(diagnose(look(path)).unmeasured) - len(diagnose(look(path, width=32)).unmeasured)
    said = " ".join(run(app, ["diagnose", str(path)]).output.split())
    assert f"--width N lets {more} more look" in said


def test_the_findings_come_before_how_the_log_was_read(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "log.csv", [{"step": step, "loss": 0.0} for step in range(40)])
    said = run(app, ["diagnose", str(path)]).output
    assert said.index("GS003") < said.index("loss read from column 'loss'")


def test_bad_input_is_exit_code_2_and_one_line(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "nothing")], [], ["--mute", "GS999", str(hand_run(tmp_path / "run"))]):
        command = [sys.executable, "-m", "gradscope.cli", "diagnose", *arguments]
        code = "import sys; from gradscope.cli import main; sys.argv[0] = 'gradscope'; main()"
        done = subprocess.run([command[0], "-c", code, *command[3:]], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


def test_the_rules_can_be_listed() -> None:
    done = run(app, ["diagnose", "--rules"])
    assert done.exit_code == 0
    assert all(name in done.output for name in rules.names())
    assert all(severity in done.output for severity in SEVERITIES)
    assert "gradscope diagnose --rules GS001 prints evidence, cause, remedy" in " ".join(done.output.split())


def test_a_rule_says_all_of_itself() -> None:
    done = run(app, ["diagnose", "--rules", "gs025,GS001", "GS029"])
    said = " ".join(done.output.split())
    places = [said.index(name) for name in ("GS025 error Values are nan", "GS001 warning", "GS029 error")]
    assert places == sorted(places)
    assert "silent where no such value." in said
    assert "remedy Go back to the last checkpoint before the first such step; bf16 or fp32" in said
    assert "can mislead a curriculum" in said
    assert "thresholds rise 0.25, least 40" in said
    with pytest.raises(ValueError, match="unknown rule 'GS999'"):
        run(app, ["diagnose", "--rules", "GS999"], catch_exceptions=False)


def test_every_rule_tells_when_it_is_silent() -> None:
    for name, rule in rules:
        parts = dict(told(rule))
        assert list(parts)[:5] == ["evidence", "cause", "remedy", "silent where", "can mislead"], name
        assert all(len(text) > 10 and "``" not in text for label, text in parts.items() if label != "thresholds"), name


def test_no_torch_is_needed(broken: Path) -> None:
    code = (
        f"import sys; from gradscope.diagnose import look, diagnose; diagnose(look({str(broken)!r})); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
