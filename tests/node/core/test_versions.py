"""Nodes of two versions in one cluster: they understand each other, or one stops and says so; they never differ."""

from __future__ import annotations

from collections.abc import Sequence

from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.state.schema import ENTRY_SCHEMA
from tickwheel.proto.log_pb2 import Command, LogEntry

FIELD_1000 = b"\xc0\x3e\x07"


def newer(node: Node, *, uses: bool) -> None:
    """From now on what this master writes is of a newer version; `uses`: with a field that others do not know."""
    assert node.host is not None
    proposer = node.host.core.proposer
    write = Proposer._sound_entry

    def sound_entry(commands: Sequence[Command], now_ms: int) -> bytes:
        entry = LogEntry.FromString(write(proposer, commands, now_ms) or b"")
        entry.schema = ENTRY_SCHEMA ^ 1
        if uses:
            entry.commands[0].MergeFromString(FIELD_1000)
        data: bytes = entry.SerializeToString()
        return data

    proposer._sound_entry = sound_entry  # type: ignore[method-assign]


def test_a_newer_master_that_uses_nothing_new_is_followed() -> None:
    """A rolling upgrade under load: nothing is refused, and all nodes stay the same."""
    world = World()
    client = Client(world)
    newer(world.elect(), uses=False)
    client.consume()
    for _ in range(20):
        client.schedule([20, 300])
        world.run(50)
    world.run(2_000)
    assert len(client.acked) == 40 and not client.lost()
    assert len(digests(world)) == 1


def test_what_the_others_do_not_know_is_never_committed() -> None:
    """P1, P8: they stop before it is in their logs, and say why; the newer one is taken back, and nothing is lost."""
    world = World()
    client = Client(world)
    client.consume()
    master = world.elect()
    client.schedule([3_000] * 10)
    world.run(500)
    assert len(client.acked) == 10
    newer(master, uses=True)
    client.schedule([3_000] * 10)
    world.run(1_000)
    others = [node for node in world.nodes.values() if node is not master]
    for node in others:
        assert "field 1000 of Command" in node.fatal and "start the version" in node.fatal
    assert world.master() is None, "without them there is no majority"
    assert len(client.acked) == 10
    master.kill()
    for node in others:
        node.start()
    world.elect()
    master.start()
    client.schedule([3_000] * 10)
    world.run(6_000)
    assert len(client.acked) == 20 and not client.lost()
    assert len(digests(world)) == 1
