"""Caption geometry over all pairs, beside the product it cannot do without, faiss, and the full matrix.

    python benchmarks/geometry.py --output runs/geometry_speed
    python benchmarks/geometry.py --rows 50000 --rounds 3 --output runs/geometry_speed_50k

Rows are random unit rows in a cone (mean cosine .5), some of them repeated. The arms do their work in turn, in an order drawn anew:
    product      the reference: every block pair i <= j multiplied in fp32, 1024 rows at a time, and nothing else
    values       ours without indices: integer histogram, mean, each row's hardest cosine
    all          ours, as `gradscope caption-geometry` uses it: also whose, near neighbours, most similar pairs, repeats, quantiles
    faiss        IndexFlatIP, search for the two nearest: the hardest neighbour only, in a process of its own
    full matrix  numpy: all products at once, numpy's histogram and maximum; left out above --full-up-to rows

All in fp32 that is checked against float64. faiss runs apart because two BLAS libraries in one process wait for each other's threads;
of the kernels its library may choose from, the fastest in a trial is used. What ours and faiss found is compared before.

How to read it: ``ratio`` is time over the product's in the same round, memory what an arm takes beside the rows. How it can mislead:
the product is as fast as this machine's best fp32 kernel lets it be, so a slow kernel flatters the ratio; faiss does less work here,
and is made for approximate search, which is another matter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import machine, report, say_machine, side_by_side
from torch import Tensor

from gradscope.metrics.geometry import Geometry, caption_geometry, mean_cosine
from gradscope.metrics.pair_sweep import Sweep, block_pairs, default_block
from gradscope.products import fast_fp32

REFERENCE = "product"

_KERNELS = ({}, {"OPENBLAS_CORETYPE": "SkylakeX"}, {"OPENBLAS_CORETYPE": "Haswell"})
_TRIAL_ROWS = 4096

_SERVER = """
import sys, time
import faiss, numpy
rows = numpy.load(sys.argv[1], mmap_mode=None)
faiss.omp_set_num_threads(int(sys.argv[2]))
index = faiss.IndexFlatIP(rows.shape[1])
index.add(rows)
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6
before = peak()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    near, _ = index.search(rows, 2)
    seconds = time.perf_counter() - start
    numpy.save(line.strip(), near[:, 1])
    print(seconds, peak() - before, flush=True)
"""


def rows_in_a_cone(n: int, width: int, seed: int = 0) -> Tensor:
    """Unit rows [N, D] of mean cosine near .5; one in a thousand repeats an earlier row."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, width, generator=generator)
    rows += torch.randn(width, generator=generator)  # the cone
    torch.nn.functional.normalize(rows, dim=1, out=rows)
    repeats = max(1, n // 1000)
    rows[n - repeats :] = rows[:repeats]
    return rows


def product(rows: Tensor) -> None:
    """The bare symmetric blocked product."""
    block = default_block(rows.device)
    room = torch.empty(min(block, len(rows)) ** 2, device=rows.device)
    for i, j in block_pairs(len(rows), block):
        left, right = rows[i : i + block], rows[j : j + block]
        torch.mm(left, right.T, out=room[: len(left) * len(right)].view(len(left), len(right)))


def values(rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """Ours without indices: histogram, hardest cosines, mean."""
    block = default_block(rows.device)
    sweep = Sweep.of(rows, block)
    with sweep.seen(block_pairs(len(rows), block)) as found:
        for seen in found:
            sweep.take(seen)
    return sweep.counts, sweep.best, mean_cosine(rows)


def full_matrix(rows: Tensor) -> tuple[np.ndarray, np.ndarray, float]:
    """What one would write down first."""
    matrix = rows.numpy() @ rows.numpy().T
    counts, _ = np.histogram(matrix, bins=200, range=(-1.0, 1.0))
    mean = (matrix.sum(dtype=np.float64) - np.trace(matrix)) / (len(rows) * (len(rows) - 1))
    np.fill_diagonal(matrix, -2.0)
    return counts, matrix.max(axis=1), float(mean)


class Faiss:
    """A process that holds the rows in an index and searches when told to."""

    def __init__(self, file: Path, threads: int, kernel: Mapping[str, str]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS")} | dict(kernel)
        command = [sys.executable, "-c", _SERVER, str(file), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._answer = file.with_name("faiss.npy")
        self.seconds = self.memory_mb = float("nan")
        self._line()

    def search(self) -> np.ndarray:
        """Each row's cosine with its second nearest row, itself being the nearest, float32 [N]."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._answer}\n")
        self._process.stdin.flush()
        self.seconds, self.memory_mb = map(float, self._line().split())
        return np.load(self._answer)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs faiss has ended; is the package faiss-cpu installed?")
        return line

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def faiss(rows: Tensor) -> Iterator[tuple[Faiss, str]]:
    """A searching process with the kernel that is fastest here, and that kernel's name."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = _fastest_kernel(Path(folder), rows)
        file = Path(folder) / "rows.npy"
        np.save(file, rows.numpy())
        server = Faiss(file, torch.get_num_threads(), kernel)
        try:
            yield server, kernel.get("OPENBLAS_CORETYPE", "its own choice")
        finally:
            server.close()


def _fastest_kernel(folder: Path, rows: Tensor) -> Mapping[str, str]:
    np.save(folder / "trial.npy", rows[:_TRIAL_ROWS].numpy())
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    allowed = [kernel for kernel in _KERNELS if "SkylakeX" not in kernel.values() or "avx512bw" in flags]
    return min(allowed, key=lambda kernel: _trial_seconds(folder / "trial.npy", kernel))


def _trial_seconds(file: Path, kernel: Mapping[str, str]) -> float:
    server = Faiss(file, torch.get_num_threads(), kernel)
    seconds = []
    for _ in range(3):
        server.search()
        seconds.append(server.seconds)
    server.close()
    return min(seconds)


def agreement(found: Geometry, nearest: np.ndarray) -> float:
    """Largest difference between ours and faiss in the hardest cosine; a repeated row's is 1 in both."""
    return float(np.abs(found.hardest - nearest).max())


def main(argv: list[str] | None = None) -> None:
    given = _arguments(argv)
    if given.rows < 2 or given.rounds < 1:
        raise SystemExit("--rows must be at least 2 and --rounds at least 1")
    if given.threads:
        torch.set_num_threads(given.threads)
    facts = machine()
    say_machine(facts)
    rows = rows_in_a_cone(given.rows, given.width)
    with faiss(rows) as (server, kernel), fast_fp32(rows.device) as products:
        difference = agreement(caption_geometry(rows), server.search())
        arms: dict[str, Callable[[], Any]] = {
            REFERENCE: lambda: product(rows), "values": lambda: values(rows), "all": lambda: caption_geometry(rows),
            "faiss": server.search,
        }  # fmt: skip
        if given.rows <= given.full_up_to:
            arms["full matrix"] = lambda: full_matrix(rows)
        start = time.perf_counter()
        frame = side_by_side(arms, reference=REFERENCE, rounds=given.rounds, label="geometry")
        frame.loc[frame["arm"] == "faiss", "memory_mb"] = server.memory_mb
    notes = {
        "products": products.words, "faiss kernel": kernel, "ours - faiss, largest difference of a hardest cosine": f"{difference:.1e}",
        "seconds in all": f"{time.perf_counter() - start:.0f}",
    }  # fmt: skip
    title = f"geometry of {given.rows:,} rows of width {given.width}"
    report(frame, title=title, output=given.output, name="geometry", facts=facts, notes=notes)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="captions (default: 20000)")
    parser.add_argument("--width", type=int, default=768, help="width of a row (default: 768)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm (default: 5)")
    parser.add_argument("--threads", type=int, default=0, help="threads of each library (default: as torch chooses)")
    parser.add_argument("--full-up-to", type=int, default=20_000, help="rows up to which the full matrix is formed (default: 20000)")
    parser.add_argument("--output", type=Path, default=Path("runs/geometry_speed"), help="folder (default: runs/geometry_speed)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
