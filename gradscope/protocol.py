"""How a retrieval number came about, in words: without it the number means nothing. Never imports torch.

How it can mislead: it says what was done, not whether the weights saw these items in training (see ``gradscope.contamination``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

HIT = "hit if any caption of the image is within k"
TIES = "ties in random order, expected value"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Facts beside every number. Counts are of images or captions; ``context`` and ``truncated`` are about tokens."""

    encoder: str
    data: str
    split: str
    sha256: str  # of the split as read (``DataSource.fingerprint``)
    images: int  # in the gallery
    captions: int
    expected: int  # records of the split before anything was left out
    missing: int  # records without their picture, left out
    bad: int  # records whose picture cannot be decoded, left out
    context: int  # tokens a caption may have
    truncated: int  # captions with more
    preprocessing: str
    precision: str
    notes: tuple[str, ...] = ()

    @property
    def truncated_share(self) -> float:
        return self.truncated / self.captions

    def sentences(self) -> list[str]:
        """What to print under a table."""
        several = "one caption each" if self.captions == self.images else f"{HIT}; text to image once per caption"
        left_out = f" ({self.missing:,} without a picture, {self.bad:,} with a bad one left out)" if self.missing or self.bad else ""
        return [
            f"{self.images:,} images, {self.captions:,} captions ({several}), of {self.expected:,} records{left_out}",
            f"{TIES}; {self.precision}",
            f"context {self.context} tokens, {self.truncated:,} captions cut ({self.truncated_share:.1%}); {self.preprocessing}",
            *self.notes,
        ]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "notes": list(self.notes), "truncated_share": self.truncated_share, "hit": HIT, "ties": TIES}


def read_protocol(facts: Mapping[str, Any]) -> Protocol:
    """The inverse of ``facts``. Raises ValueError where a field is absent or of another type."""
    values: dict[str, Any] = {}
    for field in fields(Protocol):
        kind = {"int": int, "str": str}.get(str(field.type), list)
        value = facts.get(field.name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its protocol has no proper '{field.name}'")
        values[field.name] = tuple(map(str, value)) if isinstance(value, list) else value
    if values["captions"] < 1 or values["images"] < 1:
        raise ValueError("its protocol counts no images or captions")
    return Protocol(**values)
