"""One finished step -> readings. One file, one quantity."""

from __future__ import annotations

from gradscope.registry import Registry

quantities: Registry = Registry("quantity", "gradscope.quantities")
