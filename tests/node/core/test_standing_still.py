"""A master that stands still at any point of a tick, for longer than its lease, hands out nothing without it."""

from __future__ import annotations

from tests.node.core.trio import MS, Client, World
from tickwheel.proto import consumer_pb2

STILL_NS = 400 * MS
"""Longer than the lease."""


class Watched(Client):
    """Notes of each batch whether the master held its lease when it left."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.came = False
        self.leased: list[bool] = []

    def _deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        assert self.at is not None and self.at.host is not None
        self.came = True
        self.leased.append(self.at.host.core.log.lease_held())
        super()._deliver(batch)


def play(still_at: int) -> tuple[int, list[bool]]:
    """Messages become due. From a little before that on, the master stands still where it reads its clock for the
    `still_at`-th time; 0: nowhere. Returns how often it read the clock until they came, and what the client noted."""
    world = World(3)
    node = world.elect()
    assert node.host is not None
    core, read = node.host.core, node.monotonic_ns
    tick, late_ns, reads, due = core.tick, 0, 0, False
    client = Watched(world)
    client.settle = False
    client.consume()
    world.run(100)
    client.schedule([60] * 3)
    world.run_until(lambda: bool(client.acked))

    def watched_clock() -> int:
        nonlocal late_ns, reads
        if due and not client.came:
            reads += 1
            if reads == still_at:
                late_ns = STILL_NS
        return read() + late_ns

    def watched_tick(*, woken: bool = True) -> int:
        nonlocal due
        due = world.now_ms >= max(client.acked.values()) - 6
        return tick(woken=woken)

    node.monotonic_ns = watched_clock  # type: ignore[method-assign]
    core.tick = watched_tick  # type: ignore[method-assign]
    world.run_until(lambda: bool(client.got), 3_000)
    return reads, client.leased


def test_wherever_a_master_stands_still_it_delivers_under_its_lease() -> None:
    reads, leased = play(0)
    assert reads > 8 and leased == [True]
    for still_at in range(1, reads + 1):
        assert play(still_at)[1] == [True], f"at reading {still_at} of {reads}"
