"""What reading one softmax costs beside the loss itself, forward and backward, by its width and the probe's set.

    python benchmarks/probe_width.py --output runs/probe_width

No towers: rows of noisy pairs stand for embeddings, so that nothing hides the cost of what is read. Arms, per width:
    loss                 InfoNCE as training forms it at this width (`kernels.choice`, or --kernel)
    loss, read "loss"    the same, watched and read with the set "loss": HN is evaluated beside it, gradients included
    loss, read "default" with the set "default", up to the averaged gradient (there are no parameters to read it of)

How to read it: a ratio of 2.5 says that a probed softmax takes the time of two and a half losses; of that one is the loss's own and
about one the other objective's. Beside towers all of it is small: at width 16 a step of training takes a thousand times as long.
How it can mislead: at wide widths the softmax is streamed and some readings are left out; the console says which. Memory is what one
call takes beside the rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from side_by_side import machine, report, say_machine, side_by_side
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.console import out
from gradscope.cpu_speed import cpu_speed
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.heads import Heads
from gradscope.kernels.choice import kernel_words
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.quantities import quantity_set
from gradscope.step_reader import StepReader
from gradscope.types import Batch, Embeddings

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """One batch as the loss sees it, and as the reader does."""

    embeddings: Embeddings
    batch: Batch

    def clear(self) -> None:
        self.embeddings.image.grad = self.embeddings.text.grad = None


def make_pairs(count: int, given: argparse.Namespace) -> Pairs:
    draw = torch.Generator().manual_seed(given.seed)
    base = F.normalize(torch.randn(count, given.dim, generator=draw), dim=1)

    def noisy() -> Tensor:
        return F.normalize(base + given.noise * torch.randn(base.shape, generator=draw), dim=1).requires_grad_()

    ids = torch.randint(0, 49408, (count, given.tokens), generator=draw)
    names = tuple(f"caption {i}" for i in range(count))
    batch = Batch(ids=names, images={}, texts={"full": ids}, lengths=torch.full((count,), given.tokens - 2), captions=names)
    return Pairs(embeddings=Embeddings(image=noisy(), text=noisy(), scale=torch.tensor(given.scale)), batch=batch)


def plain(pairs: Pairs, framework: Clip) -> Callable[[], None]:
    def work() -> None:
        total_loss(framework(pairs.embeddings)).backward()
        pairs.clear()

    return work


def watched(pairs: Pairs, framework: Clip, name: str, gamma: float) -> Callable[[], None]:
    objectives = {"infonce": InfoNCE(), "hn": HN(gamma=gamma)}
    model = nn.Linear(1, 1)  # a reader wants parameters; nothing of them is read in phase "batch"
    heads = Heads(objectives=objectives, trained="infonce", kernel=framework.kernel)
    reader = StepReader(model=model, heads=heads, quantities=quantity_set(name), every=1)

    def work() -> None:
        reader.begin(1, 0)
        terms = framework(pairs.embeddings, top=reader.top)
        with reader.watching(pairs.batch, pairs.embeddings, terms):
            total_loss(terms).backward()
        pairs.clear()
        rows = reader.flush()
        failed = [row["quantity"] for row in rows if row["key"] == "failed"]
        if failed or not rows:
            raise RuntimeError(f"the probe failed: {reader.failures}")

    return work


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The probe by width.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/probe_width"), help="folder for CSV and JSON")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 256, 1024, 2048, 4096, 8192], help="candidates per softmax")
    parser.add_argument("--dim", type=int, default=512, help="of the embedding")
    parser.add_argument("--tokens", type=int, default=77, help="of a caption")
    parser.add_argument("--kernel", choices=("auto", "dense", "streaming"), default="auto")
    parser.add_argument("--scale", type=float, default=50.0)
    parser.add_argument("--gamma", type=float, default=0.5, help="of the HN that is read beside it")
    parser.add_argument("--noise", type=float, default=0.08, help="standard deviation of what is added to a unit direction")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every arm, after one that is not counted")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if min(*given.widths, given.rounds) < 1 or min(given.widths) < 2 or given.tokens < 3:
        raise ValueError("give widths of 2 or more, 3 tokens or more and at least 1 round")
    with cpu_speed(torch.device("cpu"), tokens=1) as products:
        facts = {**machine(), "products": products}
        say_machine(facts)
        for width in given.widths:
            pairs, framework = make_pairs(width, given), Clip(kernel=given.kernel)
            arms = {LOSS: plain(pairs, framework)}
            arms |= {f'loss, read "{name}"': watched(pairs, framework, name, given.gamma) for name in ("loss", "default")}
            frame = side_by_side(arms, reference=LOSS, rounds=given.rounds, seed=given.seed, label=f"width {width}")
            words = kernel_words(width, given.kernel)
            report(frame, title=f"width {width}, {words}", output=given.output, name=f"width_{width}", facts=facts)
    out.print(f"written to {given.output}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"probe_width: {error}", file=sys.stderr)
        sys.exit(2)
