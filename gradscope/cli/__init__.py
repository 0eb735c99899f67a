"""The command line: parse, call one function, print. Heavy imports live inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from typing import Any

import typer

from gradscope.cli.audit import audit
from gradscope.cli.check import check
from gradscope.cli.compare import compare
from gradscope.cli.data import app as data
from gradscope.cli.defaults import Group
from gradscope.cli.demo import demo
from gradscope.cli.diagnose import diagnose
from gradscope.cli.embedding_geometry import embedding_geometry
from gradscope.cli.encoders import app as encoders
from gradscope.cli.evaluate import evaluate
from gradscope.cli.export import export
from gradscope.cli.figures import figure
from gradscope.cli.geometry import caption_geometry
from gradscope.cli.probe import probe
from gradscope.cli.sweep import sweep
from gradscope.cli.train import train
from gradscope.cli.watch import watch
from gradscope.cli.what_if import what_if
from gradscope.cli.zeros import zeros
from gradscope.launch import (
    STOPPED_ALONE,
    Lost,
    Stopped,
    has_spoken,
    leave_for_torchrun,
    only_first_speaks,
    speak_up,
    stoppable,
    together,
    wrong_environment,
)

#: What typer finds wrong with a command line: the parent of all such errors, which it does not export itself.
UsageError: Any = typer.BadParameter.__base__
#: Typer answers Ctrl-C with this code and no word.
INTERRUPTED = 130
#: After SIGTERM, as a shell counts it. Slurm sends it at the time limit.
TERMINATED = 128 + signal.SIGTERM
#: What to do after Ctrl-C or SIGTERM, of commands that have nothing to go on from.
START_OVER = "to start over, give the same command again"
#: And of those that have.
GO_ON = {
    "train": "what was written is kept; to continue from the last checkpoint, give the same command with --resume",
    "sweep": "what was written is kept; to continue, give the same command again",
    "data fetch": "what was fetched is kept; to continue, give the same command again",
    "data pack": "finished shards are kept; to continue, give the same command again",
    "probe": "checkpoints that were read are kept; choose another --output to start again",
    "caption-geometry": "a pass over all pairs is kept every two minutes; to go on, give the same command again",
    "demo": "what was written is kept; choose another --output to start again",
}

#: A full disk, a quota that is used up, a file above the limit.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Commands that may be started as several processes.
TOGETHER = ("train", "eval", "caption-geometry")

app = typer.Typer(
    name="gradscope",
    cls=Group,
    help="Why contrastive fine-tuning of a CLIP-style dual encoder stops learning: saturation, gradients, and the repair.",
    epilog="Example: gradscope demo --output runs/demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("sweep")(sweep)
app.command("eval")(evaluate)
app.command("compare")(compare)
app.command("diagnose")(diagnose)
app.command("check")(check)
app.command("probe")(probe)
app.command("zeros")(zeros)
app.command("audit")(audit)
app.command("caption-geometry")(caption_geometry)
app.command("embedding-geometry")(embedding_geometry)
app.command("what-if")(what_if)
app.command("figure")(figure)
app.command("export")(export)
app.command("watch")(watch)
app.command("demo")(demo)
app.add_typer(data)
app.add_typer(encoders)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)) -> None:
    if version:
        from gradscope import __version__

        typer.echo(f"gradscope {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: what the user got wrong is one line on stderr and exit code 2, never a traceback.

    Of several processes one speaks.
    """
    wrong = wrong_environment()
    if wrong:
        _print(wrong)
        sys.exit(2)
    only_first_speaks()
    try:
        with stoppable():
            _refuse_several(sys.argv[1:])
            code = app(standalone_mode=False)
    except Stopped:
        _say(f"{STOPPED_ALONE}; {_go_on(sys.argv[1:])}.")
        sys.exit(TERMINATED)
    except UsageError as error:
        _say_usage(error)
        sys.exit(2)
    except (ValueError, FloatingPointError) as error:
        _say(str(error), lost=isinstance(error, Lost))
        sys.exit(2)
    except OSError as error:
        line = _of_a_file(error)
        if not line:
            _hand_on()
            raise
        _say(line)
        sys.exit(2)
    except Exception:
        _hand_on()
        raise
    if code == INTERRUPTED:
        _say(f"stopped; {_go_on(sys.argv[1:])}.")
    sys.exit(code)


def _refuse_several(words: list[str]) -> None:
    """Commands that would do all their work once per process, and write over each other's files."""
    if together() and words and words[0] not in TOGETHER and not words[0].startswith("-"):
        several = f"{', '.join(TOGETHER[:-1])} and {TOGETHER[-1]}"
        raise ValueError(f"{words[0]} runs as one process; only {several} work on several (torchrun). Start it without torchrun")


def _of_a_file(error: OSError) -> str:
    """What to say of a file or a disk; "" where no file is named."""
    if error.errno in NO_ROOM:
        where = f"'{error.filename}'" if error.filename else "a file"
        return f"{where} cannot be written: {error.strerror}; make room; {_go_on(sys.argv[1:])}"
    if error.filename is None:
        return ""
    return f"'{error.filename}' cannot be read or written: {error.strerror}; check the path and its rights"


def _say(line: str, *, lost: bool = False) -> None:
    if speak_up(lost=lost):
        _print(line)
        if not lost:  # torchrun names the one that is gone
            leave_for_torchrun(f"gradscope: {line}")
        has_spoken()


def _print(line: str) -> None:
    from gradscope.console import console

    console.print(f"gradscope: {line}", soft_wrap=True)


def _say_usage(error: Any) -> None:
    from typer.rich_utils import rich_format_error

    if speak_up():
        rich_format_error(error)
        leave_for_torchrun(f"gradscope: {error.format_message()}")
        has_spoken()


def _hand_on() -> None:
    """An error that is ours: its traceback is shown by the one that speaks, and by torchrun."""
    if speak_up():
        leave_for_torchrun(traceback.format_exc())
        has_spoken()


def _go_on(words: list[str]) -> str:
    return next((hint for name, hint in GO_ON.items() if words[: name.count(" ") + 1] == name.split()), START_OVER)
