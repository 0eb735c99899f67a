"""DualEncoder: an open_clip model, its tokenizer and its preprocessing behind four methods.

Embeddings are normalised in fp32 whatever the towers computed in. Parameters are fp32 master weights: half-precision checkpoints
are promoted at load (Adam's eps of 1e-8 is zero in fp16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.encoders.tokenizer import Tokenized, wrapped
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

    @property
    def context(self) -> int:
        """Tokens of a row of ids, start and end included."""
        return self.tokenizer.context

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longer tower: the text context, or patches and class token of a ViT (0 for other image towers)."""
        vision = self.config["model_cfg"]["vision_cfg"]
        size, patch = vision.get("image_size"), vision.get("patch_size")
        patches = (size // patch) ** 2 + 1 if isinstance(size, int) and isinstance(patch, int) else 0
        return max(self.context, patches)

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def scale(self) -> Tensor:
        """exp(log_scale), [] fp32, with gradient."""
        return self.model.logit_scale.float().exp().squeeze()

    def clamp_scale(self, largest: float) -> None:
        """Bounds the scale after an update, as CLIP does (``largest`` 100)."""
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=math.log(largest))

    def add_token_scale(self) -> None:
        """Gives the token term its own learned scale. Raises ValueError where token outputs are not available."""
        self._token_modules()
        self.token_log_scale = nn.Parameter(torch.tensor(math.log(TOKEN_SCALE), device=self.device))

    # ---- text and pixels

    def tokenize(self, captions: Sequence[str]) -> Tokenized:
        """Captions -> ids and true lengths. The last kept token of a caption that is too long is end-of-text."""
        return self.tokenizer.tokenize(captions)

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

    def embed(self, batch: Batch, *, tokens: bool = False) -> Embeddings:
        """One batch through both towers; with ``tokens`` the patch and word outputs too."""
        pixels, ids = batch.images["full"], batch.texts["full"]
        if not tokens:
            return Embeddings(image=self.embed_image(pixels), text=self.embed_text(ids), scale=self.scale())
        image_norm, text_norm = self._token_modules()
        with _captured(image_norm, text_norm) as states:
            image, text = self.embed_image(pixels), self.embed_text(ids)
        patches = states[0][:, 1:] @ self.model.visual.proj
        words = states[1] @ self.model.text_projection
        assert self.token_log_scale is not None
        return Embeddings(
            image=image,
            text=text,
            scale=self.scale(),
            image_tokens=F.normalize(patches.float(), dim=-1),
            text_tokens=F.normalize(words.float(), dim=-1),
            text_valid=self.text_valid(ids),
            token_scale=self.token_log_scale.float().exp(),
        )

    def text_valid(self, ids: Tensor) -> Tensor:
        """bool [B, L]: words and end-of-text; start-of-text and padding are left out."""
        return self.tokenizer.valid(ids)

    def _token_modules(self) -> tuple[nn.Module, nn.Module]:
        """The final norms whose outputs, projected, are the token outputs: class token first, then patches; and text states."""
        visual = self.model.visual
        usual = (
            hasattr(visual, "ln_post")
            and isinstance(getattr(visual, "proj", None), Tensor)
            and visual.attn_pool is None
            and visual.pool_type == "tok"
            and not visual.final_ln_after_pool
            and isinstance(getattr(self.model, "text_projection", None), Tensor)
        )
        if not usual:
            raise ValueError(
                f"the token term needs patch outputs of a class-token ViT and a projected text transformer, "
                f"which encoder '{self.name}' does not have; use --token-weight 0"
            )
        return visual.ln_post, self.model.ln_final

    # ---- what the probe asks

    def structural_rows(self, batch: Batch) -> dict[str, Tensor]:
        """Rows of text parameters which this batch cannot reach, whatever the loss: ids that do not occur, and positions beyond
        the longest caption. bool [rows] by parameter name; exact zeros there say nothing about saturation."""
        ids = batch.texts["full"]
        rows: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if name.endswith("token_embedding.weight"):
                # Padding shares id 0 with a real token; beyond end-of-text it is causally invisible, so only ids up to it count.
                seen = torch.zeros(parameter.shape[0], dtype=torch.bool, device=ids.device)
                position = torch.arange(ids.shape[1], device=ids.device)
                reached = position <= ids.argmax(dim=1, keepdim=True)
                rows[name] = ~seen.index_fill(0, torch.where(reached, ids, ids[:, :1]).flatten(), True)
            elif name.endswith("positional_embedding") and "visual" not in name:
                rows[name] = torch.arange(parameter.shape[0], device=ids.device) > ids.argmax(dim=1).max()
        return rows

    def has_batch_norm(self) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.modules())

    def has_dropout(self) -> bool:
        """Of any make: of units, of attention weights, of patches or of whole paths."""
        return any(_drop_rate(module) > 0 for module in self.modules())


def _drop_rate(module: nn.Module) -> float:
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout
    if "drop" not in type(module).__name__.lower():
        return 0.0
    return max(float(getattr(module, name, None) or 0.0) for name in ("p", "prob", "drop_prob"))


@contextmanager
def _captured(*modules: nn.Module) -> Iterator[dict[int, Tensor]]:
    """The outputs of ``modules`` during the block, by position."""
    states: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            states[index] = output

        return hook

    handles = [module.register_forward_hook(keep(i)) for i, module in enumerate(modules)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


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
