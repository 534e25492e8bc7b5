"""Units as the wheel handles them: arrays of `UNIT` (storage/unit.py has the layout), their ids, and the cursor's key.

Ids of units are `hour << 32 | global index` in one uint64 (`ids_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.unit import HOUR_MS, LACKING, NO_INDEX, ONE_TAG, UNIT, UNIT_BYTES

__all__ = [
    "HOUR_MS",
    "LACKING",
    "NO_INDEX",
    "ONE_TAG",
    "UNIT",
    "UNIT_BYTES",
    "CursorKey",
    "Ids",
    "Units",
    "ids_of",
    "join_units",
]

Units = NDArray[np.void]
_RAW = np.dtype((np.void, UNIT_BYTES))
Ids = NDArray[np.uint64]


class CursorKey(NamedTuple):
    """Key of the next unit to dispatch: units with (due_ms, index) below it are dispatched."""

    due_ms: int
    index: int  # type: ignore[assignment]  # the word for it everywhere; tuple.index is not missed


def ids_of(units: Units) -> Ids:
    """Ids of units: hour << 32 | global index."""
    hours = (units["due_ms"] // HOUR_MS).astype(np.uint64)
    ids: Ids = (hours << np.uint64(32)) | units["index"]
    return ids


def join_units(parts: Sequence[Units]) -> Units:
    """Concatenation. Copies plain bytes, since numpy spends 24 us an array on finding that the fields are equal."""
    if len(parts) == 1:
        return parts[0]
    raw = np.concatenate([np.ascontiguousarray(part).view(_RAW) for part in parts])
    joined: Units = raw.view(UNIT)
    return joined
