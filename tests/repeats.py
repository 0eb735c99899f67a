"""Batches with repeated captions, and one step that excludes them. For the tests of duplicates."""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from toy import Toy, readings, toy_batch, toy_reader

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.types import Batch, Step


def seed() -> int:
    return secrets.randbits(31)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(seed())


def unit(n: int, d: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(n, d, generator=generator(), dtype=torch.float64), dim=1).to(dtype)


def groups(n: int, of: int) -> list[int]:
    """A random group number for each of n captions."""
    return torch.randint(of, (n,), generator=generator()).tolist()


def mask(group: list[int]) -> Tensor:
    return torch.tensor([[i != j and a == b for j, b in enumerate(group)] for i, a in enumerate(group)])


def repeated(size: int, group: list[int], strings: list[str] | None = None) -> Batch:
    """A toy batch in which captions of one group have the same ids; images stay different."""
    batch = toy_batch(size, seed(), strings or [f"caption {g}" for g in group])
    first = [group.index(g) for g in group]
    return replace(batch, texts={"full": batch.texts["full"][first]}, lengths=batch.lengths[first])


def masked_step(batch: Batch, trained: str = "hn") -> tuple[Step, dict[tuple[str, str, str], object], list[str]]:
    """One watched step of all phases with duplicates excluded."""
    encoder = Toy(scale=30.0)
    reader = toy_reader(encoder, trained)
    framework = Clip(objective=reader.heads.objectives[trained], duplicates="exclude")
    assert reader.optimizer is not None
    reader.begin(1, 0)
    embeddings = encoder.embed(batch)
    terms = framework(embeddings, token_ids=batch.texts["full"])
    with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
        total_loss(terms).backward()
    reader.accumulated([total_loss(terms)])
    reader.optimizer.step()
    reader.updated()
    step = reader._step
    assert step is not None
    return step, readings(reader), reader.failures
