"""The nouns of gradscope, with their shapes.

Shape letters, used in every file:
    B  rows of a batch            N, M  rows and columns of a score matrix (N = M = width on one process)
    D  joint embedding width      L     text tokens             P  image patches           W  hidden width

Words with one meaning each:
    cosine   inner product of two unit rows, before the scale       logits   scale * (cosine + margin)
    scale    the multiplier after exp                               margin   the additive term only
    width    the number of candidates in one softmax                residual 1 - p_positive of one row
    step     the k-th optimizer update, counted from 1; its readings are taken at the parameters BEFORE that update

This file imports torch for annotations only, so that figures and reports can use the nouns without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

#: In the stamps of readings whose softmax was streamed: quantities that need its cells are left out.
STREAMED = "streamed, no cells"
#: The quantities that need them whole.
NEED_CELLS = ("concentration", "false_negatives", "precision")

#: The two directions of a score matrix whose rows are images and whose columns are captions.
DIRECTIONS = ("i2t", "t2i")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a picture with a caption of its own.

    ``box`` is (left, top, right, bottom) in pixels of the whole picture as it is shown (upright); ``image`` is the path of a stored
    crop. Either may be missing.
    """

    caption: str
    box: tuple[float, float, float, float] | None = None
    image: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One image and its captions, before any decoding. ``image`` is a path, or None for a captions-only data set."""

    id: str
    image: str | None
    captions: tuple[str, ...]  # dense caption first
    segments: tuple[Segment, ...] = ()
    aux: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors of B records.

    ``images`` and ``texts`` are keyed by view name (``"full"`` is always there). ``lengths`` counts tokens (start and end
    included) BEFORE truncation to the context, so ``lengths > L`` marks the truncated captions.
    """

    ids: tuple[str, ...]
    images: Mapping[str, Tensor]  # float32 [B, 3, H, W]
    texts: Mapping[str, Tensor]  # int64 [B, L]
    lengths: Tensor  # int64 [B]
    captions: tuple[str, ...]  # the strings of the "full" text view

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Embeddings:
    """What the towers made of a batch: unit rows in fp32, and the scale after exp.

    ``image_tokens`` [B, P, D] and ``text_tokens`` [B, L, D] are unit rows too and exist only when a term asked for them;
    ``text_valid`` [B, L] marks words and end-of-text (start and padding excluded).
    """

    image: Tensor  # [B, D]
    text: Tensor  # [B, D]
    scale: Tensor  # []
    image_tokens: Tensor | None = None
    text_tokens: Tensor | None = None
    text_valid: Tensor | None = None
    token_scale: Tensor | None = None  # [] the token term has a scale of its own


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One softmax problem, dense: rows are images, columns are captions, the positive of row i is column i.

    ``logits = scale * (cosine + margin)``; ``margin`` is None where the objective has none. Cells of ``excluded`` are no negatives:
    their logit is -inf and their margin 0, in both directions.
    """

    cosine: Tensor  # [N, N]
    margin: Tensor | None  # [N, N], zero diagonal
    logits: Tensor  # [N, N]
    scale: Tensor  # []
    excluded: Tensor | None = None  # bool [N, N], symmetric, False on the diagonal; None: every other caption is a negative


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The softmaxes of one batch, one per anchor and direction ("i2t", "t2i"), each reduced over its negatives: all [N] float64.

    From the log odds x follow the residual sigmoid(x), the true loss softplus(x) and what is saturated, at any width and without the
    [N, N] cells. ``hardest`` is the largest cosine + margin among an anchor's negatives, -inf where it has none. The last two say how
    the residual is spread over the negatives; what was not asked for, or cannot be had without the cells, is not in them.
    """

    positive: Tensor  # [N] cosine of the positive pair
    log_odds: Mapping[str, Tensor]  # log(probability of all negatives / probability of the positive)
    hardest: Mapping[str, Tensor]
    top_share: Mapping[str, Tensor] = field(default_factory=dict)  # [K]: share of an anchor's residual on its 1 ... K hardest, mean
    effective: Mapping[str, Tensor] = field(default_factory=dict)  # exp(entropy) of the negatives' shares: 1 ... width - 1


@dataclass(frozen=True, kw_only=True)
class Term:
    """One weighted part of the total loss. ``loss`` is per anchor; it is averaged once, when the total is formed.

    A softmax that was streamed has no cells: its ``scores`` are None and it has ``anchors`` instead. ``groups``: there, captions of
    equal number are no negatives of each other; None where all are. ``zero_cells`` counts the negatives' cells of its logit gradient
    that are exactly 0, once the backward has run.
    """

    name: str
    weight: float
    loss: Tensor  # [N]
    scores: Scores | None
    anchors: Anchors | None = None
    groups: Tensor | None = None  # int64 [N]
    zero_cells: Tensor | None = None  # int64 []


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One measured number (or a short list), with everything needed to know what it means.

    ``value`` may be a 0-D/1-D tensor until the probe moves all readings of a step to the host in one transfer.
    ``term`` names the objective it belongs to ("infonce", "hn", "pair" for a comparison of the two, "" for neither).
    ``stamps`` say what was measured, e.g. ``"micro-batch 1/8; width 16; fp32; unscaled"``.
    """

    quantity: str
    key: str
    term: str
    value: Tensor | float | list[float]
    unit: str
    stamps: str = ""


@dataclass(frozen=True, kw_only=True)
class Head:
    """One objective on the measured batch: its scores, and the gradient of its batch-mean loss at the same parameters.

    Gradients are those of ``loss`` itself: not divided by the number of micro-batches, and divided by the loss scale where
    mixed precision multiplied it. ``param_grads`` follows ``Step.parameters``; None where a parameter was not reached.

    At wide widths the softmax is streamed and its cells never exist: then ``scores`` and ``logit_grad`` are None and
    ``direction_grads`` is empty, and ``anchors`` is what is known of it. ``direction_grads`` is empty too where no quantity needs it.
    """

    name: str  # "infonce" or "hn"
    gamma: float
    trained: bool
    scores: Scores | None
    anchors: Anchors
    loss: Tensor  # [] fp32, batch mean over anchors and directions, as training computes it
    logit_grad: Tensor | None  # [N, N]
    direction_grads: Mapping[str, Tensor]  # "i2t"/"t2i" -> [N, N], anchors in rows: that direction's part of the logit gradient
    image_grad: Tensor | None  # [N, D]; None of an objective that is not trained where all quantities are of the tier "loss"
    text_grad: Tensor | None  # [N, D]
    param_grads: Sequence[Tensor | None] | None  # None: not measured (the probe's price tier leaves it out)
    param_factor: Tensor | float = 1.0  # what ``param_grads`` must still be multiplied by, so that ``.grad`` need not be copied
    margin_mean: Tensor | None = None  # [] of its margin over the negatives, where no cells are there to take it from
    zero_cells: Tensor | None = None  # int64 []: negatives' cells of the logit gradient that are exactly 0, where it was streamed
    directions: tuple[str, ...] = DIRECTIONS  # those that the loss averages over; text encoders often train one


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a quantity may look at, nothing else. All tensors are detached.

    Fields of a later phase are None in an earlier one: ``accumulated`` (the averaged gradient of all micro-batches, before
    clipping) and ``micro_losses`` exist after the last backward; ``before`` (the parameters ahead of the update) after it, if a
    quantity of the probe needs it. In a loop that is not ours the captions may be unknown: then ``captions``, ``token_ids`` and
    ``lengths`` are None, and ``structural_rows`` is empty.
    """

    index: int
    samples: int
    embeddings: Embeddings
    captions: tuple[str, ...] | None  # the strings of the N captions
    token_ids: Tensor | None  # int64 [N, L], as the text tower saw them
    lengths: Tensor | None  # int64 [N], tokens BEFORE truncation
    initial_text: Tensor | None  # [N, D] the initial encoder's rows of the same captions
    heads: Mapping[str, Head]
    names: Sequence[str]
    parameters: Sequence[Parameter]
    towers: Sequence[str]  # of each parameter: "image", "text", "shared" (both) or "scale"
    structural_rows: Mapping[str, Tensor]  # parameter name -> bool [rows]: rows this batch cannot reach
    scale_max: float | None
    optimizer: Optimizer | None = None
    passed: Mapping[str, Tensor] = field(default_factory=dict)  # "image", "text": the gradient that really passed by, unscaled
    rows: slice = field(
        default_factory=lambda: slice(None)
    )  # which rows of the embeddings are this rank's, and so have a gradient in ``passed``
    accumulated: Sequence[Tensor | None] | None = None  # on this rank: its shard, where parameters are sharded
    unscale: Tensor | float = 1.0  # what ``accumulated`` must still be multiplied by (a fused optimizer unscales in its own step)
    norm_before_clipping: Tensor | None = None  # [] where ``accumulated`` may have been clipped already (a loop that is not ours)
    sharded: bool = False  # sums over ``accumulated`` must be added over ranks
    micro_losses: Tensor | None = None  # [micro-batches]
    before: Sequence[Tensor] | None = None
    groups: Tensor | None = None  # int64 [N]; of a streamed softmax: equal numbers are no negatives of each other
    own_loss: bool = False  # whether the loop trains with gradscope's own loss, so in the form that the heads have
    frozen_entries: int = 0  # entries of parameters that do not train, and so are not in ``parameters``
    memo: dict[Any, Any] = field(default_factory=dict)  # what several quantities share: ``metrics.gradients.statistics``
