"""Saturated or not: which batches are judged, how many it takes, and the words. One definition for the verdict, rules, gates and views.

    window            the last epoch; of a run of one epoch, or without epochs, its last quarter; and where that holds fewer finite
                      values than asked for, the run from its last so many on
    saturation_state
              SATURATED         at least half of the measured batches in the window have a true loss under 1e-3
              partly saturated  at least a tenth of them, or at least half of the anchors have a residual 1 - p under 1e-3
              not saturated     neither
              too few measured batches to judge (k)     fewer than ``LEAST`` in the whole run
              not judged        the gradient that passes by at the embeddings is not that of the objective as read (``turned``)

How to read: the state belongs to one width and one trajectory. How it can mislead: a partly saturated run may be a sound one in which
most pairs are learned. This file never imports torch.
"""

from __future__ import annotations

import math

import numpy as np

#: A run is called saturated if at least this share of the measured batches of its window are under 1e-3.
SATURATED = 0.5
#: Partly saturated from this share of the batches on, or from this share of the anchors.
PARTLY_BATCHES, PARTLY_ANCHORS = 0.1, 0.5
#: Measured batches below which nothing is said of a share or a median.
LEAST = 6
#: A median cosine under this, between the gradient that passes by at the embeddings and the objective's own, is another objective's.
AGREEMENT = 0.99
#: What is said in place of a state where there is nothing to judge.
NOT_TRAINED = "not judged: what was read is not what is trained (GS026)"
ONE_CANDIDATE = "one candidate per softmax: the loss is 0 by definition"


def window(epochs: np.ndarray, values: np.ndarray, least: int = LEAST) -> tuple[np.ndarray, str]:
    """Which of the values [n], in the order of their steps, are judged (bool [n], non-finite ones included), and words for it.

    A window reaches to the end of the run: values that are not finite there are never stepped over unseen.

    Args:
        epochs: [n], nan where not known.
        least: finite values that the window should hold.
    """
    finite, at = np.isfinite(values), np.arange(len(values))
    known = epochs[finite & np.isfinite(epochs)]
    if len(np.unique(known)) > 1:
        chosen, words = at >= np.flatnonzero(epochs == known.max())[0], f"epoch {known.max():g}"
    else:
        chosen, words = at >= len(values) * 3 // 4, "last quarter"
    if (chosen & finite).sum() < least:
        chosen, words = at >= min(np.flatnonzero(finite)[-least:], default=0), "end of the run"  # what follows is nan, and counts
    return chosen, words


def unit_of(count: float, units: str) -> str:
    """The unit for a count: 1 batch, 2 batches. ``units`` is a plural; what ends in no s ("nat") stays."""
    if count != 1 or not units.endswith("s") or units.endswith("ss"):
        return units
    return units.removesuffix("es") if units.endswith("ches") else units.removesuffix("s")


def two_digits(share: float) -> str:
    """A share in per cent, to two significant digits: 0.21667 is "22%", 1.1469 "110%", 0.00427 "0.43%"."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def saturation_state(batches: float, anchors: float = math.nan, *, judged: int = LEAST) -> str:
    """The word for a share of batches, and one of anchors where it is known, over ``judged`` measured batches."""
    if judged < LEAST:
        return f"too few measured batches to judge ({judged})"
    if batches >= SATURATED:
        return "SATURATED"
    return "partly saturated" if batches >= PARTLY_BATCHES or anchors >= PARTLY_ANCHORS else "not saturated"


def turned(agreements: np.ndarray, batches: float, limit: float = AGREEMENT) -> bool:
    """Whether something else is trained than what is read, by the cosines [n] of the window that is judged.

    Never of a saturated run (``batches``: its share under 1e-3), where rounding alone turns what is left of the gradient; nor of fewer
    than ``LEAST`` cosines.
    """
    return bool(len(agreements) >= LEAST and batches < SATURATED and np.median(agreements) < limit)
