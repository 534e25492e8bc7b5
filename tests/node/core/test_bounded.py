"""Memory stays bounded when the disk cannot keep up with what arrives."""

from __future__ import annotations

import gc
from dataclasses import replace

from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.prefetched import Prefetched

BUFFER_BYTES = 64 << 10


def held_bytes(node: Node) -> int:
    """What a node keeps in memory of arrivals."""
    assert node.host is not None
    return node.host.core.wheel.holdings.buffer_bytes


def world() -> World:
    """Three nodes with tiny arrival buffers."""
    return World(config=replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=BUFFER_BYTES))


def flood(trio: World, client: Client, seconds: int) -> None:
    """Schedule as fast as messages are taken, each known to the client only when it is acknowledged."""
    for _ in range(seconds * 20):
        client.schedule([60_000 + place for place in range(100)])
        trio.run(50)


def test_a_slave_that_cannot_merge_stops_applying_and_catches_up() -> None:
    """The others go on; what it has not applied waits in its journal, and nothing is lost."""
    trio = world()
    trio.elect()
    slave = next(node for node in trio.nodes.values() if node is not trio.master())
    slave.holds_merges = True
    client = Client(trio)
    flood(trio, client, 5)
    acknowledged = len(client.acked)
    assert acknowledged > 5_000, "one slow disk holds nobody up"
    assert BUFFER_BYTES < held_bytes(slave) < 4 * BUFFER_BYTES
    slave.release()
    trio.run_until(lambda: len(digests(trio)) == 1)


def test_a_master_that_cannot_merge_refuses_schedules_with_a_hint() -> None:
    """Refused, not lost: what was acknowledged is pending, and once the disk has caught up it goes on."""
    trio = world()
    master = trio.elect()
    for node in trio.nodes.values():
        node.holds_merges = True
    client = Client(trio)
    flood(trio, client, 5)
    assert client.refused, "it took everything"
    assert "wheel.buffer_bytes_max" in client.refused[-1].message
    assert int(client.refused[-1].metadata["retry_after_ms"]) > 0
    assert held_bytes(master) < 4 * BUFFER_BYTES
    for node in trio.nodes.values():
        node.release()
    trio.run(1_000)
    before = len(client.acked)
    flood(trio, client, 1)
    trio.run(1_000)
    assert len(client.acked) > before
    assert master.host is not None
    assert master.host.core.wheel.pending == len(client.acked)


def test_what_was_delivered_leaves_memory_at_once() -> None:
    """Not only when the garbage collector looks for cycles, which is seldom: records can be large. A circle among what
    fetches messages for a group kept the records of all it had delivered."""
    trio = World()
    trio.elect()
    client = Client(trio)
    client.consume()
    client.schedule(list(range(500, 800)))
    trio.run_until(lambda: len(client.acked) == 300)
    gc.collect()
    gc.disable()
    try:
        trio.run_until(lambda: len(client.got) == 300)
        left = [held for held in gc.get_objects() if isinstance(held, Prefetched)]
    finally:
        gc.enable()
    assert not left
