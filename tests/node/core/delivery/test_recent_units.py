"""The units of what was dispatched last stay in memory, and no more of them with more topics."""

from __future__ import annotations

import numpy as np
import pytest

from tickwheel.node.core.delivery import recent_units
from tickwheel.node.core.delivery.recent_units import Recent
from tickwheel.wheel.units import UNIT, Units

MAX = 96


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> Recent:
    monkeypatch.setattr(recent_units, "RECENT_UNITS_MAX", MAX)
    return Recent()


def chunk(first: int, count: int = 1) -> Units:
    """Units that tell their positions."""
    units = np.zeros(count, UNIT)
    units["index"] = np.arange(first, first + count)
    return units


def kept(recent: Recent, topic_id: int, end: int) -> list[int]:
    """Positions below `end` whose units are found, each looked for by itself."""
    of_topic = recent.of(topic_id)
    found = [of_topic.find(np.array([position], np.uint64)) for position in range(end)]
    assert all(units is None or units["index"].tolist() == [position] for position, units in enumerate(found))
    return [position for position, units in enumerate(found) if units is not None]


@pytest.mark.parametrize("topics", [1, 7, 96])
def test_many_topics_keep_as_many_units_together_as_one(recent: Recent, topics: int) -> None:
    """A bound for each topic alone let a master with a hundred topics grow by gigabytes in an hour."""
    each = 1_000 // topics
    for position in range(each):
        for topic_id in range(topics):
            recent.add(topic_id, position, chunk(position))
    of_topics = [kept(recent, topic_id, each) for topic_id in range(topics)]
    assert MAX <= sum(map(len, of_topics)) <= MAX + MAX // 16 + 1
    assert all(some == [*range(each)][-len(some) :] for some in of_topics), "the newest of each"


def test_a_topic_that_is_quiet_gives_its_room_to_the_others(recent: Recent) -> None:
    """And its next units are found again by whoever reads it."""
    recent.add(1, 0, chunk(0))
    recent.add(2, 0, chunk(0, 2 * MAX))
    assert kept(recent, 1, 1) == []
    assert kept(recent, 2, 2 * MAX) == [*range(2 * MAX)], "one chunk is kept whatever its size"
    reader = recent.of(1)
    recent.add(1, 1, chunk(1))
    assert reader.find(np.array([1], np.uint64)) is not None
    assert kept(recent, 2, 2 * MAX) == [], "a chunk goes as a whole"


def test_positions_over_several_chunks_are_found_together(recent: Recent) -> None:
    for first in range(0, 90, 3):
        recent.add(1, first, chunk(first, 3))
    found = recent.of(1).find(np.array([4, 5, 6, 17], np.uint64))
    assert found is not None and found["index"].tolist() == [4, 5, 6, 17]
