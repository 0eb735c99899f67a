"""Frames -> (matplotlib figure, the frame drawn). Never imports torch. One file, one figure."""

from __future__ import annotations

from gradscope.registry import Registry

figures: Registry = Registry("figure", "gradscope.figures")
