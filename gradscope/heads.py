"""The objectives at the embeddings of one batch: what they say there, and their gradient over all parameters.

An objective is evaluated on copies of the embeddings, in fp32 or wider, so that no graph of the loop is touched; its gradient over the
parameters is what the towers make of its gradient at the embeddings, through the loop's own graph (retained, nothing accumulated).
Above a width (``kernel``) its softmax is streamed: the same loss and gradients in the residual form, without any [N, N] tensor, so that
its cells cannot be looked at one by one. A loss of one direction always has its cells.
How it can mislead: it is the objective as gradscope computes it; a loop that forms its logits in bf16 trains a rounded one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.distributed import completed, world
from gradscope.frameworks.clip import total_loss
from gradscope.kernels.choice import kernel_for
from gradscope.metrics.gradients import agreement_and_factor
from gradscope.metrics.softmax import dense_anchors, per_direction
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import LOSS_FORMS
from gradscope.types import DIRECTIONS, Anchors, Embeddings, Head, Scores, Term

Objective = InfoNCE | HN

#: From this cosine on, the gradient that passed by at the embeddings is the objective's and a factor.
SAME = 0.999

#: What is watched while the backward of the measured batch runs.
ROWS = ("image", "text")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What each objective's gradient looks like at the embeddings: the part of a ``Head`` known before the towers' backward."""

    scores: Scores | None
    anchors: Anchors
    loss: Tensor
    logit_grad: Tensor | None
    image_grad: Tensor | None  # None where it is not looked at: ``Heads.gradients``
    text_grad: Tensor | None
    scale_grad: Tensor | None
    direction_grads: Mapping[str, Tensor] = field(default_factory=dict)
    margin_mean: Tensor | None = None  # where it was streamed
    zero_cells: Tensor | None = None  # likewise

    def at_rows(self) -> dict[str, Tensor]:
        """The gradients at the rows by ``ROWS``, where they were formed."""
        assert self.image_grad is not None
        assert self.text_grad is not None
        return {"image": self.image_grad, "text": self.text_grad}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is known of the measured batch beside its embeddings; None where the loop does not say.

    ``initial_text`` [N, D]: the initial encoder's caption rows, to measure the drift of G against. ``margin_text`` [N, D0]: the rows
    that a frozen or external margin is made of. ``excluded`` [N, N]: cells that are no negatives; ``groups`` [N]: the same as equal
    numbers, where the softmax is streamed. ``cosine`` [N, N]: of the rows of both towers, where it was formed already. ``candidates``:
    the embeddings of all ranks, where the softmax is over those; then ``rows`` says which of them are this rank's.
    """

    captions: tuple[str, ...] | None = None
    token_ids: Tensor | None = None
    lengths: Tensor | None = None
    initial_text: Tensor | None = None
    margin_text: Tensor | None = None
    excluded: Tensor | None = None
    groups: Tensor | None = None
    cosine: Tensor | None = None
    candidates: Embeddings | None = None
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(kw_only=True)
class Heads:
    """The objectives that are read, and how the loop computes its loss.

    Args:
        objectives: "infonce" and "hn", the second with the gamma and margin it is to be read at.
        trained: the name of the objective that is minimised; "" if that is neither of them, or not known.
        directions: those the loss averages over.
        loss_form: how training computes its loss; the readings use the same.
        half: whether the towers run in fp16, so that a second backward needs a factor of its own.
        normalise: whether the embeddings are not unit rows yet, so that the loss divides them by their length.
        kernel: "dense", "streaming" or "auto", by width; see ``gradscope.kernels.choice``.
        top: how many of an anchor's hardest negatives a streamed softmax is to read the share of; 0 reads none.
        by_rank: whether each rank has a softmax of its own rows only; such a softmax always has its cells.
        by_direction: whether a quantity needs each direction's own part of the logit gradient.
        gradients: whether a quantity looks at the gradient of objectives that are not trained; without, only their values are formed.
    """

    objectives: dict[str, Objective]
    trained: str
    directions: tuple[str, ...] = DIRECTIONS
    loss_form: str = "plain"
    half: bool = False
    normalise: bool = False
    kernel: str = "auto"
    top: int = 0
    by_rank: bool = False
    by_direction: bool = True
    gradients: bool = True

    def streams(self, width: int, device: torch.device) -> bool:
        """Whether a softmax of this width is streamed, so that heads have no cells."""
        own = self.by_rank and world() > 1  # the kernel would take the ranks' rows for one batch
        return len(self.directions) == 2 and not own and kernel_for(width, self.kernel, device) == "streaming"

    def evaluate(self, name: str, embeddings: Embeddings, observed: Observed) -> Watched:
        """An objective on copies of the embeddings: its loss and, if they are looked at, its gradients there. Touches no graph but its
        own."""
        with torch.enable_grad():
            image, text, scale = (leaf(t) for t in (embeddings.image, embeddings.text, embeddings.scale))
            rows = (self._unit(image), self._unit(text))
            if not self.streams(len(text), text.device):
                return self._dense(name, (image, text), rows, scale, observed)
            objective = self.objectives[name]
            streamed = objective.streamed(*rows, scale, observed.margin_text, observed.groups, top=self.top)
            loss = streamed.loss.mean()
            mean = objective.margin_mean(rows[1].detach(), observed.margin_text, observed.groups)
            if not self._wanted(name):
                return replace(_watched(loss, None, [], streamed.anchors), margin_mean=mean)
            *by_rows, by_scale = torch.autograd.grad(loss, (image, text, scale))
        found = _watched(loss, None, [*map(completed, by_rows), by_scale], streamed.anchors)
        return replace(found, margin_mean=mean, zero_cells=streamed.zero_cells)

    def _wanted(self, name: str) -> bool:
        """Whether the gradients of an objective are."""
        return self.gradients or name == self.trained

    def _dense(
        self, name: str, leaves: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], scale: Tensor, observed: Observed
    ) -> Watched:
        """With the cells. The gradients at the rows are formed from the one at the logits, so that a product that is known is not
        formed again."""
        image, text = (side.detach() for side in rows)
        scores = self.objectives[name].scores(image, text, scale.detach(), observed.margin_text, observed.excluded, observed.cosine)
        if not self._wanted(name):
            return replace(_watched(self._loss(scores), None, [], dense_anchors(scores, self.directions)), scores=scores)
        loss, parts = self._by_direction(scores)
        logit_grad = _added(parts)
        pulled = scores.scale * logit_grad
        at_rows = [pulled @ text, pulled.T @ image]
        if self.normalise:
            at_rows = list(torch.autograd.grad(rows, leaves, at_rows))
        raised = scores.cosine if scores.margin is None else scores.cosine + scores.margin
        gradients = [*at_rows, torch.dot(logit_grad.flatten(), raised.flatten())]
        parts = parts if self.by_direction else {}
        found = _watched(loss, logit_grad, gradients, dense_anchors(scores, self.directions))
        return replace(found, scores=scores, direction_grads=parts)

    def _loss(self, scores: Scores) -> Tensor:
        """The batch-mean loss []."""
        matrices = per_direction(scores.logits, self.directions).values()
        rows = [LOSS_FORMS[self.loss_form](matrix.contiguous()) for matrix in matrices]
        return (torch.stack(rows).sum(dim=0) / len(rows)).mean()

    def _by_direction(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch-mean loss [], and what each direction adds to its gradient at the logits, [N, N] with anchors in rows."""
        rows, parts = [], {}
        for direction, logits in per_direction(scores.logits, self.directions).items():
            with torch.enable_grad():
                copy = logits.detach().contiguous().requires_grad_()
                loss = LOSS_FORMS[self.loss_form](copy)
                parts[direction] = torch.autograd.grad(loss.mean() / len(self.directions), copy)[0]
            rows.append(loss.detach())
        return (torch.stack(rows).sum(dim=0) / len(rows)).mean(), parts

    def head(self, name: str, watched: Watched, param_grads: Sequence[Tensor | None] | None, factor: Tensor | float) -> Head:
        """All of an objective that quantities look at. ``factor``: what ``param_grads`` must still be multiplied by."""
        return Head(
            name=name,
            gamma=self.objectives[name].gamma,
            trained=name == self.trained,
            scores=watched.scores,
            anchors=watched.anchors,
            loss=watched.loss,
            logit_grad=watched.logit_grad,
            direction_grads=watched.direction_grads,
            image_grad=watched.image_grad,
            text_grad=watched.text_grad,
            param_grads=param_grads,
            param_factor=factor,
            margin_mean=watched.margin_mean,
            zero_cells=watched.zero_cells,
            directions=self.directions,
        )

    def through_towers(
        self, embeddings: Embeddings, watched: Watched, parameters: Sequence[Tensor], rows: slice, *, replayed: bool
    ) -> list[Tensor | None]:
        """The gradient over all parameters that belongs to a gradient at the embeddings; ``.grad`` is left alone.

        ``rows`` of that gradient are those of ``embeddings``. It passes fp16 towers under a factor of its own, since the loss scale
        suits the trained objective's size only. ``replayed``: the towers come later, in pieces; the scale's part alone.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        if not replayed:
            own = watched.at_rows()
            pairs += [(embeddings.image, own["image"][rows]), (embeddings.text, own["text"][rows])]
        if watched.scale_grad is not None:
            pairs.append((embeddings.scale, watched.scale_grad))
        live = [(output, gradient.to(output.dtype)) for output, gradient in pairs if output.requires_grad]  # a frozen tower has none
        outputs, grads = [output for output, _ in live], [gradient for _, gradient in live]
        if not outputs:
            return [None] * len(parameters)
        if not self.half:
            return list(torch.autograd.grad(outputs, parameters, grads, retain_graph=True, allow_unused=True))
        factor = _fp16_factor(grads)
        scaled = [gradient * factor for gradient in grads]
        found = torch.autograd.grad(outputs, parameters, scaled, retain_graph=True, allow_unused=True)
        return [None if gradient is None else gradient / factor for gradient in found]

    def grad_factor(self, watched: Watched, passed: Mapping[str, Tensor], observed: Observed) -> Tensor | float:
        """1 / what the loop multiplied the trained objective's mean loss by, as seen in the gradient that passed by.

        Loops divide the loss of each of k micro-batches by k, which shows at the embeddings as a common factor: it is taken out where
        the direction there agrees, i.e. where nothing else is trained beside the objective. Of a softmax over all ranks, the gradient
        at this rank's rows is W times that of the average which ``.grad`` then holds.
        """
        own = watched.at_rows()
        agreement, factor = agreement_and_factor(passed, {name: own[name][observed.rows] for name in passed})
        ranks = 1 if observed.candidates is None else world()
        return 1.0 / torch.where(agreement > SAME, factor / ranks, torch.ones_like(factor)).float()

    def unit(self, embeddings: Embeddings) -> Embeddings:
        """The embeddings as the loss compares them: unit rows outside every graph, without tokens."""
        return replace(
            embeddings,
            image=self._unit(leaf(embeddings.image)).detach(),
            text=self._unit(leaf(embeddings.text)).detach(),
            scale=leaf(embeddings.scale).detach(),
            image_tokens=None,
            text_tokens=None,
        )

    def _unit(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=1) if self.normalise else rows

    def of_training(self, term: Term, text: Tensor, observed: Observed, kept: Mapping[str, Tensor], unscale: Tensor | float) -> Watched:
        """The trained objective from what its own backward passed by; ``text`` [N, D] are its caption rows."""
        loss = total_loss([term])
        gradients = [kept[name] * unscale for name in ROWS]
        if term.scores is None:
            assert term.anchors is not None
            mean = self.objectives[term.name].margin_mean(text.detach(), observed.margin_text, observed.groups)
            return replace(_watched(loss, None, gradients, term.anchors), margin_mean=mean, zero_cells=term.zero_cells)
        scores = _detached(term.scores)
        parts = self._by_direction(scores)[1] if self.by_direction else {}
        found = _watched(loss, kept["logits"] * unscale, gradients, dense_anchors(scores, self.directions))
        return replace(found, scores=scores, direction_grads=parts)


def _watched(loss: Tensor, logit_grad: Tensor | None, gradients: Sequence[Tensor], anchors: Anchors) -> Watched:
    """``gradients``: none, or at the image rows, the text rows and, unless it is left to the loop, the scale."""
    return Watched(
        scores=None,
        anchors=anchors,
        loss=loss.detach(),
        logit_grad=logit_grad,
        image_grad=gradients[0] if gradients else None,
        text_grad=gradients[1] if gradients else None,
        scale_grad=gradients[2] if len(gradients) > 2 else None,
    )


def _added(parts: Mapping[str, Tensor]) -> Tensor:
    """What the directions add to the gradient at the logits, [N, N] with images in rows."""
    if "t2i" not in parts:
        return parts["i2t"]
    total = parts["t2i"].T.contiguous()  # a strided sum takes five times as long
    return total.add_(parts["i2t"]) if "i2t" in parts else total


def leaf(tensor: Tensor) -> Tensor:
    """A copy outside every graph, in fp32 or wider, that takes a gradient."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype.itemsize < 4 else tensor).requires_grad_()


def _detached(scores: Scores) -> Scores:
    margin = None if scores.margin is None else scores.margin.detach()
    return replace(scores, cosine=scores.cosine.detach(), margin=margin, logits=scores.logits.detach(), scale=scores.scale.detach())


def _fp16_factor(gradients: Sequence[Tensor]) -> Tensor:
    """The power of two that brings the largest entry to between 8 and 16: far from both ends of fp16. [] fp32."""
    largest = torch.stack([g.abs().max() for g in gradients]).max().clamp(min=1e-30)
    return torch.exp2(4 - torch.frexp(largest).exponent.float())
