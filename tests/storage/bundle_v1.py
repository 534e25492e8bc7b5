"""Bundles as they were built before units were packed: what clusters may still hold."""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np

from tickwheel.storage.bundle import TABLE
from tickwheel.storage.segment import LOG_BLOCK_BYTES, chunk_heads, row_checksums
from tickwheel.storage.unit import HOUR_MS, NO_INDEX, UNIT

HEADER = struct.Struct("<8sIIIIQQQII")


def build_v1(units: np.ndarray, records: bytes, *, slot_ms: int, topics: int) -> bytes:
    """A bundle of version 1. `units`: UNIT, sorted by due_requested_ms."""
    units = units.copy()
    due, sizes = units["due_requested_ms"], units["size"].astype(np.int64)
    hours = due // HOUR_MS
    logs, indexes, heads, table = [], [], [], []
    at = 0
    for hour in np.unique(hours).tolist():
        part = units[hours == hour]
        count, size = len(part), int(sizes[hours == hour].sum())
        ticks, starts, counts = np.unique(part["due_requested_ms"] // slot_ms, return_index=True, return_counts=True)
        in_run = np.arange(count) - np.repeat(starts, counts)
        part["due_ms"] = part["due_requested_ms"]
        part["index"] = np.arange(count)
        part["offset"] = np.cumsum(part["size"]) - part["size"]
        part["local_index"] = part["run_index"] = in_run
        part["previous_index"] = np.where(in_run > 0, np.arange(count) - 1, NO_INDEX)
        raw = part.view(np.uint8).reshape(count, -1)
        part["crc"] = row_checksums(raw)
        log = records[at : at + size]
        at += size
        crcs = [google_crc32c.value(log[low : low + LOG_BLOCK_BYTES]) for low in range(0, size, LOG_BLOCK_BYTES)]
        head = b"".join(
            chunk_heads(
                0,
                (ticks % (HOUR_MS // slot_ms)).astype(np.uint32),
                counts.astype(np.uint32),
                0,
                size,
                np.array(crcs, np.uint32),
                np.arange(count, dtype=np.uint32),
            )
        )
        logs.append(log)
        indexes.append(raw.tobytes())
        heads.append(head)
        table.append((hour, count, size, len(head), 0))
    body = np.array(table, TABLE).tobytes()
    facts = (b"TWBUNDLE", 1, slot_ms, len(table), topics, len(units), len(records), sum(map(len, heads)))
    header = HEADER.pack(*facts, google_crc32c.value(body), 0)[:-4]
    header += google_crc32c.value(header).to_bytes(4, "little")
    assert UNIT.itemsize == 96
    return b"".join([header, body, *logs, *indexes, *heads])
