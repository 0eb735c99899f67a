"""What arrives in TensorBoard, W&B and MLflow, read back from their own files, against the rows of the run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from gradscope.metrics import octaves
from gradscope.quantities import captions
from gradscope.recipe import resolve
from gradscope.runlog import Run, RunLog
from gradscope.sinks import feed as feeds
from gradscope.sinks import parse, points, require, sinks
from gradscope.sinks.feed import STATE, Feed, open_feeds, replay
from gradscope.sinks.points import METRICS, READINGS, STEPS, Histogram, Point
from gradscope.train import train

ALL = "tensorboard,wandb,mlflow"
Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def step_row(step: int, loss: float = 0.5, **more: object) -> dict:
    return {"step": step, "samples": 16 * step, "epoch": 1, "loss": loss, "lr": 1e-5, "grad_norm": None, **more}


def reading(step: int, value: object, quantity: str = "loss", key: str = "log10_true", term: str = "hn") -> dict:
    return {"step": step, "quantity": quantity, "term": term, "key": key, "value": value, "unit": "1", "stamps": ""}


def eval_row(step: int, value: float, metric: str = "R@1", dataset: str = "scenes") -> dict:
    words = {"dataset": dataset, "split": "val", "direction": "i2t", "metric": metric, "protocol": "all"}
    return {"step": step, "epoch": 1, **words, "value": value, "low": 0.1, "high": 0.9, "n_queries": 9, "n_candidates": 9}


def create(path: Path) -> RunLog:
    return RunLog.create(path, recipe_toml='[train]\nlr = 1e-5\n[data]\nname = "scenes"\n', provenance={"width": 16})


# ---- reading back


def from_tensorboard(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def wandb_records(file: Path):
    """The records of an offline file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # being written
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def from_wandb(run: Path) -> tuple[Curves, dict[str, dict], set[str]]:
    """Scalars, histograms by name, and the ids of all offline parts."""
    curves: Curves = defaultdict(list)
    histograms: dict[str, dict] = defaultdict(dict)
    ids = set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
            step = items.pop(("step",), None)
            for (name, *parts), value in items.items():
                if parts:  # a histogram comes as its fields
                    histograms[name][parts[0]] = value
                elif not name.startswith("_"):
                    curves[name].append((step, float(value)))
    return dict(curves), histograms, ids


def from_mlflow(run: Path, store: Path | None = None) -> tuple[Curves, dict[str, str], str]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{store or run / 'mlflow.db'}")
    found = client.get_run(json.loads((run / STATE).read_text())["mlflow"]["id"])
    assert client.get_experiment(found.info.experiment_id).name == "gradscope"
    names = found.data.metrics
    curves = {name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)] for name in names}
    return {name: sorted(c) for name, c in curves.items()}, found.data.params, found.info.status


def equal(found: Curves, expected: Curves, cast=float) -> bool:
    assert found.keys() == expected.keys()
    for name, curve in expected.items():
        want = np.array([(step, cast(value)) for step, value in sorted(curve, key=lambda pair: pair[0])], dtype=float)
        np.testing.assert_array_equal(np.array(sorted(found[name], key=lambda pair: pair[0]), dtype=float), want, name)
    return True


# ---- names


def test_names_values_and_what_stays_behind():
    found, behind = points.points("steps", [step_row(3, math.nan, loss_infonce=1.0)], False)
    assert [(p.name, p.step) for p in found] == [("train/loss", 3), ("train/lr", 3)]
    assert math.isnan(found[0].value)
    every, _ = points.points("steps", [step_row(3, loss_infonce=1.0)], True)
    assert {p.name for p in every} == {"train/loss", "train/lr", "train/epoch", "train/loss_infonce"}
    rows = [
        reading(1, -2.0),
        reading(1, math.inf, "saturation", "rows_below_1e-3.i2t"),
        reading(1, 0.5, "saturation", "odd.i2t"),
        reading(1, 3.0, "scale", "value", ""),
        reading(1, [1.0, 2.0], "accumulation", "log10_norm", "total"),
    ]
    found, behind = points.points("readings", rows, False)
    assert [p.name for p in found] == ["loss/hn/log10_true", "saturation/hn/rows_below_1e-3.i2t"]
    assert found[1].value == math.inf
    assert behind == {"accumulation/log10_norm"}
    found, behind = points.points("readings", rows, True)
    assert {p.name for p in found} >= {"scale/value", "saturation/hn/odd.i2t"}
    found, _ = points.points("evals", [eval_row(2, 0.5), eval_row(2, 0.6, "R@10"), eval_row(2, 0.5, dataset="/a/my data")], False)
    assert [p.name for p in found] == ["eval/scenes.val/i2t.R_at_1", "eval/my-data.val/i2t.R_at_1"]
    found, _ = points.points("evals", [eval_row(2, 0.5)], True)
    assert [p.name.rsplit(".", 1)[1] for p in found] == ["R_at_1", "low", "high"]


def test_histograms_have_the_bins_of_their_quantities():
    counts = np.arange(captions.BINS, dtype=float)
    (point,), _ = points.points("readings", [reading(1, list(counts), "captions", "histogram", "")], True)
    assert point.name == "captions/cosines"
    np.testing.assert_allclose(point.value.edges, np.linspace(captions.LOW, captions.HIGH, captions.BINS + 1))
    sketch = np.zeros(octaves.LENGTH)
    sketch[octaves.ZERO] = 5
    sketch[octaves.ZERO + 1 + 6] = 3  # positive, 2^(LOWEST + 6)
    sketch[octaves.ZERO - 1 - 6] = 4  # negative, of the same size
    (point,), _ = points.points("readings", [reading(1, list(sketch), "sketch", "counts.text", "total")], False)
    assert point.name == "sketch/total/log10_size.text"
    kept = point.value.trimmed()
    assert kept.counts.tolist() == [7]
    np.testing.assert_allclose(10**kept.edges, [2.0 ** (octaves.LOWEST + 6), 2.0 ** (octaves.LOWEST + 7)])


def test_unknown_twice_and_missing(monkeypatch):
    with pytest.raises(ValueError, match=r"unknown sink 'tensorbord'\. Did you mean 'tensorboard'"):
        parse("wandb,tensorbord")
    with pytest.raises(ValueError, match="twice"):
        parse("wandb, wandb")
    assert parse("") == []
    monkeypatch.setattr(type(sinks["wandb"]()), "module", "no_such_library")
    with pytest.raises(ValueError, match=re.escape("pip install 'gradscope[wandb]'")):
        require("wandb")
    with pytest.raises(ValueError, match="--sink-all has no effect"):
        resolve({}, {"log.sink_all": True})


# ---- a real run


@pytest.fixture(scope="module")
def trained(scenes_folder: Path, small_encoder: Path, tmp_path_factory) -> Path:
    """Four steps with TensorBoard beside, every scalar; both kinds of zeros and an evaluation before and after."""
    settings = {
        **{"data.name": str(scenes_folder), "encoder.name": str(small_encoder), "objective.name": "hn", "train.device": "cpu"},
        **{"train.batch_size": 8, "train.max_steps": 4, "train.lr": 1e-3, "probe.log_grads": True, "probe.every": 2},
        **{"log.sinks": "tensorboard", "log.sink_all": True},
    }
    output = tmp_path_factory.mktemp("runs") / "trained"
    train(resolve({}, settings), output, quiet=True)
    return output


def expected_curves(path: Path, everything: bool) -> Curves:
    """By plain reading of the run."""
    run, curves = Run(path), defaultdict(list)
    for row in run.rows("steps"):
        for name, value in row.items():
            if name not in ("attempt", "step", "samples") and (everything or name in STEPS) and value is not None:
                curves[f"train/{name}"].append((row["step"], value))
    for row in run.readings.to_dict("records"):
        stem = re.sub(r"\.(i2t|t2i|image|text)$", "", row["key"])
        listed = READINGS.get(row["quantity"], ())
        if (everything or row["key"] in listed or stem in listed) and not isinstance(row["value"], list):
            name = re.sub(r"[^\w./-]+", "-", "/".join(filter(None, (row["quantity"], row["term"], row["key"]))))
            curves[name].append((row["step"], row["value"]))
    for row in run.evals.to_dict("records"):
        name = f"eval/{Path(row['dataset']).name}.{row['split']}/{row['direction']}.{row['metric'].replace('@', '_at_')}"
        for ending in ("", ".low", ".high") if everything else ("",):
            if everything or row["metric"] in METRICS:
                value = row[ending[1:] or "value"]
                if not math.isnan(value):
                    curves[name + ending].append((row["step"], value))
    return dict(curves)


def test_tensorboard_beside_a_training_run_holds_its_rows(trained: Path):
    assert equal(from_tensorboard(trained), expected_curves(trained, everything=True), np.float32)


def test_a_sink_leaves_the_training_as_it_is(trained: Path, tmp_path: Path):
    from gradscope.run_tables import comparable

    plain = {
        **{f"{t}.{k}": v for t, table in Run(trained).recipe.items() for k, v in table.items()},
        "log.sinks": "",
        "log.sink_all": False,
    }
    train(resolve({}, plain), tmp_path / "plain", quiet=True)
    for table in ("steps", "readings", "evals"):
        assert comparable(getattr(Run(tmp_path / "plain"), table)).equals(comparable(getattr(Run(trained), table)))


def test_the_short_list_is_short_and_exists(trained: Path):
    curves = expected_curves(trained, everything=False)
    assert 30 <= len(curves) <= 70
    readings = Run(trained).readings
    stems = {(q, k) for q, k in zip(readings["quantity"], readings["key"], strict=True)}
    stems |= {(q, re.sub(r"\.(i2t|t2i|image|text)$", "", k)) for q, k in stems}
    assert {(q, key) for q, keys in READINGS.items() for key in keys} <= stems


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory) -> Path:
    """The same run before it met a sink."""
    path = tmp_path_factory.mktemp("runs") / "copy"
    return shutil.copytree(trained, path, ignore=shutil.ignore_patterns("tensorboard", "sinks.json", "checkpoints"))


def test_a_replay_fills_all_three_and_repeats_nothing(run: Path):
    counts = replay(run, ALL)
    rows = sum(len(getattr(Run(run), table)) for table in ("steps", "readings", "evals"))
    assert counts == dict.fromkeys(ALL.split(","), rows)
    short = expected_curves(run, everything=False)
    assert equal(from_tensorboard(run), short, np.float32)
    curves, histograms, _ = from_wandb(run)
    assert equal(curves, short)
    expected = Run(run).reading("sketch", "counts.text", "total")["value"].iloc[-1]  # of the last step, as ``histograms``
    assert sum(histograms["sketch/total/log10_size.text"]["values"]) == sum(expected) - expected[octaves.ZERO]
    curves, params, status = from_mlflow(run)
    assert equal(curves, short)
    assert params["train.lr"] == "0.001"
    assert status == "FINISHED"
    assert set(replay(run, ALL).values()) == {0}
    assert equal(from_tensorboard(run), short, np.float32)
    assert equal(from_wandb(run)[0], short)
    assert equal(from_mlflow(run)[0], short)


# ---- kills, failures, non-finite values

KILLED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_sinks import ALL, create, from_wandb, open_feeds, write
log = create(Path(sys.argv[1]))
for feed in open_feeds(ALL, log.path, {"train": {"lr": 1e-5}}, say=print):
    log.listen(feed)
for step in range(1, 8):
    write(log, step)
deadline = time.monotonic() + 120
while [s for s, _ in from_wandb(log.path)[0].get("train/loss", [])] != list(range(1, 8)):  # W&B writes once a second
    assert time.monotonic() < deadline
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def write(log: RunLog, step: int) -> None:
    log.write_readings([reading(step, -step / 7)])
    log.write_readings([reading(step, math.nan, "gradient", "cosine", "pair")])  # a second call of one step
    log.write_steps([step_row(step, 1 / step)])
    if step % 4 == 0:
        log.write_evals([eval_row(step, step / 10), eval_row(step, 0.9, "R@5")])


def test_kill_9_and_resume_continue_each_sink_without_a_step_twice_or_missing(run: Path, tmp_path: Path, monkeypatch):
    if not (run / "mlflow.db").is_file():
        replay(run, "mlflow")
    path = tmp_path / "run"
    shutil.copy(run / "mlflow.db", tmp_path / "store.db")  # making one takes seconds
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # W&B's helper process of this test run
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, check=False, capture_output=True, env=alone)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    ids = {name: entry["id"] for name, entry in json.loads((path / STATE).read_text()).items()}
    with RunLog.reopen(path, step=4, provenance={}) as log:
        said: list[str] = []
        for feed in open_feeds(ALL, path, {}, say=said.append):
            log.listen(feed)
        for step in range(5, 11):
            write(log, step)
        log.finish()
    assert [line.split(":")[0] for line in said] == [f"sink {name}" for name in ALL.split(",")]
    assert ids == {name: entry["id"] for name, entry in json.loads((path / STATE).read_text()).items()}
    expected = expected_curves(path, everything=False)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 11))
    assert equal(from_tensorboard(path), expected, np.float32)
    curves, _, seen = from_wandb(path)
    assert equal(curves, expected)
    assert seen == {ids["wandb"]}
    assert equal(from_mlflow(path, tmp_path / "store.db")[0], expected)


class Broken:
    """A dashboard whose server comes and goes."""

    id = where = "x"

    def __init__(self) -> None:
        self.got: list[Point] = []
        self.closed: list[bool] = []
        self.up = True

    def write(self, points: list[Point]) -> None:
        if not self.up:
            raise ConnectionError("no route to host")
        self.got += points

    def close(self, done: bool) -> None:
        self.closed.append(done)
        raise ConnectionError("still no route")


class Clock:
    """A made-up one, which a busy machine does not slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(feeds, "time", self)

    def monotonic(self) -> float:
        return self.now


def test_a_failing_sink_is_counted_said_once_and_ends_nothing(tmp_path: Path, monkeypatch):
    clock = Clock(monkeypatch)
    said: list[str] = []
    sink = Broken()
    with create(tmp_path / "run") as log:
        log.listen(Feed("wandb", sink, log.path, everything=False, say=said.append))
        for step in range(1, 10):
            sink.up = not 3 <= step <= 5
            clock.now += 1  # longer than the pause after so quick a failure
            log.write_steps([step_row(step)])
        log.write_readings([reading(9, [1.0, 2.0], "zeros", "positive_zero.i2t")])
        log.finish()
    assert len(Run(tmp_path / "run").steps) == 9
    assert {p.step for p in sink.got} == {1, 2, 6, 7, 8, 9}
    assert sink.closed == [True]
    assert said[0] == "sink wandb failed, training goes on: ConnectionError: no route to host"
    assert said[1].startswith("sink wandb: 3 rows did not arrive, 7 did")
    assert said[2] == "sink wandb: lists that are no histograms stay in the run directory: zeros/positive_zero"
    assert said[3:] == ["sink wandb could not be closed: ConnectionError: still no route"]


class Slow(Broken):
    """A server that never answers."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def write(self, points: list[Point]) -> None:
        self.clock.now += 5
        self.got += points
        raise TimeoutError


def test_a_sink_that_hangs_before_it_fails_is_left_alone_for_a_while(tmp_path: Path, monkeypatch):
    clock = Clock(monkeypatch)
    said: list[str] = []
    sink = Slow(clock)
    with create(tmp_path / "run") as log:
        feed = Feed("mlflow", sink, log.path, everything=False, say=said.append)
        log.listen(feed)
        for step in range(1, 50):
            log.write_steps([step_row(step)])
            clock.now += 2
    assert [p.step for p in sink.got if p.name == "train/loss"] == [1, 26], "of 49 time-outs of 5 seconds, one in each 50 seconds"
    assert feed.lost == 49
    assert len(said) == 3


def test_a_run_that_breaks_off_closes_its_sinks_as_not_done(tmp_path: Path):
    sink = Broken()
    log = create(tmp_path / "run")
    log.listen(Feed("wandb", sink, log.path, everything=False, say=str))
    log.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sink.closed == [False]


def test_a_sink_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch):
    with create(tmp_path / "run") as log:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://host")
        with pytest.raises(ValueError, match="sink 'mlflow' cannot be opened"):
            open_feeds("tensorboard,mlflow", log.path, {})
    (tmp_path / "run" / STATE).write_text("{broken")
    with pytest.raises(ValueError, match=r"sinks\.json cannot be read"):
        open_feeds("tensorboard", tmp_path / "run", {})


def test_a_replay_of_a_run_that_is_being_written_is_refused(tmp_path: Path):
    with create(tmp_path / "run") as log:
        code = f"from gradscope.sinks.feed import replay; from pathlib import Path; replay(Path({str(log.path)!r}), 'tensorboard')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ))
        assert "another process is writing" in done.stderr


def test_an_empty_histogram_has_one_bin():
    empty = Histogram(edges=np.arange(5.0), counts=np.zeros(4)).trimmed()
    assert (empty.edges.tolist(), empty.counts.tolist()) == ([0.0, 1.0], [0.0])
