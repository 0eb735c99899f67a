"""Kill and resume: the same weights bit for bit, the same frames, and a refusal where the run would not be the same."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file

from gradscope import checkpoint
from gradscope.cli import main
from gradscope.encoders.load import load_encoder
from gradscope.recipe import Recipe, read, resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.train import train

#: Steps per epoch of the small scenes at 8 x 2.
EPOCH = 10


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(scenes_folder: Path, small_encoder: Path) -> dict[str, object]:
    return {
        "data.name": str(scenes_folder),
        "encoder.name": str(small_encoder),
        "objective.name": "hn",
        "objective.margin": "frozen",
        "train.device": "cpu",
        "train.batch_size": 8,
        "train.accumulate": 2,
        "train.accumulate_mode": "narrow",
        "train.epochs": 3,
        "train.lr": 1e-3,
        "train.checkpoint_every": 2,
        "probe.log_grads": True,
        "probe.every": 3,
    }


SCRIPT = """
import sys, time, torch
from pathlib import Path
from gradscope.train import train
from gradscope.recipe import read, resolve
from gradscope.runlog import RunLog
torch.set_num_threads(1)
write = RunLog.write_steps
def slowly(log, rows):  # or a busy machine lets it get too far before the kill
    write(log, rows)
    time.sleep(0.2 if rows[-1]["step"] > 7 else 0)
RunLog.write_steps = slowly
recipe, output = map(Path, sys.argv[1:])
train(resolve(read(recipe), {}), output, quiet=True)
"""


def start(recipe: Recipe, output: Path) -> subprocess.Popen:
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".toml")
    file.write_text(recipe.toml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(file), str(output)], env=environment, stderr=subprocess.PIPE)


def kill_after(process: subprocess.Popen, output: Path, steps: int) -> None:
    """A real SIGKILL as soon as ``steps`` rows are in steps.jsonl."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        log = output / "steps.jsonl"
        if log.is_file() and log.read_bytes().count(b"\n") > steps:
            break
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(Run(run).checkpoints()[-1] / "encoder" / "open_clip_model.safetensors")


def assert_equal_runs(first: Path, second: Path) -> None:
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    one, two = Run(first), Run(second)
    assert one.done
    assert two.done
    for table in ("steps", "readings", "evals"):
        left, right = (comparable(getattr(run, table)) for run in (one, two))
        keys = [k for k in ("step", "quantity", "term", "key", "dataset", "split", "direction", "metric") if k in left]
        left, right = (frame.sort_values(keys, kind="stable").reset_index(drop=True) for frame in (left, right))
        assert len(left) == len(right) > 0
        assert left.to_json() == right.to_json(), table
        assert left.equals(right), table


def test_kill_9_and_resume_equals_an_unbroken_run(settings, tmp_path):
    """Killed twice, in mid-epoch and later; checkpoints every 2 steps, so some logged steps are taken again."""
    recipe = resolve({}, settings)
    train(recipe, tmp_path / "whole", quiet=True)
    output = tmp_path / "killed"
    kill_after(start(recipe, output), output, 7)
    assert not Run(output).done
    assert 0 < len(Run(output).steps) < 3 * EPOCH
    train_until(recipe, output, 21)
    train(resolve(read(output / "recipe.toml"), {}), output, resume=True, quiet=True)
    assert_equal_runs(tmp_path / "whole", output)
    attempts = Run(output).attempts
    assert [entry["attempt"] for entry in attempts] == [1, 2, 3]
    assert attempts[1]["from_step"] % 2 == 0
    assert Run(output).steps["step"].tolist() == list(range(1, 3 * EPOCH + 1))
    assert not Run(output).path.joinpath("checkpoints", ".step-000010.partial").exists()


class Killed(BaseException):
    """Stands for a kill where the moment matters."""


def train_until(recipe: Recipe, output: Path, step: int, where: str = "write_steps") -> None:
    """Trains (or resumes) and dies while step ``step`` is being logged."""
    from gradscope.runlog import RunLog

    original = getattr(RunLog, where)

    def write(self, rows):
        rows = list(rows)
        if any(row["step"] == step for row in rows):
            raise Killed
        original(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, where, write)
        with pytest.raises(Killed):
            train(recipe, output, resume=(output / "recipe.toml").is_file(), quiet=True)


@pytest.mark.parametrize("arm", ["token", "cached", "fp16", "held out", "dropout"])
def test_resume_in_mid_epoch(settings, tmp_path, arm, scenes_folder, make_encoder):
    """Whatever has a state of its own: token scale, cached replay, loss scale, held-out validation, random numbers."""
    changes = {
        "token": {"objective.framework": "hn_clip", "objective.margin": "live"},
        "cached": {"train.accumulate_mode": "cached"},
        "fp16": {"train.precision": "fp16"},
        "held out": {},
        "dropout": {},
    }[arm]
    if arm == "dropout":
        vision = {**SMALL["model_cfg"]["vision_cfg"], "patch_dropout": 0.5}
        changes = {"encoder.name": str(make_encoder(config={**SMALL, "model_cfg": {**SMALL["model_cfg"], "vision_cfg": vision}}))}
    if arm == "held out":
        (tmp_path / "data").mkdir()
        text = (scenes_folder / "train.jsonl").read_text()
        (tmp_path / "data" / "train.jsonl").write_text(text.replace('"images/', f'"{scenes_folder}/images/'))
        changes = {"data.name": str(tmp_path / "data")}
    recipe = resolve({}, {**settings, **changes, "train.max_steps": 8, "train.checkpoint_every": 3, "probe.every": 2})
    train(recipe, tmp_path / "whole", quiet=True)
    train_until(recipe, tmp_path / "killed", 7)
    assert Run(tmp_path / "killed").checkpoints()[-1].name == "step-000006"
    train(recipe, tmp_path / "killed", resume=True, quiet=True)
    said = (tmp_path / "killed" / "console.log").read_text()
    assert "ended early: Killed" in said
    assert "continued from step 6 of 8\n" in said
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("step", [1, 2])
def test_resume_from_before_the_first_checkpoint(settings, tmp_path, step):
    recipe = resolve({}, {**settings, "train.max_steps": 4})
    train(recipe, tmp_path / "whole", quiet=True)
    train_until(recipe, tmp_path / "killed", step)
    assert not Run(tmp_path / "killed").checkpoints()
    train(recipe, tmp_path / "killed", resume=True, quiet=True)
    assert "continued from step 0 of 4: no checkpoint" in (tmp_path / "killed" / "console.log").read_text()
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")


def test_a_kill_between_validation_and_checkpoint(settings, tmp_path):
    """The validation of step 4 is on disk, its checkpoint is not: it is taken again and counts once."""
    from gradscope import checkpoint

    recipe = resolve({}, {**settings, "train.max_steps": 4})
    train(recipe, tmp_path / "whole", quiet=True)
    original = checkpoint.save

    def save(folder, *state):
        if folder.name == "step-000004":
            raise Killed
        original(folder, *state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(Killed):
            train(recipe, tmp_path / "killed", quiet=True)
    train(recipe, tmp_path / "killed", resume=True, quiet=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")


def test_a_kill_after_the_last_checkpoint_can_still_be_finished(settings, tmp_path):
    recipe = resolve({}, {**settings, "train.max_steps": 4})
    train(recipe, tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (tmp_path / "killed" / "DONE").unlink()
    result = train(recipe, tmp_path / "killed", resume=True, quiet=True)
    assert result.steps == 4
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
    with pytest.raises(ValueError, match=r"is complete: 4 of 4 steps"):
        train(recipe, tmp_path / "killed", resume=True, quiet=True)


def test_a_half_written_checkpoint_is_not_used(settings, tmp_path):
    recipe = resolve({}, {**settings, "train.max_steps": 6})
    train(recipe, tmp_path / "whole", quiet=True)
    train_until(recipe, tmp_path / "killed", 5)
    partial = tmp_path / "killed" / "checkpoints" / ".step-000006.partial"
    partial.mkdir()
    (partial / "trainer.pt").write_bytes(b"half")
    train(recipe, tmp_path / "killed", resume=True, quiet=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
    assert not partial.exists()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As a full disk: a write beyond ``size`` bytes of a file is an error."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("file", ["encoder/open_clip_model.safetensors", "trainer.pt"])
def test_a_checkpoint_without_room_is_no_half_one(small_encoder, tmp_path, file):
    """Whichever of its files is the one too many; what was there before stays."""
    encoder = load_encoder(str(small_encoder))
    optimizer = torch.optim.AdamW(encoder.parameters())
    sum(p.sum() for p in encoder.parameters()).backward()
    optimizer.step()  # moments: twice the weights
    checkpoint.save(tmp_path / "step-000001", encoder, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    size = (tmp_path / "step-000001" / file).stat().st_size
    with files_up_to(size - 5000), pytest.raises(ValueError, match=r"step-000002 cannot be written, .* Make room, then give the same"):
        checkpoint.save(tmp_path / "step-000002", encoder, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_log_without_room_is_one_line(small_encoder, scenes_folder, tmp_path, monkeypatch, capsys):
    words = ["train", "--data", str(scenes_folder), "--encoder", str(small_encoder), "--device", "cpu", "--max-steps", "2"]
    monkeypatch.setattr(sys, "argv", ["gradscope", *words, "--log-grads", "--output", str(tmp_path / "run")])
    with files_up_to(9000), pytest.raises(SystemExit, match="2"):
        main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradscope:")]
    assert "cannot be written: File too large; make room; what was written is kept" in line


def test_a_damaged_checkpoint_is_named(settings, tmp_path):
    recipe = resolve({}, {**settings, "train.max_steps": 6})
    train_until(recipe, tmp_path / "run", 5)
    path = tmp_path / "run" / "checkpoints" / "step-000004" / "trainer.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-000004.*cannot be resumed from: [^.]*; move that folder away to go on from the one"):
        train(recipe, tmp_path / "run", resume=True, quiet=True)
    path.parent.rename(tmp_path / "damaged")
    assert train(recipe, tmp_path / "run", resume=True, quiet=True).steps == 6


CHANGES = {
    "train.lr": (1e-3, 2e-3),
    "train.epochs": (3, 8),
    "train.batch_size": (8, 16),
    "train.seed": (42, 43),
    "objective.gamma": (0.5, 0.25),
    "objective.margin": ("frozen", "live"),
    "probe.every": (3, 1),
}


@pytest.fixture
def stopped(settings, tmp_path):
    recipe = resolve({}, {**settings, "train.max_steps": 6})
    train_until(recipe, tmp_path / "run", 3)
    return tmp_path / "run"


def test_another_recipe_is_refused_with_key_old_and_new(stopped):
    before = (stopped / "provenance.json").read_bytes()
    for key, (old, new) in CHANGES.items():
        changed = resolve(Run(stopped).recipe, {key: new})
        with pytest.raises(ValueError) as refusal:
            train(changed, stopped, resume=True, quiet=True)
        message = str(refusal.value)
        assert re.search(rf"{re.escape(key)} was {re.escape(repr(old))} and is now {re.escape(repr(new))}", message), message
        assert "--output" in message
    assert (stopped / "provenance.json").read_bytes() == before, "a refused resume opens no attempt"


def test_a_refusal_names_what_was_asked_for_and_what_followed_from_it(stopped):
    both = "loss_form was 'plain' and is now 'residual', objective.kernel was 'auto' and is now 'streaming'"
    with pytest.raises(ValueError, match=both):
        train(resolve(Run(stopped).recipe, {"objective.kernel": "streaming"}), stopped, resume=True, quiet=True)


def test_another_place_for_pictures_is_not(stopped, monkeypatch):
    """A cache changes no bit of them, and another machine may have no room for it."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(stopped.parent / "cache"))
    before = (stopped / "recipe.toml").read_bytes()
    train(resolve(Run(stopped).recipe, {"data.cache": "images"}), stopped, resume=True, quiet=True)
    assert Run(stopped).done
    assert "image cache:" in (stopped / "console.log").read_text()
    assert (stopped / "recipe.toml").read_bytes() == before


def test_other_data_are_refused(settings, tmp_path, scenes_folder):
    (tmp_path / "data").mkdir()
    rows = [json.loads(line) for line in (scenes_folder / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "image": str(scenes_folder / row["image"])} for row in rows]
    file = tmp_path / "data" / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = resolve({}, {**settings, "data.name": str(tmp_path / "data"), "train.max_steps": 6})
    train_until(recipe, tmp_path / "run", 3)
    old = Run(tmp_path / "run").provenance["data"]["train_sha256"][:12]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    with pytest.raises(ValueError, match=rf"its records was {old}\.\.\. and is now [0-9a-f]{{12}}"):
        train(recipe, tmp_path / "run", resume=True, quiet=True)


def test_other_usable_pictures_are_refused(settings, tmp_path, scenes_folder):
    """The file is the same, but a picture that training used is gone: the shuffle would be another."""
    shutil.copytree(scenes_folder, tmp_path / "data")
    recipe = resolve({}, {**settings, "data.name": str(tmp_path / "data"), "data.allow_missing": True, "train.max_steps": 6})
    train_until(recipe, tmp_path / "run", 3)
    first = json.loads((tmp_path / "data" / "train.jsonl").read_text().splitlines()[0])
    (tmp_path / "data" / first["image"]).unlink()
    with pytest.raises(ValueError, match=r"\d+ records of '.*' were usable and now \d+ are"):
        train(recipe, tmp_path / "run", resume=True, quiet=True)


def test_resume_of_what_is_no_run(settings, tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        train(resolve({}, settings), tmp_path / "nothing", resume=True, quiet=True)
