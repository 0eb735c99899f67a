"""What watching costs, tool by tool, side by side in one process: open_clip ViT-B-32, batch 8, fp32, AdamW.

    python benchmarks/probe_peers.py --output runs/probe_peers

Each round takes every arm once, in an order drawn anew, and two plain steps somewhere among them. The arms:
    probe loss, default, full, full + second backward    ``gradscope.Probe`` with its log, attached for its turn: one step that makes
                                                         the log (not timed), one that is probed, one that is not
    wandb.watch             log="all", log_freq=1, offline, and the ``run.log`` that sends it
    tensorboard             ``add_histogram`` of every gradient and every weight
    traintools              ``GradientHealthMonitor.inspect``
    naive                   norm, mean, standard deviation, largest magnitude and zero share of each gradient, by ``.item()``
Two answers, both shares of the mean of the round's two plain steps:
    ratio     seconds of the step that is watched / seconds of a plain step; median, smallest and largest of the rounds
    inside    of ours: seconds inside the probe's hooks, its backward passes and its log included, averaged over whole cadence blocks
              of ``every`` steps: (probed + (every - 1) * not probed) / every

How to read it: ratio compares the tools at the step that watches; inside is what a training run pays. How it can mislead: inside
leaves out what a tool does to caches and memory, ratio holds that and all that the machine does meanwhile. Weights are random and
the batches noise, so that readings are numbers without meaning. A batch of 8 makes passes over the parameters dear: with wider
batches every share is smaller. A CPU has no queue to drain, so ``.item()`` is cheap here and is not on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.table import Table
from talk import random_weights_are_meant, told, without_paths
from torch.nn import functional as F

from gradscope.console import console, out
from gradscope.probe import Probe
from gradscope.quantities import SETS
from gradscope.train_display import counted

PLAIN = ("plain 1", "plain 2")

#: Rows of the table of ours: arm, and the cadence at which it is meant to run.
CADENCES = (
    ("probe loss", 1),
    ("probe default", 5),
    ("probe full", 10),
    ("probe full + second backward", 10),
    ("probe full + second backward", 50),
)

#: Whose versions are kept beside torch's.
PACKAGES = ("open_clip_torch", "wandb", "tensorboard", "traintools")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``rounds`` rounds of all arms on one model and batch size."""

    model: str = "ViT-B-32"
    batch: int = 8
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.batch < 2:
            raise ValueError(f"at least 1 round and batches of 2 are needed; got --rounds {self.rounds} --batch {self.batch}")


# ---- the work


class Work:
    """A dual encoder in training. ``step`` is one plain step; ``between`` is called after the backward, before the update."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.model, image_size = _model(plan.model)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        vocabulary, context = self.model.vocab_size, self.model.context_length
        lengths = torch.randint(context // 4, context, (plan.batch, 1))
        ids = torch.randint(1, vocabulary - 1, (plan.batch, context))
        self.ids = ids.masked_fill(torch.arange(context) >= lengths, 0).scatter(1, lengths - 1, vocabulary - 1)
        self.images = torch.randn(plan.batch, 3, image_size, image_size)
        self.index = 0

    def step(self, between: Callable[[Work], object] | None = None) -> None:
        self.index += 1
        self.optimizer.zero_grad(set_to_none=True)
        image, text, scale = self.model(self.images, self.ids)
        logits = scale * image @ text.T
        targets = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        loss.backward()
        if between:
            between(self)
        self.optimizer.step()


def _model(name: str) -> tuple[Any, int]:
    """A model with random weights (tiny: its own), and the side of its pictures."""
    import open_clip

    if name == "tiny":
        from gradscope.encoders.load import load_encoder

        model = load_encoder("tiny", torch.device("cpu")).model
    elif name in open_clip.list_models():
        if "hf_model_name" in open_clip.get_model_config(name)["text_cfg"]:
            raise ValueError(f"--model '{name}' has a text tower of another library; take one like ViT-B-32")
        random_weights_are_meant()
        model = open_clip.create_model(name, pretrained=None)
    else:
        raise ValueError(f"--model '{name}' is neither tiny nor a model of open_clip; ViT-B-32 is one")
    size = model.visual.image_size
    return model, size if isinstance(size, int) else size[0]


# ---- the arms: each takes its turn with the work, and answers with its timed steps


class TimedProbe(Probe):
    """A probe that adds up the seconds spent in it: from each place where training calls it, calls within calls counted once."""

    inside = 0.0
    _within = False

    def _clock(self, part: Callable[..., Any], *args: Any) -> Any:
        if self._within:
            return part(*args)
        self._within, start = True, time.perf_counter()
        try:
            return part(*args)
        finally:
            self._within = False
            self.inside += time.perf_counter() - start

    def _observe(self, *args: Any) -> None:
        self._clock(super()._observe, *args)

    def _backward_ended(self) -> None:
        self._clock(super()._backward_ended)

    def _gradient_ready(self, *args: Any) -> bool:
        return bool(self._clock(super()._gradient_ready, *args))

    def _updated(self, *args: Any) -> None:
        self._clock(super()._updated, *args)

    def _end_step(self, *args: Any) -> None:
        self._clock(super()._end_step, *args)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """``gradscope.Probe`` with one set: the first of three steps makes the run directory, the other two are timed."""

    folder: Path
    probe_set: str
    second_backward: bool = False

    def __call__(self, work: Work) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=self.folder) as output, without_paths():
            probe = TimedProbe(
                work.model,
                optimizer=work.optimizer,
                output=Path(output) / "run",
                probe_set=self.probe_set,
                second_backward=self.second_backward,
                every=1,
            )
            with probe:
                work.step()
                rows = [_timed(work.step, probe, watched=True)]
                probe.reader.every = sys.maxsize
                rows.append(_timed(work.step, probe, watched=False))
        return rows


def _timed(step: Callable[[], None], probe: TimedProbe | None = None, *, watched: bool) -> dict[str, Any]:
    """One step as a row; the collector runs before it, not inside."""
    gc.collect()
    before = probe.inside if probe else 0.0
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return {"watched": watched, "seconds": seconds, "inside": probe.inside - before if probe else 0.0}


def plain(work: Work) -> list[dict[str, Any]]:
    return [_timed(work.step, watched=False)]


class WandbWatch:
    def __init__(self, stack: ExitStack, folder: Path) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        self.run = stack.enter_context(wandb.init(mode="offline", project="probe_peers", dir=folder, settings=quiet))

    def __call__(self, work: Work) -> list[dict[str, Any]]:
        self.run.watch(work.model, log="all", log_freq=1)
        rows = [_timed(lambda: self._step(work), watched=True)]
        self.run.unwatch(work.model)
        return rows

    def _step(self, work: Work) -> None:
        work.step()
        self.run.log({"step": work.index})


class TensorboardHistograms:
    def __init__(self, stack: ExitStack, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = stack.enter_context(SummaryWriter(folder))

    def __call__(self, work: Work) -> list[dict[str, Any]]:
        return [_timed(lambda: work.step(self._write), watched=True)]

    def _write(self, work: Work) -> None:
        for name, parameter in work.model.named_parameters():
            self.writer.add_histogram(f"weights/{name}", parameter, work.index)
            if parameter.grad is not None:
                self.writer.add_histogram(f"gradients/{name}", parameter.grad, work.index)


class Traintools:
    def __init__(self) -> None:
        from traintools import GradientHealthMonitor

        self.monitor = GradientHealthMonitor()

    def __call__(self, work: Work) -> list[dict[str, Any]]:
        return [_timed(lambda: work.step(self._inspect), watched=True)]

    def _inspect(self, work: Work) -> None:
        self.monitor.inspect(work.model, step=work.index, lr=work.optimizer.param_groups[0]["lr"])


def naive(work: Work) -> list[dict[str, Any]]:
    return [_timed(lambda: work.step(five_statistics), watched=True)]


def five_statistics(work: Work) -> dict[str, tuple[float, ...]]:
    """What one writes down first: five numbers of each gradient, each brought to the host at once."""
    return {
        name: (g.norm().item(), g.mean().item(), g.std(correction=0).item(), g.abs().max().item(), (g == 0).float().mean().item())
        for name, parameter in work.model.named_parameters()
        if (g := parameter.grad) is not None
    }


def arms(stack: ExitStack, folder: Path) -> dict[str, Callable[[Work], list[dict[str, Any]]]]:
    """Name -> what takes its turn; what needs an end ends with the stack."""
    return {
        **dict.fromkeys(PLAIN, plain),
        **{f"probe {name}": Probed(folder=folder, probe_set=name) for name in SETS},
        "probe full + second backward": Probed(folder=folder, probe_set="full", second_backward=True),
        "wandb.watch": WandbWatch(stack, folder),
        "tensorboard": TensorboardHistograms(stack, folder / "events"),
        "traintools": Traintools(),
        "naive": naive,
    }


def measure(plan: Plan, folder: Path, advance: Callable[[int, int], None] | None = None) -> pd.DataFrame:
    """Rows (round, arm, watched, seconds, inside) of the timed steps. One round before the first is left out."""
    order, rows = random.Random(plan.seed), []
    with ExitStack() as stack:
        turns = arms(stack, folder)
        work = Work(plan)
        gc.collect()
        gc.freeze()  # what lives on need not be looked through before each step
        for number in range(plan.rounds + 1):
            for done, name in enumerate(order.sample(list(turns), len(turns))):
                if advance:
                    advance(number * len(turns) + done, (plan.rounds + 1) * len(turns))
                found = turns[name](work)
                rows += [{"round": number, "arm": name, **row} for row in found if number]
    return pd.DataFrame(rows)


# ---- arithmetic on frames


def _plain(measured: pd.DataFrame) -> pd.Series:
    """Seconds of a plain step, by round."""
    return measured[measured["arm"].isin(PLAIN)].groupby("round")["seconds"].mean()


def ratios(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows (arm, ratio, low, high): a watched step against the mean of the round's plain ones; of the plain ones, each by itself."""
    chosen = measured[measured["watched"] | measured["arm"].isin(PLAIN)]
    ratio = chosen["seconds"] / chosen["round"].map(_plain(measured))
    grouped = chosen.assign(ratio=ratio).groupby("arm")["ratio"]
    return grouped.agg(ratio="median", low="min", high="max").reset_index()


def shares(measured: pd.DataFrame) -> pd.DataFrame:
    """Rows (arm, every, share, low, high): seconds inside, over whole cadence blocks, in plain steps' time; over rounds."""
    inside = measured.assign(share=measured["inside"] / measured["round"].map(_plain(measured)))
    by_kind = inside.pivot_table(index=["arm", "round"], columns="watched", values="share")
    rows = []
    for arm, every in CADENCES:
        block = (by_kind.loc[arm][True] + (every - 1) * by_kind.loc[arm][False]) / every
        rows.append({"arm": arm, "every": every, "share": block.median(), "low": block.min(), "high": block.max()})
    return pd.DataFrame(rows)


# ---- what a person sees


def ratio_table(frame: pd.DataFrame, plain_seconds: float, plan: Plan) -> Table:
    title = f"A watched step, in plain steps of {plain_seconds:.2f} s: {plan.model}, batch {plan.batch}, fp32, AdamW"
    table = Table(title=title, caption=f"[smallest, largest] of {counted(plan.rounds, 'round')}", title_justify="left")
    for heading in ("arm", "median", "smallest, largest"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in frame.sort_values("ratio").to_dict("records"):
        table.add_row(row["arm"], f"{row['ratio']:.3f}", f"{row['low']:.3f}, {row['high']:.3f}")
    return table


def share_table(frame: pd.DataFrame, plan: Plan) -> Table:
    title = "Time inside the probe, averaged over whole cadence blocks, share of a plain step"
    table = Table(title=title, caption=f"median, smallest and largest of {counted(plan.rounds, 'round')}", title_justify="left")
    for heading in ("arm", "every", "median", "smallest, largest"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in frame.to_dict("records"):
        table.add_row(row["arm"], str(row["every"]), f"{row['share']:.2%}", f"{row['low']:.2%}, {row['high']:.2%}")
    return table


def machine() -> dict[str, Any]:
    """Of the other benchmark, and the versions of the tools."""
    spec = importlib.util.spec_from_file_location("probe_overhead", Path(__file__).with_name("probe_overhead.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_overhead"] = module
    spec.loader.exec_module(module)
    return {**module.machine(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def _arguments() -> argparse.Namespace:
    default = Plan()
    parser = argparse.ArgumentParser(description="What watching costs.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/probe_peers"), help="folder for CSV and JSON")
    parser.add_argument("--model", default=default.model, help="tiny, or a name of open_clip")
    parser.add_argument("--batch", type=int, default=default.batch, help="pairs of a step")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds, beside one that is left out")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights, batch and order")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its own choice")
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    plan = Plan(model=given.model, batch=given.batch, rounds=given.rounds, seed=given.seed)
    if given.threads > 0:
        torch.set_num_threads(given.threads)
    facts = machine()
    console.print(
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average_before']:.1f} before the start; "
        f"{counted(facts['threads'], 'thread')}, torch {facts['torch']}, " + ", ".join(f"{name} {facts[name]}" for name in PACKAGES)
    )
    console.print(f"building {plan.model}; then {plan.rounds + 1} rounds, the first not counted, of all arms: one to three steps each")
    with tempfile.TemporaryDirectory() as folder, told("turns") as advance:
        measured = measure(plan, Path(folder), advance)
    compared, inside = ratios(measured), shares(measured)
    out.print(ratio_table(compared, _plain(measured).median(), plan))
    out.print(share_table(inside, plan))
    given.output.mkdir(parents=True, exist_ok=True)
    for name, frame in (("steps", measured), ("ratios", compared), ("shares", inside)):
        frame.to_csv(given.output / f"{name}.csv", index=False)
    results: dict[str, Any] = {"machine": facts, "plan": dataclasses.asdict(plan)}
    results |= {"ratios": compared.to_dict("records"), "shares": inside.to_dict("records")}
    (given.output / "probe_peers.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    out.print(f"steps, ratios and shares as CSV, and with the machine as JSON: {given.output}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"probe_peers: {error}", file=sys.stderr)
        sys.exit(2)
