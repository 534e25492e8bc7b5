"""Rates by topic and lateness in a node's status."""

from __future__ import annotations

import numpy as np

from tests.node.core.schedule.test_pending import core_of, schedule
from tests.node.core.trio import Client, World
from tickwheel.node.core.watch.counters import Counters, Totals
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.core.watch.topic_rates import DELIVERED, SCHEDULED, TopicRates
from tickwheel.node.core.world import SteadyMs


def test_rates_are_of_the_last_seconds_and_topics_are_forgotten() -> None:
    """A difference of notes, whatever happened before; nothing is kept of a topic where nothing happens."""
    rates, totals, counters = TopicRates(), Totals(), Counters()
    rates.add(9, SCHEDULED, 1_000)
    for second in range(10):
        rates.note(SteadyMs(second * 1_000), totals, counters)
        rates.add(1, SCHEDULED, 100)
        totals.scheduled += 100
        rates.add(2, DELIVERED, second)
        counters.note_delivery(1, 5_000, np.array([5_000, 4_997 - 100 * second]), np.array([1, 2], np.uint32))
    assert rates.per_second() == {1: (100.0, 0, 0, 0), 2: (0, 0, (4 + 5 + 6 + 7 + 8) / 5, 0)}
    assert rates.in_all_per_second() == (100.0, 0, 2.0, 0)
    assert rates.redelivered_per_second() == 1
    assert (rates.late_ms(0.5), rates.late_ms(0.99)) == (1, 1_000)
    for second in range(10, 20):
        rates.note(SteadyMs(second * 1_000), totals, counters)
    assert rates.per_second() == {}
    assert rates.late_ms(0.99) == -1


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
