"""The arrival buffer: what it holds is found by id, and takes no more memory than it counts."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tickwheel.wheel.buffer import Buffer
from tickwheel.wheel.units import HOUR_MS, UNIT, Units

HOUR = 500_000


def add(
    buffer: Buffer, rng: np.random.Generator, count: int, first: int, record_bytes: int
) -> tuple[Units, np.ndarray]:
    """One append of units of an hour, with the next indexes. Returns them and their ids."""
    units = np.zeros(count, UNIT)
    due = np.sort(HOUR * HOUR_MS + rng.integers(0, 60_000, count))
    units["due_ms"] = due
    units["index"] = np.arange(first, first + count)
    units["size"] = record_bytes
    units["offset"] = (first + np.arange(count)) * record_bytes
    ids = np.uint64(HOUR << 32) | units["index"].astype(np.uint64)
    zero = np.zeros(1, np.int64)
    buffer.add(due, units, ids, rng.bytes(count * record_bytes), zero, zero)
    return units.copy(), ids


@pytest.mark.parametrize("most", [1, 5, 700, 20_000])
def test_units_are_found_by_id_however_they_came(most: int) -> None:
    """Small appends are joined and sorted by due time; large ones stay as they are."""
    rng = np.random.default_rng(most)
    buffer = Buffer()
    came, first = [], 0
    for _ in range(60):
        count = int(rng.integers(1, most + 1))
        came.append(add(buffer, rng, count, first, 8))
        first += count
    units = np.concatenate([part for part, _ in came])
    ids = np.concatenate([part for _, part in came])
    asked = rng.permutation(len(ids))[:5_000]
    found = buffer.find(ids[asked])
    assert (buffer.units_of(ids[asked], found) == units[asked]).all()
    restored = Buffer()
    extents = buffer.extents().copy()
    restored.restore(units, extents[:1], b"".join(buffer.records))
    restored.extents()["count"] = len(units)
    add(restored, rng, 3, first, 8)
    assert (restored.units_of(ids[asked], restored.find(ids[asked])) == units[asked]).all()


@pytest.mark.parametrize("count", [1, 64, 1_000, 20_000])
def test_it_takes_no_more_memory_than_it_counts(count: int) -> None:
    """P11: small appends were held twice, and 64 messages took 1.6 times what merges and refusals go by."""
    rng = np.random.default_rng(count)
    buffer = Buffer()
    add(buffer, rng, count, 0, 64)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0], buffer.bytes
        for number in range(1, max(40_000 // count, 2)):
            add(buffer, rng, count, number * count, 64)
        held, counted = tracemalloc.get_traced_memory()[0] - before[0], buffer.bytes - before[1]
    finally:
        tracemalloc.stop()
    assert counted * 0.5 < held < counted * 1.05
