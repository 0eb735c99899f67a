"""What a command loads before it answers: a person at the prompt waits for every import."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.cli.figures import _no_collection

SCRIPT = """
import sys
from gradscope.cli import main
for banned, words in {commands!r}:
    sys.argv = ["gradscope", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code in (None, 0, 2), (words, end.code)
    loaded = set(banned.split()) & set(sys.modules)
    assert not loaded, (words, loaded)
"""
#: Never, unless a command computes with an encoder or with gradients.
HEAVY = "torch open_clip torchvision transformers seaborn scipy.stats sentence_transformers"
#: Nor these for words alone.
LIGHT = f"{HEAVY} pandas matplotlib numpy PIL"


@pytest.fixture
def run(tmp_path):
    """One fresh process for all commands, in order: (modules that must be absent afterwards, words)."""

    def call(*commands: tuple[str, list[str]]) -> None:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(commands=commands)], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]

    return call


def test_words_are_answered_at_once(run):
    from gradscope.cli import app

    names = [command.name for command in app.registered_commands]
    assert {"train", "eval", "figure"} <= set(names)
    run(
        (LIGHT, ["--help"]),
        (LIGHT, ["--version"]),
        *((LIGHT, [str(name), "--help"]) for name in names),
        (LIGHT, ["data", "--help"]),
        (LIGHT, ["encoders", "--help"]),
    )


def test_a_wrong_argument_is_refused_at_once(run):
    run(
        (LIGHT, ["train", "--lr", "fast"]),
        (LIGHT, ["train", "--nope"]),
        (LIGHT, ["figure", "nope", "x"]),
        (HEAVY, ["train", "--recipe", "nope.toml", "--output", "x"]),
        (HEAVY, ["train", "--objective", "nope", "--output", "x"]),
        (HEAVY, ["data", "info", "nope"]),
        (HEAVY, ["watch", "nope"]),
        (HEAVY, ["diagnose", "nope"]),
        (HEAVY, ["figure", "4", "nope"]),
    )


def test_a_mistyped_encoder_is_refused_before_open_clip_is_imported(run):
    """Its import takes longer than torch's."""
    heavy = HEAVY.replace("torch ", "", 1)
    run(
        (heavy, ["train", "--encoder", "tinny", "--data", "scenes", "--output", "x"]),
        (heavy, ["eval", "vit-b-33:openai", "--data", "scenes"]),
    )


def test_names_of_models_are_open_clips_own():
    from gradscope.encoders.load import architectures

    before = subprocess.run(
        [sys.executable, "-c", "from gradscope.encoders.load import architectures; print(*architectures())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    import open_clip

    assert sorted(before) == sorted(open_clip.list_models()) == sorted(architectures())


def test_tables_and_figures_from_files_need_no_torch(run, tmp_path: Path):
    table = tmp_path / "widths.csv"
    rows = [f"{width},{batch},{random.gauss(-3, 1)}" for width in (16, 32, 64) for batch in range(5)]
    table.write_text("\n".join(["width,batch,log10_true", *rows]))
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["step,loss", *(f"{step},{1 / step}" for step in range(1, 40))]))
    run(
        (HEAVY, ["data", "list"]),
        (HEAVY, ["data", "info", "scenes"]),
        (HEAVY, ["data", "fetch", "scenes"]),
        (HEAVY, ["diagnose", str(log)]),
        (HEAVY, ["figure", "start-widths", str(table), "--output", "drawn"]),
    )
    assert list((tmp_path / "drawn").glob("*.pdf"))


def test_what_needs_torch_loads_torch_and_little_else():
    """open_clip and torchvision take longer to import than torch: only what builds an encoder or decodes a picture does."""
    heavy = [name for name in f"{HEAVY} pandas matplotlib".split() if name != "torch"]
    lines = ["import sys, importlib", f"heavy = set({heavy!r})"]
    for module in ("gradscope.probe", "gradscope.encoders.load", "gradscope.evaluate", "gradscope.train"):
        lines += [
            f"importlib.import_module({module!r})",
            f"assert not heavy & set(sys.modules), ({module!r}, heavy & set(sys.modules))",
        ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wanted", [False, True])
def test_a_figure_leaves_the_collector_as_it_was(wanted):
    before = gc.isenabled()
    try:
        (gc.enable if wanted else gc.disable)()
        with _no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == wanted
    finally:
        (gc.enable if before else gc.disable)()
