"""InfoNCE: L = 1/2 [CE(s S, y) + CE(s S^t, y)], y_i = i. Source: CLIP (Radford et al., 2021); HN-CLIP, section 2."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradscope.objectives import objectives
from gradscope.objectives.objective import SoftmaxObjective
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores


@objectives.register("infonce")
@dataclass(frozen=True, kw_only=True)
class InfoNCE(SoftmaxObjective):
    """The plain contrastive objective."""

    name: str = "infonce"

    @property
    def gamma(self) -> float:
        return 0.0

    @property
    def needs_margin_text(self) -> bool:
        return False

    def scores(
        self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None, excluded: Tensor | None = None
    ) -> Scores:
        """Unit rows [N, D] twice and scale [] -> Scores; ``excluded`` [N, N] marks cells that are no negatives.

        ``margin_text`` is not looked at.
        """
        return dense_scores(image, text, scale, excluded=excluded)
