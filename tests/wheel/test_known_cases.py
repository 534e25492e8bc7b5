"""Cases known from other schedulers: very far ahead, an hour of very many between empty ones, a restart inside it."""

from __future__ import annotations

import random

import numpy as np

from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.engine import Wheel, WheelConfig
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, Units

START_MS = 500_000 * HOUR_MS
MANY = 60_000
TWO_YEARS_MS = 2 * 365 * 24 * HOUR_MS
CONFIG = WheelConfig(buffer_bytes_max=1 << 20)


def append(wheel: Wheel, due_ms: np.ndarray) -> None:
    """Messages of one byte, and what the wheel wants to be done for them."""
    units: Units = np.zeros(len(due_ms), UNIT)
    units["due_requested_ms"] = np.sort(due_ms)
    units["size"] = 1
    wheel.append(units, b"x" * len(due_ms))
    for job in wheel.jobs(START_MS):
        job.run()
        wheel.finish(job)


def restarted(disk: SimulatedDisk, wheel: Wheel) -> Wheel:
    """A checkpoint, a power loss, and the wheel that starts from it."""
    job = wheel.begin_checkpoint()
    job.run()
    wheel.checkpoint_durable(job)
    disk.crash()
    return Wheel(disk, "wheel", CONFIG, job.state)


def test_an_hour_of_many_between_empty_ones_and_one_two_years_ahead() -> None:
    """Everything at its own time and once, though the node restarts inside the full hour; empty hours cost nothing."""
    disk = SimulatedDisk(random.Random(5))
    wheel = Wheel(disk, "wheel", CONFIG)
    for directory in ("wheel", "wheel/hours", "wheel/runs", ""):
        disk.fsync_dir(directory)
    full_ms = START_MS + 10 * HOUR_MS
    due = full_ms + np.random.default_rng(5).integers(0, HOUR_MS, MANY)
    for part in np.split(due, 12):
        append(wheel, part)
    append(wheel, np.array([START_MS + TWO_YEARS_MS]))
    assert len(wheel.holdings.hours.used()) == 2 and wheel.pending == MANY + 1
    assert len(wheel.dispatch(CursorKey(full_ms, 0)).units) == 0

    middle_ms = full_ms + HOUR_MS // 2 + 123
    first = wheel.dispatch(CursorKey(middle_ms, 0)).units["due_ms"].copy()
    wheel = restarted(disk, wheel)
    assert wheel.cursor == CursorKey(middle_ms, 0) and wheel.pending == MANY + 1 - len(first)
    second = wheel.dispatch(CursorKey(full_ms + HOUR_MS, 0)).units["due_ms"].copy()
    assert first.max() < middle_ms <= second.min()
    assert np.array_equal(np.concatenate([first, second]), np.sort(due))

    far_ms = START_MS + TWO_YEARS_MS
    counted = wheel.reads.count(0, far_ms + 1, HOUR_MS)
    counted.run()
    assert counted.buckets == [(far_ms, 1)]
    assert len(wheel.dispatch(CursorKey(far_ms, 0)).units) == 0
    wheel = restarted(disk, wheel)
    assert wheel.window.next_due_ms() is not None and (wheel.window.next_due_ms() or 0) <= far_ms
    assert wheel.dispatch(CursorKey(far_ms + 1, 0)).units["due_ms"].tolist() == [far_ms]
    assert wheel.pending == 0 and wheel.window.next_due_ms() is None
