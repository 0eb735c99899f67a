"""A dual encoder of two linear maps: real autograd, real parameters, nothing else. For tests of the probe and its quantities."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.heads import Heads
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.optim import make_optimizer
from gradscope.quantities import quantity_set
from gradscope.recipe import Train
from gradscope.step_reader import StepReader
from gradscope.types import Batch, Embeddings, Step

VOCABULARY, CONTEXT, WIDTH = 50, 12, 6


class Toy(nn.Module):
    """Image [B, 3, 2, 2] -> linear; text ids [B, L] -> mean of token embeddings -> linear."""

    def __init__(self, scale: float = 20.0, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator) * 0.5)  # noqa: E731
        self.visual = nn.Module()
        self.visual.proj = draw(12, WIDTH)
        self.token_embedding = nn.Module()
        self.token_embedding.weight = draw(VOCABULARY, WIDTH)
        self.text_projection = draw(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def embed(self, batch: Batch) -> Embeddings:
        image = batch.images["full"].flatten(1) @ self.visual.proj
        text = self.token_embedding.weight[batch.texts["full"]].mean(dim=1) @ self.text_projection
        return Embeddings(image=F.normalize(image, dim=1), text=F.normalize(text, dim=1), scale=self.logit_scale.exp())

    def structural_rows(self, ids: Tensor) -> dict[str, Tensor]:
        seen = torch.zeros(VOCABULARY, dtype=torch.bool)
        seen[ids.flatten()] = True
        return {"token_embedding.weight": ~seen}


def toy_batch(size: int, seed: int, captions: list[str] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY // 2, (size, CONTEXT), generator=generator)
    return Batch(
        ids=tuple(map(str, range(size))),
        images={"full": torch.randn(size, 3, 2, 2, generator=generator)},
        texts={"full": ids},
        lengths=torch.randint(3, CONTEXT + 4, (size,), generator=generator),
        captions=tuple(captions or [f"caption {i}" for i in range(size)]),
    )


def toy_reader(encoder: nn.Module, trained: str = "infonce", gamma: float = 0.5, **settings: object) -> StepReader:
    return StepReader(
        model=encoder,  # type: ignore[arg-type]
        heads=Heads(objectives={"infonce": InfoNCE(), "hn": HN(gamma=gamma)}, trained=trained),
        quantities=quantity_set("full"),
        every=1,
        structural=getattr(encoder, "structural_rows", None),
        scale_max=100.0,
        optimizer=make_optimizer(encoder, Train()),
        **settings,  # type: ignore[arg-type]
    )


def measured(
    encoder: Toy, batch: Batch, trained: str = "infonce", gamma: float = 0.5
) -> tuple[Step, dict[tuple[str, str, str], object]]:
    """One watched backward on the toy: the Step the quantities saw, and the batch-phase readings by (quantity, term, key)."""
    reader = toy_reader(encoder, trained, gamma)
    framework = Clip(objective=reader.heads.objectives[trained])
    reader.begin(1, 0)
    encoder.zero_grad(set_to_none=True)
    embeddings = encoder.embed(batch)
    terms = framework(embeddings)
    with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
        total_loss(terms).backward()
    step = reader._step
    assert step is not None
    return step, readings(reader)


def readings(reader: StepReader) -> dict[tuple[str, str, str], object]:
    return {(row["quantity"], row["term"], row["key"]): row["value"] for row in reader.flush()}
