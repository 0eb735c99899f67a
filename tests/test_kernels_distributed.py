"""The streaming loss on three gloo processes against one: same values everywhere, each rank's own rows of the gradient, no nan lost;
and through joined rows the mean gradient of a tower's weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

from gradscope.distributed import joined, own_share, summed, world
from gradscope.kernels import blocks
from gradscope.kernels.stream import stream

COUNT, RANKS = 24, 3
GROUPS = torch.arange(COUNT) % 9
CASES: dict[str, dict[str, Any]] = {
    "plain": {"top": 3},
    "safe": {"gamma": 0.3, "backend": "safe"},
    "centred": {"gamma": 0.3, "margin": "centred", "groups": GROUPS},
    "frozen": {"gamma": 0.3, "margin": "frozen"},
    "positives": {"gamma": 0.3, "groups": GROUPS, "several": "positives"},
    "nan": {"gamma": 0.1},
}


def measured(case: str) -> dict[str, Tensor]:
    """Everything that the call answers; gradients of the whole batch, right at this process's rows."""
    draw = torch.Generator().manual_seed(4)
    image, text, other = (F.normalize(torch.randn(COUNT, 6, generator=draw, dtype=torch.float64), dim=1) for _ in range(3))
    if case == "nan":
        image[COUNT - 1] = math.nan  # of the last rank
    scale = torch.tensor(25.0, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (image, text, scale)]
    blocks.BLOCK = 5
    found = stream(*leaves, margin_text=other, **CASES[case])
    upstream = torch.linspace(0.5, 2, COUNT, dtype=torch.float64)
    (found.loss * upstream).sum().backward()
    anchors = found.anchors
    readings = {
        f"{name}.{key}": value for name in ("log_odds", "hardest", "top_share") for key, value in getattr(anchors, name).items()
    }
    gradients = {f"gradient {name}": leaf.grad for name, leaf in zip(("image", "text", "scale"), leaves, strict=True)}
    return {"loss": found.loss.detach(), "positive": anchors.positive, "zeros": found.zero_cells, **readings, **gradients}  # type: ignore[dict-item]


def tower(case: str) -> Tensor:
    """The gradient of one layer that embeds this rank's pairs, as data parallelism would average it."""
    draw = torch.Generator().manual_seed(5)
    own = own_share(COUNT)
    inputs, captions, other = (torch.randn(COUNT, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(6, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    image, text = (joined(F.normalize(x[own] @ weight, dim=1)) for x in (inputs, captions))
    stream(image, text, torch.tensor(25.0), margin_text=other, **CASES[case]).loss.mean().backward()
    assert weight.grad is not None
    return summed(weight.grad) / world()


def _process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    try:
        torch.save({case: {**measured(case), "tower": tower(case)} for case in CASES}, folder / f"{rank}.pt")
        with pytest.raises(ValueError, match="do not divide among 3 processes"):
            stream(torch.zeros(4, 2), torch.zeros(4, 2), torch.tensor(1.0))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_process, args=(folder,), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_three_processes_answer_as_one(ranks, case, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", blocks.BLOCK)
    one = {**measured(case), "tower": tower(case)}
    for rank, found in enumerate(ranks):
        own = slice(rank * COUNT // RANKS, (rank + 1) * COUNT // RANKS)
        assert set(found[case]) == set(one)
        for key, expected in one.items():
            got = found[case][key]
            if key in ("gradient image", "gradient text"):
                got, expected = got[own], expected[own]
            torch.testing.assert_close(
                got, expected, rtol=1e-10, atol=1e-13, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
            )
