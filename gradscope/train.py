"""The training loop, flat, in execution order.

    embed; terms; total; backward (watched by the probe); read; clip; optimizer step; log
Step k reads the parameters before the k-th update. A step averages its micro-batches' gradients once, after the last backward, so
that what the probe sees of one micro-batch is the gradient of that one softmax.

On several ranks (``gradscope.launch``) each embeds its part of a micro-batch; the rows are joined with gradient, and from there on
every rank computes the same loss. The first rank writes the run; all take part in every collective, the probe's too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradscope import cached, checkpoint, parallel
from gradscope.assembly import check_same_records, make_framework, make_reader, total_steps_of
from gradscope.console import console
from gradscope.cpu_speed import cpu_speed
from gradscope.data.batching import Batches
from gradscope.data.image_cache import picture_reader
from gradscope.data.too_long import refuse_too_long
from gradscope.distributed import first_rank_first, is_sharded, local, rank, shared, summed, world
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.freeze import checkpoint_activations, freeze
from gradscope.encoders.load import load_encoder, resolve_device
from gradscope.encoders.speed import Compilations, speed_up
from gradscope.evaluate import evaluate
from gradscope.fixed_captions import fixed_captions
from gradscope.launch import STOPPED, STOPPED_ALONE, told_to_stop
from gradscope.metrics.duplicates import repeats
from gradscope.optim import make_optimizer, rate, set_rate, trainable
from gradscope.paths import shown_name
from gradscope.provenance import provenance
from gradscope.recipe import Recipe
from gradscope.resume import check_same_data, check_same_recipe
from gradscope.runlog import Run, RunLog, checkpoint_step
from gradscope.silent_log import SilentLog
from gradscope.sinks import require as require_sinks
from gradscope.sinks.feed import open_feeds
from gradscope.step_pass import Embed, StepPass
from gradscope.step_reader import StepReader
from gradscope.step_row import step_row
from gradscope.train_display import PlainProgress, display, header, ranks_words, resumed_words
from gradscope.training_data import keep_items, training_data
from gradscope.types import Record


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run ended with. Recall is the mean of both directions' R@1 on validation, a fraction."""

    path: Path
    steps: int
    last: float
    best: float
    best_step: int


def train(recipe: Recipe, output: Path, *, resume: bool = False, quiet: bool = False) -> Trained:
    """Runs a recipe into ``output``.

    Args:
        recipe: checked settings.
        output: the run directory; must be new, or with ``resume`` a run of the same recipe. Of several ranks the first writes it, and
            a resume needs it on a disk that all of them see.
        quiet: no progress bar and no header (used by sweeps).

    Raises:
        ValueError: bad settings, data or weights; a resume whose recipe or data differ.
        FloatingPointError: a non-finite loss; the last checkpoint is kept.
    """
    settings = recipe.train
    quiet = quiet or rank() > 0
    require_sinks(recipe.log.sinks)
    device = resolve_device(settings.device)
    torch.manual_seed(settings.seed)
    encoder = load_encoder(recipe.encoder.name, device, trust_archive=recipe.encoder.trust_archive)
    framework = make_framework(recipe)
    if framework.needs_tokens:
        encoder.add_token_scale()
    encoder.model.logit_scale.requires_grad_(settings.scale == "learn")
    frozen = str(freeze(encoder, recipe.encoder.freeze)) if recipe.encoder.freeze else ""
    faster = "; ".join(speed_up(encoder, compiled=settings.compile, channels=settings.channels_last))
    if recipe.encoder.checkpoint_activations:
        checkpoint_activations(encoder)
    if settings.accumulate_mode == "cached":
        cached.check_replayable(encoder)
    with first_rank_first():
        data = training_data(recipe)
    check_same_records(data)
    batches = Batches(
        records=data.train,
        encoder=encoder,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        seed=settings.seed,
        workers=settings.workers,
        decode=recipe.data.decode,
        rank=rank(),
        ranks=world(),
    )
    tested = [(record.id, caption) for record in data.validation for caption in record.captions]
    tested_tokens = encoder.tokenize([caption for _, caption in tested])
    if recipe.data.on_too_long == "error":
        ids = [*(record.id for record in data.train), *(record_id for record_id, _ in tested)]
        refuse_too_long(ids, [*batches.tokenized.lengths.tolist(), *tested_tokens.lengths.tolist()], encoder.context)
    total_steps = total_steps_of(recipe, batches)
    if settings.warmup >= total_steps:
        raise ValueError(f"train.warmup is {settings.warmup} steps, the whole run {total_steps}; lower the one or raise the other")
    checkpoint.seed_rank(settings.seed)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")

    with ExitStack() as stack:
        kernels = stack.enter_context(cpu_speed(device, encoder.longest_sequence))
        facts = provenance(
            kernels=kernels,
            **data.facts(),
            frozen=frozen,
            faster=faster,
            width=recipe.width,
            negatives_per_anchor=recipe.negatives_per_anchor,
            chance=recipe.chance,
            total_steps=total_steps,
            left_out_per_epoch=batches.left_out,
            truncated_captions=batches.tokenized.truncated(),
            truncated_validation_captions=tested_tokens.truncated(),
            repeated_captions=len(data.train) - len({record.captions[0] for record in data.train}),
            repeated_token_ids=repeats(batches.tokenized.ids),
        )
        log, first = _open_log(stack, recipe, output, resume, facts)
        stack.push(partial(_note_end, log))
        if first > 1:
            checkpoint.load_weights(log.checkpoint_dir(first - 1), encoder)
        towers = parallel.replica(encoder, settings.shard, tokens=framework.needs_tokens)
        optimizer = make_optimizer(encoder, settings)
        before = 0
        if first > 1:
            before = checkpoint.load_training(log.checkpoint_dir(first - 1), encoder, optimizer, scaler, settings.seed)
        reader = make_reader(recipe, encoder, framework, optimizer)

        def say(line: str) -> None:
            log.console(line)
            if not quiet:
                console.print(line, soft_wrap=True, markup=False)

        sinks = "" if rank() else recipe.log.sinks
        for feed in open_feeds(sinks, log.path, dataclasses.asdict(recipe), everything=recipe.log.sink_all, say=say):
            log.listen(feed)
        words = header(recipe, batches, total_steps, len(data.validation), kernels, facts)
        say(words)
        if resume:
            say(resumed_words(first - 1, total_steps, before))
        for line in [*ranks_words(recipe), *filter(None, [frozen, faster])]:
            say(line)
        for note in data.notes:
            say(f"note: {note}")
        if rank() == 0:
            keep_items(data, log.path / "arrays", recipe.encoder.name, say)
        read = picture_reader(
            [*data.train, *data.validation],
            encoder.config["preprocess_cfg"],
            decode=recipe.data.decode,
            cache=recipe.data.cache,
            workers=settings.workers,
            say=say,
        )
        fixed = fixed_captions(recipe, framework, encoder, batches, log, say)
        best = shared(None if rank() else _best_so_far(log))
        if first == 1:
            best = _validate(encoder, data.validation, recipe, log, read, step=0, epoch=0, best=best)

        def say_elsewhere(line: str) -> None:
            log.console(line)
            if not quiet and not console.is_interactive:
                console.print(line, soft_wrap=True, markup=False)

        tell = PlainProgress(total=total_steps, per_epoch=batches.steps_per_epoch, first=first, say=say_elsewhere)
        show = stack.enter_context(display(total_steps, first, quiet, log.path if reader else None))
        encoder.train()
        step_pass = StepPass(
            embed=Embed(towers=towers, precision=settings.precision, tokens=framework.needs_tokens),
            framework=framework,
            fixed=fixed,
            reader=reader,
            scaler=scaler,
            resting=cached.resting_towers(encoder),
        )
        wide = settings.accumulate_mode == "cached"
        compilations = Compilations() if settings.compile else None
        loss_scale = scaler.get_scale()
        ended = time.perf_counter()
        for step, micro_batches in enumerate(batches.steps(first, total_steps, read), first):
            start = time.perf_counter()
            set_rate(optimizer, rate(step, total_steps, settings.warmup, settings.lr))
            optimizer.zero_grad(set_to_none=True)
            if reader:
                reader.begin(step, (step - 1) * batches.per_step)
            everyone = batches.of_all_ranks(step, micro_batches, wide=wide)  # the rows that each softmax is over
            if wide:
                losses, drift = step_pass.cached(micro_batches, everyone)
                if step == first:
                    cached.check_drift(encoder, drift, settings.precision)
            else:
                losses = step_pass.narrow(micro_batches, everyone)
            towers.settle()
            scaler.unscale_(optimizer)
            if step == first:
                _say_untouched(encoder, step, say)
            parameters = list(trainable(encoder).values())
            _average(parameters, len(losses.totals))
            if reader:
                reader.accumulated(losses.totals)
            norm = parallel.gradient_norm(parameters)
            if settings.grad_clip > 0:
                parallel.clip(parameters, settings.grad_clip, norm)
            row = step_row(step, batches, losses, encoder, norm, optimizer, everyone)
            row["negatives_per_anchor"] = recipe.negatives_per_anchor
            if not math.isfinite(row["loss"]):
                _stop(row, reader, encoder, log)
            scaler.step(optimizer)
            scaler.update()
            next_scale = scaler.get_scale()
            skipped = next_scale < loss_scale
            if settings.scale == "learn":
                encoder.clamp_scale(settings.scale_max)
            if reader:
                reader.updated(skipped)
                readings = reader.flush()
                written = time.perf_counter()
                log.write_readings(readings)
                report_failures(reader, log)
                reader.seconds["write"] = time.perf_counter() - written  # part of the price, known too late to be a reading
            if skipped:
                row["grad_norm"] = None  # the scaled gradient overflowed: there is no norm and no update
            row |= {"loss_scale": loss_scale, "skipped": int(skipped), "seconds": time.perf_counter() - start}
            loss_scale = next_scale
            row["wait_seconds"] = start - ended  # since the step before: for pictures, and for its row to be written
            row["images_per_s"] = batches.per_step / (row["seconds"] + row["wait_seconds"])
            ended = time.perf_counter()
            row["probe_seconds"] = sum(reader.seconds.values()) if reader else 0.0
            if reader:
                costs = reader.ended(row["seconds"])
                log.write_readings(costs)
                for cost in costs:
                    if cost["key"] == "every":
                        say(f"step {step}: from here on every {cost['value']} steps are probed, to keep within {recipe.probe.budget}")
            log.write_steps([row])
            show(step, row)
            tell(step, row)
            if compilations and (compiled := compilations.words(step, row["seconds"], first=step == first)):
                say(compiled)
            end_of_epoch = step % batches.steps_per_epoch == 0 or step == total_steps
            to_save = end_of_epoch or (settings.checkpoint_every and step % settings.checkpoint_every == 0)
            if to_save:
                _refuse_broken_weights(step, encoder, log)
            if end_of_epoch:
                best = _validate(encoder, data.validation, recipe, log, read, step=step, epoch=batches.epoch_of(step), best=best)
            if to_save:
                checkpoint.save(log.checkpoint_dir(step), encoder, optimizer, scaler)
                log.mark_best(best.step, best.recall)
                if rank() == 0:
                    _prune(log, keep={step, best.step})
                ended = time.perf_counter()
        log.finish()
    last = shared(None if rank() else _last(Run(output)))
    return Trained(path=output, steps=total_steps, last=last, best=max(best.recall, last), best_step=best.step)


# ---- the log


def _open_log(stack: ExitStack, recipe: Recipe, output: Path, resume: bool, facts: dict[str, Any]) -> tuple[RunLog | SilentLog, int]:
    """The log, and the step to start with. The first rank opens it and says where it stands; what it refuses, all refuse."""
    if rank():
        first = shared(None)
        if isinstance(first, str):
            raise ValueError(first)
        return SilentLog(output), first
    try:
        log, first = _open_run(stack, recipe, output, resume, facts)
    except ValueError as error:
        shared(str(error))
        raise
    return log, shared(first)


def _open_run(stack: ExitStack, recipe: Recipe, output: Path, resume: bool, facts: dict[str, Any]) -> tuple[RunLog, int]:
    """A new run, or the reopened one of the same recipe and data."""
    if not resume:
        return stack.enter_context(RunLog.create(output, recipe_toml=recipe.toml(), provenance=facts)), 1
    run = Run(output)
    check_same_recipe(run, recipe)
    check_same_data(run, facts)
    done = [checkpoint_step(path) for path in run.checkpoints()]
    at = max(done, default=0)
    if at >= facts["total_steps"] and run.done:
        raise ValueError(f"'{output}' is complete: {at} of {facts['total_steps']} steps; nothing to resume")
    return stack.enter_context(RunLog.reopen(output, step=at, provenance=facts)), at + 1


# ---- inside the step


def _say_untouched(encoder: DualEncoder, step: int, say: Callable[[str], None]) -> None:
    """Names the parameters that train by the settings, yet have no gradient at all (None, not zero) after a backward: the loss does
    not reach them, as with a wrongly checkpointed tower, and they would silently stay where they are."""
    names = [name for name, parameter in trainable(encoder).items() if parameter.grad is None]
    if names:
        what = f"{len(names)} trainable parameters have no gradient after step {step}, the loss does not reach them"
        say(f"note: {what}: {', '.join(names)}")


def _average(parameters: Sequence[torch.nn.Parameter], count: int) -> None:
    if count > 1:
        parallel.scale_gradients(parameters, 1.0 / count)


def _stop(row: dict[str, Any], reader: StepReader | None, encoder: DualEncoder, log: RunLog | SilentLog) -> NoReturn:
    """A non-finite loss ends the run before it reaches the weights; its row and readings are kept."""
    if reader:
        log.write_readings(reader.flush())
        report_failures(reader, log)
    log.write_steps([row])
    bad = _broken(encoder)
    where = f"first non-finite parameter: {bad[0]}" if bad else "all parameters are finite: this batch, or a learning rate too large"
    _end(f"the loss of step {row['step']} is {row['loss']}; {where}", log)


def _refuse_broken_weights(step: int, encoder: DualEncoder, log: RunLog | SilentLog) -> None:
    """A good checkpoint is never replaced by one with a nan in it."""
    bad = _broken(encoder)
    if bad:
        _end(f"after step {step} {len(bad)} parameters are not finite, the first is {bad[0]}; lower --lr or set train.grad_clip", log)


def _broken(encoder: DualEncoder) -> list[str]:
    """Names of parameters that are not finite, on any rank."""
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    bad = torch.stack([(~torch.isfinite(local(parameter))).any() for parameter in parameters]).int()
    found = (summed(bad) if any(map(is_sharded, parameters)) else bad).tolist()  # one host transfer
    return [name for name, broken in zip(names, found, strict=True) if broken]


def _note_end(log: RunLog | SilentLog, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """In console.log, why a run ended that was not finished; a loss or weight that is not finite has said so there."""
    if error is not None and not isinstance(error, FloatingPointError):
        log.console(f"ended early: {_why(error)}")


def _why(error: BaseException) -> str:
    if told_to_stop():
        return STOPPED if world() > 1 else STOPPED_ALONE
    return "stopped (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _end(message: str, log: RunLog | SilentLog) -> NoReturn:
    """Of several ranks all come here, since all have the same loss and weights, and none leaves before the first has written: the
    first that is gone has the others ended."""
    kept = log.checkpoints()
    message += f". The last checkpoint is kept: {kept[-1]}" if kept else ". No checkpoint had been written yet"
    log.console(message)
    raise FloatingPointError(shared(message))


def report_failures(reader: StepReader, log: RunLog | SilentLog) -> None:
    for failure in reader.failures:
        if rank() == 0:
            console.print(failure, style="yellow", soft_wrap=True, markup=False)
        log.console(failure)
    reader.failures.clear()


# ---- validation and checkpoints


@dataclass(frozen=True, kw_only=True)
class _Best:
    step: int = 0
    recall: float = -math.inf


def _validate(
    encoder: DualEncoder,
    records: Sequence[Record],
    recipe: Recipe,
    log: RunLog | SilentLog,
    read: Callable[[str], Tensor],
    *,
    step: int,
    epoch: int,
    best: _Best,
) -> _Best:
    result, _ = evaluate(encoder, records, decode=recipe.data.decode, workers=recipe.train.workers, read=read)
    rows = [{"step": step, "epoch": epoch, "dataset": shown_name(recipe.data.name), "split": "val", **row} for row in result.dicts()]
    log.write_evals(rows)
    recall = (result.value("i2t", "R@1") + result.value("t2i", "R@1")) / 2
    return _Best(step=step, recall=recall) if recall > best.recall else best


def _best_so_far(log: RunLog | SilentLog) -> _Best:
    best = _Best()
    evals = Run(log.path).evals
    if not evals.empty:
        chosen = evals[(evals["metric"] == "R@1") & (evals["split"] == "val")]
        for step, recall in chosen.groupby("step")["value"].mean().items():
            if recall > best.recall:
                best = _Best(step=int(str(step)), recall=float(recall))
    return best


def _last(run: Run) -> float:
    chosen = run.evals[(run.evals["metric"] == "R@1") & (run.evals["split"] == "val")]
    return float(chosen[chosen["step"] == chosen["step"].max()]["value"].mean())


def _prune(log: RunLog | SilentLog, keep: set[int]) -> None:
    """Keeps the last and the best-on-validation checkpoint."""
    import shutil

    for folder in log.checkpoints():
        if checkpoint_step(folder) not in keep:
            shutil.rmtree(folder)
