"""How deliveries share batches: what is due together leaves together, however many dispatches brought it."""

from __future__ import annotations

from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig


def test_the_rest_of_one_dispatch_leaves_with_the_next() -> None:
    """Messages at every millisecond, so most batches end in the middle of a dispatch: what is due of the next one goes
    along. In a batch of its own it would be late by another pause."""
    world = World(config=CoreConfig())  # the bound below counts on looks with a sync every 50 ms
    world.elect()
    client = Client(world)
    client.consume()
    world.run(500)
    client.schedule([500 + place for place in range(400)])
    world.run(1_500)
    assert len(client.got) == 400 and not client.early()
    late_ms = [when - due for seen in client.got.values() for when, _, due in seen]
    moments = {when for seen in client.got.values() for when, _, _ in seen}
    pause_ms = CoreConfig().delivery_period_ms
    assert max(late_ms) < pause_ms, max(late_ms)
    assert len(moments) <= 400 // pause_ms + 2, "each pause ends with one batch"


def test_the_consumers_of_each_group_take_turns() -> None:
    """However many groups are served in the same ticks."""
    world = World()
    world.elect()
    sender = Client(world)
    consumers = [Client(world) for _ in range(4)]
    for place, client in enumerate(consumers):
        client.group = f"g{place // 2}"
        client.consume()
    world.run(200)
    for _ in range(10):
        sender.schedule([20])
        world.run(50)
    assert [len(client.got) for client in consumers] == [5, 5, 5, 5]
