"""The unit of a delay index: 96 bytes that say where a message lies, when it is due and whose it is.

`UNIT` is the layout on disk and in memory, little-endian. A batch of units is a numpy array of it.
Ids of units are `hour << 32 | global index` in one uint64 (`ids_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HOUR_MS = 3_600_000
NO_INDEX = 0xFFFF_FFFF
"""`previous_index` of the first unit of a tick in its segment."""

UNIT = np.dtype(
    [
        ("offset", "<u8"),  # of the record (meta and payload) in the hour's delay log, given at apply
        ("due_ms", "<i8"),  # that holds: the requested one, or the cursor's if that was later
        ("due_requested_ms", "<i8"),
        ("scheduled_ms", "<i8"),  # stamp of the command that brought it
        ("tag_mask", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),  # of the record
        ("index", "<u4"),  # global index
        ("previous_index", "<u4"),  # previous unit of the same tick, filled at merge; NO_INDEX: none
        ("local_index", "<u4"),  # units of that tick before it, filled at merge
        ("run_index", "<u4"),  # place in its run: contiguous units of one tick, filled at merge
        ("topic_id", "<u4"),
        (
            "tag_hash",
            "<u4",
        ),  # of its only tag; 0: none, or several (units of the first version: of the first of several)
        ("target_group", "<u4"),  # 0: all groups; else the one group a retry goes to
        ("origin_hour", "<u4"),  # id it was first scheduled under; 0, 0: its own
        ("origin_index", "<u4"),
        ("crc", "<u4"),  # checksum of the other 92 bytes (segment.row_checksums), filled at merge
        ("meta_size", "<u2"),  # of the MessageMeta in front of the payload
        ("attempts", "u1"),
        ("flags", "u1"),
    ]
)
UNIT_BYTES = 96
ONE_TAG = 1
"""In `flags`: the message has one tag only, and `tag_hash` is its hash."""
assert UNIT.itemsize == UNIT_BYTES

Units = NDArray[np.void]
_RAW = np.dtype((np.void, UNIT_BYTES))
Ids = NDArray[np.uint64]


class CursorKey(NamedTuple):
    """Key of the next unit not dispatched; units with (due_ms, index) below it are dispatched."""

    due_ms: int
    index: int  # type: ignore[assignment]  # the word for it everywhere; tuple.index is not missed


def ids_of(units: Units) -> Ids:
    """Ids of units: hour << 32 | global index."""
    hours = (units["due_ms"] // HOUR_MS).astype(np.uint64)
    ids: Ids = (hours << np.uint64(32)) | units["index"]
    return ids


def join_units(parts: Sequence[Units]) -> Units:
    """Concatenation; as plain bytes, since numpy spends 24 us an array on working out that the fields are equal."""
    if len(parts) == 1:
        return parts[0]
    raw = np.concatenate([np.ascontiguousarray(part).view(_RAW) for part in parts])
    joined: Units = raw.view(UNIT)
    return joined
