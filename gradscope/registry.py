"""Name -> component. A component is a frozen dataclass (or a function) in a file of its own; registering it is one decorator.

Unknown names are answered with the nearest known one, so that a typo costs one line and not one run.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The components of one kind, found by importing every module of one folder on first use.

    Args:
        kind: the noun used in messages, e.g. ``"objective"``.
        package: the folder (as a dotted package name) in which one file is one component.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ValueError if two components claim one name."""

        def add(item: T) -> T:
            if name in self._items and self._items[name] is not item:
                raise ValueError(f"two {self.kind}s are called '{name}'")
            self._items[name] = item
            return item

        return add

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._loaded = True

    def names(self) -> list[str]:
        self._load()
        return sorted(self._items)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        self._load()
        return iter(sorted(self._items.items()))

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._items

    def __getitem__(self, name: str) -> T:
        """Raises ValueError, naming the nearest known name, if ``name`` is unknown."""
        self._load()
        if name in self._items:
            return self._items[name]
        raise ValueError(unknown_name(self.kind, name, self.names()))


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """One sentence: what was given, what is nearest, what is allowed."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown {kind} '{name}'.{hint} Known: {', '.join(known) or 'none'}."
