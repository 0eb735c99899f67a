"""Token outputs of both towers: patches [B, P, .] and words [B, L, .], ahead of the final norm, behind it, and in the joint space.

    before      states that leave the last block                                      [B, T, W]
    after       the same behind the last norm that acts on each token                 [B, T, W]
    projected   what the tower's own head makes of one token alone                    [B, T, D]

With class-token and average pooling ``projected`` is the projection of ``after``, and pooling it gives the embedding back (average
pooling whose norm comes after it pools ``before`` instead). A head that attends (SigLIP, CoCa) has no projection per patch; a token
alone is all that its attention can look at, so ``projected`` is the path through its values. That is a choice, made in MaskCLIP too.
A post-norm text tower (BERT and its like) ends in a norm inside its last block: there ``before`` equals ``after``.

Tokens that stand for the whole picture or text (class tokens, registers) are kept apart as ``lead``, in the same three forms.

One forward pass per tower: a forward hook keeps the states on the way, and is removed even when the tower raises. The hook sits
on a module that holds the blocks or follows them, so that activation checkpointing, which runs blocks twice, cannot fire it twice.

How it can mislead: the states behind end-of-text are real numbers too; mask them with ``DualEncoder.text_valid``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Names under which Hugging Face encoders keep a norm of their own behind the blocks (T5, M2M-100).
FINAL_NORMS = ("final_layer_norm", "layer_norm")


@dataclass(frozen=True, kw_only=True)
class TokenStates:
    """Tokens in three forms, rows not normalised."""

    before: Tensor  # [B, T, W]
    after: Tensor  # [B, T, W]
    projected: Tensor  # [B, T, D]


@dataclass(frozen=True, kw_only=True)
class TowerTokens:
    """What one forward pass of a tower gave: ``pooled`` [B, D] as the model returned it, its tokens, and the tokens kept apart."""

    pooled: Tensor
    tokens: TokenStates
    lead: TokenStates | None


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """How the tokens of one family are read: where the hook sits, and what to make of that module's input and output."""

    watched: nn.Module
    states: Callable[[Any, Any], tuple[Tensor, Tensor]]  # (input, output) -> (before, after)
    alone: Callable[[Tensor, Tensor], Tensor]  # (before, after) -> projected
    first: int = 0  # tokens at the front that are kept apart
    last: int = 0  # and at the back

    def read(self, run: Callable[[], Tensor]) -> TowerTokens:
        with _passing(self.watched) as seen:
            pooled = run()
        before, after = self.states(*seen[0])
        everything = TokenStates(before=before, after=after, projected=self.alone(before, after))
        stop = before.shape[1] - self.last
        lead = slice(0, self.first) if self.first else slice(stop, None)
        return TowerTokens(
            pooled=pooled,
            tokens=_part(everything, slice(self.first, stop)),
            lead=_part(everything, lead) if self.first + self.last else None,
        )


def image_tokens(model: Any, pixels: Tensor) -> TowerTokens:
    """[B, 3, H, W] -> patches, row by row of the picture. Raises ValueError for towers without (see ``check_tokens``)."""
    return _image_reader(model.visual).read(lambda: model.encode_image(pixels))


def text_tokens(model: Any, ids: Tensor) -> TowerTokens:
    """[B, L] -> words, position by position of ``ids``. Raises ValueError for towers without."""
    return _text_reader(text_tower(model)).read(lambda: model.encode_text(ids))


def check_tokens(model: Any) -> None:
    """Raises ValueError, naming the tower, where one of them has no token outputs."""
    _image_reader(model.visual)
    _text_reader(text_tower(model))


def text_tower(model: Any) -> Any:
    """The module that holds the text tower's parts: ``model.text``, or the model itself where CLIP keeps them unpacked."""
    return getattr(model, "text", model)


@contextmanager
def _passing(module: nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """(input, output) of each call of ``module`` during the block."""
    seen: list[tuple[Any, Any]] = []
    handle = module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0] if inputs else None, output)))
    try:
        yield seen
    finally:
        handle.remove()


def _part(states: TokenStates, which: slice) -> TokenStates:
    return TokenStates(before=states.before[:, which], after=states.after[:, which], projected=states.projected[:, which])


# ---- image towers


def _image_reader(visual: Any) -> _Reader:
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, VisionTransformer):
        return _vit_reader(visual)
    if isinstance(visual, TimmModel):
        return _timm_reader(visual)
    raise ValueError(f"the image tower {type(visual).__name__} has no token outputs; vision transformers have them")


def _vit_reader(visual: Any) -> _Reader:
    pool = visual.attn_pool
    if visual.pool_type == "none":
        kind = f"'{visual.attn_pool_type}' attention pooling" if pool is not None else "no pooling"
        raise ValueError(
            f"the image tower {type(visual).__name__} with {kind} has no token outputs; class-token, average and plain attention "
            "pooling have"
        )

    def alone(before: Tensor, after: Tensor) -> Tensor:
        return _times(after if pool is None else visual.ln_post(_one_key(pool, after)), visual.proj)

    def states(_: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        return output, (visual.ln_post if pool is None else pool.ln_k)(output)

    return _Reader(watched=visual.transformer, states=states, alone=alone, first=1)


def _one_key(pool: Any, normed: Tensor) -> Tensor:
    """Attention pooling of each token alone, [B, T, W] -> [B, T, D]. The softmax over one key is 1 whatever the query."""
    keys = normed.flatten(0, 1)[:, None]  # [B * T, 1, W]
    query = pool.ln_q(pool.query[:1]).expand(len(keys), -1, -1)
    return pool.attn(query, keys, keys, need_weights=False)[0].reshape(*normed.shape[:2], -1)


def _timm_reader(visual: Any) -> _Reader:
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    trunk = visual.trunk
    if not isinstance(trunk, VisionTransformer | Eva) or hasattr(visual.head, "pool") or not (trunk.global_pool or trunk.attn_pool):
        raise ValueError(
            f"the image tower timm {type(trunk).__name__} has no token outputs here; timm's plain vision transformers have them"
        )

    def alone(before: Tensor, after: Tensor) -> Tensor:
        if trunk.attn_pool is not None:
            tokens = trunk.attn_pool(after.flatten(0, 1)[:, None]).reshape(*after.shape[:2], -1)
            after = trunk.fc_norm(tokens)
        return visual.head(trunk.head(trunk.head_drop(after)))

    def states(before: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        return before, normed if trunk.attn_pool is not None else trunk.fc_norm(normed)

    return _Reader(watched=trunk.norm, states=states, alone=alone, first=trunk.num_prefix_tokens)


# ---- text towers


def _text_reader(text: Any) -> _Reader:
    from open_clip import CLIP
    from open_clip.hf_model import HFTextEncoder
    from open_clip.transformer import TextTransformer

    if isinstance(text, HFTextEncoder):
        return _hf_reader(text)
    if not isinstance(text, TextTransformer | CLIP):
        raise ValueError(
            f"the text tower {type(text).__name__} has no token outputs; open_clip's and Hugging Face's transformers have them"
        )
    return _Reader(
        watched=text.transformer,
        states=lambda _, output: (output, text.ln_final(output)),
        alone=lambda _, after: _times(after, text.text_projection),
        last=int(getattr(text, "cls_emb", None) is not None),
    )


def _hf_reader(text: Any) -> _Reader:
    from open_clip.hf_model import ClsPooler

    inner = text.transformer
    norm = next((getattr(inner, name) for name in FINAL_NORMS if hasattr(inner, name)), None)
    pooler = getattr(inner, "pooler", None) if isinstance(text.pooler, ClsPooler) and text.pooler.use_pooler_output else None

    def alone(_: Tensor, after: Tensor) -> Tensor:
        if pooler is not None:  # a layer on the first position only
            after = pooler(after.flatten(0, 1)[:, None]).reshape(*after.shape[:2], -1)
        return text.proj(after)

    if norm is not None:
        return _Reader(watched=norm, states=lambda before, after: (before, after), alone=alone)
    return _Reader(watched=inner, states=lambda _, output: (output.last_hidden_state,) * 2, alone=alone)


def _times(states: Tensor, projection: Any) -> Tensor:
    """open_clip's projections are a matrix, a linear layer or nothing."""
    if projection is None:
        return states
    return projection(states) if isinstance(projection, nn.Module) else states @ projection
