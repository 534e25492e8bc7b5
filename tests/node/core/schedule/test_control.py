"""Pause, resume and reset on three simulated nodes, through the loss of the master."""

from __future__ import annotations

import pytest

from tests.node.core.delivery.test_filters import admin
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST
from tickwheel.proto.log_pb2 import AdminCommand


def paused(kind: str, paused: bool) -> AdminCommand:
    """Pause or resume the topic or the group."""
    request = admin_pb2.SetPausedRequest(name="t" if kind == "topic" else "g", paused=paused)
    return AdminCommand(set_topic_paused=request) if kind == "topic" else AdminCommand(set_group_paused=request)


def next_master(world: World, killed: Node) -> Node:
    """Kill the master; who leads then."""
    killed.kill()
    world.run_until(lambda: world.master() is not None, 3_000)
    found = world.master()
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["topic", "group"])
def test_a_pause_survives_its_master(kind: str) -> None:
    """Nothing is handed out while it lasts, under whichever master; what was out can be settled; then all comes."""
    world = World(51)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([50] * 20)
    world.run_until(lambda: len(client.got) == 20)
    admin(master, paused(kind, True))
    client.schedule([50] * 30)
    world.run(1_000)
    master = next_master(world, master)
    world.run(2_000)
    assert len(client.got) == 20
    assert master.host is not None
    assert master.host.core.state.backlog.total == 30
    admin(master, paused(kind, False))
    world.run_until(lambda: len(client.got) == 50, 2_000)
    assert not client.repeated()


def test_a_reset_delivers_again_as_the_first_time() -> None:
    """All that is retained comes once more as attempt 1; what was out before counts no more; digests agree."""
    world = World(52)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=600_000)
    client.schedule([50] * 40)
    world.run_until(lambda: len(client.got) == 40)
    client.settle = True
    admin(master, AdminCommand(reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=EARLIEST)))
    world.run_until(lambda: all(len(seen) == 2 for seen in client.got.values()), 2_000)
    world.run(500)
    assert {attempt for seen in client.got.values() for _, attempt, _ in seen} == {1}
    assert master.host is not None
    assert master.host.core.parts.delivery.leases.in_flight == 0 or master.host.core.state.backlog.total == 0
    admin(master, AdminCommand(reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=LATEST)))
    client.schedule([50])
    world.run_until(lambda: len(client.got) == 41, 2_000)
    world.run(300)
    assert sum(len(seen) for seen in client.got.values()) == 81
    assert len(digests(world)) == 1


def test_leases_from_before_a_reset_hold_nothing_back_at_the_next_master() -> None:
    """The slaves had heard of leases of ten minutes; after the reset and a failover all comes within seconds."""
    world = World(53)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=600_000)
    client.schedule([50] * 40)
    world.run_until(lambda: len(client.got) == 40)
    world.run(200)
    admin(master, paused("group", True))
    admin(master, AdminCommand(reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=EARLIEST)))
    master = next_master(world, master)
    world.run(500)
    admin(master, paused("group", False))
    world.run_until(lambda: all(len(seen) == 2 for seen in client.got.values()), 2_000)


def test_a_reset_before_anybody_consumes_voids_leases_of_an_earlier_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next master has heard of leases of ten minutes, and the group is reset before a consumer comes there: what
    was held comes at once. It was held on, and when the lease was over it was lost until the next change of master."""
    world = World(54)
    before, after = Client(world), Client(world)
    before.settle = False
    master = world.elect()
    before.consume(lease_ms=600_000)
    before.schedule([50] * 40)
    world.run_until(lambda: len(before.got) == 40)
    world.run(200)
    monkeypatch.setattr(before, "consume", lambda *_: None)
    master = next_master(world, master)
    assert master.host is not None
    assert master.host.core.parts.delivery.leases.in_flight == 40, "it has heard of them"
    admin(master, AdminCommand(reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=EARLIEST)))
    after.consume()
    world.run_until(lambda: len(after.got) == 40, 2_000)
