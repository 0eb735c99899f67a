"""The strict policy for captions that do not fit: none is cut, the run is refused."""

from __future__ import annotations

from collections.abc import Sequence

#: How many of them a message names.
NAMED = 5


def refuse_too_long(ids: Sequence[str], lengths: Sequence[int], context: int) -> None:
    """For --on-too-long error: raises ValueError with the number of captions over ``context`` tokens, the longest first.

    Args:
        ids: record id of each caption.
        lengths: its tokens before truncation, start and end included.
    """
    over = sorted(((length, identity) for identity, length in zip(ids, lengths, strict=True) if length > context), reverse=True)
    if over:
        named = ", ".join(f"'{identity}' ({length})" for length, identity in over[:NAMED])
        more = ", ..." if len(over) > NAMED else ""
        raise ValueError(
            f"{len(over)} of {len(ids)} captions have more than {context} tokens: {named}{more}; shorten them, take an encoder with a "
            "longer context, or cut them with --on-too-long truncate"
        )
