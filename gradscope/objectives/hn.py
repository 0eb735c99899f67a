"""HN: InfoNCE in which the logit of each negative is raised by s * gamma * (similarity of its caption to the anchor's).

    L = 1/2 [CE(s (S + gamma Gbar), y) + CE(s (S + gamma Gbar)^t, y)],  G = stopgrad(T T^t), Gbar = G with zero diagonal

Source: HN-CLIP, section 2. Inference is unchanged: no embedding depends on gamma.
How it can mislead: see ``gradscope.objectives.margin``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradscope.kernels.cells import caption_mean
from gradscope.kernels.stream import Streamed, stream
from gradscope.objectives import objectives
from gradscope.objectives.margin import margin_matrix
from gradscope.objectives.objective import SoftmaxObjective
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores


@objectives.register("hn")
@dataclass(frozen=True, kw_only=True)
class HN(SoftmaxObjective):
    """Hard negatives by caption similarity. With gamma 0 it equals ``InfoNCE``."""

    gamma: float = 0.5
    margin: str = "live"
    name: str = "hn"
    several: str = "exclude"

    @property
    def needs_margin_text(self) -> bool:
        return self.margin in ("frozen", "external")

    def scores(
        self,
        image: Tensor,
        text: Tensor,
        scale: Tensor,
        margin_text: Tensor | None = None,
        excluded: Tensor | None = None,
        cosine: Tensor | None = None,
    ) -> Scores:
        """Unit rows [N, D] twice, scale [], and for a frozen or external margin that encoder's rows of the captions -> Scores.

        ``excluded`` [N, N] marks cells that are no negatives: they have no margin, and no part in its mean. ``cosine``: see
        ``dense_scores``.
        """
        margin = margin_matrix(self.margin, self.gamma, text, margin_text, excluded)
        return dense_scores(image, text, scale, margin, excluded, cosine)

    def streamed(
        self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None, groups: Tensor | None = None, top: int = 0
    ) -> Streamed:
        """The loss in the residual form at any width, without the cells: see ``gradscope.kernels.stream``.

        ``groups`` int64 [N]: captions of equal number are to each other what ``several`` says: "exclude" (no negatives) or
        "positives". ``top``: of how many negatives shares are read.
        """
        return stream(
            image,
            text,
            scale,
            gamma=self.gamma,
            margin=self.margin,
            margin_text=margin_text,
            groups=groups,
            several=self.several,
            top=top,
        )

    def margin_mean(self, text: Tensor, margin_text: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
        """Mean of the margin over the negatives, without the matrix: [] float64."""
        if self.margin == "centred":
            return 0.0 * text.double().sum()
        rows = margin_text if self.needs_margin_text else text
        assert rows is not None
        return self.gamma * caption_mean(rows, groups)
