"""The real clock of a node."""

from __future__ import annotations

import time

import pytest

from tickwheel.node.server.ports import STEP_BACK_NS, BootClock

SECOND_NS = 1_000_000_000


def test_a_kernel_that_sets_its_clock_back_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative age ended the node, as it could not be told in its status. Readings that overtake each other by a
    little, as those of several threads, do not push the clock ahead."""
    reads: list[int] = []
    clock = BootClock()
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: reads.pop(0))

    def read(ns: int) -> int:
        reads.append(ns)
        return clock.monotonic_ns()

    assert [read(at * SECOND_NS) for at in (100, 101, 91, 92, 1, 2)] == [
        at * SECOND_NS for at in (100, 101, 101, 102, 102, 103)
    ]
    assert read(3 * SECOND_NS) - read(3 * SECOND_NS - STEP_BACK_NS) == STEP_BACK_NS
    assert read(4 * SECOND_NS) == 105 * SECOND_NS
