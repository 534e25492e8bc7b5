"""Damage that a master meets in its files while it serves: another leads first, then the node stops and says why."""

from __future__ import annotations

import pytest

from tests.node.core.test_serving import contain
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.schedule.dispatcher import Phase
from tickwheel.storage.blocks import BLOCK_BYTES

COUNT = 2_000
"""Ids of more than one block: the first is read from the file after a restart."""


def restarted_with_ready_messages(names: str) -> tuple[World, Client]:
    """A cluster that has dispatched messages to nobody, has them in a checkpoint, and was started anew."""
    world = World(names=names)
    client = Client(world)
    master = world.elect()
    world.run_until(lambda: master.host is not None and master.host.core.parts.dispatcher.phase is Phase.RUNNING)
    for _ in range(4):
        client.schedule([10] * (COUNT // 4))
    world.run_until(lambda: len(client.acked) == COUNT)
    world.run(500)
    for node in world.nodes.values():
        assert node.host is not None
        taken: list[object] = []
        node.host.core.checkpointer.request(taken.append)
        node.wake()
        world.run_until(lambda: bool(taken))  # noqa: B023  # called within the round
        assert not isinstance(taken[0], str)
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
    contain(world)
    world.elect()
    return world, client


def spoil(node: Node) -> str:
    """A byte of the first block of the topic's ready ids; the path."""
    path = next(f"state/ready/{name}" for name in node.disk.list("state/ready") if name.endswith(".ids.0"))
    file = node.disk.open(path)
    assert file.size() > BLOCK_BYTES
    byte = file.read_at(100, 1)
    file.write_at(100, bytes([byte[0] ^ 0x10]))
    file.close()
    return path


def test_a_master_hands_over_before_it_stops() -> None:
    """A consumer asks for what is damaged: the next master leads by a handover, and delivers all of it."""
    world, client = restarted_with_ready_messages("abc")
    master = world.elect()
    assert master.host is not None
    term = master.host.core.term
    path = spoil(master)
    led: list[str] = []

    def stopped(reason: str) -> None:
        led.extend(
            n.name for n in world.nodes.values() if n is not master and n.host and n.host.core.parts.reign.elected
        )
        Node._on_fatal(master, reason)

    master.host._on_fatal = stopped
    client.consume()
    world.run_until(lambda: bool(master.fatal))
    assert led, "nobody led yet when it stopped"
    assert path in master.fatal and "Remove the member and add it anew" in master.fatal
    following = world.elect()
    assert following.host is not None and following.host.core.term == term + 1
    world.run_until(lambda: not client.lost(), 20_000)


def test_alone_it_stops_at_once() -> None:
    """There is nobody to hand over to."""
    world, client = restarted_with_ready_messages("a")
    master = world.elect()
    path = spoil(master)
    client.consume()
    world.run_until(lambda: bool(master.fatal), 2_000)
    assert path in master.fatal


def test_a_slave_that_meets_it_stops_and_the_master_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked the slave is told that this request failed; the cluster has a majority."""
    world, client = restarted_with_ready_messages("abc")
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    path = spoil(slave)
    core = slave.host.core
    ready = core.state.ready_log(int(path.rpartition("/")[2].partition(".")[0]))
    assert ready is not None
    failed: list[object] = []

    def asked() -> None:
        ready.read(0, 10)

    core.serving.run(failed.append, asked)
    world.run_until(lambda: bool(slave.fatal), 2_000)
    assert failed and path in slave.fatal
    client.consume()
    world.run_until(lambda: not client.lost(), 20_000)
    assert world.master() is master
