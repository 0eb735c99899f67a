"""DualEncoder: an open_clip model, its tokenizer and its preprocessing behind four methods.

Embeddings are normalised in fp32 whatever the towers computed in. Parameters are fp32 master weights: half-precision checkpoints
are promoted at load (Adam's eps of 1e-8 is zero in fp16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.encoders.reach import unreached_rows
from gradscope.encoders.token_cache import tokenize_once
from gradscope.encoders.tokenizer import Tokenized, wrapped
from gradscope.encoders.tokens import check_tokens, image_tokens, text_tokens
from gradscope.types import Batch, Embeddings

#: FILIP's initial token scale, 1 / 0.07.
TOKEN_SCALE = 1 / 0.07


class DualEncoder(nn.Module):
    """Two towers and a scale.

    Args:
        model: an ``open_clip`` CLIP (or CustomTextCLIP).
        tokenizer: that model's, one of `gradscope.encoders.tokenizer` or of open_clip.
        config: {"model_cfg": ..., "preprocess_cfg": ...}, enough to rebuild the model.
        name: what the user called it; written beside every number.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, config: Mapping[str, Any], name: str) -> None:
        super().__init__()
        self.model: Any = model.float()
        self.tokenizer = wrapped(tokenizer)
        self.config = config
        self.name = name
        self.token_log_scale: nn.Parameter | None = None
        self.resting: list[nn.Module] = []

    # ---- modes

    def rest(self, modules: Iterable[nn.Module]) -> None:
        """Keeps ``modules`` (frozen ones) in evaluation mode whatever ``train`` says."""
        self.resting += modules
        self.train(self.training)

    def train(self, mode: bool = True) -> DualEncoder:
        super().train(mode)
        for module in self.resting:
            module.eval()
        return self

    # ---- sizes and scales

    @property
    def context(self) -> int:
        """Tokens of a row of ids, start and end included."""
        return self.tokenizer.context

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longer tower: the text context, or patches and class token of a ViT (other image towers have none)."""
        visual = self.model.visual
        trunk = getattr(visual, "trunk", None)  # timm's
        if trunk is not None:
            patches = getattr(getattr(trunk, "patch_embed", None), "num_patches", 0)
            return max(self.context, patches + getattr(trunk, "num_prefix_tokens", 0))
        rows, columns = getattr(visual, "grid_size", (0, 0))
        return max(self.context, rows * columns + 1)

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def scale(self) -> Tensor:
        """exp(log_scale), [] fp32, with gradient."""
        return self.model.logit_scale.float().exp().squeeze()

    def token_scale(self) -> Tensor | None:
        """Likewise that of the token term, if there is one."""
        return None if self.token_log_scale is None else self.token_log_scale.float().exp()

    def clamp_scale(self, largest: float) -> None:
        """Bounds the scale after an update, as CLIP does (``largest`` 100)."""
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(largest))

    def add_token_scale(self) -> None:
        """Gives the token term its own learned scale. Raises ValueError where token outputs are not available."""
        try:
            check_tokens(self.model)
        except ValueError as error:
            raise ValueError(f"encoder '{self.name}': {error}; the token term needs them: use --token-weight 0") from error
        self.token_log_scale = nn.Parameter(torch.tensor(math.log(TOKEN_SCALE), device=self.device))

    # ---- text and pixels

    def tokenize(self, captions: Sequence[str]) -> Tokenized:
        """Captions -> ids and true lengths. The last kept token of a caption that is too long is end-of-text.

        The ids of many captions are kept on disk (see `gradscope.encoders.token_cache`).
        """
        return tokenize_once(self.tokenizer, captions)

    def preprocess(self) -> Any:
        """PIL RGB image -> float32 [3, H, W], open_clip's evaluation transform of this model."""
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return image_transform_v2(PreprocessCfg(**self.config["preprocess_cfg"]), is_train=False)

    # ---- embeddings

    def embed_image(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> unit rows [B, D], fp32."""
        return F.normalize(self.model.encode_image(pixels).float(), dim=-1)

    def embed_text(self, ids: Tensor) -> Tensor:
        """[B, L] -> unit rows [B, D], fp32."""
        return F.normalize(self.model.encode_text(ids).float(), dim=-1)

    def embed_texts(self, ids: Tensor, *, batch_size: int = 128, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """All captions of a data set, ids [N, L] -> unit rows [N, D], fp32, in evaluation mode and without gradient."""
        rows: list[Tensor] = []
        done = 0
        with evaluating(self):
            for piece in ids.split(batch_size):
                rows.append(self.embed_text(piece.to(self.device)))
                done += len(piece)
                if progress:
                    progress(done, len(ids))
        return torch.cat(rows)

    def embed(self, batch: Batch, *, tokens: bool = False, known: Mapping[str, Tensor] = {}) -> Embeddings:
        """One batch through both towers; with ``tokens`` the patch and word outputs too.

        ``known``: the rows of a tower that need not run: "image" or "text", with ``tokens`` its "image_tokens" or "text_tokens" too.
        """
        pixels, ids = batch.images["full"], batch.texts["full"]
        if not tokens:
            image = known["image"] if "image" in known else _watchable(self.embed_image(pixels))
            text = known["text"] if "text" in known else _watchable(self.embed_text(ids))
            return Embeddings(image=image, text=text, scale=self.scale())
        assert self.token_log_scale is not None
        rows = dict(known)
        if "image" not in known:
            rows["image"], rows["image_tokens"] = map(_unit, self.embed_patches(pixels))
        if "text" not in known:
            rows["text"], rows["text_tokens"] = map(_unit, self.embed_words(ids))
        token_scale = self.token_scale()
        return Embeddings(**rows, scale=self.scale(), text_valid=self.text_valid(ids), token_scale=token_scale)

    def embed_patches(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] -> what the image tower gives before rows are made unit: image [B, D], patches [B, P, D]."""
        found = image_tokens(self.model, pixels)
        return found.pooled, found.tokens.projected

    def embed_words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L] -> likewise of the text tower: text [B, D], words [B, L, D]."""
        found = text_tokens(self.model, ids)
        return found.pooled, found.tokens.projected

    def text_valid(self, ids: Tensor) -> Tensor:
        """bool [B, L]: words and end-of-text; start-of-text and padding are left out."""
        return self.tokenizer.valid(ids)

    # ---- what the probe asks

    def structural_rows(self, ids: Tensor) -> dict[str, Tensor]:
        """Rows of text parameters which token ids [B, L] cannot reach, whatever the loss: ids that do not occur, and positions
        beyond the longest caption. bool [rows] by parameter name; exact zeros there say nothing about saturation."""
        rows = unreached_rows(self.model, ids, None if self.token_log_scale is None else self.text_valid(ids))
        return {name: rows[id(parameter)] for name, parameter in self.named_parameters() if id(parameter) in rows}

    def has_batch_norm(self) -> bool:
        """Whether batch statistics are in use; those of frozen parts rest."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._active())

    def _active(self) -> list[nn.Module]:
        still = {id(inner) for module in self.resting for inner in module.modules()}
        return [module for module in self.modules() if id(module) not in still]


def _unit(rows: Tensor) -> Tensor:
    return _watchable(F.normalize(rows.float(), dim=-1))


def _watchable(rows: Tensor) -> Tensor:
    """Rows of a frozen tower become leaves: no backward enters the tower, yet the gradient AT them can be read and replayed."""
    return rows.requires_grad_() if torch.is_grad_enabled() and not rows.requires_grad else rows


def blank_pixels(encoder: DualEncoder, count: int) -> Tensor:
    """[count, 3, H, W] of zeros, in the size that the encoder takes."""
    size = encoder.config["preprocess_cfg"]["size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(count, 3, height, width, device=encoder.device)


@contextmanager
def evaluating(encoder: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; restores the mode of every module."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
