"""InfoNCE: L = 1/2 [CE(s S, y) + CE(s S^t, y)], y_i = i. Source: CLIP (Radford et al., 2021); HN-CLIP, section 2."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradscope.kernels.stream import Streamed, stream
from gradscope.objectives import objectives
from gradscope.objectives.objective import SoftmaxObjective
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores


@objectives.register("infonce")
@dataclass(frozen=True, kw_only=True)
class InfoNCE(SoftmaxObjective):
    """The plain contrastive objective."""

    name: str = "infonce"
    several: str = "exclude"

    @property
    def gamma(self) -> float:
        return 0.0

    @property
    def needs_margin_text(self) -> bool:
        return False

    def scores(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        margin_text: Tensor | None = None,
        excluded: Tensor | None = None,
        cosine: Tensor | None = None,
    ) -> Scores:
        """Unit rows [N, D] twice and scale [] -> Scores; ``excluded`` [N, N] marks cells that are no negatives.

        ``cosine``: see ``dense_scores``. ``margin_text`` is not looked at.
        """
        return dense_scores(image, text, scale, excluded=excluded, cosine=cosine)

    def streamed(
        self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None, groups: Tensor | None = None, top: int = 0
    ) -> Streamed:
        """The loss in the residual form at any width, without the cells: see ``gradscope.kernels.stream``.

        ``groups`` int64 [N]: captions of equal number are to each other what ``several`` says: "exclude" (no negatives) or
        "positives". ``top``: of how many negatives shares are read.
        """
        return stream(image, text, scale, groups=groups, several=self.several, top=top)

    def margin_mean(self, text: Tensor, margin_text: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        """There is no margin: [] float64, nan where the rows are."""
        return 0.0 * text.double().sum()
