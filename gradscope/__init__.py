"""gradscope: why contrastive fine-tuning of a dual encoder stops learning, and the repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradscope.probe import Probe

__version__ = "0.1.0"

__all__ = ["Probe", "__version__"]


def __getattr__(name: str) -> Any:
    """``gradscope.Probe``, without importing torch before it is asked for."""
    if name == "Probe":
        from gradscope.probe import Probe

        return Probe
    raise AttributeError(f"module 'gradscope' has no attribute '{name}'")
