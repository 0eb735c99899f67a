"""Rules: what is wrong with a run, each with a stable id. One file, one rule; no rule imports torch.

A rule is a frozen dataclass whose fields are its thresholds and whose call takes a ``View`` and returns a ``Finding`` or None. It
is silent unless sure: it raises ``Unmeasured`` (through the view) where the log lacks what it needs, or holds fewer measured
batches than its ``least``. Its class variable ``elsewhere`` is the action in a loop that is not ours, where our flags are no
remedy. Its file's docstring has the parts of ``PARTS``, which ``told`` gives. A rule whose ``any_width`` is true also looks where
the softmax has one candidate, and everything about it is 0. An id is never reused; a rule that proves wrong is removed together
with its id.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from gradscope.judgement import LEAST
from gradscope.registry import Registry
from gradscope.run_view import Evidence, Unmeasured, View

rules: Registry[Any] = Registry("rule", "gradscope.rules")

#: Gravest first. error: training does not do what it says; warning: it learns less than it could; note: worth knowing.
SEVERITIES = ("error", "warning", "note")

#: Measured batches below which no rule speaks of a share or a median.
MEASURED = LEAST
#: Logged steps below which no rule speaks of a trend.
LOGGED = 30

#: The parts of a rule's docstring, as its file starts lines with them, and what they are called on the terminal.
PARTS = {"Evidence": "evidence", "Cause": "cause", "Silent": "silent where", "Mislead": "can mislead"}


class Rule(Protocol):
    id: ClassVar[str]
    title: ClassVar[str]
    severity: ClassVar[str]
    elsewhere: ClassVar[str]

    def __call__(self, view: View) -> Finding | None: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found: the numbers, why, what to do, what that should change, and how to see whether it did."""

    id: str
    title: str
    severity: str
    evidence: tuple[Evidence, ...]
    cause: str
    action: str
    effect: str
    verify: str


def found(rule: Rule, *evidence: Evidence, cause: str, action: str, effect: str, verify: str) -> Finding:
    """A finding of ``rule``."""
    return Finding(
        id=rule.id,
        title=rule.title,
        severity=rule.severity,
        evidence=evidence,
        cause=cause,
        action=action,
        effect=effect,
        verify=verify,
    )


def where_measured(evidence: Callable[[], Evidence]) -> tuple[Evidence, ...]:
    """A further number for a finding that does not hang on it: () where it was not measured."""
    try:
        return (evidence(),)
    except Unmeasured:
        return ()


def told(rule: type[Any]) -> list[tuple[str, str]]:
    """What a rule says of itself, as (label, text): evidence, cause, remedy, where it is silent, how it can mislead, thresholds."""
    _, *pieces = re.split(rf"(?m)^({'|'.join(PARTS)}) +", inspect.getdoc(inspect.getmodule(rule)) or "")
    parts = {PARTS[name]: " ".join(text.replace("``", "").split()) for name, text in zip(pieces[::2], pieces[1::2], strict=True)}
    limits = ", ".join(f"{each.name} {each.default:g}" for each in fields(rule))
    rows = {"evidence": parts.pop("evidence"), "cause": parts.pop("cause"), "remedy": rule.elsewhere, **parts, "thresholds": limits}
    return [(label, text) for label, text in rows.items() if text]
