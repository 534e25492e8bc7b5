"""The jitter window of a schedule: the master moves each due time later by a random part of its window.

What everybody schedules for the full hour comes due over the window instead. The draw is the master's, before the
command is made: the log holds the time that was drawn, and so does the receipt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FRACTION_BITS = 53
"""As many as a float holds exactly."""


def fractions(count: int, random_bits: Callable[[int], int]) -> NDArray[np.float64]:
    """Numbers from 0 to below 1."""
    drawn = np.frombuffer(random_bits(64 * count).to_bytes(8 * count, "little"), "<u8")
    return (drawn >> np.uint64(64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)


def spread(
    due_ms: NDArray[np.int64], windows_ms: NDArray[np.int64] | int, latest_ms: int, random_bits: Callable[[int], int]
) -> NDArray[np.int64]:
    """Due times moved within their windows, both ends included, not beyond `latest_ms`; as they are without windows."""
    if isinstance(windows_ms, int):
        if not windows_ms:
            return due_ms
        windows_ms = np.full(len(due_ms), windows_ms, np.int64)
    moved = due_ms + np.floor(fractions(len(due_ms), random_bits) * (windows_ms + 1)).astype(np.int64)
    return np.maximum(due_ms, np.minimum(moved, latest_ms))
