"""Rates by topic and lateness in a node's status."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.node.core.schedule.test_pending import core_of, schedule
from tests.node.core.trio import Client, World
from tests.node.state.solo import Solo
from tickwheel.node.core.watch.counts import DELIVERED, SCHEDULED, WINDOW_MS, Counts
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs
from tickwheel.node.state.subscription import Backlog


def test_rates_are_of_the_last_seconds_and_topics_are_forgotten() -> None:
    """A difference of notes, whatever happened before; nothing is kept of a topic where nothing happens."""
    counts = Counts(Solo(1).state)

    def note(second: int) -> None:
        counts.upkeep(Now(ClusterMs(0), SteadyMs(second * 1_000), acting=True, dispatching=True))

    counts.add(9, SCHEDULED, 1_000)
    for second in range(10):
        note(second)
        counts.add(1, SCHEDULED, 100)
        counts.totals.scheduled += 100
        counts.add(2, DELIVERED, second)
        late = np.array([5_000, 4_997 - 100 * second]), np.array([1, 2], np.uint32)
        counts.delivered(1, 5_000, [], *late)
    assert counts.busiest(Backlog(), 9) == [(1, (100.0, 0, 0, 0)), (2, (0, 0, (4 + 5 + 6 + 7 + 8) / 5, 0))]
    assert counts.in_all_per_second() == (100.0, 0, 2.0, 0)
    assert counts.redelivered_per_second() == 1
    assert (counts.late_ms(0.5), counts.late_ms(0.99)) == (1, 1_000)
    for second in range(10, 20):
        note(second)
    assert counts.busiest(Backlog(), 9) == []
    assert counts.late_ms(0.99) == -1


SECONDS = st.lists(st.dictionaries(st.integers(1, 4), st.integers(0, 2), max_size=4), min_size=2, max_size=30)
"""What is counted in each second: topic id -> messages. A stale settlement counts none."""


@given(SECONDS)
@example([{}, {1: 1}, {1: 0}, *[{}] * 10])
def test_rates_are_the_sums_of_the_window(seconds: list[dict[int, int]]) -> None:
    """Whatever topics come, rest and go, and where nothing was counted of one."""
    counts = Counts(Solo(1).state)
    window = WINDOW_MS // 1_000
    for second, counted in enumerate(seconds):
        for topic_id, count in counted.items():
            counts.add(topic_id, SCHEDULED, count)
        counts.upkeep(Now(ClusterMs(0), SteadyMs(second * 1_000), acting=True, dispatching=True))
        notes = seconds[max(0, second - window) : second + 1]
        sums = {topic_id: sum(note.get(topic_id, 0) for note in notes[1:]) for topic_id in range(1, 5)}
        length = len(notes) - 1
        assert {topic_id: rates[SCHEDULED] for topic_id, rates in counts.busiest(Backlog(), 9)} == {
            topic_id: total / length for topic_id, total in sums.items() if total
        }


def test_status_names_the_busiest_topics() -> None:
    """What was scheduled, dispatched, delivered and settled, each where it happened; a backlog without a consumer."""
    world = World()
    world.elect()
    world.run(2_000)
    client = Client(world)
    client.consume()
    world.run(100)
    schedule(world, [("t", 100, "k", [])] * 30 + [("u", 100, "k", [])] * 10)
    world.run(2_500)
    status = node_status(core_of(world))
    busiest = status.topics[0]
    assert [topic.name for topic in status.topics] == ["t", "u"]
    assert min(busiest.schedule_rate, busiest.dispatch_rate, busiest.deliver_rate, busiest.settle_rate) > 0
    assert busiest.backlog == 0
    assert status.topics[1].deliver_rate == 0 < status.topics[1].dispatch_rate
    assert status.late_p99_ms >= status.late_p50_ms >= 1
    world.run(20_000)
    assert not node_status(core_of(world)).topics
    assert node_status(core_of(world)).late_p99_ms == -1
