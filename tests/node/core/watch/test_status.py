"""What a node says of itself while it takes no part: its state, its health, and whether it is good for a backup."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.test_membership import Asked, add, remove
from tests.node.core.trio import Node, World
from tickwheel.node.core.watch.status import BACKUP_LAG_ENTRIES_MAX, backup_origin, node_status
from tickwheel.node.server.health import WHOLE, health_of
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2 import NODE_ALONE, NODE_NOT_MEMBER, NODE_SERVING


def seen(node: Node) -> tuple[admin_pb2.NodeState.ValueType, bool, str]:
    """Its state, whether it is healthy, and why a backup of it would be stale."""
    assert node.host is not None
    status = node_status(node.host.core)
    return status.state, health_of(status)[WHOLE], backup_origin(node.host.core).stale_reason


def test_a_node_without_a_majority_does_not_serve() -> None:
    """Master or slave, cut off: it says so as soon as an election would begin, and serves again once it is back."""
    world = World()
    master = world.elect()
    slave = next(node for name, node in world.nodes.items() if name != master.name)
    world.run_until(lambda: all(seen(node) == (NODE_SERVING, True, "") for node in world.nodes.values()))
    for node in (slave, master):
        world.cut_off(node.name)
        world.run(5_000)
        state, healthy, stale_reason = seen(node)
        assert (state, healthy) == (NODE_ALONE, False)
        assert "master" in stale_reason
    world.heal()
    world.run_until(lambda: all(seen(node) == (NODE_SERVING, True, "") for node in world.nodes.values()))


def test_a_node_that_waits_to_be_added_does_not_serve() -> None:
    """It holds nothing, and says what it waits for; added, it serves."""
    world = World()
    world.elect()
    newcomer = world.join("d")
    world.run(2_000)
    state, healthy, stale_reason = seen(newcomer)
    assert (state, healthy) == (NODE_NOT_MEMBER, False)
    assert "waits to be added" in stale_reason
    Asked(world, add("d"))
    world.run_until(lambda: seen(newcomer)[0] == NODE_SERVING)


def test_a_removed_node_does_not_serve() -> None:
    """Its data ends where it was removed."""
    world = World()
    master = world.elect()
    slave = next(node for name, node in world.nodes.items() if name != master.name)
    Asked(world, remove(slave.name))
    world.run(5_000)
    state, healthy, stale_reason = seen(slave)
    assert (state, healthy) in ((NODE_NOT_MEMBER, False), (NODE_ALONE, False))
    assert stale_reason


def test_a_slave_far_behind_is_no_good_for_a_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commit index that its master tells with each append, though its own log ends before."""
    world = World()
    master = world.elect()
    slave = next(node for name, node in world.nodes.items() if name != master.name)
    world.run_until(lambda: seen(slave)[0] == NODE_SERVING)
    world.run(1_000)
    assert slave.host is not None and master.host is not None
    log = slave.host.core.log
    assert log.status().heard_commit_index == master.host.core.log.status().commit_index
    status = replace(log.status(), heard_commit_index=log.status().applied_index + BACKUP_LAG_ENTRIES_MAX + 1)
    monkeypatch.setattr(log, "status", lambda: status)
    origin = backup_origin(slave.host.core)
    assert f"{BACKUP_LAG_ENTRIES_MAX + 1:,} entries behind" in origin.stale_reason
