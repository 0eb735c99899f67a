"""One image view, one caption view, one global objective, and the token term if it has a weight.

L = L_global + token_weight * L_token        L_global: "infonce" or "hn" in plain or residual form
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradscope.frameworks import frameworks
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import symmetric_loss
from gradscope.objectives.token_interaction import token_loss, token_scores
from gradscope.types import Embeddings, Scores, Term


@frameworks.register("clip")
@dataclass(frozen=True, kw_only=True)
class Clip:
    """The framework most people fine-tune with."""

    objective: InfoNCE | HN = field(default_factory=InfoNCE)
    loss_form: str = "plain"
    token_weight: float = 0.0

    @property
    def needs_tokens(self) -> bool:
        return self.token_weight > 0

    def global_term(self, scores: Scores) -> Term:
        return Term(name=self.objective.name, weight=1.0, loss=symmetric_loss(scores, self.loss_form), scores=scores)

    def __call__(self, embeddings: Embeddings, margin_text: Tensor | None = None) -> tuple[Term, ...]:
        """Embeddings of one batch -> weighted terms, the global one first."""
        scores = self.objective.scores(embeddings.image, embeddings.text, embeddings.scale, margin_text)
        terms = [self.global_term(scores)]
        if self.needs_tokens:
            assert embeddings.image_tokens is not None
            assert embeddings.text_tokens is not None
            assert embeddings.text_valid is not None
            assert embeddings.token_scale is not None
            a, b = token_scores(embeddings.image_tokens, embeddings.text_tokens, embeddings.text_valid)
            loss = token_loss(a, b, embeddings.token_scale)
            terms.append(Term(name="token_interaction", weight=self.token_weight, loss=loss, scores=None))
        return tuple(terms)


def total_loss(terms: Sequence[Term]) -> Tensor:
    """Sum of weight times mean over anchors: the one place where a loss is reduced. []"""
    return torch.stack([term.weight * term.loss.mean() for term in terms]).sum()
