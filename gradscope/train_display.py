"""What a person sees of a training run: what it is about to do, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from rich.live import Live
from rich.progress import TextColumn

from gradscope.console import Course, bar, console
from gradscope.data.batching import Batches
from gradscope.distributed import world
from gradscope.following import Following
from gradscope.kernels.choice import kernel_for, kernel_words
from gradscope.paths import shown_name
from gradscope.recipe import Recipe
from gradscope.watch import Panel

Show = Callable[[int, dict[str, Any]], None]

SHARE = 0.01  # of the time that drawing may take


def header(recipe: Recipe, batches: Batches, total_steps: int, validation: int, kernels: str, facts: dict[str, Any]) -> str:
    """The run, a line each: data and objective, precision, width and chance level, schedule, what is cut or left out, the probe."""
    objective, settings = recipe.objective, recipe.train
    what = objective.name if objective.name == "infonce" else f"hn gamma {objective.gamma:g}, margin {objective.margin}"
    held = " held out of train" if facts["validation"]["held_out_of_train"] else ""
    negatives = counted(recipe.negatives_per_anchor, "negative")
    lines = [
        f"{recipe.encoder.name} on {shown_name(recipe.data.name)}: {len(batches.records)} train, {validation} val{held}; {what}",
        f"{settings.precision} towers, fp32 logits and loss; {batches.encoder.device}, {kernels}",
        f"width {recipe.width} candidates per softmax, {negatives} per anchor, chance ln {recipe.width} = {recipe.chance:.4f}; "
        f"{rows_words(recipe)}",
        loss_words(recipe, batches.encoder.device),
        schedule_words(recipe, batches, total_steps),
        captions_words(facts, len(batches.records), batches.encoder.context, objective.duplicates),
        probe_words(recipe),
    ]
    return "\n".join(filter(None, lines))


def schedule_words(recipe: Recipe, batches: Batches, total_steps: int) -> str:
    """Steps, what an epoch leaves over, the rate; and where ``max_steps`` has no effect."""
    settings = recipe.train
    words = f"{counted(total_steps, 'step')}, {batches.steps_per_epoch} an epoch; "
    words += f"{counted(batches.left_out, 'record')} left out per epoch; " if batches.left_out else ""
    warmup = f" after {counted(settings.warmup, 'step')} of warm-up" if settings.warmup else ""
    words += f"peak rate {settings.lr:g}{warmup}, then a cosine"
    if settings.max_steps > total_steps:
        epochs = counted(settings.epochs, "epoch")
        words += (
            f"\nnote: --max-steps {settings.max_steps} has no effect, {epochs} end after {counted(total_steps, 'step')}; raise --epochs"
        )
    return words


def captions_words(facts: dict[str, Any], captions: int, context: int, duplicates: str) -> str:
    """How many captions are cut, and how many repeat another; "" where there are none and nothing becomes of them."""
    cut, of_validation = facts["truncated_captions"], facts["truncated_validation_captions"]
    same, same_tokens = facts["repeated_captions"], facts["repeated_token_ids"]
    words = (
        [f"{cut} of {captions} captions (and {of_validation} of validation) are cut at {context} tokens"]
        if cut or of_validation
        else []
    )
    if same or same_tokens:
        words.append(f"{same} captions repeat the words of another, {same_tokens} its tokens")
    return ", ".join(words) + duplicates_words(same_tokens, duplicates).removeprefix("" if words else "; ")


def counted(number: int, what: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def rows_words(recipe: Recipe) -> str:
    """The records of an optimizer step, and how they are divided."""
    settings = recipe.train
    if settings.accumulate == 1:
        return f"{counted(settings.batch_size, 'record')} a step, not accumulated"
    return f"{counted(settings.batch_size, 'record')} x {settings.accumulate} micro-batches a step ({settings.accumulate_mode})"


def resumed_words(done: int, total_steps: int, before: int) -> str:
    """Where a run goes on that was continued after ``done`` steps, ``before`` being the processes that wrote its checkpoint."""
    words = f"continued from step {done} of {total_steps}"
    if not done:
        return f"{words}: no checkpoint had been written, so it starts from the beginning"
    if before == world():
        return words
    return f"{words} (written by {before} process{'es' * (before > 1)}, now {world()}: equal to rounding)"


def loss_words(recipe: Recipe, device: torch.device) -> str:
    """How the loss is formed and what that means; "" for the usual form, which holds the cells of its softmax."""
    width, objective = recipe.width, recipe.objective
    if kernel_for(width, objective.kernel, device) == "dense":
        said = [kernel_words(width, objective.kernel, device)] if objective.kernel != "auto" else []
        said += ["in the residual form"] if objective.loss_form == "residual" else []
        return f"loss {'; '.join(said)}" if said else ""
    words = f"loss {kernel_words(width, objective.kernel, device)}; value and gradient in the residual form, no reading of single cells"
    if objective.token_weight > 0:
        words += f"; the token term keeps its scores, {decimal(2 * width * width * 4)} and as much again for each use"
    return words


def ranks_words(recipe: Recipe) -> list[str]:
    """How the work is dealt out; nothing on one process."""
    if world() == 1:
        return []
    settings = recipe.train
    kept = "each has all parameters (DDP)" if settings.shard == "none" else "each keeps a part of the parameters (FSDP2)"
    each = settings.batch_size // world()
    lines = [f"{settings.batch_size} rows a micro-batch, {each} on each of {world()} ranks; rows gathered with gradient; {kept}"]
    if settings.shard == "full" and recipe.probe.log_grads and recipe.probe.set == "full":
        unread = "quantities gradient, zero_causes, and zeros of parameters"
        lines.append(f"note: parameters are divided, so the probe does not read their gradient by objective ({unread})")
    return lines


def duplicates_words(captions: int, duplicates: str) -> str:
    """What becomes of the captions that repeat another token for token; "" where there is nothing to say."""
    if duplicates == "exclude":
        return "; duplicates excluded: captions of identical token ids are no negatives of each other (--duplicates exclude)"
    if duplicates == "positives":
        return "; captions of identical token ids are each other's positives (--duplicates positives)"
    return "; these are each other's negatives (--duplicates keep)" if captions else ""


def probe_words(recipe: Recipe) -> str:
    """Which set the probe reads, how often, and what makes it cost; no share, which depends on encoder and machine (tiny, 2026-11-30:
    between half and once a step's time for each probed step of set full)."""
    probe = recipe.probe
    if not probe.log_grads:
        return "probe off (--log-grads turns it on)"
    divided = recipe.train.shard == "full"
    gradients = "neither objective's" if divided else "both objectives'" if probe.second_backward else "the trained objective's"
    reads = f"probe set {probe.set}" + (f" with {gradients} gradients" if probe.set == "full" else "")
    every = "at every step" if probe.every == 1 else f"every {probe.every} steps"
    twice = "each probed step takes a second backward; " if probe.set == "full" and probe.second_backward and not divided else ""
    if probe.budget:
        return f"{reads}, {every} at the densest: {twice}thinned by itself to add at most {probe.budget} to the time of the steps"
    return f"{reads}, {every}: {twice}the end of the run tells what it took"


@dataclass(kw_only=True)
class PlainProgress:
    """For console.log, and for an output that is no terminal: a line at the end of each epoch and at most one a minute within."""

    total: int
    per_epoch: int
    first: int
    say: Callable[[str], None]
    _course: Course = field(init=False)

    def __post_init__(self) -> None:
        self._course = Course(self.first - 1)

    def __call__(self, step: int, row: dict[str, Any]) -> None:
        """``row`` of the step that has just been made; its ``loss`` is that step's alone."""
        if step % self.per_epoch and step < self.total and not self._course.due():
            return
        epochs = -(-self.total // self.per_epoch)
        epoch = -(-step // self.per_epoch)
        self.say(f"step {self._course.line(step, self.total)}; epoch {epoch} of {epochs}, loss {row['loss']:.2e}")


@contextmanager
def display(total: int, first: int, quiet: bool, run: Path | None = None) -> Iterator[Show]:
    """A progress bar with loss, throughput and the time left; yields ``show(step, row)``, which does nothing if ``quiet``.

    With ``run``, the directory of a run whose probe is on, and a terminal: the panel of ``gradscope watch`` instead.
    """
    if quiet:
        yield lambda step, row: None
    elif run is not None and console.is_terminal:
        with _panel(run) as show:
            yield show
    else:
        with _bar(total, first) as show:
            yield show


@contextmanager
def _bar(total: int, first: int) -> Iterator[Show]:
    with bar(TextColumn("{task.fields[state]}")) as progress:
        task = progress.add_task("training", total=total, completed=first - 1, state="")

        def show(step: int, row: dict[str, Any]) -> None:
            state = f"loss {row['loss']:.2e}  {row['images_per_s']:.0f} images/s"
            progress.update(task, completed=step, state=state)

        yield show


@contextmanager
def _panel(run: Path) -> Iterator[Show]:
    """Drawn from what the run has written, as another process would; about ``SHARE`` of the time goes into it."""
    following = Following(run)
    panel = Panel(following)
    due = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(step: int, row: dict[str, Any]) -> None:
            nonlocal due
            start = time.monotonic()
            if start < due:
                return
            try:
                following.poll()
                live.update(panel.draw(*console.size), refresh=True)
            except Exception as error:  # a view must never end a training run
                due = math.inf
                live.stop()
                words = f"the live view failed, training goes on: {type(error).__name__}: {error}"
                console.print(words, style="yellow", soft_wrap=True)
                return
            end = time.monotonic()
            due = end + max(0.25, (end - start - panel.looking) / SHARE)  # looking for findings has a pace of its own

        yield show
