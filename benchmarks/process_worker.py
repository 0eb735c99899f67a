"""One process of ``processes.py``: builds the arms of its group, and does what it is told through a pipe, until that is closed.

{"do": "update", "arm": ..., "steps": n, "folder": ...}    trains so many steps from the start; one process writes the weights that
                                                           come out, several say how far theirs are from those
{"do": "steps", "arm": ..., "steps": n}                    seconds of one step, the mean of n
{"do": "memory", "arm": ...}                               MB that are held between steps, and the peak above them during one
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cached import encoder_of, pieces_of
from side_by_side import peak_memory
from torch import Tensor

from gradscope.cpu_speed import cpu_speed
from gradscope.distributed import local, rank, whole, world
from gradscope.encoders.speed import speed_up
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.joining import joined_embeddings
from gradscope.objectives.hn import HN
from gradscope.parallel import Replica, replica
from gradscope.types import Batch, Embeddings

FRAMEWORK = Clip(objective=HN(gamma=0.5))
#: Batches that follow each other in turn.
BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one process. ``arms``: name -> ``shard``, ``compiled``, ``silent``."""

    rank: int
    world: int
    port: int
    threads: int
    batch: int
    model: str
    arms: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model that is trained in one of the ways; ``silent``: nothing is sent."""

    towers: Replica
    optimizer: torch.optim.Optimizer
    batches: Sequence[Batch]
    silent: bool

    def step(self, number: int) -> None:
        """One update by the rows of all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.towers.quiet() if self.silent else nullcontext():
            own = self.towers.embed(self.batches[number % len(self.batches)])
            total_loss(FRAMEWORK(_repeated(own) if self.silent else joined_embeddings(own))).backward()
        if not self.silent:
            self.towers.settle()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for number in range(count):
            self.step(number)

    def weights(self) -> Tensor:
        return torch.cat([whole(p.detach()).double().flatten() for p in self.towers.encoder.parameters()])

    def held(self) -> float:
        """MB of weights, gradients and moments on this rank."""
        parameters = list(self.towers.encoder.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        tensors += [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors) / 1e6


def _repeated(own: Embeddings) -> Embeddings:
    """This rank's rows in the place of the others', so that the softmax is as wide."""
    return replace(own, image=torch.cat([own.image] * world()), text=torch.cat([own.text] * world()))


def _arm(given: Settings, *, shard: str, compiled: bool, silent: bool) -> Arm:
    torch.manual_seed(0)
    encoder = encoder_of(given.model)
    batches = [_own(batch) for batch in pieces_of(encoder, BATCHES, given.batch)]
    speed_up(encoder, compiled=compiled, channels=False)
    towers = replica(encoder, shard)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.02, momentum=0.9)
    return Arm(towers=towers, optimizer=optimizer, batches=batches, silent=silent)


def _own(batch: Batch) -> Batch:
    each = len(batch) // world()
    rows = slice(rank() * each, (rank() + 1) * each)
    return replace(
        batch,
        ids=batch.ids[rows],
        images={"full": batch.images["full"][rows]},
        texts={"full": batch.texts["full"][rows]},
        lengths=batch.lengths[rows],
        captions=batch.captions[rows],
    )


def _update(arm: Arm, steps: int, folder: Path) -> dict[str, Any]:
    before = arm.weights()
    arm.steps(steps)
    after, file = arm.weights(), folder / "one.pt"
    if world() == 1:
        torch.save((before, after), file)
        return {}
    start, wanted = torch.load(file)
    assert torch.equal(before, start), "the processes did not start from the same weights"
    return {"update": float((after - wanted).norm() / (wanted - start).norm())}


def _seconds(arm: Arm, steps: int) -> dict[str, Any]:
    if world() > 1:
        dist.barrier()
    start = time.perf_counter()
    arm.steps(steps)
    return {"seconds": (time.perf_counter() - start) / steps}


def _answer(arms: dict[str, Arm], told: dict[str, Any]) -> dict[str, Any]:
    arm = arms[told["arm"]]
    if told["do"] == "update":
        return _update(arm, told["steps"], Path(told["folder"]))
    if told["do"] == "steps":
        return _seconds(arm, told["steps"])
    return {"held": arm.held(), "extra": peak_memory(lambda: arm.step(0))}


def serve(given: Settings, pipe: Connection) -> None:
    """Answers first with the kernels that it chose."""
    torch.set_num_threads(given.threads)
    if given.world > 1:
        where = f"tcp://127.0.0.1:{given.port}"
        dist.init_process_group("gloo", init_method=where, rank=given.rank, world_size=given.world)
    arms = {name: _arm(given, **settings) for name, settings in given.arms.items()}
    encoder = next(iter(arms.values())).towers.encoder
    with cpu_speed(torch.device("cpu"), encoder.longest_sequence) as kernels, suppress(EOFError):
        pipe.send({"kernels": kernels})
        while True:
            pipe.send(_answer(arms, pipe.recv()))
    if given.world > 1:
        dist.destroy_process_group()
