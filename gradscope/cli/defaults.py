"""One style for what an option does by itself: "(default: X)" as the last words of its help, in every command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """The commands of an app, each option's default written into its help text."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        _state_defaults(self)


def _state_defaults(command: Any) -> None:
    for inner in getattr(command, "commands", {}).values():
        _state_defaults(inner)
    for parameter in command.params:
        words = _default(parameter)
        if words:
            parameter.help = f"{parameter.help or ''} (default: {words})".strip()
        parameter.show_default = False


def _default(parameter: Any) -> str:
    """What typer would show, without its brackets; "" where there is nothing to say."""
    shown, value = getattr(parameter, "show_default", False), parameter.default
    if isinstance(shown, str):
        return shown
    if not shown or parameter.required or value is None or isinstance(value, bool):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
