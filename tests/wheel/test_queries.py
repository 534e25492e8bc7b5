"""Pages and counts of what is pending, against the plain list of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.wheel.test_engine_model import HOUR_MS, START_MS, History
from tickwheel.wheel import queries, reads
from tickwheel.wheel.buffer import Block
from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.queries import Schedule, Wanted
from tickwheel.wheel.units import CursorKey, ids_of

END_MS = START_MS + 1_000 * HOUR_MS


def grown(seed: int, slot_ms: int = 1_000) -> History:
    """Some hundred messages, many merged, some buffered, some cancelled, some dispatched."""
    history = History(seed, slot_ms)
    steps = [history.append] * 5 + [history.dispatch, history.cancel, history.pump, history.checkpoint, history.crash]
    for _ in range(80):
        history.rng.choice(steps)()
    return history


def pages(history: History, limit: int, wanted: Wanted | None = None, due_min: int = 0) -> list[int]:
    """Ids of all pages."""
    found: list[int] = []
    start: CursorKey | None = None
    while True:
        job = history.wheel.reads.scan(due_min, END_MS, start, limit, wanted)
        job.run()
        assert len(job.units) <= limit
        found += ids_of(job.units).tolist()
        start = job.next_key
        if start is None:
            return found


@pytest.fixture(params=["roomy", "narrow"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, once with budgets so small that every question takes many jobs."""
    if request.param == "narrow":
        monkeypatch.setattr(queries, "WINDOW_UNITS_FIRST", 3)
        monkeypatch.setattr(queries, "WINDOW_UNITS_MAX", 9)
        monkeypatch.setattr(queries, "EXAMINED_MAX", 20)
        monkeypatch.setattr(reads, "HOURS_MAX", 2)


def test_whole_hours_are_counted_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console asks every other second for the load of 24 hours. Of hours ahead it costs no read, even if some of
    their messages have been cancelled."""
    history = grown(4)
    for _ in range(10):
        history.cancel()
    read: list[int] = []
    between = Schedule.between

    def watched(self: Schedule, hour: HourChunks, low_ms: int, high_ms: int) -> Block | None:
        read.append(hour.hour)
        return between(self, hour, low_ms, high_ms)

    monkeypatch.setattr(Schedule, "between", watched)
    job = history.wheel.reads.count(0, END_MS, HOUR_MS)
    job.run()
    hours = [item.key[0] // HOUR_MS for item in history.pending]
    assert job.buckets == [(hour * HOUR_MS, hours.count(hour)) for hour in sorted(set(hours))]
    assert set(read) <= {history.wheel.cursor.due_ms // HOUR_MS}
    job = history.wheel.reads.count(0, END_MS, 60_000)
    job.run()
    assert len(set(read)) > 1, "some hours have marks"


@pytest.mark.usefixtures("budget")
@pytest.mark.parametrize("seed", range(6))
def test_pages_and_counts_are_the_list(seed: int) -> None:
    """Whatever lies in buffers or files and wherever a job ends: each pending message once, in order, and counted."""
    history = grown(seed, random.Random(seed).choice([1_000, 200]))
    expected = sorted(history.pending, key=lambda item: item.key)
    for limit in (1, 7, 1_000):
        assert pages(history, limit) == [item.id for item in expected]
    middle_ms = expected[len(expected) // 2].key[0]
    assert pages(history, 50, due_min=middle_ms) == [item.id for item in expected if item.key[0] >= middle_ms]
    for bucket_ms in (1_000, 60_000, HOUR_MS):
        counts: dict[int, int] = {}
        start_ms: int | None = 0
        while start_ms is not None:
            job = history.wheel.reads.count(start_ms, END_MS, bucket_ms)
            job.run()
            for at_ms, count in job.buckets:
                counts[at_ms] = counts.get(at_ms, 0) + count
            start_ms = job.next_ms
        model: dict[int, int] = {}
        for item in expected:
            at_ms = item.key[0] // bucket_ms * bucket_ms
            model[at_ms] = model.get(at_ms, 0) + 1
        assert counts == model


@pytest.mark.usefixtures("budget")
def test_what_a_unit_says_sorts_it_out() -> None:
    """Topic, mask, key, stamp and retries each leave out what they should, and only that."""
    history = History(3, 1_000)
    units, blob, _ = history.batch()
    while len(units) < 40:
        units, blob, _ = history.batch()
    number = np.arange(len(units))
    units["topic_id"] = number % 2 + 1
    units["tag_mask"] = np.where(number % 3 == 0, 0b111, 0b101)
    units["key_hash"] = number % 4
    units["scheduled_ms"] = number
    units["target_group"] = number % 5 == 0
    ids = history.wheel.append(units, blob)
    cases = [
        (Wanted(topic_id=2), number % 2 == 1),
        (Wanted(tag_mask=0b011), number % 3 == 0),
        (Wanted(key_hash=3), number % 4 == 3),
        (Wanted(with_key=True), number % 4 != 0),
        (Wanted(stamped_ms_max=10), number <= 10),
        (Wanted(retries=False), number % 5 != 0),
        (Wanted(topic_id=1, tag_mask=0b101, key_hash=2), (number % 2 == 0) & (number % 4 == 2)),
    ]
    for wanted, keep in cases:
        assert sorted(pages(history, 4, wanted)) == sorted(ids[keep].tolist()), wanted
        counted = history.wheel.reads.count(0, END_MS, HOUR_MS, wanted)
        counted.run()
        if counted.next_ms is None:
            assert sum(count for _, count in counted.buckets) == int(keep.sum())


def test_a_page_is_not_shifted_by_what_comes_meanwhile() -> None:
    """Between two pages messages are scheduled before and behind the place: those that were there come once each."""
    history = grown(5)
    expected = [item.id for item in sorted(history.pending, key=lambda item: item.key)]
    job = history.wheel.reads.scan(0, END_MS, None, len(expected) // 2)
    job.run()
    first = ids_of(job.units).tolist()
    for _ in range(5):
        history.append()
        history.pump()
    rest: list[int] = []
    start = job.next_key
    while start is not None:
        job = history.wheel.reads.scan(0, END_MS, start, 10)
        job.run()
        rest += ids_of(job.units).tolist()
        start = job.next_key
    seen = [*first, *rest]
    assert len(seen) == len(set(seen))
    assert [number for number in seen if number in set(expected)] == expected
