"""Turns arrivals and their lateness into the figures of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RAMP_SHARE = 0.1
"""Share left out of a rate at each end: deliveries begin and end over the width of the due times."""

Counts = dict[str, int]
"""Number by value, as a load program prints it: JSON has only strings as keys."""


def counted(values: NDArray[Any]) -> Counts:
    """How often each value occurs."""
    found, counts = np.unique(values, return_counts=True)
    return {str(value): count for value, count in zip(found.tolist(), counts.tolist(), strict=True)}


def spread_out(counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values in ascending order, and how often each occurs."""
    values = np.array([int(value) for value in counts], np.int64)
    order = np.argsort(values)
    return values[order], np.array(list(counts.values()), np.int64)[order]


def quantile(counts: Counts, share: float) -> float:
    """The smallest value that this share of all values does not exceed; nan without values."""
    values, numbers = spread_out(counts)
    if not len(values):
        return float("nan")
    reached = np.cumsum(numbers)
    return float(values[np.searchsorted(reached, share * reached[-1])])


def steady_rate(at_s: NDArray[Any], numbers: NDArray[np.int64]) -> float:
    """Arrivals a second between the first and the last tenth of `numbers` arrivals at ascending times.

    0 if all came at once, or none did.
    """
    reached = np.cumsum(numbers)
    if not len(reached):
        return 0.0
    first, last = np.searchsorted(reached, (RAMP_SHARE * reached[-1], (1 - RAMP_SHARE) * reached[-1]))
    took_s = at_s[last] - at_s[first]
    return float((reached[last] - reached[first]) / took_s) if took_s > 0 else 0.0
