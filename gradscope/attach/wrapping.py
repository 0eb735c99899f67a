"""What is hung onto other people's objects: hooks that their copies do not inherit, and methods that are replaced and given back.

``copy.deepcopy`` and ``pickle`` take a module's hooks along: an average of the weights that is made by a deep copy would carry the
whole probe with its open files, or fail on them. A ``Hook`` becomes a call that does nothing, of the standard library, so that a saved
module loads where gradscope is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

#: What stands in a method's place -> whether it is still on, and what stood there before.
_REPLACED: WeakKeyDictionary[Callable[..., Any], tuple[Callable[[], bool], Any]] = WeakKeyDictionary()


class Hook:
    """Calls ``call``; a copy of it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, returns None


def replace_method(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Puts ``around(method)`` in the method's place, on this object alone; returns what takes it away again.

    Several may be put around one method and taken away in any order.
    """
    below = owner.__dict__.get(name)
    original = getattr(owner, name)
    wrapped = around(original)
    on = True

    def call(*args: Any, **kwargs: Any) -> Any:
        return (wrapped if on else original)(*args, **kwargs)

    def undo() -> None:
        nonlocal on
        on = False
        while (top := owner.__dict__.get(name)) is not None and top in _REPLACED and not _REPLACED[top][0]():
            owner.__dict__[name] = _REPLACED[top][1]
            if _REPLACED[top][1] is None:
                del owner.__dict__[name]

    _REPLACED[call] = (lambda: on), below
    owner.__dict__[name] = call
    return undo
