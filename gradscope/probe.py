"""The probe: readings of a contrastive loss and its gradients from hooks, in anybody's training loop.

    with gradscope.Probe(model, output="runs/mine"):
        ...                                     # the loop as it is: any trainer, any precision, any two towers

It finds the two matrices of embeddings in what the model returns or the loss is given (``gradscope.attach.found``), the scale, the
parameters, and the optimizer that updates them; or it is told: ``loss=``, ``optimizer=``, ``scaler=``, and ``probe.watch(...)``.

What happens on a probed step, in order:
    forward       a forward hook sees the embeddings (nothing is traced by torch.compile, nothing is counted twice by checkpointing)
    backward      tensor hooks keep the gradient at the embeddings; when the whole backward has ended, phase "batch" is read
    optimizer     its own step hooks read the averaged gradient before the step and the update after it
Everything is undone by ``detach`` (the end of the ``with`` block). Weights are bit-identical with and without it.

How it can mislead: the loss is computed again from the embeddings, in fp32 and as InfoNCE, and as HN beside it; quantity ``hooks`` says
how well the gradient of the loop's own loss agrees. The measured softmax is that of the first micro-batch of a step. A further loss
that reaches the parameters past the embeddings (a captioning head, a penalty on weights) is in the gradient over the parameters, and
no agreement at the embeddings shows it.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscope import distributed
from gradscope.attach import found
from gradscope.attach.embedding_source import EmbeddingSource, passive
from gradscope.attach.found import Found
from gradscope.attach.local_norm import LocalNorm
from gradscope.attach.optimizer_watch import OptimizerWatch
from gradscope.attach.probe_log import ProbeLog
from gradscope.attach.towers import towers
from gradscope.attach.wrapping import replace_method
from gradscope.cadence import percent, share
from gradscope.console import console
from gradscope.encoders.reach import reachable_rows
from gradscope.heads import Heads, Observed
from gradscope.kernels.choice import kernel_for
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.quantities import quantity_set
from gradscope.step_reader import StepReader
from gradscope.types import DIRECTIONS, Embeddings, Reading

#: Below this cosine between the gradient at the embeddings and the objective's own, something else is trained.
AGREES = 0.99

#: How precisions are called here.
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A diagnostic must never end a training run: what goes wrong is said, and the loop goes on."""

    @functools.wraps(method)
    def call(self: Probe, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.reader.failures.append(f"step {self._index}: the probe failed: {type(error).__name__}: {error}")
            return True

    return call


class Probe:
    """Attaches to a training loop, reads, detaches. Use it as a context manager, or call ``attach`` and ``detach``.

    Args:
        model: the module that is trained; both towers' parameters are in it. Give the compiled or wrapped module where the loop calls
            that one.
        optimizer: one of those that update the parameters; each is found at its first step anyway.
        loss: a loss module that is called with the embeddings (open_clip's ClipLoss): they are then taken from its call. Needed where
            the model does not return both embeddings, and for open_clip's accumulation, whose softmax the model never sees.
        scaler: the GradScaler, if mixed precision has one: gradients are unscaled with it and skipped steps are noticed.
        output: a run directory for the readings, which every command of gradscope reads; None keeps the last step's only.
        probe_set: "loss", "default" or "full"; see ``gradscope.quantities``.
        every: probe steps 1, 1 + every, ...
        budget: share of the loop's time that the probe may take, "2%" or 0.02; it then probes less often than ``every`` by itself.
        trained: the objective that the loop minimises, "infonce" or "hn"; "" if neither.
        gamma, margin: of the HN objective that is read beside it, or is trained.
        directions: ("i2t", "t2i") for a symmetric loss; one of them where the loss has one (first tower -> second: "i2t"). None
            asks the loss (sentence-transformers), and else takes both.
        second_backward: also take the full-parameter gradient of the objective that is not trained (one more backward; set "full").
        gather: whether the softmax is over all ranks; None takes it from the loss module (``world_size``, ``gather_across_devices``).
        kernel: "auto" streams a softmax above a width, so that readings of its single cells are left out and said; "dense" reads them
            at any width, in memory of width^2; "streaming" never holds them.
        scale_max: the clamp of a learned scale.
        precision: of the towers, "fp32", "bf16" or "fp16", where a library turns autocast on inside the model's forward; None takes
            what is on when the model is called.
        first_step: the number of the next step; above 1 the run in ``output`` is continued.
        sinks: "tensorboard", "wandb", "mlflow", joined with commas: where readings are sent beside ``output``.

    Raises:
        ValueError: unknown set, objective, kernel or direction; no trainable parameters; an ``output`` that holds something else.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | None = None,
        loss: nn.Module | None = None,
        scaler: Any = None,
        output: str | Path | None = None,
        probe_set: str = "default",
        every: int = 5,
        budget: str | float | None = None,
        trained: str = "infonce",
        gamma: float = 0.5,
        margin: str = "live",
        directions: Sequence[str] | None = None,
        second_backward: bool = False,
        gather: bool | None = None,
        kernel: str = "auto",
        scale_max: float | None = None,
        precision: str | None = None,
        first_step: int = 1,
        sinks: str = "",
    ) -> None:
        _check(every, trained, margin, directions or DIRECTIONS, second_backward, probe_set, first_step)
        kernel_for(2, kernel)  # refuses an unknown one now, and not at the first step
        self.model, self.loss, self.scaler = model, loss, scaler
        self._source = EmbeddingSource(model, loss, self._observe)
        stated = self._source.directions
        if directions is None:
            directions = stated or DIRECTIONS
        if stated == ():
            trained = ""  # a softmax over other cells than ours
        self.reader = StepReader(
            model=model,
            heads=Heads(
                objectives={"infonce": InfoNCE(), "hn": HN(gamma=gamma, margin=margin)},
                trained=trained,
                directions=tuple(directions),
                kernel=kernel,
            ),
            quantities=quantity_set(probe_set),
            every=every,
            budget=None if budget is None else share(percent(budget)),
            second_backward=second_backward,
            structural=reachable_rows(model),
            scale_max=scale_max,
        )
        if not self.reader.parameters:
            raise ValueError(
                "the model has no trainable parameters, so there are no gradients to read; give the module that is trained"
            )
        if second_backward and self.reader.sharded:
            raise ValueError("second_backward needs whole parameters, and these are sharded (FSDP); leave it out")
        self.gather = gather
        self.precision = precision
        self.epoch = 1
        #: Readings of the last probed step: (quantity, term, key) -> value.
        self.last: dict[tuple[str, str, str], Any] = {}
        self._log = ProbeLog(output, probe_set, trained, gamma, margin, every, first_step, sinks)
        self._first = first_step
        self._index, self._samples = first_step - 1, 0
        self._micro = 0  # forward passes seen since the last step of the optimizer
        self._open_step = False
        self._cached = False
        self._normalise: bool | None = None
        self._rows = 0  # pairs seen since then, of all ranks where the softmax is over those
        self._passing = 0  # forward passes that the backward under way passes
        self._in_backward = False  # whether an optimizer ever stepped inside a backward
        self._failures: Counter[str] = Counter()
        self._overflows: Tensor | None = None
        self._fused_skips = 0  # steps that a fused optimizer left out
        self._ending = False
        self._local: LocalNorm | None = None
        self._local_unscale: Tensor | float = 1.0
        self._until_step: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._ended = time.perf_counter()
        self._optimizers = OptimizerWatch(
            self.reader.parameters,
            optimizer,
            ready=self._gradient_ready,
            updated=self._updated,
            inside=self._stepped_inside,
            over=lambda left_out: self._end_step(int(left_out > 0)),
        )
        self.reader.optimizer = cast(Optimizer, self._optimizers)

    # ---- attaching

    def attach(self) -> Probe:
        """Registers every hook. Raises ValueError if attached already."""
        if self._undo:
            raise ValueError("this probe is attached already; detach it first")
        self._source.attach()
        self._optimizers.attach()
        self._undo = [self._source.detach, self._optimizers.detach]
        if self.scaler is not None:
            self._undo.append(replace_method(self.scaler, "step", self._optimizers.scaled))
        self._ended = time.perf_counter()
        return self

    def detach(self, *, complete: bool = False) -> None:
        """Takes every hook away and closes the log; ``complete`` marks the run as one that reached its end. May be called twice."""
        if self._undo:
            self._say_no_step()
            self._optimizers.next_step()
        self.reader.abandon()
        if self._local is not None:
            self._local.remove()
        for undo in (*self._until_step, *reversed(self._undo)):
            undo()
        self._until_step, self._undo, self._local = [], [], None
        self._open_step, self._micro, self._passing = False, 0, 0
        self._say_how_often()
        if self._log.rows:
            steps = f"{self._log.rows} step{'s' * (self._log.rows != 1)}"
            console.print(f"the probe read {steps}; look with: gradscope diagnose {self._log.output}", soft_wrap=True)
        self._log.close(complete)

    def __enter__(self) -> Probe:
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach(complete=kind is None)

    def log_recall(self, *, i2t: float, t2i: float, k: int = 1, dataset: str = "the loop's own", split: str = "val") -> None:
        """Recall@k that the loop measured, as fractions: for Figure 4, and for the rules that compare it with the loss.

        It belongs to the last step and to ``epoch``. Raises ValueError for what is no fraction.
        """
        for value in (i2t, t2i):
            if not 0 <= value <= 1:
                raise ValueError(f"recall is a fraction between 0 and 1; got {value}")
        row = {"step": self._index, "epoch": self.epoch, "dataset": dataset, "split": split, "metric": f"R@{k}"}
        row |= dict.fromkeys(("low", "high", "n_queries", "n_candidates")) | {"protocol": "the loop's own"}
        self._log.write_evals([{**row, "direction": name, "value": value} for name, value in (("i2t", i2t), ("t2i", t2i))])

    # ---- forward

    def watch(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor | float | None = None,
        *,
        captions: Sequence[str] | None = None,
        token_ids: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        """Tells the probe what the loss is about to compare. Call it after the forward pass and before the backward.

        From the first call on, embeddings are no longer looked for.

        Args:
            image, text: [N, D] of the two towers, with their graph; unit rows, or rows that the loss normalises.
            scale: after exp; None takes the model's own.
            captions, token_ids [N, L], lengths [N] (tokens before truncation): of the second tower, for the quantities about them.
        """
        if not self._source.told and self.reader.opened and self._micro == 1:
            self._micro = self._rows = 0  # the search has found this very batch already
        self._source.told = True
        self._source.stop_searching()
        if not passive():
            self._observe(Found(image=image, text=text, scale=scale, token_ids=token_ids), True, captions, lengths)

    @_guarded
    def _observe(self, seen: Found, whole: bool, captions: Sequence[str] | None = None, lengths: Tensor | None = None) -> None:
        """One micro-batch on its way into the loss. ``whole``: one backward passes all of its rows; if not, embeddings are cached
        and the towers are passed in pieces, so that no single backward leaves this batch's gradient behind."""
        live = seen.image.requires_grad or seen.text.requires_grad
        if (whole and not live) or self._optimizers.trying:
            return
        self._optimizers.next_step()
        self._ending, self._passing = False, 0
        self._begin()
        self._micro, self._cached = self._micro + 1, not whole
        self._rows += len(seen.text) * (distributed.world() if self._gathers() else 1)
        due = self.reader.due
        again = self.reader.opened and whole  # the last one before the backward is measured: an evaluation may come in between
        if due or again:
            try:
                self._open(seen, whole, captions, lengths)
            except Exception as error:  # a diagnostic must never end a training run
                self.reader.fail("embeddings", error)
        if self._cached and due:
            self._watch_parameters()
        elif live and not self._cached and (due or again or self.reader.reading):
            self._when_backward_ends(seen.image if seen.image.requires_grad else seen.text)

    def _when_backward_ends(self, rows: Tensor) -> None:
        """Once the whole backward that passes ``rows`` is over."""

        def hook(gradient: Tensor) -> None:
            handle.remove()
            self._passing += 1
            _queue(self._backward_ended)

        handle = rows.register_hook(hook)
        self._until_step.append(handle.remove)

    def _watch_parameters(self) -> None:
        """Embeddings that are cached are passed by no backward of their own: the towers' backwards are noticed at the parameters."""
        queued = False

        def accumulated(parameter: Tensor) -> None:
            nonlocal queued
            if not queued:
                queued = True
                _queue(ended)

        def ended() -> None:
            nonlocal queued
            queued = False
            self._backward_ended()

        self._until_step += [p.register_post_accumulate_grad_hook(accumulated).remove for p in self.reader.parameters]

    def _begin(self) -> None:
        if not self._open_step:
            self._open_step, self._micro, self._rows, self._passing = True, 0, 0, 0
            self._index += 1
            self.reader.begin(self._index, self._samples)

    def _open(self, seen: Found, whole: bool, captions: Sequence[str] | None, lengths: Tensor | None) -> None:
        scale = seen.scale if seen.scale is not None else found.scale_of(self.model)
        if scale is None:
            raise ValueError(
                "no scale was found: the model returns none and has no logit_scale; tell it with probe.watch(image, text, scale)"
            )
        scale = scale if isinstance(scale, Tensor) else torch.tensor(float(scale))
        if self._normalise is None:
            self.reader.towers = towers(seen.image, seen.text, self.reader.names, self.reader.parameters)
            self._normalise = not (found.unit_rows(seen.image) and found.unit_rows(seen.text))
        self.reader.heads.normalise = self._normalise
        self._log.precision = self.precision or NAMES.get(self._source.dtype or seen.image.dtype, "fp32")
        self.reader.heads.by_rank = not self._gathers()
        self.reader.heads.half = self._log.precision == "fp16"
        embeddings = Embeddings(image=seen.image, text=seen.text, scale=scale.squeeze().to(seen.text.device))
        ids = seen.token_ids if seen.token_ids is not None else self._source.token_ids
        ids = ids if ids is not None and len(ids) == len(seen.text) else None
        observed = self._observed(embeddings, None if captions is None else tuple(captions), ids, lengths)
        self._log.width = len((observed.candidates or embeddings).text)
        self.reader.abandon()
        if distributed.world() > 1 and not self.reader.sharded and "accumulation" in self.reader.quantities:
            if self._local is not None:
                self._local.remove()
            self._local = LocalNorm(self.reader.parameters)
        self.reader.open(embeddings, observed, own_grad=whole)

    def _observed(
        self, embeddings: Embeddings, captions: tuple[str, ...] | None, ids: Tensor | None, lengths: Tensor | None
    ) -> Observed:
        """With the embeddings of all ranks where the softmax is over those; of their captions this rank knows its own only."""
        if distributed.world() == 1 or not self._gathers():
            return Observed(captions=captions, token_ids=ids, lengths=lengths)
        n = len(embeddings.text)
        sizes = distributed.gathered(torch.tensor([n], device=embeddings.text.device)).tolist()
        if len(set(sizes)) > 1:  # the same on every rank, and before any gather of rows, which would wait for ever
            raise ValueError(
                f"the ranks hold batches of {sizes} pairs, and a softmax over all ranks needs one size; drop the last batch"
            )
        start = distributed.rank() * n
        everyone = Embeddings(
            image=distributed.gathered(embeddings.image), text=distributed.gathered(embeddings.text), scale=embeddings.scale.detach()
        )
        return Observed(candidates=everyone, rows=slice(start, start + n))

    def _gathers(self) -> bool:
        if self.gather is not None:
            return self.gather
        return getattr(self.loss, "world_size", 1) > 1 or bool(getattr(self.loss, "gather_across_devices", False))

    def _unscale(self) -> Tensor | float:
        """1 / the loss scale in force during this backward, on the device."""
        scale = getattr(self.scaler, "_scale", None) if self.scaler is not None and self.scaler.is_enabled() else None
        return 1.0 if scale is None else scale.detach().reciprocal()

    # ---- backward and optimizer

    @_guarded
    def _backward_ended(self) -> None:
        unscale = self._unscale()
        if self._local is not None:
            self._local.remove()
            self._local_unscale = unscale
        alone, self._passing = self._passing <= 1 and not self._in_backward, 0
        self.reader.close(unscale, alone=alone)
        self.reader.backward_ended(unscale)

    @_guarded
    def _gradient_ready(self, optimizer: Optimizer) -> bool:
        """Before the weights change. False for an optimizer that comes after the step is over, with no forward pass of its own."""
        if self._micro == 0:
            if self._in_backward or self._optimizers.is_late(optimizer):
                return False
            self._begin()
            self._say_unseen()
        if self.reader.opened:
            self._lost()
        if self._local is not None:
            by_rank = self._local.by_rank(self._local_unscale, self.reader.parameters[0].device)
            self.reader.add(Reading(quantity="accumulation", key="norm_by_rank", term="total", value=by_rank, unit="nat / weight"))
            self._local = None
        fused = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides in its own kernel
        self.reader.accumulated([], 1.0 if fused is None else fused.detach().reciprocal())
        return True

    @_guarded
    def _updated(self, optimizer: Optimizer) -> None:
        self._fused_skips += self._skipped_inside(optimizer)
        self.reader.updated(bool(self._fused_skips))

    def _stepped_inside(self) -> None:
        """Optimizers that step while the backward runs: it ends, and the step with it."""
        if not self._in_backward:
            self.reader.failures.append(
                f"step {self._index}: an optimizer steps inside the backward, so that no averaged gradient and no update are there to "
                "read; readings end with phase 'batch'"
            )
        self._in_backward = True
        if not self._ending:
            self._begin()
            if self._micro == 0:
                self._say_unseen()
            self._ending = True
            _queue(self._ended_inside)

    def _ended_inside(self) -> None:
        if self.reader.opened:
            self._backward_ended()
        self._end_step(0)

    def _skipped_inside(self, optimizer: Optimizer) -> int:
        """A fused optimizer leaves a step out in its own kernel, hooks and all. Counted on the device, and read on probed steps: the
        number of steps left out since the last one."""
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            found_now = (overflow.detach() > 0).sum()
            self._overflows = found_now if self._overflows is None else self._overflows + found_now
        if self._overflows is None or not self.reader.reading:
            return 0
        count, self._overflows = int(self._overflows), None
        return count

    def _say_unseen(self) -> None:
        where = "the loss was not called" if self.loss is not None else self._source.returned
        self.reader.failures.append(
            f"step {self._index}: the optimizer stepped, but no embeddings were seen: {where}, or its hook became a no-op "
            "(a module compiled after attaching, or in place). Give the module that the loop calls, loss=, or use probe.watch"
        )

    def _say_no_step(self) -> None:
        if self._open_step and self._index == self._first:
            self.reader.failures.append(
                f"step {self._index}: embeddings were seen {self._micro} times, but no optimizer stepped: nothing was read"
            )

    def _lost(self) -> None:
        self.reader.abandon()
        self.reader.fail("embeddings", RuntimeError("no backward passed the embeddings that were seen, or it did not end"))

    @_guarded
    def _end_step(self, skipped: int) -> None:
        if not self._open_step:
            return
        try:
            self._write_step(max(skipped, self._fused_skips))
            self._log.write_costs(self.reader.ended(time.perf_counter() - self._ended))
        except Exception as error:  # a full disk, a folder that is gone: the training goes on
            self.reader.failures.append(f"step {self._index}: the readings could not be written: {type(error).__name__}: {error}")
        self._say_failures()
        for undo in self._until_step:
            undo()
        self._until_step = []
        self._samples += self._log.width if self._cached else self._rows
        self._open_step, self._micro, self._fused_skips, self._ending = False, 0, 0, False
        self._source.token_ids = None
        self._ended = time.perf_counter()

    def _write_step(self, skipped: int) -> None:
        if self.reader.reading or self.reader.failures:
            self.reader.stamps = self._stamps()
        rows = self.reader.flush()
        if not rows and not skipped:
            return
        if rows:
            self.last = {(row["quantity"], row["term"], row["key"]): row["value"] for row in rows}
            self._say_another_loss()
        facts = {
            "seconds": time.perf_counter() - self._ended,
            "probe_seconds": sum(self.reader.seconds.values()),
            "micro_batches": self._micro,
        }
        used = self.scaler is not None and getattr(self.scaler, "_scale", None) is not None
        loss_scale = float(self.scaler.get_scale()) if used else None
        lr = next((float(group["lr"]) for group in self._optimizers.param_groups), None)
        start = time.perf_counter()
        self._log.write(self._index, self._samples, self.epoch, rows, skipped=skipped, loss_scale=loss_scale, lr=lr, facts=facts)
        self.reader.seconds["write"] = time.perf_counter() - start  # part of the price, known too late to be in ``facts``

    def _say_another_loss(self) -> None:
        trained = self.reader.heads.trained
        if trained and self.last.get(("hooks", trained, "agreement"), 1.0) < AGREES:
            self.reader.failures.append(
                f"step {self._index}: the gradient at the embeddings is not that of '{trained}' (cosine below {AGREES}): "
                "the loop trains another loss (SigLIP, another scale, further terms; for another loss give trained=''), or rounding "
                "has taken what is left of it"
            )

    def _say_failures(self) -> None:
        """Each in full once; how often it came is said at the end."""
        for failure in self.reader.failures:
            what = failure.split(": ", 1)[-1]
            self._failures[what] += 1
            if self._failures[what] == 1:
                console.print(failure, style="yellow", markup=False, soft_wrap=True)
                self._log.say(failure)
        self.reader.failures.clear()

    def _say_how_often(self) -> None:
        self._say_failures()
        for failure, times in self._failures.items():
            if times > 1:
                console.print(f"the probe, {times} times: {failure}", style="yellow", markup=False, soft_wrap=True)
                self._log.say(f"{times} times: {failure}")
        self._failures.clear()

    def _stamps(self) -> str:
        hn = self.reader.heads.objectives["hn"]
        parts = [
            "whole step, cached" if self._cached else f"micro-batch 1/{self._micro}",
            f"width {self._log.width}",
            f"gamma {hn.gamma:g} {getattr(hn, 'margin', '')}",
        ]
        parts += ["loss fp32 from the embeddings", "unscaled"]
        if self._source.left_out:
            parts.append(f"{self._source.left_out} columns of hard negatives left out")
        world = distributed.world()
        if world > 1:
            parts.append(f"softmax over {world} ranks" if self._gathers() else f"softmax of rank {distributed.rank()}")
            parts.append(f"gradients averaged over {world} ranks")
        return "; ".join(parts)


def _queue(ended: Callable[[], None]) -> None:
    """For the end of the backward that is under way. DDP queues its averaging later than this call: a callback that is queued by a
    callback runs after both."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(ended))


def _check(
    every: int, trained: str, margin: str, directions: Sequence[str], second_backward: bool, probe_set: str, first_step: int
) -> None:
    if every < 1 or first_step < 1:
        raise ValueError(f"every and first_step count from 1; got {every} and {first_step}")
    if trained not in ("infonce", "hn", ""):
        raise ValueError(f"trained is 'infonce', 'hn' or '' (neither); got '{trained}'")
    if margin not in ("live", "fixed", "centred"):
        raise ValueError(
            f"the probe reads HN with margin live, fixed or centred; got '{margin}' (other encoders' rows are not at hand)"
        )
    if not directions or set(directions) - set(DIRECTIONS) or len(set(directions)) != len(directions):
        raise ValueError(f"directions are 'i2t', 't2i' or both; got {tuple(directions)}")
    if second_backward and probe_set != "full":
        raise ValueError(f"second_backward has no effect in the set '{probe_set}': only 'full' reads gradients by objective")
