"""One process with 2 threads against 2 processes with one thread each (gloo): the same recipe, the same update.

    python benchmarks/processes.py --output runs/bench_processes
    python benchmarks/processes.py --model ViT-B-32 --batch 16 --steps 1 --rounds 5 --output runs/bench_processes_b32
    python benchmarks/processes.py --compile --output runs/bench_processes_compiled          # some minutes more, to compile

A step is forward, HN loss over the rows of all processes (gamma 0.5), backward, averaging and an update by SGD with momentum, on
random pictures and full captions that lie in memory. Arms, interleaved, each in processes that live for the whole run and wait while
the others have their turn:
    one process             all threads, all rows: the reference
    DDP                     each process has all parameters and its part of the rows
    DDP, nothing sent       the same work without a gather or an average (its own rows stand for the others'): what talking costs
    FSDP2                   parameters, gradients and moments divided (--shard full)
    ... compiled            --compile: one process and DDP once more, their blocks by torch.compile

Answers: seconds of a step and their ratio to one process's, by round; ``talking``, the share of a step that is not there when nothing
is sent (what overlaps with the backward costs nothing and is not in it; of FSDP2 it holds the bookkeeping of shards too); memory of one
process, what it holds between steps (weights, gradients, moments) and the peak above that; and ``update``, |w - w1| / |w1 - w0| after
three steps from the same weights, w1 those of one process: it must be below 1e-5, and the command fails where it is not.

How it can mislead: both processes share one memory bus, and "sending" is a copy there; between nodes it takes longer. With compiled
blocks rounding is another, so their update is shown and not held to the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd
from process_worker import Settings, serve
from side_by_side import machine, report, say_machine

from gradscope.console import progress

ONE, DDP, SILENT, FSDP = "one process", "DDP", "DDP, nothing sent", "FSDP2"
COMPILED = {ONE: "one process, compiled", DDP: "DDP, compiled"}
#: How far an update may be from that of one process.
CLOSE = 1e-5
UPDATES = 3


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of some arms, each at the end of a pipe."""

    pipes: Sequence[Connection]
    arms: Sequence[str]

    def hear(self) -> list[dict[str, Any]]:
        """An answer of each."""
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise ValueError("a process of this benchmark has ended; its reason stands above") from None

    def ask(self, **told: Any) -> list[dict[str, Any]]:
        for pipe in self.pipes:
            pipe.send(told)
        return self.hear()


def arms_of(*, compiled: bool) -> list[dict[str, dict[str, Any]]]:
    """Settings of each arm: of one process, and of several."""
    plain = {"shard": "none", "compiled": False, "silent": False}
    one, several = {ONE: plain}, {DDP: plain, SILENT: {**plain, "silent": True}, FSDP: {**plain, "shard": "full"}}
    if compiled:
        one[COMPILED[ONE]] = several[COMPILED[DDP]] = {**plain, "compiled": True}
    return [one, several]


@contextmanager
def group(size: int, threads: int, arms: Mapping[str, Any], given: argparse.Namespace) -> Iterator[Group]:
    """Starts the processes, and ends them after the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["process_worker"])  # imported once
    pipes, members = [], []
    for rank in range(size):
        settings = Settings(rank=rank, world=size, port=port, threads=threads, batch=given.batch, model=given.model, arms=arms)
        ours, theirs = context.Pipe()
        members.append(context.Process(target=serve, args=(settings, theirs), daemon=True))
        members[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        yield Group(pipes=pipes, arms=list(arms))
    finally:
        for pipe in pipes:
            pipe.close()
        for member in members:
            member.join()


def rounds_of(groups: Sequence[Group], rounds: int, steps: int) -> pd.DataFrame:
    """Rows (round, arm, seconds): every arm once a round, in an order drawn anew; a round before the first is not counted."""
    order, rows = random.Random(0), []
    turns = [(one, arm) for one in groups for arm in one.arms]
    with progress("rounds") as advance:
        for turn in range(-1, rounds):
            for one, arm in order.sample(turns, len(turns)):
                seconds = max(answer["seconds"] for answer in one.ask(do="steps", arm=arm, steps=steps))
                rows += [{"round": turn, "arm": arm, "seconds": seconds}] * (turn >= 0)
            advance(turn + 2, rounds + 1)
    return pd.DataFrame(rows)


def table(timed: pd.DataFrame, memory: Mapping[str, float]) -> pd.DataFrame:
    """The rows that ``report`` shows."""
    wide = timed.pivot_table(index="round", columns="arm", values="seconds")
    ratio = wide.div(wide[ONE], axis=0)
    columns = {"seconds": wide.median(), "ratio": ratio.median(), "low": ratio.min(), "high": ratio.max()}
    frame = pd.DataFrame(columns).loc[list(memory)].rename_axis("arm").reset_index()
    return frame.assign(memory_mb=frame["arm"].map(memory))


def talking(timed: pd.DataFrame) -> dict[str, float]:
    """Of each arm that sends: the median over rounds of the share of a step that is not there when nothing is sent."""
    wide = timed.pivot_table(index="round", columns="arm", values="seconds")
    return {arm: statistics.median(1 - wide[SILENT] / wide[arm]) for arm in (DDP, FSDP)}


def updates_of(groups: Sequence[Group]) -> dict[str, float]:
    """Arm -> how far its update is from one process's. Raises ValueError where that is further than rounding."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in groups:
            for arm in (name for name in one.arms if name not in (SILENT, COMPILED[ONE])):
                answers = one.ask(do="update", arm=arm, steps=UPDATES, folder=folder)
                found |= {arm: [answer["update"] for answer in answers]} if "update" in answers[0] else {}
    wrong = {arm: far for arm, far in found.items() if arm != COMPILED[DDP] and not all(update < CLOSE for update in far)}
    if wrong:
        raise ValueError(f"the update differs from that of one process: {wrong} by rank; the limit is {CLOSE:g}")
    return {arm: max(far) for arm, far in found.items()}


def memory_of(groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, str]]:
    """Arm -> MB of the process that takes most, and the same in words by its two parts."""
    found, words = dict[str, float](), dict[str, str]()
    for one in groups:
        for arm in one.arms:
            most = max(one.ask(do="memory", arm=arm), key=lambda answer: answer["held"] + answer["extra"])
            found[arm] = most["held"] + most["extra"]
            words[arm] = f"{most['held']:,.0f} held + {most['extra']:,.0f}"
    return found, words


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Processes.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_processes"), help="folder for CSV and JSON")
    parser.add_argument("--model", default="tiny", help="tiny, or a model of open_clip, which gets random weights")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step, of all processes together")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=2, help="each gets its part of --threads")
    parser.add_argument("--threads", type=int, default=2, help="of all processes together")
    parser.add_argument("--compile", action="store_true", help="also the arms with compiled blocks")
    return parser.parse_args()


def _check(given: argparse.Namespace) -> None:
    if min(given.steps, given.rounds) < 1 or given.processes < 2:
        raise ValueError("give at least 1 step, 1 round and 2 processes")
    if given.batch < 2 or given.batch % given.processes or given.threads < 1 or given.threads % given.processes:
        raise ValueError(f"--batch {given.batch} and --threads {given.threads} must be multiples of --processes {given.processes}")


def main() -> None:
    given = _arguments()
    _check(given)
    facts = machine()
    say_machine(facts)
    alone, several = arms_of(compiled=given.compile)
    with (
        group(1, given.threads, alone, given) as one,
        group(given.processes, given.threads // given.processes, several, given) as together,
    ):
        groups = [one, together]
        kernels = [answer["kernels"] for answers in (one.hear(), together.hear()) for answer in answers]
        updates = updates_of(groups)
        timed = rounds_of(groups, given.rounds, given.steps)
        memory, words = memory_of(groups)
    notes = {
        "kernels": ", ".join(dict.fromkeys(kernels)),
        "talking, share of a step": ", ".join(f"{arm} {share:.1%}" for arm, share in talking(timed).items()),
        "update against one process": ", ".join(f"{arm} {update:.1e}" for arm, update in updates.items()),
        "MB of a process": "; ".join(f"{arm} {text}" for arm, text in words.items()),
    }
    title = f"{given.model}: {given.batch} rows; {given.threads} threads, in one process or in {given.processes}"
    report(table(timed, memory), title=title, output=given.output, name="processes", facts=facts, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"processes: {error}", file=sys.stderr)
        sys.exit(2)
