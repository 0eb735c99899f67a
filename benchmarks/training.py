"""How many pictures a second are trained on: this trainer with its probe on, beside open_clip's ``train_one_epoch`` without any.

    python benchmarks/training.py --output runs/training                      # tiny, batch 16
    python benchmarks/training.py --output runs/training-vit --model ViT-B-32 --batch 8 --steps 4 --warm 1 --rounds 3 --only training

Photo-like JPEGs with captions are made on the fly; all arms train the same weights on them, in the same batch size, precision and
number of threads, InfoNCE and AdamW. Each arm's turn is a run of its own, from a copy of the weights on; its first steps are left out,
and so is a short turn of each arm before the first round. ``--only`` takes one of the two tables. Arms:
    open_clip                   its loop, optimizer and preprocessing, torch's default kernels
    open_clip, our kernels      the same loop with the verified products and attention, and the fused update, of this package
    ours, torch's kernels       this trainer at torch's default kernels, pictures decoded as by open_clip (--decode exact)
    ours                        the same with the verified products and attention
    + image path                and --decode fast
    + image cache               and --cache images, filled before
The probe (set ``default``, every 5 steps) is on in all of ours. Answers, two tables of one run:
    ratio     seconds of a step / those of open_clip in the same round: pictures, update, log and probe included; median and extremes
    and       the same for HN with the probe against InfoNCE without it, both in this trainer with the image cache

How to read it: "ours, torch's kernels" against open_clip is the price of this loop and its probe at identical settings; the lines below
say what each further part adds. "open_clip, our kernels" says how much of that would be open_clip's too. How it can mislead: open_clip
is given its evaluation transform, which is what this package trains with, and pictures are read by the training process
(--workers 0) unless told otherwise; validation is in nobody's time, and checkpoints are not even written. Rounds that something else
disturbed show as extremes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from image_path import photo
from PIL import Image
from side_by_side import machine, report, say_machine
from talk import random_weights_are_meant, told
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import gradscope.train as trainer
from gradscope import checkpoint
from gradscope.cpu_speed import cpu_speed
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.load import load_encoder
from gradscope.optim import make_optimizer
from gradscope.recipe import Recipe, Train, resolve
from gradscope.runlog import Run

REFERENCE = "open_clip"
PLAIN = "infonce, no probe"
OPTIMIZER = {"train.lr": 1e-5, "train.weight_decay": 0.2, "train.beta2": 0.98, "train.eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``steps`` timed steps a turn, after ``warm`` that are not; ``rounds`` turns of each arm."""

    model: str = "tiny"
    batch: int = 16
    steps: int = 20
    warm: int = 3
    rounds: int = 5
    side: int = 640
    workers: int = 0
    precision: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.warm) < 1 or self.batch < 2:
            raise ValueError("at least 1 round, 1 step, 1 step before it and batches of 2 are needed")

    @property
    def pictures(self) -> int:
        return self.batch * (self.steps + self.warm)

    def words(self) -> str:
        """Of one turn, for a person."""
        decoding = f"{self.workers} processes decode" if self.workers else "the training process decodes"
        return f"{self.steps} steps after {self.warm} that are not timed, {self.rounds} rounds, {decoding}, seed {self.seed}"


# ---- the work: one folder of pictures, one folder of weights


@dataclass(frozen=True, kw_only=True)
class Work:
    """``folder`` holds train.jsonl, val.jsonl and pictures; runs are made in it and thrown away. Every turn trains a copy of
    ``weights``: building a large model takes as long as several of its steps."""

    plan: Plan
    folder: Path
    weights: DualEncoder

    def encoder(self) -> DualEncoder:
        return copy.deepcopy(self.weights, {id(self.weights.tokenizer): self.weights.tokenizer})

    def short(self) -> Work:
        """The shortest turn, which fills caches and is not counted."""
        return replace(self, plan=replace(self.plan, steps=1, warm=1))


def prepare(plan: Plan, folder: Path) -> Work:
    rng = np.random.default_rng(plan.seed)
    words = ["red", "small", "house", "on", "a", "hill", "beside", "the", "river", "with", "two", "old", "trees", "and", "clouds"]
    rows = []
    for i in range(plan.pictures + 2):
        photo(plan.side, plan.side * 3 // 4, np.random.default_rng((plan.seed, i))).save(folder / f"{i}.jpg", quality=90)
        rows.append({"image": f"{i}.jpg", "caption": f"{i} " + " ".join(rng.choice(words, size=int(rng.integers(30, 60))))})
    for name, some in (("train", rows[:-2]), ("val", rows[-2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    torch.manual_seed(plan.seed)
    return Work(plan=plan, folder=folder, weights=_encoder(plan.model))


def _encoder(name: str) -> DualEncoder:
    """tiny, or a model of open_clip with random weights."""
    import open_clip

    if name == "tiny":
        return load_encoder("tiny", torch.device("cpu"))
    if name not in open_clip.list_models():
        raise ValueError(f"--model '{name}' is neither tiny nor a model of open_clip; ViT-B-32 is one")
    random_weights_are_meant()
    model = open_clip.create_model(name, pretrained=None)
    config = {"model_cfg": open_clip.get_model_config(name), "preprocess_cfg": open_clip.get_model_preprocess_cfg(model)}
    return DualEncoder(model, open_clip.get_tokenizer(name), config, name).eval()


# ---- open_clip's turn


class Pictures(Dataset):
    """As a data set of open_clip's: a picture through its transform, a caption through its tokenizer."""

    def __init__(self, work: Work, encoder: DualEncoder) -> None:
        lines = (work.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.rows = [json.loads(line) for line in lines[: work.plan.pictures]]
        self.folder, self.transform, self.tokenize = work.folder, encoder.preprocess(), encoder.tokenizer.tokenize

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Image.open(self.folder / self.rows[index]["image"]) as image:
            pixels: Tensor = self.transform(image)
        return pixels, self.tokenize([self.rows[index]["caption"]]).ids[0]


class Timed:
    """A loader as ``train_one_epoch`` wants it, that notes when each batch is asked for."""

    def __init__(self, work: Work, encoder: DualEncoder) -> None:
        plan = work.plan
        self.loader = DataLoader(Pictures(work, encoder), plan.batch, shuffle=True, drop_last=True, num_workers=plan.workers)
        self.num_batches, self.num_samples, self.dataloader = len(self.loader), plan.pictures, self
        self.asked: list[float] = []

    def set_epoch(self, epoch: int) -> None:
        """One epoch is all there is."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        batches = iter(self.loader)
        while True:
            self.asked.append(time.perf_counter())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


def open_clip_turn(work: Work, *, our_kernels: bool) -> float:
    """Seconds of a step, the first ones left out."""
    from open_clip import ClipLoss
    from open_clip_train.train import train_one_epoch

    plan = work.plan
    torch.manual_seed(plan.seed)
    encoder = work.encoder()
    encoder.model.output_dict = True
    data = Timed(work, encoder)
    precision = {"fp32": "fp32", "bf16": "amp_bf16"}[plan.precision]
    args = Namespace(
        device="cpu", precision=precision, distill=False, accum_freq=1, skip_scheduler=True, horovod=False, grad_clip_norm=None,
        rank=0, local_rank=0, distributed=False, world_size=1, log_every_n_steps=100, wandb=False, save_logs=False,
        tensorboard=False, log_local=False, batch_size=plan.batch,
    )  # fmt: skip
    optimizer = make_optimizer(encoder.model, _train_settings())
    if not our_kernels:  # open_clip takes torch's default
        for group in optimizer.param_groups:
            group["fused"] = None
    with cpu_speed(encoder.device, encoder.longest_sequence) if our_kernels else nullcontext():
        train_one_epoch(encoder.model, {"train": data}, ClipLoss(), 0, optimizer, None, None, None, args)
    steps = np.diff(data.asked)[plan.warm :]
    return float(np.mean(steps))


def _train_settings() -> Train:
    return Train(**{key.removeprefix("train."): value for key, value in OPTIMIZER.items()})


# ---- our turn


def our_turn(work: Work, *, verified: bool = True, **changes: Any) -> float:
    """Seconds of a step, the wait for its pictures included, the first ones left out."""
    output = work.folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    with ExitStack() as stack:
        stack.enter_context(_nothing_on_disk(work))
        if not verified:
            stack.enter_context(torch_kernels())
        trainer.train(recipe(work, **changes), output, quiet=True)
    rows = Run(output).steps
    taken = (rows["seconds"] + rows["wait_seconds"])[work.plan.warm :]
    shutil.rmtree(output)
    return float(taken.mean())


def recipe(work: Work, **changes: Any) -> Recipe:
    plan = work.plan
    base = {
        "data.name": str(work.folder),
        "encoder.name": plan.model,
        "train.device": "cpu",
        "train.batch_size": plan.batch,
        "train.max_steps": plan.steps + plan.warm,
        "train.epochs": 1,
        "train.workers": plan.workers,
        "train.precision": plan.precision,
        "train.seed": plan.seed,
        "probe.log_grads": True,
        "probe.set": "default",
        **OPTIMIZER,
    }
    return resolve({}, {**base, **changes})


@contextmanager
def _nothing_on_disk(work: Work) -> Iterator[None]:
    """The trainer takes the weights that are in memory, and an empty folder is all that it leaves for a checkpoint (of ViT-B-32 that
    would be 1.8 GB a turn)."""
    load, save = trainer.load_encoder, checkpoint.save
    trainer.load_encoder = lambda *_, **__: work.encoder()
    checkpoint.save = lambda folder, *_: folder.mkdir(parents=True)
    try:
        yield
    finally:
        trainer.load_encoder, checkpoint.save = load, save


@contextmanager
def torch_kernels() -> Iterator[None]:
    """The trainer leaves torch's kernels as they are."""

    @contextmanager
    def as_they_are(device: torch.device, tokens: int) -> Iterator[str]:
        yield "torch"

    before = trainer.cpu_speed
    trainer.cpu_speed = as_they_are
    try:
        yield
    finally:
        trainer.cpu_speed = before


Turn = Callable[[Work], float]

EXACT = {"data.decode": "exact"}
CACHED = {"data.cache": "images"}

ARMS: dict[str, Turn] = {
    REFERENCE: functools.partial(open_clip_turn, our_kernels=False),
    "open_clip, our kernels": functools.partial(open_clip_turn, our_kernels=True),
    "ours, torch's kernels": functools.partial(our_turn, verified=False, **EXACT),
    "ours": functools.partial(our_turn, **EXACT),
    "+ image path": our_turn,
    "+ image cache": functools.partial(our_turn, **CACHED),
    PLAIN: functools.partial(our_turn, **CACHED, **{"probe.log_grads": False}),
    "hn + probe": functools.partial(our_turn, **CACHED, **{"objective.name": "hn"}),
}
BESIDE_OPEN_CLIP = tuple(ARMS)[:6]
OBJECTIVES = (PLAIN, "+ image cache", "hn + probe")
#: Table -> its arms, the reference first.
TABLES = {"training": BESIDE_OPEN_CLIP, "objectives": OBJECTIVES}
TITLES = {"training": "A training step beside open_clip's", "objectives": "HN and the probe beside plain InfoNCE"}


def measure(work: Work, tables: Sequence[str] = tuple(TABLES)) -> pd.DataFrame:
    """Rows (round, arm, seconds); a short turn of each arm before the first round is not counted."""
    arms = list(dict.fromkeys(arm for table in tables for arm in TABLES[table]))
    order, rows = random.Random(work.plan.seed), []
    with told("turns") as advance:
        for turn in range(-1, work.plan.rounds):
            for done, arm in enumerate(order.sample(arms, len(arms))):
                advance((turn + 1) * len(arms) + done, (work.plan.rounds + 1) * len(arms))
                seconds = ARMS[arm](work if turn >= 0 else work.short())
                rows += [{"round": turn, "arm": arm, "seconds": seconds}] if turn >= 0 else []
    return pd.DataFrame(rows)


def ratios(measured: pd.DataFrame, arms: Sequence[str], reference: str) -> pd.DataFrame:
    """Rows (arm, seconds, ratio, low, high, memory_mb) as ``report`` takes them; memory is not measured."""
    wide = measured.pivot_table(index="round", columns="arm", values="seconds")
    ratio = wide.div(wide[reference], axis=0)
    columns = {"seconds": wide.median(), "ratio": ratio.median(), "low": ratio.min(), "high": ratio.max()}
    return pd.DataFrame(columns).loc[list(arms)].rename_axis("arm").reset_index().assign(memory_mb=float("nan"))


def _arguments() -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(description="Pictures per second.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/training"), help="folder for CSV and JSON")
    parser.add_argument("--model", default=plan.model, help="tiny, or a name of open_clip")
    parser.add_argument("--batch", type=int, default=plan.batch)
    parser.add_argument("--steps", type=int, default=plan.steps, help="timed steps of a turn")
    parser.add_argument("--warm", type=int, default=plan.warm, help="steps before them")
    parser.add_argument("--rounds", type=int, default=plan.rounds)
    parser.add_argument("--side", type=int, default=plan.side, help="width of the pictures")
    parser.add_argument("--workers", type=int, default=plan.workers, help="processes that decode, of both trainers")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=plan.precision)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--only", choices=tuple(TABLES), nargs="+", default=list(TABLES), help="these tables")
    return parser.parse_args()


def main() -> None:
    given = vars(_arguments())
    output, threads, tables = given.pop("output"), given.pop("threads"), given.pop("only")
    torch.set_num_threads(threads)
    plan = Plan(**given)
    facts = machine()
    say_machine(facts)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADSCOPE_CACHE"] = f"{folder}/cache"  # nothing of it stays
        measured = measure(prepare(plan, Path(folder)), tables)
    output.mkdir(parents=True, exist_ok=True)
    measured.to_csv(output / "turns.csv", index=False)
    what = f"{plan.model}, batch {plan.batch}, {plan.precision}, JPEGs of {plan.side} x {plan.side * 3 // 4}"
    for table in tables:
        show(measured, table, what, output, facts, plan)


def show(measured: pd.DataFrame, table: str, what: str, output: Path, facts: Mapping[str, Any], plan: Plan) -> None:
    frame = ratios(measured, TABLES[table], TABLES[table][0])
    rates = ", ".join(f"{row['arm']} {plan.batch / row['seconds']:.1f}" for row in frame.to_dict("records"))
    notes = {"pictures per second": rates, "turns": plan.words()}
    title = f"{TITLES[table]}: {what}"
    report(frame, title=title, output=output, name=table, facts={**facts, "plan": vars(plan)}, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"training: {error}", file=sys.stderr)
        sys.exit(2)
