"""Zero accounting of an encoder, or of a run as it stands, on one batch of a data set.

A run brings what it trains with: its frozen parameters, its precision and objective (unless others are named), its token term, its
loss scale and the state of its optimizer. Any other encoder, a checkpoint's folder included, is read as if fine-tuning were about to
start: in fp32, everything trains, and no second moment exists yet.
The towers are in training mode, as they are when a gradient is taken.

How it can mislead: one batch, the first of a shuffle; structural zeros shrink with the number of captions a step sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscope import checkpoint
from gradscope.assembly import make_framework
from gradscope.console import console
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.data.too_long import refuse_too_long
from gradscope.data.usable import usable
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.freeze import freeze
from gradscope.encoders.load import load_encoder, resolve_device
from gradscope.encoders.text import load_text_encoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.optim import make_optimizer
from gradscope.quantities.gradient import tower_of
from gradscope.recipe import Data, Recipe, resolve
from gradscope.run_checkpoints import chosen_checkpoints
from gradscope.runlog import Run, is_run
from gradscope.types import Batch
from gradscope.zeros.accounting import Accounting, account
from gradscope.zeros.counterfactual import Pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ZeroBatch:
    """The accounting, and what it belongs to. ``split`` and ``objective`` are as they were resolved."""

    encoder: str
    data: str
    split: str
    width: int
    precision: str
    objective: str
    accounting: Accounting


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """An encoder as training has it: what trains, for what, and the optimizer's memory."""

    name: str
    recipe: Recipe
    encoder: DualEncoder
    framework: Clip
    optimizer: Optimizer
    precision: str
    loss_scale: float


def account_encoder(
    name: str,
    *,
    data: Data,
    split: str,
    width: int,
    precision: str | None,
    objective: Mapping[str, Any] | None,
    loss_scale: float | None,
    seed: int,
    device: str,
    which: str = "last",
    trust_archive: bool = False,
) -> ZeroBatch:
    """Counts the zeros of one batch of ``width`` records by cause; notes of the data are printed.

    Args:
        name: a run, or whatever ``load_encoder`` takes.
        precision: fp32, bf16 or fp16; None for the run's own, fp32 where there is none.
        objective: {"name": ..., "gamma": ...}; None for the run's own, InfoNCE where there is none.
        loss_scale: of mixed precision, > 0; None for the run's, as it stands, in fp16, and 1 everywhere else.
        which: of a run: its last or best checkpoint.

    Raises:
        ValueError: bad names, settings or data, or a loss that is not finite.
    """
    _check(precision, loss_scale, which)
    standing = _standing(name, objective, which, resolve_device(device), trust_archive)
    precision = precision or standing.precision
    split, batch = _one_batch(standing, data, split, width, seed)
    found = account(
        standing.encoder.train(),
        _closure(standing.framework, batch, _margin_text(standing, batch)),
        dtype=DTYPES[precision],
        loss_scale=loss_scale or (standing.loss_scale if precision == "fp16" else 1.0),
        structural=standing.encoder.structural_rows(batch.texts["full"]),
        optimizer=standing.optimizer,
        group=tower_of,
    )
    words = _objective_words(standing.framework)
    return ZeroBatch(
        encoder=standing.name, data=data.name, split=split, width=width, precision=precision, objective=words, accounting=found
    )


def _check(precision: str | None, loss_scale: float | None, which: str) -> None:
    if precision not in (None, *DTYPES):
        raise ValueError(f"--precision '{precision}' is unknown; choose {', '.join(DTYPES)}")
    if loss_scale is not None and not 0 < loss_scale < float("inf"):
        raise ValueError(f"--loss-scale must be a positive number, got {loss_scale:g}; GradScaler starts at 65536")
    if which == "both":
        raise ValueError("--checkpoint both would be two batches of numbers; choose last or best")


def _standing(name: str, objective: Mapping[str, Any] | None, which: str, place: torch.device, trust_archive: bool) -> _Standing:
    """Loads the encoder, and of a run everything that decides what has a gradient."""
    (chosen,) = chosen_checkpoints(name, which)
    tables = dict(Run(name).recipe) if is_run(name) else {"encoder": {"name": name}}
    if objective is not None:
        own = tables.get("objective", {})
        tables["objective"] = {**objective, **{key: own[key] for key in ("loss_form", "duplicates") if key in own}}
    recipe = resolve(tables, {})
    encoder = load_encoder(chosen.load, place, trust_archive=trust_archive)
    trained = resolve(Run(name).recipe, {}) if is_run(name) else recipe
    if make_framework(trained).needs_tokens:
        encoder.add_token_scale()
    encoder.model.logit_scale.requires_grad_(trained.train.scale == "learn")
    if trained.encoder.freeze:
        freeze(encoder, trained.encoder.freeze)
    optimizer = make_optimizer(encoder, trained.train)
    scaler = torch.amp.GradScaler(place.type, enabled=trained.train.precision == "fp16")
    if is_run(name):
        folder = Path(chosen.load) if Path(chosen.load) != Path(name) else Run(name).checkpoints()[-1]
        checkpoint.load(folder, encoder, optimizer, scaler)
    return _Standing(
        name=chosen.name,
        recipe=recipe,
        encoder=encoder,
        framework=make_framework(recipe),
        optimizer=optimizer,
        precision=trained.train.precision,
        loss_scale=scaler.get_scale(),
    )


def _one_batch(standing: _Standing, data: Data, split: str, width: int, seed: int) -> tuple[str, Batch]:
    source = open_data(data.name, **data.settings())
    split = source.split_or_only(split)
    found = source.read(split)
    kept = usable(found.records, allow_missing=data.allow_missing, on_bad_image=data.on_bad_image, workers=0)
    for note in (*found.notes, *kept.notes):
        console.print(f"note: {note}", soft_wrap=True)
    if len(kept.records) < width:
        raise ValueError(f"--width is {width}, split '{split}' of '{data.name}' has {len(kept.records)} usable records; lower --width")
    stream = Batches(records=kept.records, encoder=standing.encoder, batch_size=width, accumulate=1, seed=seed, decode=data.decode)
    ((batch,),) = stream.steps(1, 1)
    if data.on_too_long == "error":
        refuse_too_long(list(batch.ids), batch.lengths.tolist(), standing.encoder.context)
    cut = int((batch.lengths > standing.encoder.context).sum())
    if cut:
        console.print(f"{cut} of {width} captions cut at {standing.encoder.context} tokens", soft_wrap=True)
    return split, batch


def _margin_text(standing: _Standing, batch: Batch) -> Tensor | None:
    """Rows of the batch's captions by the encoder that a frozen or external margin names."""
    objective, encoder = standing.recipe.objective, standing.encoder
    if objective.margin == "frozen":
        start = load_encoder(standing.recipe.encoder.name, encoder.device, trust_archive=standing.recipe.encoder.trust_archive)
        return start.embed_texts(batch.texts["full"])
    if objective.margin == "external":
        return load_text_encoder(objective.margin_encoder, device=str(encoder.device)).embed(list(batch.captions))[0].to(encoder.device)
    return None


def _closure(framework: Clip, batch: Batch, margin_text: Tensor | None) -> Any:
    def closure(run: Pass) -> Tensor:
        images = {view: run.cast(pixels) for view, pixels in batch.images.items()}
        encoder: Any = run.model
        with run.autocast():
            embeddings = encoder.embed(dataclasses.replace(batch, images=images), tokens=framework.needs_tokens)
        margin = None if margin_text is None else run.cast(margin_text)
        return total_loss(framework(embeddings, margin, batch.texts["full"]))

    return closure


def _objective_words(framework: Clip) -> str:
    """As it stands beside the numbers."""
    objective = framework.objective
    margin = f", {objective.margin} margin" if isinstance(objective, HN) and objective.margin != "live" else ""
    words = [objective.name if objective.gamma == 0 else f"{objective.name} (gamma {objective.gamma:g}{margin})"]
    words += [f"{framework.loss_form} form"] if framework.loss_form != "plain" else []
    words += [f"token term {framework.token_weight:g}"] if framework.needs_tokens else []
    words += {"keep": [], "exclude": ["duplicates excluded"], "positives": ["duplicates are positives"]}[framework.duplicates]
    return ", ".join(words)
