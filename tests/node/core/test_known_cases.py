"""Cases known from other schedulers' own tests, on three simulated nodes: levels over a restart, mixed delays, and how
late messages are whose master was killed."""

from __future__ import annotations

import numpy as np

from tests.node.core.test_when import change, one, schedule
from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.schedule.publisher import BatchOutcome


def test_levels_one_to_four_in_time_over_a_restart_of_all() -> None:
    """Each level of the table comes at its time and once, though all nodes lose power between the second and third."""
    world = World(91)
    client = Client(world)
    master = world.elect()
    change(master, delay_levels="1s 2s 6s 8s 1h")
    due: list[int] = []
    for level in (4, 3, 2, 1):
        outcome = schedule(master, one(delay_level=level))
        assert isinstance(outcome, BatchOutcome) and outcome.levels is not None
        due += outcome.due_ms.tolist()
    client.consume()
    world.run(3_000)
    for node in world.nodes.values():
        node.kill()
    client.closed = True
    for node in world.nodes.values():
        node.start()
    world.run(7_000)
    seen = sorted((due_ms, when) for _, found in client.got.items() for when, _, due_ms in found)
    assert [due_ms for due_ms, _ in seen] == sorted(due), "each once"
    assert all(0 <= when - due_ms <= 200 for due_ms, when in seen)
    assert len(digests(world)) == 1


def test_fixed_mixed_and_no_delays_are_never_early() -> None:
    """P3, P4: the same delay for all, others in any order, and none at all; at the millisecond, not at the tick."""
    world = World(92)
    client = Client(world)
    world.elect()
    client.consume()
    world.run(200)
    client.schedule([1_500] * 50)
    client.schedule([7, 2_999, 1, 1_000, 999, 1_001, 2_500, 3])
    client.schedule([0] * 20)
    world.run(3_500)
    assert len(client.got) == 78 and not client.early() and not client.repeated()
    late = [when - client.acked[record] for record, ((when, _, _),) in client.got.items()]
    assert max(late) < 100


def test_a_killed_master_delays_no_more_than_until_the_next_one() -> None:
    """P1, P4: 99 of 100 come within a second of their due time or of the new master, whichever is later."""
    world = World(93)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([5 * number for number in range(1_000)])
    world.run(2_000)
    master.kill()
    world.run_until(lambda: world.master() is not None)
    there_ms = world.now_ms
    world.run(5_000)
    assert len(client.got) == 1_000 and not client.early()
    late = [seen[0][0] - max(client.acked[record], there_ms) for record, seen in client.got.items()]
    assert np.percentile(late, 99) < 1_000
