"""Which parameters belong to which tower, read off the graph of the embeddings: the names of somebody else's model say little.

A parameter that only the first embeddings depend on is of tower "image", one that only the second depend on is of "text", one that both
depend on is "shared", and what neither depends on (a scale, a head of another loss) goes by its name. Where no parameter is of one
tower alone, all go by their names: a compiled model is one node of the graph. How it can mislead: reentrant checkpointing hides
parameters from the graph; they go by their names too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradscope.quantities.gradient import tower_of


def towers(image: Tensor, text: Tensor, names: Sequence[str], parameters: Sequence[Tensor]) -> list[str]:
    """A tower for each parameter. Walks each graph once, without touching a value."""
    first, second = leaves(image), leaves(text)
    if not (first ^ second) & {id(parameter) for parameter in parameters}:
        return [tower_of(name) for name in names]
    return [_tower(name, id(parameter) in first, id(parameter) in second) for name, parameter in zip(names, parameters, strict=True)]


def _tower(name: str, in_first: bool, in_second: bool) -> str:
    if in_first and in_second:
        return "shared"
    return "image" if in_first else "text" if in_second else tower_of(name)


def leaves(rows: Tensor) -> set[int]:
    """id() of every tensor at which the graph of ``rows`` ends."""
    found: set[int] = set()
    seen = {rows.grad_fn}
    todo = [rows.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        new = {function for function, _ in node.next_functions} - seen
        seen |= new
        todo += new
    return found
