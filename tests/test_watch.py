"""The live view: what it reads while a run grows is what the run says in the end, and what it draws is what it read."""

from __future__ import annotations

import io
import math
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hand_run import hand_run
from rich.console import Console
from test_sinks import create, eval_row, reading, step_row

from gradscope import train_display
from gradscope.following import WANTED, Following
from gradscope.run_tables import Tail
from gradscope.run_view import view_run
from gradscope.runlog import Run, RunLog
from gradscope.sparkline import LEVELS, sparkline
from gradscope.watch import TALL, WINDOW, Panel, heading, watch


def console(width: int = 80, height: int = 50, file: io.StringIO | None = None) -> Console:
    return Console(file=file or io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def text_of(path: Path, width: int = 80, height: int = 50) -> str:
    following = Following(path)
    following.poll()
    drawn = console(width, height)
    drawn.print(Panel(following).draw(width, height))
    return drawn.file.getvalue()


def write_step(log: RunLog, step: int, generator: np.random.Generator, **more: object) -> dict[tuple[str, str, str], float]:
    """A probed step with every reading that the view wants; returns them."""
    values = {}
    for quantity, keys in WANTED.items():
        for key in keys:
            terms = {"scale": [""], "accumulation": ["total"]}.get(quantity, ["infonce", "hn"])
            if key == "log10_ratio":
                terms = ["pair"]
            for term in terms:
                values[quantity, key, term] = float(generator.random())
    log.write_readings([reading(step, value, *name) for name, value in values.items()])
    log.write_readings([reading(step, 1.0, "other", "value", "hn"), reading(step, [1.0, 2.0], "captions", "histogram", "")])
    row = {"seconds": 0.5, "probe_seconds": 0.1, "scale": 100.0, "loss_scale": 1.0, "skipped": 0, **more}
    log.write_steps([step_row(step, loss=float(generator.random()), **row)])
    return values


# ---- the sparkline


def test_each_value_has_its_level():
    values = [float(v) for v in np.random.default_rng(secrets.randbits(32)).normal(size=30)]
    low, high = min(values), max(values)
    expected = "".join(LEVELS[min(7, math.floor((v - low) / (high - low) * 7 + 0.5))] for v in values)
    assert sparkline(values, 40) == expected
    assert sparkline(values, 30) == expected


def test_long_curves_show_medians_and_hide_no_nan():
    values = [float(v) for v in np.random.default_rng(secrets.randbits(32)).normal(size=137)]
    cuts = [round(i * 137 / 10) for i in range(11)]
    medians = [statistics.median(values[a:b]) for a, b in pairwise(cuts)]
    assert sparkline(values, 10) == sparkline(medians, 10)
    values[100] = math.nan
    line = sparkline(values, 10)
    assert [i for i, mark in enumerate(line) if mark == "×"] == [next(i for i in range(10) if cuts[i] <= 100 < cuts[i + 1])]


def test_flat_empty_and_not_finite():
    assert sparkline([], 10) == ""
    assert sparkline([3.0] * 4, 10) == LEVELS[0] * 4
    assert sparkline([1.0, 1.0005], 10, least=1e-3) == LEVELS[0] * 2
    assert sparkline([math.nan, math.inf, -math.inf], 10) == "×××"
    assert sparkline([0.0, math.inf, 1.0], 10) == f"{LEVELS[0]}×{LEVELS[7]}"


# ---- following


def test_a_tail_gives_each_whole_line_once_however_the_bytes_arrive(tmp_path: Path):
    generator = np.random.default_rng(secrets.randbits(32))
    with create(tmp_path / "whole") as log:
        for step in range(1, 40):
            log.write_readings(
                [reading(step, math.nan if step % 7 == 0 else step / 3), reading(step, [1.0] * (step % 5), "other", "é")]
            )
    data = (tmp_path / "whole" / "readings.jsonl").read_bytes()
    for wanted in ((), ('"quantity": "loss"',)):
        copy = tmp_path / f"copy{len(wanted)}"
        copy.mkdir()
        tail, rows, at = Tail(copy, "readings", wanted), [], 0
        assert tail.rows() == []
        while at < len(data):
            size = int(generator.integers(1, 300))
            with (copy / "readings.jsonl").open("ab") as file:
                file.write(data[at : at + size])
            at += size
            rows += tail.rows()
        expected = [row for row in Run(tmp_path / "whole").rows("readings") if not wanted or row["quantity"] == "loss"]
        assert repr(rows) == repr(expected)
        assert tail.rows() == []


def test_a_line_that_is_no_row_is_refused(tmp_path: Path):
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1)])
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(b"{broken}\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl line 3 is not a JSON object"):
        Following(tmp_path / "run").poll()


def test_resumes_are_followed_as_the_run_reads_them_in_the_end(tmp_path: Path):
    """Attempts that stop anywhere and resume at a random earlier step, polled at random moments; torn lines in between."""
    generator = np.random.default_rng(secrets.randbits(32))
    path = tmp_path / "run"
    create(path).close()
    following = Following(path)
    start = 0
    for _ in range(4):
        with RunLog.reopen(path, step=start, provenance={}) as log:
            end = start + int(generator.integers(1, 8))
            for step in range(start + 1, end + 1):
                write_step(log, step, generator)
                if generator.random() < 0.3:
                    log.write_evals([eval_row(step, float(generator.random()))])
                if generator.random() < 0.4:
                    following.poll()
        with (path / "steps.jsonl").open("ab") as file:
            file.write(b'{"attempt": 1, "step"')
        start = int(generator.integers(0, end + 1))
        following.poll()
    run = Run(path)
    assert following.column("loss") == run.steps.sort_values("step")["loss"].tolist()
    for quantity, keys in WANTED.items():
        for key in keys:
            for term in ("", "infonce", "hn", "pair", "total"):
                chosen = run.readings.query("quantity == @quantity and key == @key and term == @term").sort_values("step")
                assert following.reading(quantity, key, term) == chosen["value"].tolist()
    evals = run.evals.sort_values("step")["value"].tolist()
    assert following.evals("R@1") == ({"i2t": evals} if evals else {})


# ---- the panel


@pytest.fixture
def run(tmp_path: Path) -> Path:
    generator = np.random.default_rng(7)
    with create(tmp_path / "run") as log:
        log.write_evals([eval_row(0, 0.25)])
        for step in range(1, 31):
            write_step(log, step, generator, loss_scale=65536.0, skipped=int(step == 4))
        log.write_evals([eval_row(30, 0.5)])
    return tmp_path / "run"


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_says_the_numbers(run: Path, width: int):
    text = text_of(run, width)
    lines = text.splitlines()
    assert {len(line) for line in lines} == {width}
    assert "step 30 · epoch 1 · width 16" in text
    following = Following(run)
    following.poll()
    for term in ("infonce", "hn"):
        for direction in ("i2t", "t2i"):
            assert f"{np.mean(following.reading('saturation', f'rows_below_1e-3.{direction}', term)[-WINDOW:]):.0%}" in text
            assert f"{np.mean(following.reading('zeros', f'positive_zero.{direction}', term)[-WINDOW:]):.0%}" in text
        losses = following.reading("loss", "log10_true", term)
        assert f"{losses[0]:.1f} → {losses[-1]:.1f}" in text
    assert "25.0 → 50.0" in text
    assert "loss scale 65536.0, 1 step skipped" in text
    assert "probe: 25% on top of the plain step, 30 batches measured" in text


def test_no_epoch_and_no_width_where_there_are_none(tmp_path: Path):
    own = {"loop": "not gradscope's"}
    with RunLog.create(tmp_path / "run", recipe_toml="", provenance={"width": 0, **own}) as log:
        log.write_steps([step_row(1)])
        following = Following(log.path)
        following.poll()
        assert heading(following)[0] == "step 1"
        log.write_steps([{**step_row(2), "epoch": 2}])
        following.poll()
        assert heading(following)[0] == "step 2 · epoch 2"
    assert view_run(tmp_path / "run").width is None


def test_a_narrow_terminal_cuts_no_word(run: Path):
    text = text_of(run, 60)
    assert {len(line) for line in text.splitlines()} == {60}
    assert "last 20 measured batches   InfoNCE i2t   InfoNCE t2i" in text
    assert "…" not in text.partition("\n")[2]


def test_a_plain_loop_of_ones_own_shows_its_own_objective(tmp_path: Path):
    """HN is read beside InfoNCE by every probe: it is shown where it is trained, or its gradient was asked for."""
    for name, more, shown in (("plain", {}, False), ("asked", {("gradient", "log10_ratio", "pair"): 1.0}, True)):
        path = hand_run(tmp_path / name, more, facts={"loop": "not gradscope's"})
        assert ("HN" in text_of(path)) == shown


@pytest.mark.parametrize(
    ("steps", "below", "word"),
    [
        (5, 1.0, "too few measured batches to judge (5)"),
        (40, 1.0, "SATURATED"),
        (40, 0.3, "partly saturated"),
        (40, 0.0, "not saturated"),
    ],
)
def test_the_state_is_that_of_the_rules(steps: int, below: float, word: str, tmp_path: Path):
    readings = {("saturation", "below_1e-3", "*"): below}
    assert f"InfoNCE: {word}" in text_of(hand_run(tmp_path / "run", readings, steps=steps, every=1))


def test_a_low_terminal_shows_what_matters_within_its_lines(run: Path):
    text = text_of(run, 80, 24)
    assert len(text.splitlines()) < 24
    assert "rows under 1e-3" in text
    assert "probe: 25%" in text
    assert len(text_of(run, 80, TALL).splitlines()) <= TALL


def test_time_left_age_and_state(tmp_path: Path):
    with RunLog.create(tmp_path / "run", recipe_toml="[train]\n", provenance={"total_steps": 100}) as log:
        following = Following(log.path)
        assert heading(following)[0].startswith("no step yet")
        for step in range(1, 11):
            log.write_steps([step_row(step, seconds=2.0)])
        following.poll()
        assert heading(following)[0] == "step 10 of 100 · epoch 1"
        assert "0:03:00 left" in heading(following)[1]
        os.utime(log.path / "steps.jsonl", (time.time() - 500, time.time() - 500))
        for name in ("readings", "evals"):
            os.utime(log.path / f"{name}.jsonl", (0, 0))
        assert "last row 0:08:20 ago: has it stopped?" in heading(following)[1]
        log.finish()
    assert heading(following)[1] == "done"


@pytest.mark.parametrize("kind", ["nothing", "steps only", "not finite", "a loop of one's own"])
def test_odd_runs_are_drawn(tmp_path: Path, kind: str):
    with create(tmp_path / "run") as log:
        if kind == "steps only":
            log.write_steps([step_row(step) for step in range(1, 4)])
        if kind == "not finite":
            log.write_readings([reading(1, math.nan), reading(1, math.inf, "gradient", "log10_norm", "hn")])
            log.write_steps([step_row(1, math.nan, scale=math.nan), step_row(2, 0.0), step_row(3, math.inf)])
        if kind == "a loop of one's own":
            log.write_readings([reading(1, -1.0), reading(1, 1.0, "saturation", "below_1e-3")])
            log.write_steps([{"step": 1, "samples": 16, "epoch": 1, "loss": None}])
    text = text_of(tmp_path / "run")
    assert {len(line) for line in text.splitlines()} == {80}
    assert "×" in text or kind != "not finite"


def test_findings_that_cannot_be_looked_for_are_said(run: Path):
    with (run / "provenance.json").open("a") as file:
        following = Following(run)
        following.poll()
        panel = Panel(following)
        file.write("broken")
    panel.draw(80, 50)
    drawn = console(200)
    drawn.print(panel.draw(200, 50))
    assert "could not be looked for (ValueError" in drawn.file.getvalue()


# ---- the command and the training display

WRITER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import numpy as np
from test_watch import write_step
from gradscope.run_view import view_run
from gradscope.runlog import RunLog
with RunLog.reopen(Path(sys.argv[1]), step=0, provenance={"width": 16, "total_steps": 12}) as log:
    for step in range(1, 13):
        write_step(log, step, np.random.default_rng(step))
        time.sleep(0.05)
    log.finish()
"""


def test_it_follows_another_process_to_its_end(tmp_path: Path):
    create(tmp_path / "run").close()
    started: list[subprocess.Popen] = []

    class Screen(io.StringIO):
        """Starts the writer once the first frame is drawn, so that there is a frame without a step on any machine."""

        def write(self, text: str) -> int:
            if "no step yet" in text and not started:
                started.append(subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run"), str(Path(__file__).parent)]))
            return super().write(text)

    drawn = console(100, 60, Screen())
    watch(tmp_path / "run", drawn, every=0.05)
    assert started[0].wait() == 0
    text = drawn.file.getvalue()
    assert "step 12 of 12 · epoch 1 · attempt 2" in text
    assert text.count("step 12 of 12") >= 1
    assert "no step yet" in text


def test_once_prints_one_frame_also_where_there_is_no_terminal(run: Path):
    code = (
        "import sys; sys.argv[1:] = ['watch', sys.argv[1]]; from gradscope.cli import main; main(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("step 30") == 1


def test_ctrl_c_leaves_quietly(run: Path):
    code = """
import sys
from gradscope import console
from rich.console import Console
console.out = Console(force_terminal=True)
sys.argv[1:] = ["watch", sys.argv[1], "--every", "0.05"]
from gradscope.cli import main
main()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert b"step 30" in b"".join(process.stdout.readline() for _ in range(6))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")


def test_training_shows_the_panel_in_a_terminal_and_the_bar_elsewhere(run: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = console(100, 60)
    monkeypatch.setattr(train_display, "console", drawn)
    with train_display.display(30, 1, quiet=False, run=run) as show:
        show(30, {"loss": 1.0, "images_per_s": 1.0})
    assert "rows under 1e-3" in drawn.file.getvalue()
    with train_display.display(30, 1, quiet=True, run=run) as show:
        show(30, {})


def test_a_view_that_fails_ends_no_training(run: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = console(100, 60)
    monkeypatch.setattr(train_display, "console", drawn)
    with (run / "steps.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    with train_display.display(30, 1, quiet=False, run=run) as show:
        for step in range(3):
            show(step, {})
    assert drawn.file.getvalue().count("the live view failed, training goes on: ValueError") == 1


def test_a_run_without_the_probe_has_findings_too(tmp_path: Path) -> None:
    """Its losses alone tell that it diverged."""
    path = hand_run(
        tmp_path / "run", probed=False, recipe={"probe.log_grads": False}, columns={"loss": lambda step: 0.4 if step < 25 else 2.5}
    )
    assert "GS029" in text_of(path)
