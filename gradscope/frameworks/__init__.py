"""Which views, which weighted terms. One file, one framework."""

from __future__ import annotations

from gradscope.registry import Registry

frameworks: Registry = Registry("framework", "gradscope.frameworks")
