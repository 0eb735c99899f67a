"""gradscope check: gates equal the verdict's numbers, exit codes, JSON, JUnit."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hand_run import hand_run
from typer.testing import CliRunner

from gradscope import gates
from gradscope.cli import app
from gradscope.diagnose import diagnose, look
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.train import train
from gradscope.verdict import summarise

run = CliRunner().invoke


@pytest.fixture(scope="module")
def real(scenes_folder: Path, small_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short epochs, every second step probed."""
    path = tmp_path_factory.mktemp("runs") / "real"
    tables = {
        "data": {"name": str(scenes_folder)},
        "encoder": {"name": str(small_encoder)},
        "objective": {"name": "hn", "gamma": 0.2},
        "train": {"batch_size": 16, "epochs": 2, "lr": 1e-3, "device": "cpu"},
        "probe": {"log_grads": True, "every": 2},
    }
    train(resolve(tables, {}), path, quiet=True)
    return path


def values(path: Path, *names: str, over: str = "last", term: str = "") -> dict[str, float | None]:
    found = gates.evaluate(look(path), dict.fromkeys(names, 0.5), over=over, term=term)
    return {outcome.name: outcome.value for outcome in found}


def median_of_last(path: Path, quantity: str, key: str, term: str) -> float:
    """Over the last epoch, or the last six measured batches where it holds fewer."""
    rows = Run(path).reading(quantity, key, term).sort_values("step")
    last = rows[rows["epoch"] == rows["epoch"].max()]
    return float((last if len(last) >= 6 else rows.tail(6))["value"].astype(float).median())


def test_gates_are_the_numbers_of_the_verdict(real: Path) -> None:
    summary = summarise(real)
    every = ("max-saturated-batches", "min-residual", "min-effective-rows")
    for term in ("hn", "infonce"):
        got = values(real, *every, term=term)
        rows = [median_of_last(real, "residual", f"log10_mean.{d}", term) for d in ("i2t", "t2i")]
        assert got["min-residual"] == pytest.approx(10 ** np.mean(rows))
        rows = [median_of_last(real, "saturation", f"effective_rows.{d}", term) for d in ("i2t", "t2i")]
        assert got["min-effective-rows"] == pytest.approx(np.mean(rows))
    assert values(real, "max-saturated-batches", "max-saturated-rows") == {
        "max-saturated-rows": pytest.approx(summary.judged[1]),
        "max-saturated-batches": pytest.approx(summary.judged[0]),
    }
    assert values(real, *every) == values(real, *every, term="hn"), "the trained objective is the default"
    whole = values(real, "max-exact-zero", "max-pull-lost", over="all")
    zeros = summary.zeros["hn"]
    assert whole["max-exact-zero"] == pytest.approx(zeros["entries_reached.parameters"])
    assert whole["max-pull-lost"] == pytest.approx((zeros["positive_zero.i2t"] + zeros["positive_zero.t2i"]) / 2)


def test_gates_are_what_their_definitions_say(real: Path) -> None:
    """The same numbers by hand from the rows of the log."""
    log = Run(real)
    rows = log.readings.merge(log.steps[["step", "epoch"]], on="step")
    last = rows[(rows["term"] == "hn") & rows["key"].str.startswith("rows_below_1e-3")].sort_values("step")
    last = last.tail(max(12, int((last["epoch"] == 2).sum())))  # two directions of six batches
    steps = log.steps[log.steps["epoch"] == 2]
    recall = log.evals[(log.evals["metric"] == "R@1") & (log.evals["step"] == log.evals["step"].max())]["value"]
    got = values(real, "max-saturated-rows", "max-loss", "max-skipped", "min-recall")
    assert got["max-saturated-rows"] == pytest.approx(np.mean(last["value"].astype(float)))
    assert got["max-loss"] == pytest.approx(np.median(steps["loss"]))
    assert got["max-skipped"] == 0
    assert got["min-recall"] == pytest.approx(recall.mean())


@pytest.mark.parametrize(
    ("limits", "code", "states"),
    [
        (["--max-saturated-rows", "0.5"], 0, {"max-saturated-rows": "passed"}),
        (["--max-saturated-rows", "0.3"], 0, {"max-saturated-rows": "passed"}),  # the limit itself is kept
        (["--max-saturated-rows", "0.1", "--min-residual", "1e-4"], 1, {"max-saturated-rows": "failed", "min-residual": "passed"}),
        (["--min-residual", "0.9"], 1, {"min-residual": "failed"}),
        (["--max-loss", "0.1"], 1, {"max-loss": "failed"}),
        (["--min-recall", "0.5", "--no-findings", "note"], 0, {"min-recall": "passed", "no-findings": "passed"}),
    ],
)
def test_exit_codes_and_states(limits: list[str], code: int, states: dict[str, str], tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run")
    done = run(app, ["check", str(path), *limits, "--json", str(tmp_path / "gates.json")])
    assert done.exit_code == code, done.output
    content = json.loads((tmp_path / "gates.json").read_text())
    assert (content["schema"], content["version"], content["exit_code"]) == ("gradscope.check", 1, code)
    assert {row["name"]: row["state"] for row in content["gates"]} == states
    for row in content["gates"]:
        assert row["name"] in done.output
        assert row["definition"].split()[0] in done.output


@pytest.mark.parametrize(
    ("severity", "code"),
    [("error", 0), ("warning", 1), ("note", 1)],
)
def test_findings_are_a_gate(severity: str, code: int, tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run", {("saturation", "below_1e-3", "*"): 1.0})  # GS001, a warning
    assert run(app, ["check", str(path), "--no-findings", severity]).exit_code == code
    assert run(app, ["check", str(path), "--no-findings", severity, "--mute", "GS001"]).exit_code == 0


def test_what_was_not_measured_neither_passes_nor_fails(tmp_path: Path) -> None:
    readings = {("zeros", "entries_reached.parameters", "*"): None, ("saturation", "rows_below_1e-3.*", "*"): 0.9}
    path = hand_run(tmp_path / "run", readings, recipe={"probe.set": "default"})
    done = run(app, ["check", str(path), "--max-exact-zero", "0.5", "--max-saturated-rows", "0.5"])
    assert done.exit_code == 2
    assert "not measured" in done.output
    assert "--probe-set full records it" in " ".join(done.output.split())
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n" + "".join(f"{step},0.5\n" for step in range(1, 60)))
    assert run(app, ["check", str(log), "--max-loss", "1"]).exit_code == 0
    assert run(app, ["check", str(log), "--max-saturated-rows", "1"]).exit_code == 2
    assert run(app, ["check", str(log), "--no-findings", "error", "--width", "64"]).exit_code == 0


def test_a_number_that_is_not_finite_cannot_pass(tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run", {("saturation", "rows_below_1e-3.*", "*"): float("nan")})
    assert run(app, ["check", str(path), "--max-saturated-rows", "1"]).exit_code == 2


def test_a_run_that_ends_in_nan_does_not_pass_by_its_finite_part(tmp_path: Path) -> None:
    """Half of the last epoch's losses are nan: the median of the other half is no answer."""
    path = hand_run(tmp_path / "run", columns={"loss": lambda step: float("nan") if step > 30 else 0.4})
    done = run(app, ["check", str(path), "--max-loss", "1", "--json", str(tmp_path / "gates.json")])
    assert done.exit_code == 2
    gate = json.loads((tmp_path / "gates.json").read_text())["gates"][0]
    assert (gate["state"], gate["value"]) == ("unevaluated", None)
    assert gate["detail"].startswith("10 values are not finite")


def test_a_last_epoch_of_nan_is_not_stepped_over(tmp_path: Path) -> None:
    """Every reading of the second epoch is nan: the first one, which passes, is no answer for the run."""
    nan = {("saturation", "rows_below_1e-3.*", "*"): lambda step: float("nan") if step > 20 else 0.0}
    path = hand_run(tmp_path / "run", nan)
    assert run(app, ["check", str(path), "--max-saturated-rows", "1"]).exit_code == 2


def test_too_few_measured_batches_are_no_answer(tmp_path: Path) -> None:
    path = hand_run(tmp_path / "run", steps=5, every=1)
    done = run(app, ["check", str(path), "--max-saturated-rows", "1"])
    assert done.exit_code == 2
    assert "has 5 measured batches, at least 6 are needed" in " ".join(done.output.split())


def test_steps_of_other_loops_that_were_not_probed_are_no_nan(tmp_path: Path) -> None:
    """A loop that is not ours logs a skipped step without its loss."""
    facts = {"loop": "not gradscope's"}
    path = hand_run(tmp_path / "run", columns={"loss": lambda step: None if step % 2 else 0.4}, facts=facts)
    assert run(app, ["check", str(path), "--max-loss", "1"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to check: give at least one of --max-saturated-rows"),
        (["--max-saturated-rows", "50"], "--max-saturated-rows must be between 0 and 1; got 50"),
        (["--max-loss", "nan"], "--max-loss must be a finite number, 0 or more; got nan"),
        (["--max-loss", "1", "--over", "half"], "unknown value of --over 'half'"),
        (["--max-loss", "1", "--term", "clip"], "unknown value of --term 'clip'"),
        (["--max-loss", "1", "--mute", "GS001"], "--mute has no effect without --no-findings"),
        (["--no-findings", "fatal"], "--no-findings takes one of error, warning, note; got 'fatal'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run(app, ["check", str(hand_run(tmp_path / "run")), *arguments])
    assert isinstance(done.exception, ValueError)
    assert words in str(done.exception)


def test_junit_is_what_ci_reads(tmp_path: Path) -> None:
    """Read back with the standard library, and with the library that wrote it."""
    from junitparser import JUnitXml

    path = hand_run(tmp_path / "run", {("zeros", "positive_zero.*", "*"): None})
    out = tmp_path / "gates.xml"
    limits = ["--max-saturated-rows", "0.1", "--max-pull-lost", "0.5", "--max-loss", "1", "--no-findings", "error"]
    assert run(app, ["check", str(path), *limits, "--junit", str(out)]).exit_code == 2
    root = ElementTree.fromstring(out.read_text(encoding="utf-8"))
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "errors")} == {"tests": "4", "failures": "1", "errors": "1"}
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases == {"max-saturated-rows": ["failure"], "max-pull-lost": ["error"], "max-loss": [], "no-findings": []}
    message = suite[0][0].get("message")
    assert message is not None
    assert "0.3" in message
    assert JUnitXml.fromfile(str(out)).failures == 1


def test_every_gate_has_a_flag_and_a_definition() -> None:
    from typer.main import get_command

    flags = {option for parameter in get_command(app).commands["check"].params for option in parameter.opts}  # type: ignore[attr-defined]
    for name, gate in gates.GATES.items():
        assert f"--{name}" in flags
        assert gate.largest == name.startswith("max-")
        assert len(gate.definition) > 20


def test_no_findings_of_nothing_is_no_answer(tmp_path: Path) -> None:
    """A log so short that no rule looked."""
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n1,0.5\n")
    outcome = gates.findings_outcome(diagnose(look(log), ["GS025"]), "error")
    assert outcome.state == "unevaluated"
