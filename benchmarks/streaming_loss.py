"""What the streaming contrastive loss costs, forward and backward, beside open_clip's and beside the plain form with a margin.

    python benchmarks/streaming_loss.py --output runs/streaming_loss

Image and caption rows are noisy copies of the same random directions, so that losses and gradients are not 0. Two tables per width.
Against the peer:
    ClipLoss              open_clip's, one process, no margin: its logits, their transpose by a second product, and autograd's copies
    plain HN              this package's dense form with a live margin (`objectives`), up to --plain-up-to rows
    auto                  what the trainer would take at this width (`kernels.choice`)
    streaming, shared     blocks, live margin, one exp per cell where a check allows it; `shared` says in what share of the blocks
    streaming, safe       the same with two
Against the same kernel without a margin: a live margin, a frozen one (rows of --other-width), and the live one that also reads what
share of each image's residual lies on its hardest captions (--top).

How to read it: a ratio is of the same round; memory is what one call takes beside the rows. All arms use the same products
(`cpu_speed`: the fastest that are exact fp32 here). A peer that does not fit is left out by --peer-up-to.
How it can mislead: the materialised forms pay for fresh memory, which the system hands out page by page; a machine with huge pages, or
one whose cache is small, moves the ratio. ClipLoss has no margin; where residuals are small its fp32 gradient is not this one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from side_by_side import machine, report, say_machine, side_by_side
from torch import Tensor
from torch.nn import functional as F

from gradscope.console import out
from gradscope.cpu_speed import cpu_speed
from gradscope.kernels.choice import kernel_for
from gradscope.kernels.stream import Streamed, stream
from gradscope.objectives.hn import HN

PEER = "ClipLoss, no margin"
BASE = "streaming, no margin"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Leaves of one width, and what the last streamed call said."""

    image: Tensor  # [N, D]
    text: Tensor  # [N, D]
    other: Tensor  # [N, D0] another encoder's rows of the captions
    scale: Tensor  # []
    gamma: float
    said: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        for leaf in (self.image, self.text, self.scale):
            leaf.grad = None


def make_rows(count: int, given: argparse.Namespace) -> Rows:
    draw = torch.Generator().manual_seed(given.seed)

    def noisy() -> Tensor:
        return F.normalize(base + given.noise * torch.randn(base.shape, generator=draw), dim=1).requires_grad_()

    base = F.normalize(torch.randn(count, given.width, generator=draw), dim=1)
    image, text = noisy(), noisy()
    other = F.normalize(torch.randn(count, given.other_width, generator=draw), dim=1)
    return Rows(image=image, text=text, other=other, scale=torch.tensor(given.scale, requires_grad=True), gamma=given.gamma)


def streaming(rows: Rows, **settings: Any) -> Callable[[], None]:
    def work() -> None:
        found: Streamed = stream(rows.image, rows.text, rows.scale, **settings)
        found.loss.mean().backward()
        rows.said.update(words(found))
        rows.clear()

    return work


def words(found: Streamed) -> dict[str, str]:
    """What a streamed call says of itself, after its backward."""
    return {
        "mean loss": f"{found.loss.mean().detach():.4g}",
        "blocks of the shared form that needed no second exp": f"{found.shared_share():.1%}",
        "negatives whose gradient is exactly 0": f"{int(found.zero_cells):,}",
        "the streaming kernel": found.how,
    }


def peer(rows: Rows) -> Callable[[], None]:
    from open_clip import ClipLoss

    loss = ClipLoss()

    def work() -> None:
        loss(rows.image, rows.text, rows.scale).backward()
        rows.clear()

    return work


def plain(rows: Rows) -> Callable[[], None]:
    objective = HN(gamma=rows.gamma)

    def work() -> None:
        objective.loss(objective.scores(rows.image, rows.text, rows.scale)).mean().backward()
        rows.clear()

    return work


def against_peer(rows: Rows, given: argparse.Namespace) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The first table of a width, and its notes."""
    count = len(rows.image)
    dense = kernel_for(count) == "dense"
    arms = {
        PEER: peer(rows),
        "plain HN": plain(rows),
        "auto": plain(rows) if dense else streaming(rows, gamma=rows.gamma),
        "streaming, shared": streaming(rows, gamma=rows.gamma, backend="shared"),
        "streaming, safe": streaming(rows, gamma=rows.gamma, backend="safe"),
    }
    if count > given.plain_up_to:
        del arms["plain HN"]
    if count > given.peer_up_to:
        del arms[PEER]
    arms["streaming, shared"]()
    notes = {"auto takes the kernel": kernel_for(count), **rows.said}
    reference = next(iter(arms)) if count <= given.peer_up_to else "streaming, shared"
    return side_by_side(arms, reference=reference, rounds=given.rounds, seed=given.seed, label=f"{count} rows"), notes


def against_itself(rows: Rows, given: argparse.Namespace) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The second table: what a margin and the read-outs add."""
    frozen = streaming(rows, gamma=rows.gamma, margin="frozen", margin_text=rows.other)
    live, read = "live margin", f"live margin, read-outs and top {given.top}"
    arms = {
        BASE: streaming(rows),
        live: streaming(rows, gamma=rows.gamma),
        f"frozen margin, width {given.other_width}": frozen,
        read: streaming(rows, gamma=rows.gamma, top=given.top),
    }
    frame = side_by_side(arms, reference=BASE, rounds=given.rounds, seed=given.seed, label="margins")
    seconds = frame.set_index("arm")["seconds"]
    return frame, {f"top {given.top} / without, of the medians": round(seconds[read] / seconds[live], 3)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The streaming loss.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/streaming_loss"), help="folder for CSV and JSON")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384, 32768], help="widths of the softmax")
    parser.add_argument("--width", type=int, default=512, help="of the embedding")
    parser.add_argument("--other-width", type=int, default=384, help="of the frozen encoder's rows")
    parser.add_argument("--scale", type=float, default=50.0)
    parser.add_argument("--gamma", type=float, default=0.3)
    parser.add_argument("--noise", type=float, default=0.08, help="standard deviation of what is added to a unit direction")
    parser.add_argument("--top", type=int, default=10, help="hardest captions whose share is read")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every arm, after one that is not counted")
    parser.add_argument("--peer-up-to", type=int, default=16384, help="most rows for ClipLoss (16.5 GB at 32768)")
    parser.add_argument("--plain-up-to", type=int, default=4096, help="most rows for the plain form (6 GB at 16384)")
    parser.add_argument("--margins-up-to", type=int, default=16384, help="most rows for the second table")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch, 0 for its own choice")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if min(*given.rows, given.width, given.other_width, given.top, given.rounds) < 1:
        raise ValueError("give at least 1 row, width, top and round")
    if given.threads < 0 or not 0 < given.scale < math.inf or not 0 <= given.noise < math.inf:
        raise ValueError("give --threads of 0 or more, a finite --scale above 0 and a finite --noise of 0 or more")
    if given.threads:
        torch.set_num_threads(given.threads)
    with cpu_speed(torch.device("cpu"), tokens=1) as products:
        facts = {**machine(), "products": products}
        say_machine(facts)
        out.print(products)
        for count in given.rows:
            rows = make_rows(count, given)
            title = f"{count} rows of {given.width}, scale {given.scale:g}, gamma {given.gamma:g}: loss and gradients"
            frame, notes = against_peer(rows, given)
            report(frame, title=title, output=given.output, name=f"peer_{count}", facts=facts, notes=notes)
            if count <= given.margins_up_to:
                frame, notes = against_itself(rows, given)
                report(frame, title=f"{count} rows, one kernel", output=given.output, name=f"margin_{count}", facts=facts, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"streaming_loss: {error}", file=sys.stderr)
        sys.exit(2)
