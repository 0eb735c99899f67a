"""The passes of one training step through towers, loss and back, whatever forms its softmaxes. Gradients add up in the parameters.

    narrow    each micro-batch is a softmax of its own: embed; terms; total; backward
    cached    all micro-batches are one softmax (see ``gradscope.cached``): embed without a graph; terms; total; backward; replay
On several ranks the rows of all are joined in between. The probe watches a backward where it is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.cached import FirstPass, first_pass, joined
from gradscope.fixed_captions import FixedCaptions
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.joining import joined_embeddings
from gradscope.parallel import Replica
from gradscope.step_reader import StepReader
from gradscope.step_row import StepLosses
from gradscope.types import Batch, Embeddings, Term

#: What the towers compute in, by ``train.precision``; None: as their weights are.
TOWERS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Embed:
    """The towers under the chosen precision; embeddings are fp32."""

    towers: Replica
    precision: str
    tokens: bool = False

    def __call__(self, batch: Batch, known: Mapping[str, Tensor] = {}) -> Embeddings:
        dtype = TOWERS[self.precision]
        with torch.autocast(self.towers.encoder.device.type, dtype) if dtype else nullcontext():
            return self.towers.embed(batch, tokens=self.tokens, known=known)


@dataclass(frozen=True, kw_only=True)
class StepPass:
    """Takes a step of a run through its passes. ``resting``: the towers of ``cached.resting_towers``."""

    embed: Embed
    framework: Clip
    fixed: FixedCaptions
    reader: StepReader | None
    scaler: torch.amp.GradScaler
    resting: Sequence[str]

    def narrow(self, batches: Sequence[Batch], everyone: Sequence[Batch]) -> StepLosses:
        """``batches``: this rank's rows of each micro-batch, ``everyone``: those of all ranks. Returns what the softmaxes came to."""
        found = StepLosses()
        for batch, whole in zip(batches, everyone, strict=True):
            with nullcontext() if batch is batches[-1] else self.embed.towers.quiet():
                self._backward(whole, joined_embeddings(self.embed(batch)), found)
        return found

    def cached(self, batches: Sequence[Batch], everyone: Sequence[Batch]) -> tuple[StepLosses, Tensor]:
        """Likewise, with how far the replayed rows were from the first pass's (see ``cached.check_drift``)."""
        found, towers = StepLosses(), self.embed.towers
        scale, token_scale = towers.encoder.scale(), towers.encoder.token_scale()
        passed = first_pass(self.embed, batches, scale, token_scale, towers.quiet, self.resting)
        drift = self._backward(joined(everyone), joined_embeddings(passed.embeddings), found, passed)
        assert drift is not None
        return found, drift

    def _backward(self, whole: Batch, embeddings: Embeddings, found: StepLosses, passed: FirstPass | None = None) -> Tensor | None:
        """The loss of one softmax, and back to the parameters."""
        looks = self.reader if self.reader and self.reader.due else None
        terms = self.framework(embeddings, self.fixed.margin_text(whole), whole.texts["full"], top=looks.top if looks else 0)
        total = total_loss(terms)
        with self._watched(looks, whole, embeddings, terms, replayed=passed is not None):
            self.scaler.scale(total).backward()
            drift = passed.replay(self.reader.replaying if self.reader else None) if passed else None
        found.add(total, terms)
        return drift

    def _watched(
        self, looks: StepReader | None, whole: Batch, embeddings: Embeddings, terms: Sequence[Term], *, replayed: bool
    ) -> AbstractContextManager[Any]:
        if looks is None:
            return nullcontext()
        return looks.watching(
            whole,
            embeddings,
            terms,
            initial_text=self.fixed.initial_text(whole),
            margin_text=self.fixed.margin_text(whole),
            loss_scale=self.scaler.get_scale(),
            replayed=replayed,
        )
