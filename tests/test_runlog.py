"""The run log against what can go wrong: torn lines, kills, resumes, two writers, non-finite values, garbage."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gradscope.run_tables import VOLATILE_COLUMNS, comparable
from gradscope.runlog import Run, RunLog, checkpoint_step, is_run

RECIPE = '[train]\nlr = 1e-5\n[objective]\nname = "hn"\n'


def create(path: Path) -> RunLog:
    return RunLog.create(path, recipe_toml=RECIPE, provenance={"commit": "abc", "device": "cpu"})


def step_row(step: int, loss: float = 0.5, **more: float) -> dict:
    return {"step": step, "samples": 16 * step, "epoch": (step - 1) // 10 + 1, "loss": loss, **more}


def reading_row(step: int, value: object, *, quantity: str = "loss", key: str = "true", term: str = "hn") -> dict:
    return {"step": step, "quantity": quantity, "term": term, "key": key, "value": value, "unit": "nat", "stamps": "width 16"}


def eval_row(step: int, value: float, metric: str = "R@1") -> dict:
    names = {"dataset": "scenes", "split": "val", "direction": "i2t", "metric": metric, "protocol": "all"}
    numbers = {"value": value, "low": 0.1, "high": 0.9, "n_queries": 9, "n_candidates": 9}
    return {"step": step, "epoch": step // 10, **names, **numbers}


def test_a_finished_run_reads_back(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps(step_row(step, loss=1 / step, lr=np.float32(0.25)) for step in (1, 2, 3))
        log.write_readings([reading_row(1, 0.5), reading_row(1, [1.0, math.nan], key="quantiles")])
        log.write_evals([eval_row(0, 0.4), eval_row(3, 0.5)])
        log.console("hello")
        reference = log.save_array("histogram", np.arange(100))
        assert not Run(log.path).done
        log.finish()
    run = Run(tmp_path / "run")
    assert run.done
    assert run.recipe["objective"]["name"] == "hn"
    assert run.provenance["commit"] == "abc"
    assert [entry["attempt"] for entry in run.attempts] == [1]
    assert run.steps["loss"].tolist() == [1, 1 / 2, 1 / 3]
    assert run.steps["lr"].tolist() == [0.25] * 3
    assert run.steps["step"].dtype == np.int64
    assert run.evals["value"].tolist() == [0.4, 0.5]
    assert (run.array(reference) == np.arange(100)).all()
    assert (run.path / "console.log").read_text() == "hello\n"
    first, second = run.readings["value"]
    assert first == 0.5
    assert second[0] == 1.0
    assert math.isnan(second[1])


def test_every_line_is_one_json_object_below_a_schema_header(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_readings([reading_row(1, math.inf)])
    header, row = (tmp_path / "run" / "readings.jsonl").read_text().splitlines()
    assert '"schema": "gradscope.readings"' in header
    assert '"version": 1' in header
    assert '"inf"' in row
    assert "Infinity" not in row


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e308, 3])
def test_values_round_trip_exactly(tmp_path: Path, value: float) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1, loss=value)])
        log.write_readings([reading_row(1, value), reading_row(1, [value, value], key="list")])
    run = Run(tmp_path / "run")
    scalar, many = run.readings["value"]
    for back in (scalar, *many, run.steps["loss"].iloc[0]):
        assert np.float64(back).tobytes() == np.float64(value).tobytes() or (math.isnan(back) and math.isnan(value))


def test_words_that_look_like_numbers_stay_words(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_readings([reading_row(1, math.nan, key="inf")])
    assert Run(tmp_path / "run").readings["key"].tolist() == ["inf"]


def test_a_torn_last_line_is_ignored_by_readers_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1), step_row(2)])
    file = tmp_path / "run" / "steps.jsonl"
    whole = file.read_bytes()
    for length in range(1, len(whole.splitlines()[-1])):
        file.write_bytes(whole + whole.splitlines()[-1][:length])
        run = Run(tmp_path / "run")
        assert run.steps["step"].tolist() == [1, 2]
        assert run.torn["steps"] == 1
    with RunLog.reopen(tmp_path / "run", step=2, provenance={}) as log:
        log.write_steps([step_row(3)])
    run = Run(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert run.torn["steps"] == 0
    assert "torn line" in (run.path / "console.log").read_text()


def test_a_torn_header_is_written_again(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    (tmp_path / "run" / "evals.jsonl").write_bytes(b'{"schema": "grad')
    assert Run(tmp_path / "run").evals.empty
    with RunLog.reopen(tmp_path / "run", step=0, provenance={}) as log:
        log.write_evals([eval_row(1, 0.5)])
    assert len(Run(tmp_path / "run").evals) == 1


def test_a_very_long_torn_line_is_cut(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1)])
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(b"x" * 200_000)
    RunLog.reopen(tmp_path / "run", step=1, provenance={}).close()
    assert Run(tmp_path / "run").steps["step"].tolist() == [1]


def test_resuming_supersedes_later_rows_of_older_attempts(tmp_path: Path) -> None:
    """Three attempts with random starts, against a dictionary that simply forgets."""
    generator = np.random.default_rng()
    for trial in range(20):
        path = tmp_path / f"run{trial}"
        truth: dict[int, float] = {}
        reached = 0
        log = create(path)
        for attempt in (1, 2, 3):
            if attempt > 1:
                start = int(generator.integers(0, reached + 1))
                log = RunLog.reopen(path, step=start, provenance={})
                truth = {step: loss for step, loss in truth.items() if step <= start}
                reached = start
            assert log.attempt == attempt
            end = reached + int(generator.integers(0, 6))
            for step in range(reached + 1, end + 1):
                truth[step] = float(generator.random())
                log.write_steps([step_row(step, truth[step])])
                log.write_readings([reading_row(step, truth[step])])
            reached = end
            log.close()
        run = Run(path)
        assert dict(zip(run.steps["step"], run.steps["loss"], strict=True)) == truth
        assert run.steps["step"].tolist() == sorted(truth)
        if truth:
            assert run.reading("loss", "true", "hn")["value"].tolist() == [truth[step] for step in sorted(truth)]


def test_one_quantity_is_what_all_readings_say_of_it(tmp_path: Path) -> None:
    """Twin: the whole table, filtered. Names that occur in other columns too, values of all kinds, a resume in between."""
    rng = np.random.default_rng()
    names = ("loss", "gradient", "nan", "true", "nat", "los")
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(step) for step in range(1, 9)])
        for step in range(1, 9):
            values = [float(rng.random()), math.nan, math.inf, [1.0, math.nan]]
            drawn = [(name, values[int(rng.integers(4))], str(rng.choice(names))) for name in names]
            log.write_readings([reading_row(step, value, quantity=name, key=key) for name, value, key in drawn])
    with RunLog.reopen(tmp_path / "run", step=5, provenance={}) as log:
        log.write_readings([reading_row(step, 0.5, quantity="loss", key="gradient") for step in (4, 6)])
    whole = Run(tmp_path / "run").readings
    for name in (*names, "missing"):
        expected = whole[whole["quantity"] == name].reset_index(drop=True)
        found = Run(tmp_path / "run").readings_of(name)
        assert found.columns.tolist() == expected.columns.tolist()
        assert [repr(row) for row in found.to_numpy().tolist()] == [repr(row) for row in expected.to_numpy().tolist()]


def test_the_lines_of_other_quantities_are_not_parsed(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_readings([reading_row(1, 0.5), reading_row(1, 0.25, quantity="gradient")])
    file = tmp_path / "run" / "readings.jsonl"
    file.write_text(file.read_text().replace(": 0.25", ": broken"))
    assert Run(tmp_path / "run").readings_of("loss")["value"].tolist() == [0.5]
    with pytest.raises(ValueError, match="line 3 is not a JSON object"):
        Run(tmp_path / "run").readings_of("gradient")


def test_an_evaluation_repeated_at_the_resumed_step_counts_once(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_evals([eval_row(10, 0.1), eval_row(10, 0.2, "R@5"), eval_row(20, 0.9)])
        log.finish()
    with RunLog.reopen(tmp_path / "run", step=10, provenance={}) as log:
        assert not Run(log.path).done
        log.write_evals([eval_row(10, 0.3)])
    run = Run(tmp_path / "run")
    assert sorted(zip(run.evals["step"], run.evals["metric"], run.evals["value"], strict=True)) == [
        (10, "R@1", 0.3),
        (10, "R@5", 0.2),
    ]
    assert run.superseded["evals"] == 2


def test_checkpoints_are_sorted_and_later_ones_set_aside_on_resume(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        for step in (1_000_000, 20, 3):
            log.checkpoint_dir(step).mkdir()
        (tmp_path / "run" / "checkpoints" / "step-000004.partial").mkdir()
        assert [checkpoint_step(path) for path in log.checkpoints()] == [3, 20, 1_000_000]
    with RunLog.reopen(tmp_path / "run", step=20, provenance={}) as log:
        assert [path.name for path in log.checkpoints()] == ["step-000003", "step-000020"]
    assert "superseded" in (tmp_path / "run" / "console.log").read_text()


WRITER = """
import sys
from gradscope.runlog import RunLog
log = RunLog.create(sys.argv[1], recipe_toml="", provenance={})
step = 0
while True:
    step += 1
    log.write_steps([{"step": step, "samples": step, "epoch": 1, "loss": 0.5}])
    words = {"quantity": "q", "term": "", "unit": "", "stamps": "s" * 200}
    log.write_readings([{"step": step, "key": str(k), "value": 1.0, **words} for k in range(20)])
    print(step, flush=True)
"""


def test_kill_9_between_or_inside_writes_loses_no_acknowledged_row(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(50)]
    with pytest.raises(ValueError, match="another process is writing"):
        RunLog.reopen(tmp_path / "run", step=1, provenance={})
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    run = Run(tmp_path / "run")
    assert run.steps["step"].tolist()[:50] == acknowledged
    assert (run.readings.groupby("step").size().loc[acknowledged] == 20).all()
    with RunLog.reopen(tmp_path / "run", step=25, provenance={}) as log:
        log.write_steps([step_row(26, 9.0)])
    assert Run(tmp_path / "run").steps["step"].tolist() == list(range(1, 27))


def test_two_writers_in_one_process_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log, pytest.raises(ValueError, match="another process is writing"):
        RunLog.reopen(log.path, step=0, provenance={})
    RunLog.reopen(log.path, step=0, provenance={}).close()


def test_create_refuses_what_is_there_already(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    with pytest.raises(ValueError, match=r"--resume.*--output"):
        create(tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(ValueError, match=r"not empty.*--output"):
        create(tmp_path / "notes")
    with pytest.raises(ValueError, match="--output"):
        create(tmp_path / "notes" / "a.txt")
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty").close()
    assert is_run(tmp_path / "empty")
    assert not is_run(tmp_path / "notes")


def test_what_is_not_a_run_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    for path, found in ((tmp_path, "holiday.jpg"), (tmp_path / "none", "no such"), (tmp_path / "holiday.jpg", "a file")):
        with pytest.raises(ValueError, match=rf"looked for recipe\.toml.*{found}") as caught:
            Run(path)
        assert "\n" not in str(caught.value)


def test_damaged_files_are_named_with_their_line(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1)])
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl line 3"):
        _ = Run(tmp_path / "run").steps
    (tmp_path / "run" / "evals.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="header"):
        _ = Run(tmp_path / "run").evals
    (tmp_path / "run" / "evals.jsonl").write_text('{"schema": "gradscope.evals", "version": 99}\n')
    with pytest.raises(ValueError, match="newer"):
        _ = Run(tmp_path / "run").evals
    (tmp_path / "run" / "provenance.json").write_text("[]")
    with pytest.raises(ValueError, match="provenance"):
        _ = Run(tmp_path / "run").attempts


def test_a_missing_reading_names_the_setting(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps([step_row(1)])
        with pytest.raises(ValueError, match="--log-grads"):
            Run(log.path).reading("gradient", "norm", "hn")
        log.write_readings([reading_row(1, 0.5)])
    with pytest.raises(ValueError, match=r"only true/hn;.*--log-grads"):
        Run(log.path).reading("loss", "true", "infonce")


@pytest.mark.parametrize("loop", [False, True])
def test_a_reading_of_a_larger_set_is_named_in_the_words_of_who_made_the_run(tmp_path: Path, loop: bool) -> None:
    """Whoever trained by the command is told a flag, whoever attached gradscope.Probe an argument."""
    facts = {"loop": "not gradscope's"} if loop else {}
    with RunLog.create(tmp_path / "run", recipe_toml='[probe]\nset = "default"\n', provenance=facts) as log:
        log.write_steps([step_row(1)])
        log.write_readings([reading_row(1, 0.5)])
    with pytest.raises(ValueError, match="has no reading 'sketch'") as said:
        Run(log.path).reading("sketch", "counts.image", "total")
    assert ('probe_set="full"' in str(said.value)) == loop
    assert ("--log-grads --probe-set full" in str(said.value)) == (not loop)


def test_a_reading_comes_with_its_epoch(tmp_path: Path) -> None:
    with create(tmp_path / "run") as log:
        log.write_steps(step_row(step) for step in (5, 15))
        log.write_readings([reading_row(5, 1.0), reading_row(15, math.inf), reading_row(15, [1.0], key="list")])
    frame = Run(log.path).reading("loss", "true", "hn")
    expected = pd.DataFrame({"step": [5, 15], "epoch": [1, 2], "value": [1.0, math.inf]})
    pd.testing.assert_frame_equal(frame, expected)


def test_comparable_frames_leave_clocks_and_memory_out(tmp_path: Path) -> None:
    frames = []
    for name, speed in (("a", 1.0), ("b", 2.0)):
        with create(tmp_path / name) as log:
            log.write_steps([step_row(1, images_per_s=speed, peak_mem=speed, seconds=speed)])
            log.write_readings([reading_row(1, 0.5), {**reading_row(1, speed, quantity="cost"), "unit": "s"}])
        frames.append([comparable(frame) for frame in (Run(log.path).steps, Run(log.path).readings)])
    for one, other in zip(*frames, strict=True):
        pd.testing.assert_frame_equal(one, other)
        assert not set(VOLATILE_COLUMNS) & set(one)


def test_reading_a_run_needs_no_torch(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    code = f"import sys, gradscope.runlog as r; r.Run({str(tmp_path / 'run')!r}).steps; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
