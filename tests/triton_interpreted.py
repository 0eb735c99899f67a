"""Runs the Triton kernels on CPU tensors and prints, as JSON, how far they are from float64: `test_kernels_triton` starts it with
TRITON_INTERPRET=1, which counts only before the first import of triton.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass

import torch
from host_waits import Waits
from torch import Tensor
from torch.nn import functional as F

from gradscope.kernels import triton_strip
from gradscope.kernels.cells import Cells
from gradscope.kernels.stream import stream
from gradscope.kernels.strip import Sums, Weights
from gradscope.kernels.triton_found import launch_fails
from gradscope.kernels.triton_strip import Tiles, backward_strip, forward_strip
from gradscope.objectives.scores import dense_scores, symmetric_loss

SMALL = Tiles(rows=32, columns=16, inner=16)
MIDDLE = Tiles(rows=64, columns=32, inner=32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """N pairs of unit rows of width D; ``noise`` is how far a caption lies from its image, ``shift`` > 0 pairs it with another one."""

    n: int
    d: int
    scale: float = 50.0
    gamma: float = 0.3
    noise: float = 1.0
    shift: int = 0
    repeated: int = 0  # captions said twice: equal groups, no negatives of each other
    strips: int = 1
    dtype: torch.dtype = torch.float32
    tiles: Tiles = SMALL
    frozen: bool = False  # the margin of another encoder's rows, as further columns of q and k
    nan: bool = False
    precision: str = "ieee"


CASES = {
    "two rows": Case(n=2, d=16),
    "three rows": Case(n=3, d=5),
    "seventeen": Case(n=17, d=33, precision="ieee-tiles"),
    "no margin": Case(n=130, d=96, gamma=0.0, tiles=MIDDLE),
    "margin": Case(n=130, d=96, tiles=MIDDLE, precision="ieee-tiles"),
    "default tiles": Case(n=200, d=96, tiles=Tiles()),
    "default tiles, products within": Case(n=200, d=96, tiles=Tiles(), precision="ieee-tiles"),
    "wide tiles": Case(n=70, d=40, tiles=Tiles(rows=16, columns=64, inner=64)),
    "two strips": Case(n=64, d=24, strips=2),
    "three strips": Case(n=51, d=20, strips=3, repeated=5, precision="ieee-tiles"),
    "equal captions": Case(n=45, d=32, repeated=9),
    "frozen margin": Case(n=37, d=24, frozen=True),
    "frozen margin, products within": Case(n=37, d=24, frozen=True, precision="ieee-tiles"),
    "nearly nothing left": Case(n=61, d=64, scale=100.0, gamma=0.0, noise=0.0),
    "saturated": Case(n=61, d=64, scale=100.0, noise=0.1, precision="ieee-tiles"),
    "all wrong": Case(n=61, d=64, scale=60.0, noise=0.1, shift=1),
    "scale 200": Case(n=40, d=32, scale=200.0, noise=0.5),
    "fp16": Case(n=50, d=48, dtype=torch.float16),
    "nan row": Case(n=20, d=16, nan=True),
    "nan row, products within": Case(n=20, d=16, nan=True, precision="ieee-tiles"),
}


def rows(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    image = F.normalize(torch.randn(case.n, case.d, generator=generator), dim=1)
    text = F.normalize(image + case.noise * torch.randn(case.n, case.d, generator=generator) / math.sqrt(case.d), dim=1)
    text = text.roll(case.shift, 0)
    groups = torch.arange(case.n)
    if case.repeated:
        text[-case.repeated :] = text[: case.repeated]
        groups[-case.repeated :] = groups[: case.repeated]
    if case.nan:
        image[3] = math.nan
    other = F.normalize(torch.randn(case.n, 7, generator=generator), dim=1)
    return {"image": image.to(case.dtype), "text": text.to(case.dtype), "groups": groups, "other": other}


def cells_of(case: Case, given: dict[str, Tensor]) -> Cells:
    image, text, other = given["image"], given["text"], given["other"].to(case.dtype)
    return Cells(
        image=image,
        text=text,
        keys=torch.cat([text, other], 1) if case.frozen else text,
        gamma=case.gamma,
        groups=given["groups"] if case.repeated else None,
    )


def reference(case: Case, cells: Cells) -> dict[str, Tensor]:
    """float64 autograd of the dense loss, of the very same rows and sides."""
    image, text = cells.image.double().requires_grad_(), cells.text.double().requires_grad_()
    scale = torch.tensor(case.scale, dtype=torch.float64, requires_grad=True)
    products = cells.queries(slice(0, case.n)).double() @ cells.keys.double().T
    margin = (products - cells.image.double() @ cells.text.double().T).fill_diagonal_(0.0)
    number = torch.arange(case.n) if cells.groups is None else cells.groups
    equal = number[:, None] == number
    excluded = equal.clone().fill_diagonal_(False)
    scores = dense_scores(image, text, scale, margin.masked_fill(excluded, 0.0), excluded)
    scores.logits.retain_grad()
    loss = symmetric_loss(scores, "residual").mean()
    loss.backward()
    assert image.grad is not None
    assert text.grad is not None
    assert scale.grad is not None
    assert scores.logits.grad is not None
    along = (scores.logits.grad * (scores.cosine + margin)).abs().sum().detach()  # the scale's gradient cancels between cells
    negatives = (products * case.scale).masked_fill(equal, -math.inf)
    best = {"row_max": negatives.amax(1), "column_max": negatives.amax(0), "top": negatives.topk(min(4, case.n), dim=1).values}
    gradients = {"image": image.grad, "text": text.grad, "scale": torch.stack([scale.grad, along])}
    return {"loss": loss.detach(), **gradients, **{name: torch.exp(value / case.scale) for name, value in best.items()}}


def streamed(case: Case, cells: Cells) -> dict[str, Tensor]:
    """The symmetric loss and its gradients, the rows in strips as ranks would hold them."""
    scale, n = torch.tensor(case.scale), case.n
    height = n // case.strips
    strips = [slice(start, start + height) for start in range(0, n, height)]
    sums = [forward_strip(cells, scale, strip, top=4, precision=case.precision, tiles=case.tiles) for strip in strips]
    image, text = cells.image.double(), cells.text.double()
    positive = case.scale * (image * text).sum(1)
    x, y = log_odds(sums, positive)
    weight = torch.full((n,), 0.5 / n, dtype=torch.float64)
    found = []
    for strip in strips:
        logs = positive + F.softplus(x, threshold=1e9), positive + F.softplus(y, threshold=1e9)
        weights = Weights(row_logs=logs[0][strip], column_logs=logs[1], rows=weight[strip], columns=weight)
        found.append(backward_strip(cells, scale, strip, weights, precision=case.precision, tiles=case.tiles))
    pull = 0.5 / n * (torch.sigmoid(x) + torch.sigmoid(y))
    return {
        "loss": (F.softplus(x, threshold=1e9) + F.softplus(y, threshold=1e9)).mean() / 2,
        "image": case.scale * (torch.cat([f.rows for f in found]) - pull[:, None] * text),
        "text": case.scale * (torch.stack([f.columns for f in found]).sum(0) - pull[:, None] * image),
        "scale": torch.as_tensor(sum(f.along for f in found)) - (pull * positive).sum() / case.scale,
        "zeros": sum(f.zeros for f in found),
        "row_max": torch.exp(torch.cat([s.hardest_rows for s in sums])),
        "column_max": torch.exp(torch.stack([s.hardest_columns for s in sums]).amax(0)),
        "top": torch.exp(torch.cat([s.top for s in sums]) / case.scale),
    }


def log_odds(sums: list[Sums], positive: Tensor) -> tuple[Tensor, Tensor]:
    columns = torch.logsumexp(torch.stack([s.columns for s in sums]), 0)
    return torch.cat([s.rows for s in sums]) - positive, columns - positive


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error by norm; nan must meet nan."""
    if not torch.equal(found.isnan(), wanted.isnan()):
        return math.inf
    found, wanted = (t.double().nan_to_num(0.0) for t in (found, wanted))
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-300))


def run(case: Case) -> dict[str, float]:
    cells = cells_of(case, rows(case))
    wanted, found = reference(case, cells), streamed(case, cells)
    wanted["scale"], along = wanted["scale"]
    answer = {name: error(found[name], value) for name, value in wanted.items()}
    if not case.nan:
        answer["scale"] = float((found["scale"] - wanted["scale"]).abs() / along)
    return {**answer, "true_loss": float(wanted["loss"])}


def zeros() -> dict[str, int]:
    """Logits 1000 apart: most shares are far below, some far above the smallest number of fp32."""
    text = F.normalize(torch.eye(6) + 0.2 * torch.arange(6.0).repeat(6, 1), dim=1)
    cells = Cells(image=torch.eye(6), text=text, keys=text, gamma=0.0)
    found = streamed(Case(n=6, d=6, scale=1000.0, gamma=0.0), cells)
    logits = 1000 * cells.image.double() @ text.double().T
    shares = (torch.softmax(logits, 1) + torch.softmax(logits, 0)) / 12
    expected = (shares < 2.0**-150) & ~torch.eye(6, dtype=torch.bool)
    return {"found": int(found["zeros"]), "expected": int(expected.sum())}


def repeated() -> bool:
    """Whether two passes over the same rows give the same bits."""
    cells = cells_of(CASES["three strips"], rows(CASES["three strips"]))
    first, second = (streamed(CASES["three strips"], cells) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def waits() -> list[str]:
    """What would make the host wait for a GPU around the kernels themselves, whose launch the interpreter replaces."""
    case = CASES["two strips"]
    cells = cells_of(case, rows(case))
    weight = torch.full((case.n,), 0.5 / case.n, dtype=torch.float64)
    scale = torch.tensor(case.scale)
    with Waits() as seen:
        found = forward_strip(cells, scale, slice(0, case.n), top=3)
        weights = Weights(row_logs=found.rows, column_logs=found.columns, rows=weight, columns=weight)
        backward_strip(cells, scale, slice(0, case.n), weights)
    return seen.seen


def runs() -> bool:
    """Whether rows in several runs (of one row of tiles each here) answer as rows in one."""
    case = CASES["two strips"]
    cells = cells_of(case, rows(case))
    whole = streamed(case, cells)
    triton_strip.CELLS = triton_strip.SUMMED_CELLS = 1
    return all(torch.allclose(value, whole[name], rtol=1e-5, atol=1e-7) for name, value in streamed(case, cells).items())


def whole_loss(**settings: object) -> dict[str, float]:
    """``stream`` by Triton against itself in float64 by torch."""
    case = Case(n=48, d=32, repeated=6, noise=2.0)
    given = rows(case)
    rows64 = [given[name].double() for name in ("image", "text", "other")]
    settings["groups"] = given["groups"]
    answers = []
    for backend, (image, text, other) in (("safe", rows64), ("triton", [r.float() for r in rows64])):
        scale = torch.tensor(case.scale, dtype=image.dtype)
        leaves = [leaf.clone().requires_grad_() for leaf in (image, text, scale)]
        found = stream(*leaves, gamma=case.gamma, margin_text=other, top=3, backend=backend, **settings)  # type: ignore[arg-type]
        found.loss.mean().backward()
        share = found.anchors.top_share["i2t"]
        answers.append(
            [found.loss, share, *found.anchors.hardest.values(), *found.anchors.log_odds.values(), *(x.grad for x in leaves)]
        )
    names = ("loss", "share", "hardest i2t", "hardest t2i", "log odds i2t", "log odds t2i", "image", "text", "scale")
    return {name: error(b.detach(), a.detach()) for name, a, b in zip(names, *answers, strict=True)}


def main() -> None:
    torch.set_num_threads(1)
    cases = {name: run(case) for name, case in CASES.items()}
    kinds = ("live", "exclude"), ("live", "positives"), ("external", "exclude"), ("centred", "positives")
    losses = {f"{margin}, {several}": whole_loss(margin=margin, several=several) for margin, several in kinds}
    found = {"cases": cases, "zeros": zeros(), "repeated": repeated(), "losses": losses, "waits": waits(), "runs": runs()}
    json.dump({**found, "launch": launch_fails(torch.device("cpu"))}, sys.stdout)


if __name__ == "__main__":
    main()
