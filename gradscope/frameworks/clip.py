"""One image view, one caption view, one global objective, and the token term if it has a weight.

L = L_global + token_weight * L_token        L_global: "infonce" or "hn" in plain or residual form

``duplicates="exclude"``: captions of identical token ids (cut at the context, in the tokenizer's spelling: what the encoder sees) are
no negatives of each other, in either term and direction. They are told by their ids, not by their strings or their images.
``duplicates="positives"``: they are each other's positives, and the loss of an anchor is -log of the probability of all of them
together; streamed at any width, without the token term.
``kernel``: above a width the loss is streamed, without an [N, N] store (``gradscope.kernels``). Value and gradient are then in the
residual form, whatever ``loss_form`` says, the term has anchors in the place of scores, and duplicates are told by groups. The token
term's scores stay two [N, N] matrices at any width, and so does their mask.
How it can mislead: an anchor with fewer negatives has a lower loss; compare losses of both settings with care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradscope.frameworks import frameworks
from gradscope.kernels.choice import kernel_for
from gradscope.metrics.duplicates import identical_groups, identical_rows
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
    duplicates: str = "keep"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError where positives are asked for and something else would be computed."""
        asked = self.duplicates == "positives"
        if asked != (self.objective.several == "positives") or (asked and (self.kernel != "streaming" or self.needs_tokens)):
            raise ValueError(
                'duplicates="positives" belongs to kernel="streaming", an objective of several="positives" and no token term; give all '
                "of them or none"
            )

    @property
    def needs_tokens(self) -> bool:
        return self.token_weight > 0

    def global_term(self, scores: Scores) -> Term:
        return Term(name=self.objective.name, weight=1.0, loss=symmetric_loss(scores, self.loss_form), scores=scores)

    def excluded(self, token_ids: Tensor | None) -> Tensor | None:
        """[N, L] -> bool [N, N], the cells that are no negatives; None with "keep"."""
        if self.duplicates == "keep":
            return None
        assert token_ids is not None
        return identical_rows(token_ids)

    def streamed_term(self, embeddings: Embeddings, margin_text: Tensor | None, token_ids: Tensor | None, top: int) -> Term:
        """The global term without cells; ``top``: of how many hardest negatives the share is read."""
        groups = None
        if self.duplicates != "keep":
            assert token_ids is not None
            groups = identical_groups(token_ids)
        found = self.objective.streamed(embeddings.image, embeddings.text, embeddings.scale, margin_text, groups, top)
        return Term(
            name=self.objective.name,
            weight=1.0,
            loss=found.loss,
            scores=None,
            anchors=found.anchors,
            groups=groups,
            zero_cells=found.zero_cells,
        )

    def __call__(
        self, embeddings: Embeddings, margin_text: Tensor | None = None, token_ids: Tensor | None = None, *, top: int = 0
    ) -> tuple[Term, ...]:
        """Embeddings of one batch -> weighted terms, the global one first. ``token_ids`` [N, L] tell duplicates to be excluded.

        ``top``: where the softmax is streamed, also read the share of an anchor's so many hardest negatives.
        """
        streams = kernel_for(len(embeddings.text), self.kernel, embeddings.text.device) == "streaming"
        excluded = None if streams and not self.needs_tokens else self.excluded(token_ids)
        if streams:
            terms = [self.streamed_term(embeddings, margin_text, token_ids, top)]
        else:
            scores = self.objective.scores(embeddings.image, embeddings.text, embeddings.scale, margin_text, excluded)
            terms = [self.global_term(scores)]
        if self.needs_tokens:
            assert embeddings.image_tokens is not None
            assert embeddings.text_tokens is not None
            assert embeddings.text_valid is not None
            assert embeddings.token_scale is not None
            a, b = token_scores(embeddings.image_tokens, embeddings.text_tokens, embeddings.text_valid)
            loss = token_loss(a, b, embeddings.token_scale, excluded)
            terms.append(Term(name="token_interaction", weight=self.token_weight, loss=loss, scores=None))
        return tuple(terms)


def total_loss(terms: Sequence[Term]) -> Tensor:
    """Sum of weight times mean over anchors: the one place where a loss is reduced. []"""
    return torch.stack([term.weight * term.loss.mean() for term in terms]).sum()
