"""FILIP's token-wise late interaction, without ever holding a B x B x P x L tensor.

    c_ij = X_i Y_j^t                      cosines of the P patches of image i with the valid tokens of caption j
    a_ij = mean over patches of max over tokens          b_ij = mean over tokens of max over patches
    L    = 1/2 [CE of the rows of s_t a + CE of the columns of s_t b]       s_t: a learned scale of its own, from 1/0.07

Source: FILIP (Yao et al., 2021); HN-CLIP adds it with weight 1 and without a margin. Start-of-text and padding never count.
Memory: blocks of at most ``max_cells`` cosines, recomputed in the backward pass: O(max_cells + B^2).
How it can mislead: a and b are two different matrices; a token cosine of an untuned CLIP is small and flat, so the term can sit
near log(width) for a long time without anything being broken.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

#: 4M cosines, 16 MB in fp32: 66 pairs of ViT-L/14's 256 patches with 248 tokens.
MAX_CELLS = 1 << 22


def token_scores(image_tokens: Tensor, text_tokens: Tensor, valid: Tensor, max_cells: int = MAX_CELLS) -> tuple[Tensor, Tensor]:
    """a and b, both [N, M] (image i, caption j), fp32.

    Args:
        image_tokens: unit rows [N, P, D].
        text_tokens: unit rows [M, L, D].
        valid: bool [M, L], at least one True in each row.
        max_cells: bound on the number of cosines held at once.
    """
    patches, tokens = image_tokens.shape[1], text_tokens.shape[1]
    pairs = max(1, max_cells // (patches * tokens))
    captions = min(text_tokens.shape[0], max(1, pairs))
    images = max(1, pairs // captions)
    rows = []
    for i in range(0, image_tokens.shape[0], images):
        blocks = [
            checkpoint(
                _block,
                image_tokens[i : i + images],
                text_tokens[j : j + captions],
                valid[j : j + captions],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for j in range(0, text_tokens.shape[0], captions)
        ]
        rows.append(tuple(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))
    a, b = (torch.cat(parts, dim=0) for parts in zip(*rows, strict=True))
    return a, b


def _block(image_tokens: Tensor, text_tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    cosines = torch.einsum("npd,mld->nmpl", image_tokens, text_tokens)
    best_token = cosines.masked_fill(~valid[None, :, None, :], -torch.inf).amax(dim=3)  # [N, M, P]
    best_patch = cosines.amax(dim=2).masked_fill(~valid[None], 0.0)  # [N, M, L]
    return best_token.mean(dim=2), best_patch.sum(dim=2) / valid.sum(dim=1)


def token_loss(a: Tensor, b: Tensor, scale: Tensor, excluded: Tensor | None = None) -> Tensor:
    """Loss per anchor [N] of square score matrices a, b [N, N] under the token scale []; ``excluded`` cells are no negatives."""
    target = torch.arange(a.shape[0], device=a.device)
    both = [scale * a, scale * b.T]
    if excluded is not None:
        both = [both[0].masked_fill(excluded, -torch.inf), both[1].masked_fill(excluded.T, -torch.inf)]
    rows, columns = (F.cross_entropy(logits, target, reduction="none") for logits in both)
    return (rows + columns) / 2
