"""Name -> component. A component is a frozen dataclass (or a function) in a file of its own; registering it is one decorator.

Unknown names are answered with the nearest known one, so that a typo costs one line and not one run.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")
#: How a component of these folders says its name: at the start of a line, in plain quotes.
_NAMES = re.compile(r'^@?\w+\.register\("([^"]+)"\)', re.MULTILINE)


class Registry(Generic[T]):
    """The components of one kind, found by the names that the modules of one folder register. One is imported when it is asked for.

    Args:
        kind: the noun used in messages, e.g. ``"objective"``.
        package: the folder (as a dotted package name) in which one file is one component.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ValueError if two components claim one name."""

        def add(item: T) -> T:
            if name in self._items and self._items[name] is not item:
                raise ValueError(f"two {self.kind}s are called '{name}'")
            self._items[name] = item
            return item

        return add

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Name -> the module that registers it, read off the source: no component is imported for its name."""
        found: dict[str, str] = {}
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            for name in _NAMES.findall(_source(module)):
                if name in found:
                    raise ValueError(f"two {self.kind}s are called '{name}'")
                found[name] = module.name
        return found

    def names(self) -> list[str]:
        return sorted({*self._items, *self._modules})

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter([(name, self[name]) for name in self.names()])

    def __contains__(self, name: object) -> bool:
        return name in self._items or name in self._modules

    def __getitem__(self, name: str) -> T:
        """Raises ValueError, naming the nearest known name, if ``name`` is unknown."""
        if name not in self:
            raise ValueError(unknown_name(self.kind, name, self.names()))
        if name not in self._items:
            importlib.import_module(self._modules[name])
        return self._items[name]


def _source(module: pkgutil.ModuleInfo) -> str:
    spec = module.module_finder.find_spec(module.name, None)
    assert spec is not None
    assert isinstance(spec.loader, importlib.abc.InspectLoader)
    return spec.loader.get_source(module.name) or ""


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """One sentence: what was given, what is nearest, what is allowed."""
    by_letters = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=0.6)
    hint = f" Did you mean '{by_letters[near[0]]}'?" if near else ""
    return f"unknown {kind} '{name}'.{hint} Known: {', '.join(known) or 'none'}."
