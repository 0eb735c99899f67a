"""Scores -> loss per anchor. One file, one objective."""

from __future__ import annotations

from gradscope.registry import Registry

objectives: Registry = Registry("objective", "gradscope.objectives")
