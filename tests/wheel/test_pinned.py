"""A pin tells later what was pending when it was made."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.engine import Wheel, WheelConfig
from tickwheel.wheel.units import HOUR_MS, UNIT, CursorKey, ids_of

BASE_MS = 490_000 * HOUR_MS


def append(wheel: Wheel, due: list[int]) -> list[int]:
    """Units of one byte each; their ids."""
    units = np.zeros(len(due), UNIT)
    units["due_requested_ms"] = sorted(due)
    units["size"] = 1
    return [int(n) for n in wheel.append(units, b"x" * len(due))]


def merge(wheel: Wheel) -> None:
    """Everything that arrived goes to the hours' files."""
    for job in wheel.jobs(0):
        job.run()
        wheel.finish(job)


@given(
    st.lists(st.integers(0, 3 * HOUR_MS - 1), min_size=1, max_size=60),
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3 * HOUR_MS - 1)),
            st.tuples(st.just("cancel"), st.integers(0, 59)),
            st.tuples(st.just("dispatch"), st.integers(0, 2 * HOUR_MS)),
            st.tuples(st.just("merge"), st.just(0)),
        ),
        max_size=20,
    ),
    st.integers(0, 20),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_what_comes_later_does_not_show(
    first: list[int], steps: list[tuple[str, int]], pinned_at: int, page: int, hours: int
) -> None:
    """Arrivals, cancels, dispatches and merges behind a pin change nothing of what it means, whatever the page size and
    however many hours are read together."""
    wheel = Wheel(SimulatedDisk(Random(1)), "wheel", WheelConfig(buffer_bytes_max=1))
    pending = dict.fromkeys(append(wheel, [BASE_MS + ms for ms in first]), 0)
    known = list(pending)
    pin = expected = None
    for number, (kind, value) in enumerate([*steps, ("end", 0)]):
        if number == min(pinned_at, len(steps)):
            pin, expected = wheel.reads.pin(0, 1 << 50), sorted(pending)
        if kind == "append":
            known += append(wheel, [BASE_MS + value])
            pending[known[-1]] = 0
        elif kind == "cancel":
            id = known[value % len(known)]
            due_ms = next((int(u["due_ms"]) for u in _units(wheel, id)), 0)
            if wheel.cancel(id, due_ms).name == "CANCELLED":
                pending.pop(id, None)
        elif kind == "dispatch":
            passed = wheel.dispatch(CursorKey(BASE_MS + value, 0)).units
            for id in ids_of(passed).tolist():
                pending.pop(id, None)
        elif kind == "merge":
            merge(wheel)
    assert pin is not None and expected is not None
    found: list[int] = []
    for at in range(0, len(pin.hours), hours):
        together = pin.hours[at : at + hours].tolist()
        start: CursorKey | None = None
        while True:
            span = range(together[0], together[-1] + 1)
            job = wheel.reads.scan_pinned(pin, span, start, 0, 1 << 50, page)
            job.run()
            found += [int(n) for n in ids_of(pin.known(job.units))]
            if job.next_key is None:
                break
            start = job.next_key
    assert sorted(found) == expected
    assert len(set(found)) == len(found)


def _units(wheel: Wheel, id: int) -> np.ndarray:
    job = wheel.reads.lookup(np.array([id], np.uint64))
    job.run()
    return job.units[job.found]
