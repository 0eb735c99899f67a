"""File -> preprocessed picture, float32 [3, H, W]: one path for training and evaluation, in three decodes.

    exact    PIL decodes and resizes: the same bits as open_clip's evaluation transform on the picture ``load_rgb`` returns
    fast     the same size, crop and filter, but the resize runs on the uint8 tensor, in SIMD: within 1 level of 255 of exact.
             JPEGs in RGB or gray are decoded by torchvision, to the same bits as by PIL. Small and very tall pictures are resized
             as by exact
    scaled   such JPEGs are decoded at 1/2, 1/4 or 1/8, never below three times the wanted size; then as fast. On photo-like
             pictures of 2048 x 1536 to 224, 2026-11-30: within 3 levels of exact, save 1 value in 10,000, at sharp coloured edges of
             files with coarse colour, with 6 at most. Where a side is no multiple of 8, single values of the last row and column are up
             to 21 levels away: the file repeats its edge there. On patterns as fine as a pixel, noise or a screen of dots, far more

Sizes and crops are those of torchvision and open_clip: the long side is int(size * long / short), the crop starts at
round((side - size) / 2); another rounding would move the picture by a pixel.

How it can mislead: a level is 1/255 before normalisation. Embeddings made by two decodes differ a little, so the decode is a setting
of the run; compare models with the same one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from gradscope.data.images import load_rgb, opened, orientation, stored_bytes, to_rgb
from gradscope.registry import unknown_name

DECODES = ("fast", "exact", "scaled")
RESIZE_MODES = ("shortest", "longest", "squash")
INTERPOLATIONS = ("bicubic", "bilinear", "random")  # "random" is for training; open_clip evaluates it as bicubic

#: CLIP's own mean and standard deviation, for a configuration that names none.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

#: Below so many pixels for each of the result the fast resize gains little and, with its shorter weights, can be 2 levels off.
FAST_FROM = 4

#: From Pillow 13 on, pictures taller than twice their width, or made much flatter, are resized in the vertical direction first.
#: Both directions round and clip to 8 bits, so another order can be 20 levels off on noise.
TALL = 2
FLATTENED = 1.25

#: A scaled decode keeps at least so many pixels for each wanted one, in both directions.
SCALED_MARGIN = 3


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The size of the whole picture after the resize, and where its corner lies in the result (negative: cropped)."""

    height: int
    width: int
    top: int
    left: int


@dataclass(frozen=True, kw_only=True)
class PixelPath:
    """path -> float32 [3, height, width]. Holds plain values only, so that it can be sent to a worker process.

    Args:
        size: (height, width) of the result.
        mean, std: three numbers each, of values in 0..1.
        interpolation: "bicubic" or "bilinear", both antialiased.
        resize_mode: "shortest" crops, "longest" pads with ``fill``, "squash" does neither.
        fill: level 0 to 255 of the padding.
        decode: "fast", "exact" or "scaled".
    """

    size: tuple[int, int]
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill: int = 0
    decode: str = "fast"

    def __call__(self, path: str | Path) -> Tensor:
        """Raises ValueError naming the file and the reason."""
        return self.normalised(self.levels(path))

    def levels(self, path: str | Path) -> Tensor:
        """uint8 [3, H, W], before normalisation."""
        if self.decode == "exact":
            return self.exact_levels(load_rgb(path))
        if self.decode == "scaled":
            reduced = self._scaled_levels(path)
            if reduced is not None:
                return reduced
        return self._fast_levels(path)

    def normalised(self, levels: Tensor) -> Tensor:
        """(levels / 255 - mean) / std in fp32."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return levels.to(torch.float32).div_(255).sub_(mean).div_(std)

    def exact_levels(self, image: Image.Image) -> Tensor:
        """An RGB picture resized by PIL."""
        place = self.placement(image.height, image.width)
        resample = Image.Resampling.BILINEAR if self.filter == "bilinear" else Image.Resampling.BICUBIC
        return self._placed(_tensor(image.resize((place.width, place.height), resample)), place)

    def _fast_levels(self, path: str | Path) -> Tensor:
        whole = _decoded_jpeg(path)
        if whole is None:
            whole = _tensor(load_rgb(path))
        place = self.placement(whole.shape[1], whole.shape[2])
        if _differs_in_simd(whole.shape[1], whole.shape[2], place):
            return self.exact_levels(Image.fromarray(whole.permute(1, 2, 0).numpy()))
        small = F.interpolate(whole[None], (place.height, place.width), mode=self.filter, antialias=True)[0]
        return self._placed(small, place)

    def _scaled_levels(self, path: str | Path) -> Tensor | None:
        """None where the file is no plain JPEG, or its picture too small or too tall."""
        with opened(path) as image:
            if not _plain_jpeg(image):
                return None
            turn, full = orientation(image), (image.height, image.width)
            sideways = turn >= 5
            place = self.placement(*(full[::-1] if sideways else full))
            wanted = (place.width, place.height) if sideways else (place.height, place.width)
            image.draft(image.mode, (SCALED_MARGIN * wanted[1], SCALED_MARGIN * wanted[0]))
            if image.size == full[::-1] or _differs_in_simd(*full, place):
                return None
            reduced = _tensor(to_rgb(image))  # [3, ceil(h / s), ceil(w / s)]
        return self._placed(turned(self._from_reduced(reduced, full, wanted), turn), place)

    def _from_reduced(self, reduced: Tensor, full: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
        """Where a side is no multiple of the reduction s, the last reduced pixel lies partly outside the picture. So the resize
        is told its factor, wanted / (side / s), and not only the size of its result."""
        step = next(s for s in (2, 4, 8) if s * reduced.shape[1] >= full[0] and s * reduced.shape[2] >= full[1])
        # The result has floor(reduced side * factor) pixels; the small addition keeps a rounding error from losing the last.
        factors = [(side + 1e-3) * step / whole for side, whole in zip(wanted, full, strict=True)]
        small = F.interpolate(reduced[None], scale_factor=factors, mode=self.filter, antialias=True)[0]
        return small[:, : wanted[0], : wanted[1]]

    @property
    def filter(self) -> str:
        """open_clip resizes to an oblong shape always with bicubic, unless it squashes or pads."""
        oblong = self.resize_mode == "shortest" and self.size[0] != self.size[1]
        return "bilinear" if self.interpolation == "bilinear" and not oblong else "bicubic"

    def placement(self, height: int, width: int) -> Placement:
        """For a picture of ``height`` x ``width``."""
        tall, wide = self._resized(height, width)
        return Placement(height=tall, width=wide, top=_offset(tall, self.size[0]), left=_offset(wide, self.size[1]))

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.resize_mode == "squash":
            return self.size
        if self.resize_mode == "shortest" and self.size[0] == self.size[1]:
            side = self.size[0]
            return (int(side * height / width), side) if width <= height else (side, int(side * width / height))
        ratios = height / self.size[0], width / self.size[1]
        ratio = max(ratios) if self.resize_mode == "longest" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _placed(self, small: Tensor, place: Placement) -> Tensor:
        """The cropped or padded picture."""
        rows, columns = self.size
        small = small[:, max(0, -place.top) :, max(0, -place.left) :][:, :rows, :columns]
        if small.shape[1:] == self.size:
            return small
        canvas = torch.full((3, rows, columns), self.fill, dtype=torch.uint8)
        top, left = max(0, place.top), max(0, place.left)
        canvas[:, top : top + small.shape[1], left : left + small.shape[2]] = small
        return canvas


def pixel_path(preprocess: Mapping[str, Any], decode: str = "fast") -> PixelPath:
    """An encoder's ``preprocess_cfg`` (size, mean, std, interpolation, resize_mode, fill_color) -> its path for files.

    Raises:
        ValueError: a decode, resize mode or interpolation that does not exist, or no size.
    """
    size = preprocess.get("size")
    if size is None:
        raise ValueError("the encoder's preprocessing names no size; add preprocess_cfg.size to its configuration")
    height, width = (size, size) if isinstance(size, int) else (size * 2 if len(size) == 1 else size)
    interpolation = preprocess.get("interpolation") or "bicubic"
    resize_mode = preprocess.get("resize_mode") or "shortest"
    for what, value, allowed in (
        ("decode", decode, DECODES),
        ("interpolation", interpolation, INTERPOLATIONS),
        ("resize mode", resize_mode, RESIZE_MODES),
    ):
        if value not in allowed:
            raise ValueError(unknown_name(what, value, list(allowed)))
    return PixelPath(
        size=(int(height), int(width)),
        mean=_three(preprocess.get("mean"), CLIP_MEAN),
        std=_three(preprocess.get("std"), CLIP_STD),
        interpolation=interpolation,
        resize_mode=resize_mode,
        fill=int(preprocess.get("fill_color") or 0),
        decode=decode,
    )


def turned(picture: Tensor, orientation: int) -> Tensor:
    """[3, H, W] -> upright, by EXIF orientation 1 to 8."""
    if orientation >= 5:
        picture = picture.transpose(1, 2)
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation, [])
    return picture.flip(flips) if flips else picture


def _plain_jpeg(image: Image.Image) -> bool:
    return image.format == "JPEG" and image.mode in ("RGB", "L")


def _differs_in_simd(height: int, width: int, place: Placement) -> bool:
    down, across = height / place.height, width / place.width
    return down * across < FAST_FROM or height > TALL * width or down > FLATTENED * across


def _decoded_jpeg(path: str | Path) -> Tensor | None:
    """uint8 [3, H, W], upright; None where PIL must decide (another format or mode, damage, no decoder in torchvision).

    torchvision calls its decoder deprecated. It is used for its speed only: without it PIL gives the same bits, more slowly.
    """
    with opened(path) as image:  # which also keeps the deprecation warning quiet
        if not _plain_jpeg(image):
            return None
        turn = orientation(image)
        try:
            from torchvision.io import ImageReadMode, decode_jpeg

            picture: Tensor = decode_jpeg(torch.from_numpy(stored_bytes(image, path)), mode=ImageReadMode.RGB)
        except (ImportError, RuntimeError):
            return None
    return turned(picture, turn)


def _tensor(image: Image.Image) -> Tensor:
    """RGB -> uint8 [3, H, W], a view of the picture's bytes in its own order, which is the order the resize is fastest in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and nothing writes to them
        return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def _offset(side: int, wanted: int) -> int:
    return (wanted - side) // 2 if wanted > side else -round((side - wanted) / 2)


def _three(values: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    if not values:
        return default
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(float(v) for v in values)
