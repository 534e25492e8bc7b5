"""The jitter window of a schedule: the master moves each due time later by a random part of its window.

Messages that everybody schedules for the full hour come due over the window instead. The master draws before it makes
the command: the log and the receipt hold the drawn time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FRACTION_BITS = 53
"""Bits of a random fraction: as many as a float holds exactly."""


def fractions(count: int, random_bits: Callable[[int], int]) -> NDArray[np.float64]:
    """Random numbers from 0 to below 1."""
    drawn = np.frombuffer(random_bits(64 * count).to_bytes(8 * count, "little"), "<u8")
    return (drawn >> np.uint64(64 - FRACTION_BITS)) / float(1 << FRACTION_BITS)


def spread(
    due_ms: NDArray[np.int64], windows_ms: NDArray[np.int64] | int, latest_ms: int, random_bits: Callable[[int], int]
) -> NDArray[np.int64]:
    """Due times moved within their windows, both ends included, but not beyond `latest_ms`. Without windows they
    stay."""
    if isinstance(windows_ms, int):
        if not windows_ms:
            return due_ms
        windows_ms = np.full(len(due_ms), windows_ms, np.int64)
    moved = due_ms + np.floor(fractions(len(due_ms), random_bits) * (windows_ms + 1)).astype(np.int64)
    return np.maximum(due_ms, np.minimum(moved, latest_ms))
