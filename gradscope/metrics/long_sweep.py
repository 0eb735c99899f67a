"""The whole sweep over all pairs: dealt out over processes, with progress, and saved now and then so that a kill costs minutes.

The state is a file per process, ``<key>.<rank>-of-<world>.npz``; the key is a hash of the rows and of every setting that decides a
number, so a state is never taken up for other rows, and what is taken up ends with the numbers of an undisturbed run. It is written
under another name and then renamed: a kill in between leaves the older one. Once the sweep is complete it is removed.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from gradscope import distributed
from gradscope.metrics.pair_sweep import BINS, NEAR, Sweep, block_pairs, number_of_pairs
from gradscope.metrics.same_rows import refuse_different

Progress = Callable[[int, int], None]  # (blocks done, blocks in all)

SAVE_EVERY = 120.0  # seconds

_PARTS = ("counts", "best", "winner", "near")
_VERSION = 2  # raise it whenever the same settings may give other numbers


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a sweep is run.

    Attributes:
        shared: the block pairs are dealt out over the processes of torch.distributed, which must hold the same rows; a collective.
        state: folder for the state of an unfinished sweep; nothing is kept without it.
        save_every: seconds between two writes; a sweep that is done before leaves nothing.
        progress: called with (block pairs done, block pairs in all) of this process.
    """

    shared: bool = False
    state: Path | None = None
    save_every: float = SAVE_EVERY
    progress: Progress | None = None

    @property
    def part(self) -> tuple[int, int]:
        """(number of this process, number of processes)."""
        return (distributed.rank(), distributed.world()) if self.shared else (0, 1)


def run(sweep: Sweep, course: Course, *, setting: str) -> int:
    """Sweeps over all pairs; returns how many block pairs a saved state held already.

    Args:
        sweep: one that has seen nothing; it is filled, and joined over processes.
        setting: torch's name for the products in use (see ``gradscope.products``).

    Raises:
        ValueError: a saved state cannot be read; if shared, also if processes hold different rows.
    """
    if course.shared:
        refuse_different(sweep.unit)
    rank, world = course.part
    file = _file(course, sweep, setting)
    start = _resume(file, sweep) if file else 0
    total = len(range(rank, number_of_pairs(len(sweep.unit), sweep.block), world))
    last = time.monotonic()
    pairs = islice(block_pairs(len(sweep.unit), sweep.block), rank + start * world, None, world)
    with sweep.seen(pairs) as found:
        for done, seen in enumerate(found, start=start + 1):
            sweep.take(seen)
            if file and done < total and time.monotonic() - last >= course.save_every:
                _save(file, sweep, done)
                last = time.monotonic()
            if course.progress is not None:
                course.progress(done, total)
    if course.shared:
        sweep.merge()
    if file:
        file.unlink(missing_ok=True)
    return start


def _file(course: Course, sweep: Sweep, setting: str) -> Path | None:
    if course.state is None:
        return None
    rank, world = course.part
    digest = hashlib.sha256(f"{_VERSION} {list(sweep.unit.shape)} {sweep.block} {BINS} {NEAR} {setting} {torch.__version__}".encode())
    for part in sweep.unit.split(4096):
        digest.update(part.cpu().numpy().tobytes())
    return course.state / f"{digest.hexdigest()[:32]}.{rank}-of-{world}.npz"


def _resume(file: Path, sweep: Sweep) -> int:
    """Fills ``sweep`` from ``file`` if there is one; the number of block pairs of this process that it holds."""
    if not file.exists():
        return 0
    try:
        with np.load(file) as stored:
            parts = {name: torch.from_numpy(stored[name]) for name in _PARTS}
            done = int(stored["done"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"the saved state '{file}' cannot be read ({error}); delete it to start anew.") from error
    for name, part in parts.items():
        getattr(sweep, name).copy_(part)
    return done


def _save(file: Path, sweep: Sweep, done: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(sweep, name).cpu().numpy() for name in _PARTS}
    fresh = file.with_suffix(f".{os.getpid()}.tmp")
    with fresh.open("wb") as stream:
        np.savez(stream, done=np.int64(done), **arrays)
    fresh.replace(file)
