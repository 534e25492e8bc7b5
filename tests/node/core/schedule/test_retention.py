"""Hours that nobody needs any more go, from the state and from the disks of all nodes; others stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.delivery.test_fifo import Ordered
from tests.node.core.delivery.test_retries import Picky, admin, settlement
from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.proto import admin_pb2, consumer_pb2
from tickwheel.proto.log_pb2 import AdminCommand, RemoveHours
from tickwheel.proto.scheduler_pb2 import NOT_FOUND
from tickwheel.wheel.units import HOUR_MS

CONFIG = replace(
    CoreConfig(),
    retention_period_ms=500,
    checkpoint_period_ms=700,
    checkpoint_log_bytes=1 << 14,
    buffer_bytes_max=1 << 14,
)


def hours_on_disk(world: World) -> list[set[int]]:
    """Hours that have files, node by node."""
    found = []
    for node in world.nodes.values():
        names = [name for name in node.disk.list("") if name.startswith("wheel")]
        root = f"{names[0]}/hours" if names else "wheel/hours"
        found.append({int(name) for name in node.disk.list(root)})
    return found


def overdue(world: World, client: Client) -> int:
    """Messages due in each of the last six hours, and some later; the hour of now."""
    # In one batch: what comes after the first dispatch is not due before the cursor.
    client.schedule([-hours * HOUR_MS + minute * 60_000 for hours in range(6, 0, -1) for minute in range(40)])
    client.schedule([200 + 10 * number for number in range(100)])
    return world.now_ms // HOUR_MS


def test_settled_hours_go_everywhere() -> None:
    """All settled: all but the cursor's hour and the one before leave state and disks, digests stay equal."""
    world = World(31, config=CONFIG)
    client = Client(world)
    world.elect()
    client.consume()
    hour = overdue(world, client)
    world.run(6_000)
    assert not client.lost()
    for node in world.nodes.values():
        assert node.host is not None
        assert node.host.core.state.hour_min_kept == hour - 1
        assert node.host.core.state.removed_unsettled == 0
    assert len(digests(world)) == 1
    # Any later entry makes the next checkpoint, with which the files go.
    client.schedule([50])
    world.run(3_000)
    assert all(min(hours, default=hour) >= hour - 1 for hours in hours_on_disk(world)), hours_on_disk(world)
    for node in list(world.nodes.values()):
        node.kill()
        node.start()
    client.closed = True
    world.elect()
    world.run(2_000)
    assert len(digests(world)) == 1
    assert not client.lost()


def test_what_a_group_has_not_settled_stays() -> None:
    """A consumer that settles nothing: its hours are kept, older than retention though they are. That begins when a
    message can be delivered, and these were scheduled hours after they were due."""
    world = World(32, config=CONFIG)
    client = Client(world)
    client.settle = False
    master = world.elect()
    client.consume(lease_ms=600_000)
    hour = overdue(world, client)
    world.run(4_000)
    assert master.host is not None
    state = master.host.core.state
    assert state.hour_min_kept <= hour - 6
    assert len(client.got) == 340
    settings = state.settings.message()
    settings.retention_ms = 2 * HOUR_MS
    answers: list[object] = []
    master.host.core.serving.start(
        master.host.core.parts.requests.admin(AdminCommand(settings=settings)), answers.append
    )
    master.wake()
    world.run(3_000)
    assert state.hour_min_kept <= hour - 6
    assert state.removed_unsettled == 0
    assert len(digests(world)) == 1


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("by", ["removal", "setting"])
def test_who_waits_for_the_window_goes_on_when_it_moves(by: str, *, fifo: bool) -> None:
    """A consumer holds a message and does not answer; the next one lies beyond the window. It comes once the first one
    is removed with its hour, or the window is longer, though nothing else happens."""
    world = World(36)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    world.run(100)
    for node in world.nodes.values():
        assert node.host is not None
        subscription = node.host.core.state.subscription(1, 1)
        assert subscription is not None
        subscription.window_messages_max = 1
    client = Ordered(world, lambda record, attempt: None)
    client.consume(lease_ms=600_000)
    client.schedule_of(["a"], -6 * HOUR_MS)
    world.run(200)
    client.schedule_of(["a" if by == "removal" else "b"])
    world.run(2_000)
    assert len(client.got) == 1
    if by == "removal":
        admin(world, remove_hours=RemoveHours(hour_min_kept=world.now_ms // HOUR_MS - 1))
    else:
        admin(world, settings=admin_pb2.Settings(window_messages_max=1_000))
    world.run(2_000)
    assert len(client.got) == 2


def test_a_message_due_long_ago_is_not_removed_before_it_was_delivered() -> None:
    """`due_ms` 0 on a cluster that has dispatched nothing yet: its hour is that of 1970, its retention begins now."""
    world = World(34, config=CONFIG)
    client = Client(world)
    master = world.elect()
    client.schedule([-world.now_ms] * 30)
    client.schedule([10] * 10)
    world.run(4_000)
    assert master.host is not None and master.host.core.state.removed_unsettled == 0
    client.consume()
    world.run(2_000)
    assert len(client.got) == 40 and not client.lost()


def test_a_removed_message_is_said_to_be_removed() -> None:
    """Looking up what went with its hour: a definite answer, and a cancel finds nothing."""
    world = World(33, config=CONFIG)
    client = Client(world)
    world.elect()
    client.consume()
    overdue(world, client)
    world.run(6_000)
    master = world.master()
    assert master is not None and master.host is not None
    outcomes: list[object] = []
    oldest = (world.now_ms // HOUR_MS - 6) << 32
    master.host.core.serving.start(master.host.core.parts.requests.cancel(oldest), outcomes.append)
    master.wake()
    world.run(200)
    assert outcomes == [NOT_FOUND]


def test_dead_letters_go_after_the_retention_though_no_hour_does() -> None:
    """In one hour, of which nothing may go: letters older than the retention leave all nodes and are counted."""
    world = World(35, config=CONFIG)
    admin(world, settings=admin_pb2.Settings(retention_ms=60_000))
    client = Picky(world, lambda record, attempt: settlement(consumer_pb2.DEAD, reason="no"))
    client.consume()
    client.schedule([50] * 5)
    world.run(1_000)
    cores = [node.host.core for node in world.nodes.values() if node.host is not None]
    assert [core.state.dead_letters_kept() for core in cores] == [5, 5, 5]
    kept = {core.state.hour_min_kept for core in cores}
    world.run(58_000)
    assert [core.state.dead_letters_kept() for core in cores] == [5, 5, 5]
    world.run(3_000)
    assert [core.state.dead_letters_kept() for core in cores] == [0, 0, 0]
    assert {core.state.removed_unsettled for core in cores} == {5}
    assert {core.state.hour_min_kept for core in cores} == kept
    assert len(digests(world)) == 1
