"""Rows of all ranks as one matrix, with gradient: one softmax over the pairs of all ranks.

    forward     R = [R_0; R_1; ...; R_(W-1)], an all_gather in order of rank
    backward    dL/dR_r = W * (rows of rank r of dL/dR)        no collective

Why this is exact. Every rank holds the same R, so it computes the same loss L and the same dL/dR, complete at its own rows. The
gradient over the parameters is sum_r J_r^t (dL/dR)_r, where J_r are the towers' derivatives at rank r's rows, which only rank r has.
Data parallelism averages over ranks, (1/W) sum_r, so each rank hands W times its own rows to its towers, and the average is the sum.
A parameter that enters L outside the towers (the scale) has the whole gradient on every rank, and the average leaves it as it is.

A gather without gradient would pass 1/W of this gradient, and a loss over the rank's own rows without gradient at the columns another
one altogether; neither is offered. Memory: W n (D_image + D_text) numbers a rank; sent: the same, once a step.

How it can mislead: the loss is that of all ranks, on each of them; adding it up over ranks would count it W times. A streamed loss may
leave the gradient at other ranks' rows at zero: they are not read here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradscope.distributed import gathered, joined, rank, world
from gradscope.types import Embeddings


class Joined(torch.autograd.Function):
    """[n, ...] on each rank -> [W n, ...]; see above."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.own = slice(rank() * len(rows), (rank() + 1) * len(rows))
        return gathered(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return world() * gradient[ctx.own]


def joined_embeddings(own: Embeddings) -> Embeddings:
    """The embeddings of all ranks' rows; the scales are each rank's own. On one process the same object."""
    if world() == 1:
        return own
    tokens = [None if rows is None else joined(rows) for rows in (own.image_tokens, own.text_tokens)]
    return replace(
        own,
        image=joined(own.image),
        text=joined(own.text),
        image_tokens=tokens[0],
        text_tokens=tokens[1],
        text_valid=None if own.text_valid is None else gathered(own.text_valid.byte()).bool(),
    )
