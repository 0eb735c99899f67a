"""Several processes that work on one run: started by torchrun, or by anything that sets the same environment (Slurm's srun can).

    RANK, WORLD_SIZE      which process this is, of how many          LOCAL_RANK      which of this node's, and so which GPU
    MASTER_ADDR, MASTER_PORT      where they meet

The processes speak with one voice: the first rank prints, the others are silent. Whichever fails first says why, whichever rank it is;
the others, who only see it gone, end without a word. Nothing here imports torch before it is needed, and one process is left alone.

How it can mislead: a process that is killed (kill -9, out of memory) says nothing; then another says that one is gone, and torchrun
names it. A collective that is waited for longer than ``TIMEOUT`` ends the run; with NCCL whoever waits in one can only be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: How long one rank may wait for another. Long, since what only the first rank does (an external margin encoder, a checkpoint) is
#: waited for; a process that died is noticed much earlier, by its closed connection or by torchrun.
TIMEOUT = timedelta(hours=1)

#: How long the processes may take to find each other.
MEETING = timedelta(minutes=10)
#: How long the others wait for the one that says what is wrong.
SPEAKING = timedelta(seconds=5)

LOST = (
    "another process of this run has ended, so this one ends too; look for its reason above or in the other nodes' output. What was "
    "written is kept; to continue from the last checkpoint, start all processes again with --resume"
)
STOPPED = (
    "told to stop (SIGTERM): another process of this run has ended, or the job was cancelled. What was written is kept; to continue "
    "from the last checkpoint, start all processes again with --resume"
)
STOPPED_ALONE = "stopped (SIGTERM)"

_store: Any = None
_said = False
_told_to_stop = False
_voice: IO[str] | None = None


class Lost(ValueError):
    """Another process of this run has ended."""


def told_to_stop() -> bool:
    """Whether SIGTERM has arrived in this run: since its processes met, or, of one process, since its command began."""
    return _told_to_stop


class Stopped(BaseException):
    """SIGTERM arrived. No diagnostic may take it for a failure of its own."""


def wrong_environment() -> str:
    """What is wrong with the variables that a launcher sets, "" where nothing is. Asked first of all: the rest relies on them."""
    found = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT") if name in os.environ}
    for name, value in found.items():
        if not value.isascii() or not value.isdigit():
            return f"{name} is '{value}' and must be a whole number; start the processes with torchrun, which sets it, or unset it"
    size, rank = int(found.get("WORLD_SIZE", "1")), int(found.get("RANK", "0"))
    if size > 1 and rank >= size:
        return f"RANK is {rank}, and the {size} processes of WORLD_SIZE count from 0 to {size - 1}; give each a number of its own"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size > 1 and "RANK" in found and missing:
        return f"{' and '.join(missing)} must say where the {size} processes meet; start them with torchrun, or set what is missing"
    return ""


def together() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def leads() -> bool:
    """Whether this process is the one, or the first of several: for work that is not divided, before they have met."""
    return not together() or int(os.environ["RANK"]) == 0


def only_first_speaks() -> None:
    """From now on only the first rank writes to the terminal. Called once, when the program starts and before torch is imported."""
    global _voice, _said
    _said = False
    if not together():
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a lost connection is told in frames of C++, by each process
    if not leads():
        _voice = sys.stderr
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def speak_up(*, lost: bool = False) -> bool:
    """Whether this process is the one to say why the run failed: the first of all that asks; then its stderr is heard again.

    The others wait until it ``has_spoken``. ``lost``: all it has to say is that another one is gone.
    """
    global _said
    first = not _said and (not together() or _first_to_fail(lost))
    _said = True
    if first and _voice is not None:
        sys.stderr = _voice
    return first


def has_spoken() -> None:
    """The other processes, which wait in ``speak_up``, may end: as soon as one has, torchrun ends all that are left."""
    if together():
        with suppress(Exception):  # they do not wait for ever
            _meeting_place().set("gradscope/spoken", "")


def leave_for_torchrun(line: str) -> None:
    """For torchrun's own report, which comes below and is the last that is seen: without it, it points to its documentation."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    earlier = int(time.time()) - 1  # of failures in one second torchrun names the lowest rank, which may have left nothing
    further = {"py_callstack": line, "timestamp": str(earlier)}
    with suppress(OSError):  # nothing depends on it
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": further}}), encoding="utf-8")


def _first_to_fail(lost: bool) -> bool:
    try:
        place = _meeting_place()
        first = bool(place.add("gradscope/failed", 1) == 1)
        if not first:
            with suppress(Exception):
                place.wait(["gradscope/spoken"], SPEAKING)
        return first
    except Exception:  # the first rank kept the list and is gone: with a word about what ails us too, or killed without one
        return int(os.environ["RANK"]) == (1 if lost else 0)


def _meeting_place() -> Any:
    global _store
    if _store is None:
        from torch.distributed.rendezvous import rendezvous

        _store = next(iter(rendezvous("env://", timeout=MEETING)))[0]
    return _store


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM in the block raises ``Stopped`` in a program of one process, so that files are closed and the reason can be said.
    Several processes are told in ``processes``, which ends them together."""
    if together():
        yield
        return
    global _told_to_stop
    signal_before = _on_sigterm()
    try:
        yield
    except Exception:
        if _told_to_stop:  # what is raised while files are closed is no other reason
            raise Stopped from None
        raise
    finally:
        _told_to_stop = False  # a later command of this program was not
        if signal_before is not None:
            signal.signal(signal.SIGTERM, signal_before)


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Joins the processes of this run for the block, where there are several: NCCL on GPUs, gloo on CPUs.

    Args:
        device: of this process, by ``gradscope.encoders.load.resolve_device``.

    Raises:
        Lost: another one has ended.
        ValueError: they do not meet, or this one was told to stop.
    """
    if not together():
        yield
        return
    import torch.distributed as dist

    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # small values may be on the host
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    global _told_to_stop
    signal_before = _on_sigterm()
    try:
        store = _met(rank, size)
        dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=rank, world_size=size)
        yield
        dist.destroy_process_group()  # after a failure the others are not there to take part
    except (Stopped, RuntimeError) as error:
        if _told_to_stop:  # what is raised while files are closed, as by the end of a process that decodes, is no other reason
            raise ValueError(STOPPED) from None
        if not _is_lost(error):
            raise
        raise Lost(LOST) from error
    finally:
        _told_to_stop = False  # a later run of this program was not
        if signal_before is not None:
            signal.signal(signal.SIGTERM, signal_before)


def _met(rank: int, size: int) -> Any:
    """The place where all have been: a process that ended on its way is missed after ``MEETING``, not after ``TIMEOUT``."""
    import torch.distributed as dist

    try:
        store = dist.PrefixStore("gradscope", _meeting_place())
        if store.add(f"of/{rank}", 1) > 1:
            raise ValueError(f"two processes of this run have the RANK {rank}; give each a number of its own")
        store.set(f"here/{rank}", str(size))
        for other in range(size):
            if (told := store.get(f"here/{other}").decode()) != str(size):  # get waits
                raise ValueError(f"WORLD_SIZE is {size} in process {rank} and {told} in process {other}; give all the same")
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"another program, or a second process of RANK 0, listens at {place}, where the processes of this run are to meet; set "
                "MASTER_PORT to a free port (torchrun on one node finds one with --standalone)"
            ) from error
        raise ValueError(
            f"the {size} processes of this run did not meet at {place} within {MEETING.total_seconds() / 60:g} minutes: one has ended "
            "(look for its reason above or in the other nodes' output) or was not started, or this address cannot be reached from its "
            "node, or its port is taken"
        ) from error
    return store


def own_gpu(device: torch.device) -> torch.device:
    """The GPU of this process's LOCAL_RANK, where several processes share a node.

    Raises:
        ValueError: one GPU named for all processes, or more processes on this node than GPUs.
    """
    import torch

    own, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None:
        raise ValueError(f"--device {device} would give all processes of this run one GPU; use --device cuda, and each takes its own")
    if own >= count:
        raise ValueError(
            f"process {own} of this node has no GPU, there are {count}: start as many processes as GPUs "
            f"(torchrun --nproc-per-node {count}), or use --device cpu"
        )
    return torch.device("cuda", own)


def _is_lost(error: BaseException) -> bool:
    import torch.distributed as dist

    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(w in words for w in ("gloo", "connection closed", "connection reset", "nccl"))


def _on_sigterm() -> Any:
    """A stop that unwinds: files are closed and the message is said. None outside the main thread, where no handler can be set."""
    if threading.current_thread() is not threading.main_thread():
        return None
    global _told_to_stop
    _told_to_stop, owner = False, os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that decodes pictures has inherited this
            os._exit(128 + number)
        global _told_to_stop
        _told_to_stop = True
        raise Stopped

    return signal.signal(signal.SIGTERM, stop)
