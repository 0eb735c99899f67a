"""The bins in which the sizes of many signed numbers are drawn: octaves (factors of two), both signs, and exact zeros apart.

A list of ``LENGTH`` counts holds, from the left: negative numbers by falling size, the exact zeros, positive numbers by rising size.
Octave e holds 2^e <= |x| < 2^(e + 1), e from ``LOWEST`` to ``HIGHEST``; the two end octaves of each sign hold what lies beyond them.
Made by ``gradscope.metrics.signed_log``; this file knows only the bins and never imports torch.

How it can mislead: bins are equally wide in the logarithm, so a tall bin far out holds few of the sum of squares' decades, not few
entries; and numbers under 2^-96 share one bin.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: 1.3e-29 to 1.3e5: thirty-three decades.
LOWEST, HIGHEST = -96, 16
OCTAVES = HIGHEST - LOWEST + 1
LENGTH = 2 * OCTAVES + 1
ZERO = OCTAVES  # the place of the exact zeros


def split(counts: Sequence[float]) -> tuple[np.ndarray, float, np.ndarray]:
    """[LENGTH] -> negative [OCTAVES] by rising size, zeros, positive [OCTAVES] by rising size.

    Raises:
        ValueError: another number of counts.
    """
    array = np.asarray(counts, dtype=float)
    if array.shape != (LENGTH,):
        raise ValueError(f"a signed sketch has {LENGTH} counts; got {array.size}, perhaps from another version of gradscope.")
    return array[:ZERO][::-1], float(array[ZERO]), array[ZERO + 1 :]


def edges() -> np.ndarray:
    """The signed edges of the bins, [LENGTH + 1], rising: the zeros lie between -2^LOWEST and 2^LOWEST."""
    sizes = 2.0 ** np.arange(LOWEST, HIGHEST + 2)  # [OCTAVES + 1]
    return np.concatenate([-sizes[::-1], sizes])
