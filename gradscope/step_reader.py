"""The step reader: schedules quantities on the steps of a training loop and hands them what they look at.

On a probed step it looks at ONE softmax: the first micro-batch with narrow accumulation, the whole step with cached. While that
backward runs, tensor hooks keep the gradient of the logits and of both embeddings; before it, the objectives that are not trained are
evaluated on the same embeddings and their gradient taken through the same graph (retained, never accumulated into ``.grad``).
Nothing here draws a random number, writes to a parameter or keeps a reference to a gradient beyond the step, so training is
bit-identical with and without it. Readings stay tensors until ``flush`` moves them to the host together: one synchronisation per
probed step.

    with reader.watching(batch, embeddings, terms): total.backward()     # phase "batch"
    reader.accumulated(losses)                                           # phase "step": averaged gradient, before clipping
    reader.updated()                                                     # phase "update": after optimizer.step()
    readings = reader.flush()

``gradscope.probe.Probe`` does the same from hooks, in anybody's loop. How it can mislead: the time it reports is host time; on a GPU
its kernels overlap with training's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscope.cadence import Cadence, Ledger
from gradscope.distributed import (
    FailedElsewhereError,
    averaged,
    completed,
    everyones,
    failing_together,
    is_sharded,
    largest,
    local,
    rank,
    summed,
    world,
)
from gradscope.encoders.reach import plain_name
from gradscope.heads import ROWS, Heads, Observed, Watched
from gradscope.metrics.gradients import norm_over_ranks
from gradscope.optim import trainable
from gradscope.quantities import left_out_words, needs, needs_gradients
from gradscope.quantities.gradient import tower_of
from gradscope.types import STREAMED, Batch, Embeddings, Reading, Step, Term

Quantity = Callable[[Step], list[Reading]]

#: The key of a reading that says a quantity, or a part of the probe, failed.
FAILED = "failed"


@dataclass(kw_only=True)
class _Open:
    """The measured batch between the evaluation of its heads and the end of its backward."""

    embeddings: Embeddings
    observed: Observed
    terms: Sequence[Term]
    unscale: Tensor | float
    known: dict[str, Watched]
    param_grads: dict[str, list[Tensor | None]]
    own_grad: bool = True  # the backward to come is of this whole batch
    fresh: bool = False  # and found no gradient when it set out: afterwards .grad is this batch's alone
    watched: frozenset[str] = frozenset()
    kept: dict[str, Tensor] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class StepReader:
    """Readings of the steps of a training loop.

    Args:
        model: the module whose trainable parameters are watched.
        heads: the objectives that are read, which of them is trained, and how.
        quantities: name -> component; see ``gradscope.quantities.quantity_set``.
        every: probe steps 1, 1 + every, 1 + 2 every, ... May be changed between steps.
        budget: share of a plain step's time that the probe may take; then ``every`` is the densest cadence (see ``gradscope.cadence``).
        second_backward: whether an objective that is not trained gets its full-parameter gradient (one more backward pass each).
        structural: token ids [N, L] -> parameter name -> bool [rows] that these ids cannot reach.
        scale_max: the clamp of the scale, or None.
        dealt: whether each rank embedded a part of the rows (``gradscope.joining``): a gradient over the parameters is then the mean
            over ranks. Every rank reads, in the same order.
    """

    model: nn.Module
    heads: Heads
    quantities: dict[str, Quantity]
    every: int
    budget: float | None = None
    second_backward: bool = True
    structural: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    scale_max: float | None = None
    optimizer: Optimizer | None = None
    stamps: str = ""
    dealt: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _step: Step | None = None
    _readings: list[Reading] = field(default_factory=list)
    _mark: int | None = None
    _told: bool = False  # what is left out where the softmax is streamed
    _due: bool = False
    _ours: bool = False
    _copies: list[Tensor] = field(default_factory=list)
    _probed: bool = False
    _next: int = 1
    _ledger: Ledger = field(default_factory=Ledger)
    _cadence: Cadence | None = None
    _opened: _Open | None = None
    _replayed: dict[str, list[Tensor | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = trainable(self.model)
        self.names, self.parameters = [plain_name(name) for name in parameters], list(parameters.values())
        #: Of each parameter, by its name; a loop that is not ours replaces it by what the graph of the embeddings says.
        self.towers = [tower_of(name) for name in self.names]
        self.frozen_entries = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        self._cadence = None if self.budget is None else Cadence(budget=self.budget, densest=self.every)

    # ---- the schedule

    def begin(self, index: int, samples: int) -> None:
        """Opens step ``index`` (1-based); ``samples`` were seen before it."""
        self._due = (index - 1) % self.every == 0 if self._cadence is None else index >= self._next
        self._index, self._samples, self._probed = index, samples, False
        self._step, self._readings, self._mark, self.seconds = None, [], None, {}

    @property
    def due(self) -> bool:
        """Whether the measured batch of a probed step is still to come."""
        return self._due

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the parameters only (FSDP2)."""
        return any(is_sharded(parameter) for parameter in self.parameters)

    def add(self, reading: Reading) -> None:
        """A reading that no quantity makes, of a step that is being read."""
        if self.reading:
            self._readings.append(reading)

    @property
    def reading(self) -> bool:
        """Whether this step has a measured batch whose later phases are still to be read."""
        return self._step is not None

    def needs(self, what: str) -> bool:
        """Whether a quantity of the set needs ``what``, one of ``gradscope.quantities.NEEDS``."""
        return any(needs(quantity, what) for quantity in self.quantities.values())

    @property
    def top(self) -> int:
        """How many of an anchor's hardest negatives are read the share of, where the softmax is streamed."""
        return max(self.quantities["residual"].top) if "residual" in self.quantities else 0  # type: ignore[attr-defined]

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
            initial_text, margin_text: see ``Observed``.
            loss_scale: the factor that mixed precision multiplies the loss by.
            replayed: cached accumulation: ``embeddings`` are leaves, and the towers' backward is replayed inside the block, each
                piece announced by ``replaying``.
        """
        if not self.due:
            yield
            return
        observed = Observed(
            captions=batch.captions,
            token_ids=batch.texts["full"],
            lengths=batch.lengths,
            initial_text=initial_text,
            margin_text=margin_text,
            excluded=terms[0].scores.excluded if terms and terms[0].scores else None,
            groups=terms[0].groups if terms else None,
            cosine=terms[0].scores.cosine.detach() if terms and terms[0].scores else None,
        )
        self.open(embeddings, observed, terms=terms, unscale=1.0 / loss_scale, replayed=replayed)
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole:
                self.abandon()
        self.close()

    def open(
        self,
        embeddings: Embeddings,
        observed: Observed,
        *,
        terms: Sequence[Term] = (),
        unscale: Tensor | float = 1.0,
        replayed: bool = False,
        own_grad: bool = True,
    ) -> None:
        """Before the backward of the measured batch: evaluates what that backward will not leave behind, and starts to watch it.

        Args:
            terms: the trained terms, the global one first, where the loop is ours; else the objectives are evaluated on copies.
            unscale: what the gradients that pass by must be multiplied by.
            own_grad: whether the backward to come is of this whole batch; if not (a loop that caches), no gradient over the
                parameters belongs to it.
        """
        self._due, self._probed, self._ours = False, True, bool(terms)  # this is the measured batch, even if reading it fails
        self.heads.top, self.heads.by_direction = self.top, self.needs("direction_grads")
        self.heads.gradients = any(map(needs_gradients, self.quantities.values()))
        alone = len(terms) == 1  # then the trained objective's gradient is simply what the backward leaves in .grad
        try:
            with self._together(self.dealt):
                known = self._known(embeddings, observed, alone)
            grads = self._param_grads(embeddings, observed, known, bool(terms), replayed) if own_grad else {}
        except FailedElsewhereError:  # which ``flush`` hears of
            return
        except Exception as error:  # a diagnostic must never end a training run: it goes on unwatched
            self.fail("heads", error)
            return
        self._opened = _Open(
            embeddings=embeddings,
            observed=observed,
            terms=terms,
            unscale=unscale,
            known=known,
            param_grads=grads,
            own_grad=own_grad,
        )
        self._watch(self._opened, logits=alone)
        self._replayed = grads if replayed else {}

    def _watch(self, opened: _Open, *, logits: bool) -> None:
        """Keeps the gradients that will pass by."""
        watched = {"image": opened.embeddings.image, "text": opened.embeddings.text}
        if logits and opened.terms[0].scores is not None:
            watched["logits"] = opened.terms[0].scores.logits
        watched = {name: tensor for name, tensor in watched.items() if tensor.requires_grad}
        opened.watched = frozenset(watched)
        opened.handles += [_keep(opened.kept, name, tensor, self._set_out) for name, tensor in watched.items()]

    @property
    def opened(self) -> bool:
        """Whether the backward of the measured batch is still to come."""
        return self._opened is not None

    def _set_out(self) -> None:
        """The backward of the measured batch reaches the embeddings: loops empty ``.grad`` at any time before. A scale has its own."""
        opened = self._opened
        if opened is None or opened.terms or not opened.own_grad or self.sharded or not self.needs("param_grads"):
            return
        held = [p.grad for p in self.parameters if p.grad is not None and p.numel() > 1]
        opened.fresh = not held or not bool(torch.stack([g.detach().count_nonzero() for g in held]).any())

    def abandon(self) -> None:
        """The backward of the measured batch did not end: takes the hooks away and forgets it."""
        opened, self._opened, self._replayed = self._opened, None, {}
        for handle in opened.handles if opened else ():
            handle.remove()

    def close(self, unscale: Tensor | float | None = None, *, alone: bool = True) -> None:
        """After the backward of the measured batch: reads phase "batch". ``unscale`` replaces what ``open`` was told: a loss scale
        may not exist before the first backward. ``alone``: whether that backward was of this batch only."""
        opened = self._opened
        self.abandon()
        if not self._on_all_ranks(opened) or opened is None:
            return
        opened.fresh = opened.fresh and alone and any(p.grad is not None for p in self.parameters)
        opened.unscale = opened.unscale if unscale is None else unscale
        try:
            with self._timed("heads"), self._together(self.dealt):
                step = self._measured(opened)
        except FailedElsewhereError:  # which ``flush`` hears of
            return
        except Exception as error:
            self.fail("heads", error)
            return
        self._step = step
        self._read("batch")

    def _together(self, several: bool) -> AbstractContextManager[None]:
        """For what is put together from parts of ``several`` ranks."""
        return failing_together() if several else nullcontext()

    def _on_all_ranks(self, opened: _Open | None) -> bool:
        """Whether every rank has the measured batch; gradients over the parameters that one of them lacks are forgotten. What failed
        on one rank would leave the others waiting in the collectives to come."""
        if not (self.dealt and self._probed):
            return opened is not None
        grads = {} if opened is None else opened.param_grads
        lacking = [opened is None, *(name not in grads for name in self.heads.objectives)]
        batch, *by_name = summed(torch.tensor(lacking, dtype=torch.int64)).tolist()
        for name, ranks in zip(self.heads.objectives, by_name, strict=True):
            if ranks:
                grads.pop(name, None)
        return not batch

    def _known(self, embeddings: Embeddings, observed: Observed, alone: bool) -> dict[str, Watched]:
        """The objectives whose gradient the backward will not leave in ``.grad``, at the embeddings."""
        with self._timed("heads"):
            at, known = observed.candidates or embeddings, {}
            for name in self.heads.objectives:
                if alone and name == self.heads.trained:
                    continue
                known[name] = self.heads.evaluate(name, at, observed)
                scores = known[name].scores
                observed = observed if scores is None else replace(observed, cosine=scores.cosine)
            return known

    def _param_grads(
        self, embeddings: Embeddings, observed: Observed, known: dict[str, Watched], ours: bool, replayed: bool
    ) -> dict[str, list[Tensor | None]]:
        """Their gradients over all parameters. In a loop that is not ours, the trained one's is read from ``.grad`` afterwards.

        One that fails (a compiled graph may let no second backward through) is said, and leaves the step its other readings.
        """
        if not self.needs("param_grads") or (ours and self.sharded):
            return {}
        found: dict[str, list[Tensor | None]] = {}
        with self._timed("second backward"):
            for name in [name for name in known if (ours if name == self.heads.trained else self.second_backward)]:
                try:
                    found[name] = self.heads.through_towers(embeddings, known[name], self.parameters, observed.rows, replayed=replayed)
                except Exception as error:
                    self.fail("second backward", error)
        return found

    def _measured(self, opened: _Open) -> Step:
        """The step as the quantities see it, from what was known before the backward and what passed by during it."""
        known, grads, trained = dict(opened.known), dict(opened.param_grads), self.heads.trained
        if self.dealt:  # a streamed loss leaves each rank the gradient at its own rows
            opened.kept |= {name: completed(opened.kept[name]) for name in ROWS if name in opened.kept}
        silent = sorted(opened.watched - set(opened.kept))
        if silent:
            raise RuntimeError(f"no gradient passed by at {', '.join(silent)}: the hook is dead, or the loss does not reach them")
        if trained and trained not in known:
            text = opened.embeddings.text
            known[trained] = self.heads.of_training(opened.terms[0], text, opened.observed, opened.kept, opened.unscale)
        passed = {name: opened.kept[name] * opened.unscale for name in ROWS if name in opened.kept}
        factors: dict[str, Tensor | float] = {}
        # What ``.grad`` holds is the trained objective's: of our loop where no further term is trained beside it.
        whole = not self.sharded and (trained not in opened.known if opened.terms else opened.fresh)
        if self.needs("param_grads") and trained in known and trained not in grads and whole:
            # Our loop divides by the micro-batches after the last one; what others multiply the loss by is seen at the embeddings.
            seen = 1.0 if opened.terms else self.heads.grad_factor(known[trained], passed, opened.observed)
            grads[trained], factors[trained] = [p.grad for p in self.parameters], opened.unscale * seen
        if self.dealt:
            grads = {name: averaged(gradient) for name, gradient in grads.items()}
        return Step(
            index=self._index,
            samples=self._samples,
            embeddings=self.heads.unit(opened.observed.candidates or opened.embeddings),
            captions=opened.observed.captions,
            token_ids=opened.observed.token_ids,
            lengths=opened.observed.lengths,
            initial_text=opened.observed.initial_text,
            heads={name: self.heads.head(name, known[name], grads.get(name), factors.get(name, 1.0)) for name in self.heads.objectives},
            names=self.names,
            parameters=self.parameters,
            towers=self.towers,
            frozen_entries=self.frozen_entries,
            structural_rows=self._structural(opened.observed.token_ids),
            scale_max=self.scale_max,
            optimizer=self.optimizer,
            passed=passed,
            rows=opened.observed.rows,
            groups=opened.observed.groups,
            own_loss=bool(opened.terms),
        )

    def _structural(self, token_ids: Tensor | None) -> Mapping[str, Tensor]:
        return {} if token_ids is None or self.structural is None else self.structural(token_ids)

    def replaying(self, embeddings: Embeddings, rows: slice) -> None:
        """Cached accumulation: called with the live embeddings of each replayed micro-batch before their backward."""
        if not self._replayed or self._opened is None:
            return
        try:
            with self._timed("second backward"):
                if not (embeddings.image.requires_grad or embeddings.text.requires_grad):
                    raise RuntimeError(
                        "the replayed embeddings have no graph, so their part of the gradient over the parameters is lost"
                    )
                for name, total in self._replayed.items():
                    towers = self._own_rows(self._opened.known[name])
                    grads = self.heads.through_towers(embeddings, towers, self.parameters, rows, replayed=False)
                    self._replayed[name][:] = [_sum(a, b) for a, b in zip(total, grads, strict=True)]
        except Exception as error:
            self._replayed.clear()  # a gradient of some micro-batches is none: "not measured"
            self.fail("second backward", error)

    def _own_rows(self, watched: Watched) -> Watched:
        """What the towers of this rank are replayed with. The scale has had its part."""
        if not self.dealt:
            return replace(watched, scale_grad=None)
        grads = watched.at_rows()
        each = len(grads["image"]) // world()
        own = slice(rank() * each, (rank() + 1) * each)
        return replace(watched, scale_grad=None, image_grad=world() * grads["image"][own], text_grad=world() * grads["text"][own])

    # ---- phases "step" and "update"

    def accumulated(self, micro_losses: Sequence[Tensor], unscale: Tensor | float = 1.0) -> None:
        """After the last backward: ``.grad`` holds the averaged gradient, to be multiplied by ``unscale``, and is not yet clipped."""
        if self._step is None:
            return
        if self.heads.half or not self._ours:
            self._step.memo.clear()  # unscaling, and a write to ``.grad.data``, change a gradient without counting up its version
        before = None
        if self.needs("before"):
            with self._timed("update"):
                before = self._copied()
        self._step = replace(
            self._step,
            accumulated=[self._handed(p) for p in self.parameters],
            unscale=unscale,
            optimizer=self.optimizer,
            sharded=self.sharded,
            micro_losses=torch.stack([loss.detach() for loss in micro_losses]) if micro_losses else None,
            before=before,
        )
        self._read("step")

    def _handed(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of a gradient; where parts are added up over ranks, a whole one is the first rank's."""
        if parameter.grad is None or (rank() and self.dealt and self.sharded and not is_sharded(parameter)):
            return None
        return local(parameter.grad)

    def _copied(self) -> list[Tensor]:
        """The parameters as they are now. On a CPU the memory is kept for the next time: to get it takes longer than to fill it."""
        if any(p.device.type != "cpu" for p in self.parameters):
            return [p.detach().clone() for p in self.parameters]
        if not self._copies:
            self._copies = [torch.empty_like(p, requires_grad=False) for p in self.parameters]
        for copy, parameter in zip(self._copies, self.parameters, strict=True):
            copy.copy_(parameter.detach())
        return self._copies

    def backward_ended(self, unscale: Tensor | float = 1.0) -> None:
        """After each backward of a loop that is not ours: the norm of ``.grad``, since the loop may clip before we see it again."""
        if self._step is None or "accumulation" not in self.quantities:
            return
        with self._timed("accumulation"), torch.no_grad():
            grads = [None if p.grad is None else local(p.grad) for p in self.parameters]
            if any(gradient is not None for gradient in grads):
                norm = norm_over_ranks(grads, self.sharded, self._step.memo) * unscale
                self._step = replace(self._step, norm_before_clipping=norm)

    def updated(self, skipped: bool = False) -> None:
        """After the optimizer's step; a step that mixed precision skipped has no update to read."""
        if self._step is None or skipped:
            return
        self._mark = len(self._readings) if self._mark is None else self._mark
        del self._readings[self._mark :]  # of several optimizers, the last sees the whole update
        self._read("update")

    # ---- readings

    def _read(self, phase: str) -> None:
        assert self._step is not None
        streamed = any(head.scores is None for head in self._step.heads.values())
        if streamed and not self._told:
            self._told = True
            words = left_out_words(self.quantities, len(self._step.embeddings.text))
            self.failures += [f"step {self._index}: {words}"] if words else []
        for name, quantity in self.quantities.items():
            if quantity.phase != phase or (streamed and needs(quantity, "cells")):  # type: ignore[attr-defined]
                continue
            with self._timed(name), torch.no_grad():
                try:
                    with self._together(self.dealt and self.sharded):
                        self._readings += quantity(self._step)
                except FailedElsewhereError:  # which ``flush`` hears of
                    pass
                except Exception as error:  # a diagnostic must never end a training run
                    self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """A failure is a reading too, and words for the console. ``name`` is a quantity, or the part of the probe that failed."""
        where = f", rank {rank()}" if rank() else ""
        self.failures.append(f"step {self._index}{where}: '{name}' of the probe failed: {type(error).__name__}: {error}")
        self._readings.append(_failed(name, 1.0))

    def flush(self) -> list[dict[str, Any]]:
        """All readings of this step as rows for the run log, in one transfer; [] on a step that was not probed. Where rows are dealt
        to several ranks every one must call this: what failed on another is counted and said here too."""
        self._hear_of_failures()
        if self._step is None and not self._readings:
            return []
        with self._timed("flush"):
            streamed = self._step is not None and any(head.scores is None for head in self._step.heads.values())
            rows = to_rows(self._readings, self._index, self.stamps + (f"; {STREAMED}" if streamed else ""))
        self._step, self._readings = None, []
        rows += [
            {"step": self._index, "quantity": "probe", "term": "", "key": name, "value": value, "unit": "s", "stamps": ""}
            for name, value in self.seconds.items()
        ]
        return rows

    def _hear_of_failures(self) -> None:
        """A reading "failed" counts the ranks on which its quantity did. The numbers of a quantity that failed elsewhere stay: what is
        dealt is put together before a quantity sees it."""
        if not (self.dealt and self._probed):
            return
        own = [reading.quantity for reading in self._readings if reading.key == FAILED]
        if not int(summed(torch.tensor(len(own)))):
            return
        told = everyones((own, self.failures))
        self.failures += [line for _, lines in told for line in dict.fromkeys(lines) if line not in self.failures]
        counts = Counter(name for names, _ in told for name in dict.fromkeys(names))
        self._readings = [reading for reading in self._readings if reading.key != FAILED]
        self._readings += [_failed(name, float(ranks)) for name, ranks in counts.items()]

    def ended(self, seconds: float) -> list[dict[str, Any]]:
        """At the very end of a step that took so long: rows on what observing costs, [] unless the step was probed.

        ``share`` is of the block of steps that this one ended; ``every`` is the cadence from here on, where a budget changed it. With a
        budget a probed step ends in a collective: every rank must call this.
        """
        inside = sum(self.seconds.values())
        if not self._probed:
            self._ledger.add(seconds, inside)
            return []
        block, self._ledger = self._ledger, Ledger()
        self._ledger.add(seconds, inside)
        rows = [self._cost("share", block.share, "share of plain time")] if block.steps else []
        if self._cadence is not None:
            plain = (block.plain + self._ledger.plain) / (block.steps + 1)
            over = block.probed - self._cadence.budget * block.plain
            chosen = self._cadence.after_probe(*self._agreed([inside / plain, over / plain] if plain > 0 else [0.0, 0.0]))
            rows += [self._cost("every", chosen.every, "steps")] if chosen.every != self._cadence.every else []
            self._cadence, self._next = chosen, self._index + chosen.every
        return rows

    def _agreed(self, costs: list[float]) -> list[float]:
        """The largest over ranks, so that all look at the same steps."""
        agreed: list[float] = largest(torch.tensor(costs, dtype=torch.float64, device=self.parameters[0].device)).tolist()
        return agreed

    def _cost(self, key: str, value: float, unit: str) -> dict[str, Any]:
        return {"step": self._index, "quantity": "probe", "term": "", "key": key, "value": value, "unit": unit, "stamps": ""}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _failed(name: str, ranks: float) -> Reading:
    return Reading(quantity=name, key=FAILED, term="", value=ranks, unit="ranks")


def to_rows(readings: Sequence[Reading], index: int, stamps: str) -> list[dict[str, Any]]:
    """Readings -> plain rows. Every tensor travels in one float64 vector."""
    tensors = [r.value.detach().double().flatten() for r in readings if isinstance(r.value, Tensor)]
    place = next((t.device for t in tensors if t.device.type != "cpu"), None)  # a count of captions may have stayed on the host
    values = torch.cat([t if place is None else t.to(place, non_blocking=True) for t in tensors]).tolist() if tensors else []
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


def _keep(kept: dict[str, Tensor], name: str, tensor: Tensor, first: Callable[[], None]) -> Any:
    def hook(gradient: Tensor) -> None:
        if not kept:
            first()
        kept[name] = gradient.detach().clone()

    return tensor.register_hook(hook)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
