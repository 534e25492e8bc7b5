"""T10: the wheel without a network, beside a heap and a sorted list in the same run."""

from __future__ import annotations

import heapq
import random
import time
from tempfile import TemporaryDirectory

import numpy as np
from sortedcontainers import SortedList

from tickwheel.bench.figures import Figure
from tickwheel.storage.local import LocalDisk
from tickwheel.wheel.engine import Wheel, WheelConfig
from tickwheel.wheel.units import UNIT, CursorKey

START_MS = 1_800_000_000_000
BATCH = 4_096


def fill(count: int) -> tuple[float, float]:
    """Units a second, merges included: the first four million and the last ones of `count`, over 1,440 hours."""
    rng = np.random.default_rng(2)
    part = min(4_000_000, count // 4)
    taken_s: list[float] = []
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        wheel = Wheel(LocalDisk(directory), "wheel", WheelConfig())
        records = bytes(BATCH)
        while wheel.pending < count:
            units = np.zeros(BATCH, UNIT)
            units["due_requested_ms"] = np.sort(START_MS + rng.integers(0, 1_440 * 3_600_000, BATCH))
            units["size"] = 1
            at = time.perf_counter()
            wheel.append(units, records)
            for job in wheel.jobs(0):
                job.run()
                wheel.finish(job)
            taken_s.append(time.perf_counter() - at)
    batches = part // BATCH
    return batches * BATCH / sum(taken_s[:batches]), batches * BATCH / sum(taken_s[-batches:])


async def t10(quick: bool) -> list[Figure]:
    """Append (merges included), then load and dispatch tick by tick; rates by units, and at 50 M pending."""
    count = (200_000 if quick else 4_000_000) // BATCH * BATCH
    rng = np.random.default_rng(1)
    due = START_MS + rng.integers(0, 600_000, count)
    with TemporaryDirectory(prefix="tickwheel-bench-") as directory:
        wheel = Wheel(LocalDisk(directory), "wheel", WheelConfig(buffer_bytes_max=32 << 20))
        batches = []
        for start in range(0, count, BATCH):
            units = np.zeros(BATCH, UNIT)
            units["due_requested_ms"] = np.sort(due[start : start + BATCH])
            units["size"] = 1
            batches.append(units)
        records = bytes(BATCH)
        append_s = merge_s = 0.0
        for units in batches:
            at = time.perf_counter()
            wheel.append(units, records)
            append_s += time.perf_counter() - at
            at = time.perf_counter()
            for job in wheel.jobs(0):
                job.run()
                wheel.finish(job)
            merge_s += time.perf_counter() - at
        at = time.perf_counter()
        passed = 0
        for second in range(1, 601):
            passed += wheel.dispatch(CursorKey(START_MS + 1_000 * second, 0)).passed_count
        load_s = time.perf_counter() - at
        assert passed == count and wheel.pending == 0
    figures = [
        Figure("append", count / append_s, "unit/s", "3,000,000"),
        Figure("append_with_merges", count / (append_s + merge_s), "unit/s"),
        Figure("load_and_dispatch", count / load_s, "unit/s", "5,000,000"),
        Figure("units", count, "unit"),
    ]
    pending = 400_000 if quick else 50_000_000
    first, last = fill(pending)
    figures += [
        Figure("pending", pending, "unit"),
        Figure("append_first_4m", first, "unit/s"),
        Figure("append_last_4m", last, "unit/s", "as the first"),
    ]
    sample = due[: min(count, 500_000)].tolist()
    heap: list[int] = []
    at = time.perf_counter()
    for value in sample:
        heapq.heappush(heap, value)
    while heap:
        heapq.heappop(heap)
    figures.append(Figure("heapq_push_and_pop", len(sample) / (time.perf_counter() - at), "item/s"))
    random.Random(1).shuffle(sample)
    at = time.perf_counter()
    ordered = SortedList()
    for value in sample:
        ordered.add(value)
    while ordered:
        ordered.pop(0)
    figures.append(Figure("sortedlist_add_and_pop", len(sample) / (time.perf_counter() - at), "item/s"))
    return figures
