"""The command line: help is instant and complete, and what the user got wrong is one line and exit code 2."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gradscope import launch
from gradscope.cli import app, main
from gradscope.cli.sweep import _table as sweep_table
from gradscope.cli.train import KEYS
from gradscope.console import out as printed
from gradscope.recipe import resolve
from gradscope.runlog import Run

COMMANDS = [
    *("audit", "train", "sweep", "eval", "compare", "diagnose", "check", "probe", "zeros", "what-if"),
    *("caption-geometry", "embedding-geometry", "figure", "export", "watch", "demo"),
]

HELP = """
import sys
from typer.testing import CliRunner
from gradscope.cli import app
names = sorted(command.name for command in app.registered_commands)
for command in (None, *names):
    result = CliRunner().invoke(app, [command, "--help"] if command else ["--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, (command, result.output)
    assert "Example: gradscope " in result.output, command
    if command:
        assert f"Example: gradscope {command} " in result.output, command
heavy = {"torch", "pandas", "matplotlib", "seaborn", "open_clip", "scipy", "PIL", "sentence_transformers"} & set(sys.modules)
assert not heavy, heavy
print(",".join(names))
"""


def test_every_help_has_an_example_and_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split(",") == sorted(COMMANDS)


def every_help(width: int) -> dict[str, str]:
    """The help of every command and subcommand, in a terminal of ``width`` columns."""
    helps = {}

    def visit(words: list[str], command: Any) -> None:
        result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
        assert result.exit_code == 0, (words, result.output)
        helps[" ".join(words)] = result.output
        for name, inner in getattr(command, "commands", {}).items():
            visit([*words, name], inner)

    visit([], get_command(app))
    return helps


def test_every_help_says_defaults_in_one_style():
    """(default: X), never in square brackets or as a sentence."""
    for name, text in every_help(200).items():
        for wrong in ("[default", "Default:", "by default", "(default: (", "(default: None", "(default: )"):
            assert wrong not in text, (name, wrong)


def test_every_help_fits_eighty_columns():
    for name, text in every_help(80).items():
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80, name
        for line in lines:  # a table's rows end at its frame
            assert not line.startswith("│") or (line.endswith("│") and len(line) == 80), (name, line)


def test_the_defaults_that_train_names_are_those_of_a_recipe():
    """Its flags default to None, "not given"; what its help says is written by hand."""
    settings = dataclasses.asdict(resolve({}, {}))
    parameters = {parameter.name: parameter for parameter in get_command(app).commands["train"].params}
    named = 0
    for name, key in KEYS.items():
        table, _, entry = key.partition(".")
        said = re.search(r"\(default: (.*)\)$", parameters[name].help)
        if said and (key, said[1]) not in ARE_WORDS:
            value = 0.5 if name == "gamma" else "live" if name == "margin" else settings[table][entry]  # of hn
            assert (float(said[1]) if isinstance(value, int | float) else said[1]) == value, name
            named += 1
        assert said or not settings[table][entry] or name in HAVE_NONE, (name, settings[table][entry])
    assert named > 20


#: Defaults that are no value of the setting, and flags whose setting needs no word.
ARE_WORDS = {
    ("data.folder", "$GRADSCOPE_DATA, the cache"),
    ("data.encoding", "utf-8"),
    ("train.checkpoint_every", "one per epoch"),
}
HAVE_NONE = {"accumulate_mode"}


def test_the_installed_command_answers():
    """The console script itself: version, help, and a wrong command."""
    script = Path(sys.executable).parent / "gradscope"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gradscope ")
    done = subprocess.run([script, "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_no_argument_prints_help():
    result = CliRunner().invoke(app, [])
    assert "caption-geometry" in result.output


@pytest.fixture
def cli(monkeypatch, capfd, tmp_path):
    """``cli("train", "--data", "x")`` -> (exit code, stdout, stderr), in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradscope", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture
def small(scenes_folder, small_encoder):
    return ["--data", scenes_folder, "--encoder", small_encoder, "--device", "cpu", "--batch-size", 8, "--max-steps", 2]


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert "Traceback" not in err + out
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("gradscope: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


def test_wrong_settings(cli, small):
    refused(cli("train", "--data", "scene"), "unknown data set 'scene'", "Did you mean 'scenes'", "path")
    refused(cli("train", *small, "--encoder", "ViT-B-61:openai"), "unknown encoder", "Did you mean 'ViT-B-16")
    refused(cli("train", *small, "--encoder", "tinny"), "unknown encoder 'tinny'", "Did you mean 'tiny'")
    refused(cli("train", *small, "--gamma", ".5"), "--gamma", "hn")
    refused(cli("train", *small, "--accumulate", "8"), "--accumulate-mode", "narrow", "cached")
    refused(cli("train", *small, "--probe-every", "2"), "--log-grads")
    refused(cli("train", *small, "--set", "train.gradclip=1"), "Did you mean 'grad_clip'")
    refused(cli("train", *small, "--set", "lr=1"), "table.key=value")
    refused(cli("train", *small, "--recipe", "no.toml"), "'no.toml' does not exist")
    refused(cli("train", *small, "--device", "gpu"), "unknown device 'gpu'", "cpu")
    refused(cli("train", *small, "--batch-size", 500), "500 x 1 = 500 records", "160", "--batch-size")
    refused(cli("train", *small, "--resume"), "not a run directory")


def test_wrong_data(cli, small, tmp_path, scenes_folder):
    (tmp_path / "empty").mkdir()
    refused(cli("train", *small, "--data", "empty"), "neither train.jsonl nor test.jsonl", "nothing")
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad" / "train.jsonl"
    bad.write_text("\n")
    refused(cli("train", *small, "--data", "bad"), "holds no records")
    same = ('{"id": 1, "image": "a.jpg", "captions": ["x"]}', '{"id": 2, "image": "./a.jpg", "captions": ["y"]}')
    bad.write_text("\n".join(same))
    refused(cli("train", *small, "--data", "bad"), "a.jpg' to 2 records", "into one record")
    rows = {
        '{"id": 1, "image": "a.jpg"}': "no key 'captions'",
        '{"id": 1, "image": "a.jpg", "captions": "one"}': "'captions' must be a list",
        '{"id": 1, "image": "a.jpg", "captions": [" "]}': "'captions' must be a list",
        '{"id": 1, "image": null, "captions": ["one"]}': "'image' must be the path",
        '{"id": 1, "image": "a.jpg", "captions": ["one"]': "line 2",
        "[1, 2]": "line 2",
    }
    for row, message in rows.items():
        bad.write_text(f'{{"id": 0, "image": "a.jpg", "captions": ["zero"]}}\n{row}\n')
        refused(cli("train", *small, "--data", "bad"), str(Path("bad/train.jsonl")), "line 2", message)
    bad.write_text('{"id": 0, "image": "a.jpg", "captions": ["zero"]}\n' * 2)
    refused(cli("train", *small, "--data", "bad"), "id '0' 2 times")
    bad.write_bytes('{"id": 0, "image": "a.jpg", "captions": ["caf\xe9"]}\n'.encode("latin-1"))
    refused(cli("train", *small, "--data", "bad"), "not UTF-8")
    bad.write_text("".join(f'{{"id": {i}, "image": "no{i}.jpg", "captions": ["zero"]}}\n' for i in range(40)))
    refused(cli("train", *small, "--data", "bad"), "40 of 40 pictures do not exist: bad/no0.jpg, bad/no1.jpg", "and 30 more")
    assert not (tmp_path / "runs").exists(), "a run that cannot start leaves no folder behind"


def test_wrong_evaluations(cli, scenes_folder, small_encoder, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "train.jsonl").write_bytes((scenes_folder / "train.jsonl").read_bytes())
    common = ["--device", "cpu", "--data"]
    refused(cli("eval", small_encoder, *common, "part", "--split", "test"), "no split 'test'", "it has train")
    refused(cli("eval", "part", *common, scenes_folder), "'part' holds no encoder", "found train.jsonl")
    refused(cli("eval", "nothing", *common, scenes_folder), "unknown encoder 'nothing'")
    refused(cli("eval", "longclip-L", *common, scenes_folder), "longclip-L", "not on disk", "Fetch")
    (tmp_path / "text.pt").write_text("<html>not weights</html>")
    refused(cli("eval", "text.pt", *common, scenes_folder), "text.pt", "not weights")
    refused(cli("probe", "nothing", *common, scenes_folder), "unknown encoder 'nothing'")


def test_wrong_figures_and_sweeps(cli, tmp_path):
    (tmp_path / "no-run").mkdir()
    refused(cli("figure", "4", "no-run"), "not a run directory", "an empty directory")
    refused(cli("figure", "5", "no-run"), "unknown figure '5'")
    (tmp_path / "recipe.toml").write_text("")
    refused(cli("sweep", "recipe.toml", "--over", "objective.gama=0,1"), "Did you mean 'gamma'")
    refused(cli("sweep", "recipe.toml", "--over", "gamma"), "--over takes")
    refused(cli("sweep", "no.toml", "--over", "train.lr=1"), "does not exist")


RESUME = "to continue from the last checkpoint, give the same command with --resume"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ("sweep", "recipe.toml", "--over", "objective.gamma=0,1"),
            "what was written is kept; to continue, give the same command again",
        ),
        (("train", "--recipe", "recipe.toml"), f"what was written is kept; {RESUME}"),
        (("train", "--recipe", "recipe.toml", "--resume"), f"what was written is kept; {RESUME}"),
        (("figure", "4", "run"), "to start over, give the same command again"),
        (("data", "info", "scenes"), "to start over, give the same command again"),
    ],
)
def test_an_interrupt_says_how_to_go_on(cli, monkeypatch, words, hint):
    def interrupted(*values, **named):
        raise KeyboardInterrupt

    for reader in ("recipe.read", "runlog.Run.__init__", "data.fetch.fetch_folder"):
        monkeypatch.setattr(f"gradscope.{reader}", interrupted)
    code, out, err = cli(*words)
    assert code == 130
    assert err.strip().endswith(f"gradscope: stopped; {hint}.")
    assert "Traceback" not in err + out


def test_sigterm_is_said_too_and_the_next_command_was_not_told(cli, monkeypatch):
    def told(*values, **named):
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr("gradscope.recipe.read", told)
        code, out, err = cli("train", "--recipe", "recipe.toml")
    assert (code, err.strip(), out) == (143, f"gradscope: stopped (SIGTERM); what was written is kept; {RESUME}.", "")
    assert signal.getsignal(signal.SIGTERM) is before
    assert not launch.told_to_stop()
    assert cli("figure", "4", "no-such-run")[0] == 2


def test_a_run_that_sigterm_ends_says_so_in_its_log(cli, small, tmp_path, monkeypatch):
    monkeypatch.setattr("gradscope.train._validate", lambda *values, **named: signal.raise_signal(signal.SIGTERM))
    code, _, err = cli("train", *small, "--output", "told")
    assert (code, "gradscope: stopped (SIGTERM); what was written is kept" in err) == (143, True)
    assert (tmp_path / "told" / "console.log").read_text().splitlines()[-1] == "ended early: stopped (SIGTERM)"
    assert not Run(tmp_path / "told").done


def test_brackets_in_names_are_text(cli, tmp_path):
    """Neither file names nor fixed words lose what stands in square brackets."""
    (tmp_path / "x[b].txt").write_text("a red flag\na red flag\na blue car\n", encoding="utf-8")
    code, out, err = cli("caption-geometry", "x[b].txt", "--encoder", "tiny", "--output", "g[red]")
    assert code == 0, err
    assert "wrote g[red]/figure1.pdf" in out
    assert "note x[b]: 2 captions occur more than once" in out
    frame = pd.DataFrame([{"a": 1, "width": 8, "seed": 7, "metric": "R@1", "direction": d, "value": 0.5} for d in ("i2t", "t2i")])
    with printed.capture() as seen:
        printed.print(sweep_table(frame, ["a"], "test"), width=120)
    assert "mean over seeds [smallest, largest seed]" in seen.get()


def test_train_eval_probe_figure(cli, small, scenes_folder, tmp_path):
    """One pass through the commands as a person uses them; then a second train into the same folder is refused."""
    code, out, err = cli("train", *small, "--objective", "hn", "--log-grads", "--probe-every", 1, "--output", "run")
    assert code == 0, err
    assert "width 8 candidates per softmax, 7 negatives per anchor, chance ln 8 = 2.0794" in err
    assert "validation R@1" in out
    assert "HN (gamma 0.5) at width 8" in out
    refused(cli("train", *small, "--output", "run"), "already holds a run", "--resume")
    refused(cli("train", "--output", "run", "--resume", "--lr", "1"), "train.lr was 1e-05 and is now 1.0")
    refused(cli("train", "--output", "run", "--resume"), "is complete: 2 of 2 steps")
    code, out, err = cli("eval", "run", "--data", scenes_folder, "--device", "cpu", "--resamples", 50)
    assert code == 0, err
    assert "R@1" in out
    assert (tmp_path / "run" / f"eval-{scenes_folder.name}-test.json").is_file()
    code, out, err = cli("probe", "run", "--data", scenes_folder, "--device", "cpu", "--width", 8, "--batches", 2)
    assert code == 0, err
    assert "all readings in runs/probe/run" in out
    code, out, err = cli("figure", "4", "run", "--output", "pictures")
    assert code == 0, err
    assert sorted(p.suffix for p in (tmp_path / "pictures").iterdir()) == [".csv", ".pdf", ".png"]
    assert not os.environ.get("MPLBACKEND")


def test_geometry_refuses_flags_that_nothing_would_look_at(cli, tmp_path):
    (tmp_path / "own.csv").write_text("caption\na red chair\na blue table\n")
    for flags in (["--data-dir", "."], ["--caption", "short"]):
        refused(cli("caption-geometry", "own.csv", *flags, "--encoder", "tiny"), flags[0], "would be ignored")
    refused(cli("caption-geometry", "scenes", "--encoding", "latin-1"), "--encoding latin-1", "would be ignored")


def test_geometry_of_a_handful_of_captions(cli, tmp_path):
    (tmp_path / "one.txt").write_text("a red chair\n")
    refused(cli("caption-geometry", "one.txt", "--encoder", "nowhere"), "'one' has 1 caption", "a pair needs two")
    (tmp_path / "same.txt").write_text("a red chair\na red chair\n")
    code, out, err = cli("caption-geometry", "same.txt", "--encoder", "tiny")
    assert code == 0, err
    assert "same: 1 pair, " in err
    assert "fewer than 16 captions: nothing to say of random batches, and no width curve" in out
    assert out.count("100%") == 6
    assert [path.stem for path in (tmp_path / "runs" / "geometry").glob("*.pdf")] == ["figure1"]
    refused(cli("figure", "width", "runs/geometry/same"), "begins at 16 captions", "same has fewer")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0%"),
        (1.0, "100%"),
        (0.9996, "99.9%"),
        (0.5, "50.0%"),
        (0.0997, "10.0%"),
        (0.0312, "3.1%"),
        (4e-5, "0.004%"),
        (1e-7, "0.00001%"),
    ],
)
def test_shares_in_words(share, words):
    from gradscope.cli.geometry import _share

    assert _share(share) == words


def test_weights_without_a_finite_number_give_no_recall(cli, make_encoder, scenes_folder):
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_encoder()
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(folder / "open_clip_model.safetensors").items()}
    save_file(state, folder / "open_clip_model.safetensors")
    code, _, err = cli("eval", folder, "--data", scenes_folder, "--split", "val", "--device", "cpu")
    assert code == 2
    assert "there is no recall" in err.splitlines()[-1]


def test_a_path_that_cannot_be_written_is_one_line(cli, tmp_path):
    (tmp_path / "own.csv").write_text("caption\na red chair\na blue table\n")
    code, _, err = cli("caption-geometry", "own.csv", "--encoder", "tiny", "--output", "own.csv")
    assert code == 2
    assert "own.csv" in err.splitlines()[-1]
    assert "cannot be read or written" in err.splitlines()[-1]
    assert "Traceback" not in err
