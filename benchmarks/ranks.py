"""Retrieval ranks in both directions, beside the product they cannot do without and beside sorting.

    python benchmarks/ranks.py --output runs/ranks_speed
    python benchmarks/ranks.py --sort-up-to 20000 --rounds 2 --output runs/ranks_speed_sort      needs 10 GB

A gallery of N pictures with one caption each, random unit rows in a cone whose captions are their pictures plus noise. In turn, in an
order drawn anew:
    product     the reference: all N x N scores in fp32, 1024 x 1024 at a time, and nothing else
    ours        ``gradscope.metrics.ranks``: ranks both ways, ties counted, equal to float64
    untrained   the same on captions that know nothing of their pictures, where half of all scores are above the true one
    topk        the full fp32 matrix, its ten best per row and per column, and whether the true one is among them
    argsort     the full fp32 matrix sorted both ways, and the place of the true one; left out above --sort-up-to rows

How to read it: ``ratio`` is time over the product's in the same round; memory is what an arm takes beside the embeddings. The notes say
how argsort's ranks differ from ours (fp32 puts near-ties in either order). How it can mislead: a slow fp32 kernel flatters the ratio;
how much must be formed again in float64 depends on how many scores lie within 2e-5 of a true one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, report, say_machine, side_by_side
from torch import Tensor

from gradscope.metrics.ranks import ranks
from gradscope.products import fast_fp32

REFERENCE = "product"
BLOCK = 1024
DEPTH = 10

#: argsort both ways: scores, sorted scores and int64 places of one direction, and what sorting takes meanwhile.
SORT_BYTES = 24


def gallery(n: int, width: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images [N, D], captions [N, D] and their pictures [N]; ``noise`` is the length of what a caption adds to its picture's row."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, width, generator=generator)
    images += torch.randn(width, generator=generator)  # the cone
    torch.nn.functional.normalize(images, dim=1, out=images)
    texts = torch.randn(n, width, generator=generator)
    texts.mul_(noise / width**0.5).add_(images)
    return images, torch.nn.functional.normalize(texts, dim=1, out=texts), torch.arange(n)


def product(images: Tensor, texts: Tensor) -> None:
    """The bare blocked product."""
    room = torch.empty(BLOCK, BLOCK)
    for left in images.split(BLOCK):
        for right in texts.split(BLOCK):
            torch.mm(left, right.T, out=room.view(-1)[: len(left) * len(right)].view(len(left), len(right)))


def by_sorting(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Places from 0, both ways, of the true one among all, as retrieval scripts find them."""
    scores = images @ texts.T
    true = torch.arange(len(images))[:, None]
    return tuple((torch.argsort(s, dim=1, descending=True) == true).byte().argmax(1) for s in (scores, scores.T))  # type: ignore[return-value]


def by_topk(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the true one is among the ten best, both ways."""
    scores = images @ texts.T
    true = torch.arange(len(images))[:, None]
    depth = min(DEPTH, len(images))
    return tuple((s.topk(depth, dim=1).indices == true).any(1) for s in (scores, scores.T))  # type: ignore[return-value]


def refuse_too_large(rows: int) -> None:
    """Sorting a matrix that does not fit stops the machine, not only this script."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if SORT_BYTES * rows**2 > free:
        need = SORT_BYTES * rows**2 / 1e9
        raise SystemExit(f"sorting {rows:,} x {rows:,} scores takes {need:.0f} GB and {free / 1e9:.0f} GB are free; lower --sort-up-to")


def main(argv: list[str] | None = None) -> None:
    given = _arguments(argv)
    if given.rows < 2 or given.rounds < 1:
        raise SystemExit("--rows must be at least 2 and --rounds at least 1")
    if given.threads:
        torch.set_num_threads(given.threads)
    sort = given.rows <= given.sort_up_to
    if sort:
        refuse_too_large(given.rows)
    facts = machine()
    say_machine(facts)
    trained, untrained = gallery(given.rows, given.width, given.noise), gallery(given.rows, given.width, 1e4)
    with fast_fp32(trained[0].device) as products:
        arms: dict[str, Callable[[], Any]] = {
            REFERENCE: lambda: product(*trained[:2]), "ours": lambda: ranks(*trained), "untrained": lambda: ranks(*untrained),
        }  # fmt: skip
        if sort:
            arms |= {"topk": lambda: by_topk(*trained[:2]), "argsort": lambda: by_sorting(*trained[:2])}
        frame = side_by_side(arms, reference=REFERENCE, rounds=given.rounds, label="ranks")
        notes = {"products": products.words, **_notes(trained, sort)}
    title = f"ranks both ways of {given.rows:,} pairs of width {given.width}"
    report(frame, title=title, output=given.output, name="ranks", facts=facts, notes=notes)


def _notes(trained: tuple[Tensor, Tensor, Tensor], sort: bool) -> dict[str, str]:
    found = ranks(*trained)
    notes = {f"R@1 {one.direction}": f"{float((one.greater == 0).double().mean()):.3f}" for one in found}
    if sort:
        for one, places in zip(found, by_sorting(*trained[:2]), strict=True):
            other = int((one.greater != places).sum())
            furthest = int((one.greater - places).abs().max())
            notes[f"argsort {one.direction}"] = f"{other:,} of {len(places):,} places are not ours, by {furthest} at most"
    return notes


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="pictures, each with one caption (default: 20000)")
    parser.add_argument("--width", type=int, default=768, help="width of a row (default: 768)")
    parser.add_argument("--noise", type=float, default=6.0, help="what a caption adds to its picture's unit row (default: 6)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm (default: 5)")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: as torch chooses)")
    parser.add_argument("--sort-up-to", type=int, default=5000, help="rows up to which all scores are sorted (default: 5000)")
    parser.add_argument("--output", type=Path, default=Path("runs/ranks_speed"), help="folder (default: runs/ranks_speed)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
