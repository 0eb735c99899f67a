"""The probe: schedules quantities, and is the only place that attaches and removes hooks.

On a probed step it looks at ONE softmax: the first micro-batch with narrow accumulation, the whole step with cached. While that
backward runs, tensor hooks keep the gradient of the logits and of both embeddings; before it, the other objective is evaluated on
the same embeddings and its gradient taken through the same graph (retained, never accumulated into ``.grad``). Nothing here draws a
random number, writes to a parameter or keeps a reference to a gradient beyond the step, so training is bit-identical with and
without it. Readings stay tensors until ``flush`` moves them to the host together: one synchronisation per probed step.

    with probe.watching(batch, embeddings, terms): total.backward()      # phase "batch"
    probe.accumulated(losses)                                            # phase "step": averaged gradient, before clipping
    probe.updated()                                                      # phase "update": after optimizer.step()
    readings = probe.flush()

How it can mislead: the time it reports is host time; on a GPU its kernels overlap with training's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscope.encoders.dual import DualEncoder
from gradscope.frameworks.clip import total_loss
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import LOSS_FORMS, symmetric_loss
from gradscope.optim import trainable
from gradscope.quantities import quantities
from gradscope.types import Batch, Embeddings, Head, Reading, Scores, Step, Term

Objective = InfoNCE | HN
Quantity = Callable[[Step], list[Reading]]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What each objective's gradient looks like at the embeddings: the part of a ``Head`` known before the towers' backward."""

    scores: Scores
    loss: Tensor
    logit_grad: Tensor
    image_grad: Tensor
    text_grad: Tensor
    scale_grad: Tensor | None


@dataclass(kw_only=True)
class Probe:
    """Readings of a training loop.

    Args:
        encoder: the towers whose parameters are watched.
        objectives: "infonce" and "hn", the second with the gamma and margin it is to be read at.
        trained: the name of the objective that is minimised.
        quantities: name -> component; see ``all_quantities``.
        every: probe steps 1, 1 + every, 1 + 2 every, ...
        second_backward: whether the objective that is not trained gets its full-parameter gradient (one more backward pass).
        loss_form: how training computes its loss; the readings use the same.
        scale_max: the clamp of the scale, or None.
        half: whether the towers run in fp16, so that the second backward needs a factor of its own.
    """

    encoder: DualEncoder
    objectives: dict[str, Objective]
    trained: str
    quantities: dict[str, Quantity]
    every: int
    second_backward: bool = True
    loss_form: str = "plain"
    scale_max: float | None = None
    half: bool = False
    optimizer: Optimizer | None = None
    stamps: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _step: Step | None = None
    _readings: list[Reading] = field(default_factory=list)
    _due: bool = False
    _replayed: dict[str, list[Tensor | None]] = field(default_factory=dict)
    _pending: dict[str, Watched] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = trainable(self.encoder)
        self.names, self.parameters = list(parameters), list(parameters.values())

    # ---- the schedule

    def begin(self, index: int, samples: int) -> None:
        """Opens step ``index`` (1-based); ``samples`` were seen before it."""
        self._due = (index - 1) % self.every == 0
        self._index, self._samples = index, samples
        self._step, self._readings, self.seconds = None, [], {}

    @property
    def due(self) -> bool:
        """Whether the measured batch of a probed step is still to come."""
        return self._due

    # ---- phase "batch"

    @contextmanager
    def watching(
        self,
        batch: Batch,
        embeddings: Embeddings,
        terms: Sequence[Term],
        *,
        initial_text: Tensor | None = None,
        margin_text: Tensor | None = None,
        loss_scale: float = 1.0,
        replayed: bool = False,
    ) -> Iterator[None]:
        """Wraps the backward of one batch. A no-op unless this is the measured batch of a probed step.

        Args:
            initial_text: the initial encoder's caption rows [B, D], to measure the drift of G against.
            margin_text: the rows [B, D0] that a frozen or external margin is made of, as the framework was given them.
            loss_scale: the factor that mixed precision multiplies the loss by.
            replayed: cached accumulation: ``embeddings`` are leaves, and the towers' backward is replayed inside the block, each
                piece announced by ``replaying``.
        """
        if not self.due:
            yield
            return
        self._due = False  # this is the measured batch, even if reading it fails
        scores = terms[0].scores
        assert scores is not None
        alone = len(terms) == 1  # then the trained objective's gradient is simply what the backward leaves in .grad
        found = None
        try:
            found = self._before_backward(embeddings, alone, margin_text, replayed)
        except Exception as error:  # a diagnostic must never end a training run: it goes on unwatched
            self._fail("heads", error)
        if found is None:
            yield
            return
        known, param_grads = found
        kept: dict[str, Tensor] = {}
        handles = [
            _keep(kept, "logits", scores.logits),
            _keep(kept, "image", embeddings.image),
            _keep(kept, "text", embeddings.text),
        ]
        self._pending, self._replayed = (known, param_grads) if replayed else ({}, {})
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._pending, self._replayed = {}, {}
        try:
            with self._timed("heads"):
                if alone:
                    known[self.trained] = self._of_training(scores, total_loss(terms), kept, 1.0 / loss_scale)
                    param_grads[self.trained] = [_scaled(p.grad, 1.0 / loss_scale) for p in self.parameters]
                heads = {name: self._head(name, known[name], param_grads.get(name)) for name in ("infonce", "hn")}
                self._step = self._measured(batch, embeddings, initial_text, heads)
        except Exception as error:
            self._fail("heads", error)
            return
        self._read("batch")

    def _before_backward(
        self, embeddings: Embeddings, alone: bool, margin_text: Tensor | None, replayed: bool
    ) -> tuple[dict[str, Watched], dict[str, list[Tensor | None]]]:
        """The objectives whose gradient the backward will not leave in ``.grad``: at the embeddings, and over the parameters."""
        with self._timed("heads"):
            known = {
                name: self._evaluate(objective, embeddings, margin_text)
                for name, objective in self.objectives.items()
                if not (alone and name == self.trained)
            }
        param_grads: dict[str, list[Tensor | None]] = {}
        with self._timed("second backward"):
            for name, watched in known.items():
                if self.second_backward or name == self.trained:
                    param_grads[name] = self._through_towers(embeddings, watched, replayed)
        return known, param_grads

    def _of_training(self, scores: Scores, loss: Tensor, kept: dict[str, Tensor], unscale: float) -> Watched:
        """The trained objective from what its own backward passed by."""
        return Watched(
            scores=_detached(scores),
            loss=loss.detach(),
            logit_grad=kept["logits"] * unscale,
            image_grad=kept["image"] * unscale,
            text_grad=kept["text"] * unscale,
            scale_grad=None,
        )

    def _measured(self, batch: Batch, embeddings: Embeddings, initial_text: Tensor | None, heads: dict[str, Head]) -> Step:
        return Step(
            index=self._index,
            samples=self._samples,
            batch=batch,
            embeddings=replace(
                embeddings,
                image=embeddings.image.detach(),
                text=embeddings.text.detach(),
                scale=embeddings.scale.detach(),
                image_tokens=None,
                text_tokens=None,
            ),
            initial_text=initial_text,
            heads=heads,
            names=self.names,
            parameters=self.parameters,
            structural_rows=self.encoder.structural_rows(batch),
            scale_max=self.scale_max,
            optimizer=self.optimizer,
        )

    def replaying(self, embeddings: Embeddings, rows: slice) -> None:
        """Cached accumulation: called with the live embeddings of each replayed micro-batch before their backward."""
        if not self._replayed:
            return
        try:
            with self._timed("second backward"):
                for name, total in self._replayed.items():
                    watched = self._pending[name]
                    grads = torch.autograd.grad(
                        [embeddings.image, embeddings.text],
                        self.parameters,
                        [watched.image_grad[rows], watched.text_grad[rows]],
                        retain_graph=True,
                        allow_unused=True,
                    )
                    self._replayed[name][:] = [_sum(a, b) for a, b in zip(total, grads, strict=True)]
        except Exception as error:
            self._replayed.clear()  # a gradient of some micro-batches is none: "not measured"
            self._fail("second backward", error)

    def _evaluate(self, objective: Objective, embeddings: Embeddings, margin_text: Tensor | None) -> Watched:
        """An objective on copies of the embeddings: its loss and its gradients there. Touches no graph but its own."""
        with torch.enable_grad():
            image, text, scale = (t.detach().requires_grad_() for t in (embeddings.image, embeddings.text, embeddings.scale))
            scores = objective.scores(image, text, scale, margin_text)
            loss = symmetric_loss(scores, self.loss_form).mean()
            logit_grad, image_grad, text_grad, scale_grad = torch.autograd.grad(loss, [scores.logits, image, text, scale])
        return Watched(
            scores=_detached(scores),
            loss=loss.detach(),
            logit_grad=logit_grad,
            image_grad=image_grad,
            text_grad=text_grad,
            scale_grad=scale_grad,
        )

    def _through_towers(self, embeddings: Embeddings, watched: Watched, replayed: bool) -> list[Tensor | None]:
        """The gradient over all parameters that belongs to a gradient at the embeddings; ``.grad`` is left alone.

        It passes fp16 towers under a factor of its own, since the loss scale suits the trained objective's size only.
        """
        outputs, grads = [], []
        if not replayed:
            outputs, grads = [embeddings.image, embeddings.text], [watched.image_grad, watched.text_grad]
        if embeddings.scale.requires_grad:
            assert watched.scale_grad is not None
            outputs, grads = [*outputs, embeddings.scale], [*grads, watched.scale_grad]
        if not outputs:
            return [None] * len(self.parameters)
        if not self.half:
            return list(torch.autograd.grad(outputs, self.parameters, grads, retain_graph=True, allow_unused=True))
        factor = _fp16_factor(grads)
        scaled = [gradient * factor for gradient in grads]
        found = torch.autograd.grad(outputs, self.parameters, scaled, retain_graph=True, allow_unused=True)
        return [None if gradient is None else gradient / factor for gradient in found]

    def _head(self, name: str, watched: Watched, param_grads: Sequence[Tensor | None] | None) -> Head:
        logits = watched.scores.logits
        return Head(
            name=name,
            gamma=self.objectives[name].gamma,
            trained=name == self.trained,
            scores=watched.scores,
            loss=watched.loss,
            logit_grad=watched.logit_grad,
            direction_grads={d: self._direction_grad(m) for d, m in (("i2t", logits), ("t2i", logits.T))},
            image_grad=watched.image_grad,
            text_grad=watched.text_grad,
            param_grads=param_grads,
        )

    def _direction_grad(self, logits: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(LOSS_FORMS[self.loss_form](leaf).mean() / 2, leaf)[0]

    # ---- phases "step" and "update"

    def accumulated(self, micro_losses: Sequence[Tensor]) -> None:
        """After the last backward: ``.grad`` holds the averaged, unscaled gradient and is not yet clipped."""
        if self._step is None:
            return
        with self._timed("update"):
            before = [p.detach().clone() for p in self.parameters]
        self._step = replace(
            self._step,
            accumulated=[p.grad for p in self.parameters],
            micro_losses=torch.stack([loss.detach() for loss in micro_losses]),
            before=before,
        )
        self._read("step")

    def updated(self, skipped: bool = False) -> None:
        """After the optimizer's step; a step that mixed precision skipped has no update to read."""
        if self._step is not None and not skipped:
            self._read("update")

    # ---- readings

    def _read(self, phase: str) -> None:
        assert self._step is not None
        for name, quantity in self.quantities.items():
            if quantity.phase != phase:  # type: ignore[attr-defined]
                continue
            with self._timed(name), torch.no_grad():
                try:
                    self._readings += quantity(self._step)
                except Exception as error:  # a diagnostic must never end a training run
                    self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """A failure is a reading too, and words for the console. ``name`` is a quantity, or the part of the probe that failed."""
        self.failures.append(f"step {self._index}: '{name}' of the probe failed: {type(error).__name__}: {error}")
        self._readings.append(Reading(quantity=name, key="failed", term="", value=1.0, unit="0/1"))

    def flush(self) -> list[dict[str, Any]]:
        """All readings of this step as rows for the run log, in one transfer; [] on a step that was not probed."""
        if self._step is None and not self._readings:
            return []
        with self._timed("flush"):
            rows = to_rows(self._readings, self._index, self.stamps)
        self._step, self._readings = None, []
        rows += [
            {"step": self._index, "quantity": "probe", "term": "", "key": name, "value": value, "unit": "s", "stamps": ""}
            for name, value in self.seconds.items()
        ]
        return rows

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def to_rows(readings: Sequence[Reading], index: int, stamps: str) -> list[dict[str, Any]]:
    """Readings -> plain rows. Every tensor travels in one float64 vector."""
    tensors = [r.value.detach().double().flatten() for r in readings if isinstance(r.value, Tensor)]
    values = torch.cat(tensors).tolist() if tensors else []
    rows, at = [], 0
    for reading in readings:
        value: Any = reading.value
        if isinstance(value, Tensor):
            size = value.numel()
            value = values[at] if value.ndim == 0 else values[at : at + size]
            at += size
        row = {"step": index, "quantity": reading.quantity, "term": reading.term, "key": reading.key}
        rows.append({**row, "value": value, "unit": reading.unit, "stamps": stamps})
    return rows


def all_quantities() -> dict[str, Quantity]:
    """Every registered quantity with its defaults."""
    return {name: component() for name, component in quantities}


def _keep(kept: dict[str, Tensor], name: str, tensor: Tensor) -> Any:
    def hook(gradient: Tensor) -> None:
        kept[name] = gradient.detach().clone()

    return tensor.register_hook(hook)


def _detached(scores: Scores) -> Scores:
    margin = None if scores.margin is None else scores.margin.detach()
    return Scores(cosine=scores.cosine.detach(), margin=margin, logits=scores.logits.detach(), scale=scores.scale.detach())


def _scaled(gradient: Tensor | None, factor: float) -> Tensor | None:
    return gradient if gradient is None or factor == 1.0 else gradient * factor


def _fp16_factor(gradients: Sequence[Tensor]) -> Tensor:
    """The power of two that brings the largest entry to between 8 and 16: far from both ends of fp16. [] fp32."""
    largest = torch.stack([g.abs().max() for g in gradients]).max().clamp(min=1e-30)
    return torch.exp2(4 - torch.frexp(largest).exponent.float())


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
