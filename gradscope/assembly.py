"""What a recipe becomes before the first step: the framework, the step reader, the number of steps."""

from __future__ import annotations

import dataclasses

import torch

from gradscope.data.batching import Batches
from gradscope.distributed import everyones, world
from gradscope.encoders.dual import DualEncoder
from gradscope.frameworks.clip import Clip
from gradscope.heads import Heads
from gradscope.objectives import objectives
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.quantities import quantity_set
from gradscope.recipe import Recipe
from gradscope.step_reader import StepReader
from gradscope.training_data import TrainingData

#: The gamma at which an InfoNCE run reads HN: the paper's.
PAPER_GAMMA = 0.5


def make_framework(recipe: Recipe) -> Clip:
    """The framework of a recipe."""
    objective = recipe.objective
    component = objectives[objective.name]
    fields = {f.name for f in dataclasses.fields(component)} & {"gamma", "margin"}
    return Clip(
        objective=component(**{name: getattr(objective, name) for name in fields}, several=_several(objective.duplicates)),
        loss_form=objective.loss_form,
        token_weight=objective.token_weight,
        duplicates=objective.duplicates,
        kernel=objective.kernel,
    )


def _several(duplicates: str) -> str:
    return "positives" if duplicates == "positives" else "exclude"


def make_reader(recipe: Recipe, encoder: DualEncoder, framework: Clip, optimizer: torch.optim.Optimizer) -> StepReader | None:
    """The step reader of a recipe, or None without --log-grads. Both objectives are read, whichever is trained."""
    if not recipe.probe.log_grads:
        return None
    hn = framework.objective if isinstance(framework.objective, HN) else HN(gamma=PAPER_GAMMA, several=_several(framework.duplicates))
    settings = recipe.train
    batches = f"micro-batch 1/{settings.accumulate}" if settings.accumulate_mode == "narrow" else "whole step"
    left_out = {"keep": "", "exclude": "; duplicates excluded", "positives": "; duplicates are positives"}[framework.duplicates]
    return StepReader(
        model=encoder,
        heads=Heads(
            objectives={"infonce": InfoNCE(several=_several(framework.duplicates)), "hn": hn},
            trained=framework.objective.name,
            loss_form=framework.loss_form,
            half=settings.precision == "fp16",
            kernel=framework.kernel,
        ),
        quantities=quantity_set(recipe.probe.set),
        every=recipe.probe.every,
        budget=recipe.probe.share,
        second_backward=recipe.probe.second_backward and settings.shard == "none",
        dealt=world() > 1,
        structural=encoder.structural_rows,
        scale_max=settings.scale_max if settings.scale == "learn" else None,  # a fixed scale is not clamped
        optimizer=optimizer,
        stamps=f"{batches}; width {recipe.width}; gamma {hn.gamma:g} {hn.margin}; towers {settings.precision}, loss fp32; unscaled"
        + left_out
        + (f"; dealt to {world()} ranks" if world() > 1 else ""),
    )


def total_steps_of(recipe: Recipe, batches: Batches) -> int:
    """Of all epochs, or what ``max_steps`` leaves of them."""
    every = recipe.train.epochs * batches.steps_per_epoch
    return min(every, recipe.train.max_steps) if recipe.train.max_steps else every


def check_same_records(data: TrainingData) -> None:
    """Ranks on other nodes read their own disk. Raises ValueError, on every rank, if they do not all have the same records."""
    found = everyones(data.facts()["data"]["used_sha256"])
    other = [str(index) for index, digest in enumerate(found) if digest != found[0]]
    if other:
        raise ValueError(
            f"processes {', '.join(other)} read other records than process 0; give all nodes the same files, or a disk that all see"
        )
