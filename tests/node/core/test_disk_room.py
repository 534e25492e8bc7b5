"""The high-water mark of the disk, and what a data directory holds, on three simulated nodes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.node.core.schedule.test_flow import batch, refusal, tick_of
from tests.node.core.test_when import schedule
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.core.watch.disk_use import disk_use
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2
from tickwheel.proto.common_pb2 import DISK_FULL, LIMIT_REACHED, NOT_MASTER
from tickwheel.storage.disk import NoDescriptorError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.jobs import MergeJob

CONFIG = replace(
    CoreConfig(), disk_high_percent=85, segment_bytes=1 << 20, buffer_bytes_max=1 << 14, checkpoint_log_bytes=1 << 14
)

BALLAST_BYTES = 32 << 20
"""So that what a node writes meanwhile is little beside it."""


def fill(node: Node, percent: float) -> None:
    """Make the disk so small, or so large, that so much of it is used; the node has looked after that."""
    if not node.disk.exists("ballast"):
        node.disk.open("ballast", create=True).append(bytes(BALLAST_BYTES))
    used = node.disk.space_total() - node.disk.space_left()
    node.disk.fill(int(used * (100 / percent - 1)))
    node.world.run(1_200)


def test_the_mark_has_hysteresis() -> None:
    """At 85 % no more, at 82 % neither, below 80 % again; without a mark never."""
    disk = SimulatedDisk(Random(1), capacity_bytes=100_000)
    file = disk.open("ballast", create=True)
    room = DiskRoom(disk, 85, list)
    unmarked = DiskRoom(disk, 0, list)
    seen = []
    for size in (84_000, 86_000, 82_000, 81_000, 79_000, 84_000, 99_000):
        file.truncate(0)
        file.append(bytes(size))
        for each in (room, unmarked):
            each.look()
        seen.append(room.above)
        assert not unmarked.above and unmarked.refusal() is None
        assert (room.refusal() is not None) == room.above
    assert seen == [False, True, True, True, False, False, True]


def test_the_reserve_of_the_disk_is_named() -> None:
    """Without a mark too. The text is a sentence."""
    disk = SimulatedDisk(Random(1), capacity_bytes=100)
    disk.open("ballast", create=True).append(bytes(100))
    room = DiskRoom(disk, 0, list)
    room.look()
    failure = room.own_refusal()
    assert failure is not None and failure.metadata["field"] == "storage.space_reserve_bytes"
    assert failure.message == ("storage.space_reserve_bytes: the disk has no more than that left; retry after 5000 ms")


def test_above_the_mark_only_schedules_are_refused() -> None:
    """What was accepted is dispatched, delivered and settled; with room again schedules are taken."""
    world = World(71, config=CONFIG)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([2_500] * 50)
    world.run(100)
    for node in sorted(world.nodes.values(), key=lambda node: node is master):
        fill(node, 86)
    refused = refusal(schedule(master, batch(1, tick_of(world))), "storage.high_water_percent")
    assert refused.metadata["limit"] == "85 %"
    assert master.host is not None
    assert node_status(master.host.core).disk_above_mark
    world.run_until(lambda: len(client.got) == 50, 5_000)
    world.run(500)
    assert master.host.core.state.backlog.total == 0
    for node in world.nodes.values():
        fill(node, 50)
    assert isinstance(schedule(world.elect(), batch(1, tick_of(world))), BatchOutcome)


@pytest.mark.parametrize("mark", [85, 0])
def test_a_full_master_hands_over_and_schedules_go_on(mark: int) -> None:
    """P10: while slaves have room nothing is refused for want of it, at the mark as at the reserve; the next master has
    room, and nothing was lost or delivered twice."""
    world = World(75, config=replace(CONFIG, disk_high_percent=mark))
    client = Client(world)
    master = world.elect()
    client.consume()
    world.run(200)
    if mark:
        fill(master, 86)
    else:
        master.disk.fill(0)
        master.disk.open("reserve-of-the-test", create=True)
    for _ in range(60):
        client.schedule([500] * 5)
        world.run(50)
    after = world.elect()
    assert after is not master and not after.fatal and not master.fatal
    assert not [failure for failure in client.refused if failure.reason in (LIMIT_REACHED, DISK_FULL)]
    world.run(2_000)
    assert len(client.acked) > 200 and not client.lost() and not client.repeated()


def test_a_full_master_that_nobody_can_follow_refuses() -> None:
    """Without a majority that has room, or with slaves that are silent, its own disk decides."""
    world = World(76, config=CONFIG)
    master, *slaves = sorted(world.nodes.values(), key=lambda node: node is not world.elect())
    fill(slaves[0], 90)
    fill(master, 90)
    answer = schedule(world.elect(), batch(1, tick_of(world)))
    assert refusal(answer, "storage.high_water_percent")


def test_a_node_whose_disk_is_full_names_the_master() -> None:
    """It takes no part, but it hears who leads: a client is sent there, and not kept."""
    world = World(77, config=CONFIG)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    slave.host.core.log._storage.halt("no room")  # type: ignore[attr-defined]
    world.run(300)
    answer = schedule(slave, batch(1, tick_of(world)))
    assert isinstance(answer, Failure) and answer.reason == NOT_MASTER
    assert answer.metadata["master_id"] == master.name and int(answer.metadata["term"]) > 0


@pytest.mark.parametrize("full", [1, 2])
def test_a_majority_of_disks_needs_room(full: int) -> None:
    """One slave above its mark is its own trouble; two of three would stop the cluster, so the master refuses first."""
    world = World(72, config=CONFIG)
    client = Client(world)
    master = world.elect()
    client.schedule([60_000])
    for slave in [node for node in world.nodes.values() if node is not master][:full]:
        fill(slave, 90)
    world.run(1_200)
    answer = schedule(master, batch(1, tick_of(world)))
    if full == 1:
        assert isinstance(answer, BatchOutcome)
    else:
        assert refusal(answer, "storage.high_water_percent").metadata["value"].count(",") == 1


def test_disk_use_by_part_hour_and_topic() -> None:
    """Each byte is told once; hours and topics are those of the messages; a slave answers for itself."""
    world = World(73, config=CONFIG)
    master = world.elect()
    hour = world.now_ms // 3_600_000 + 2
    for topic, count in (("u", 100), ("t", 300)):
        assert isinstance(schedule(master, batch(count, hour * 3_600_000, topic=topic)), BatchOutcome)
    world.run(3_000)
    for node in world.nodes.values():
        assert node.host is not None
        answers: list[object] = []
        node.host.core.serving.start(
            disk_use(node.host.core, node.host.core.parts.disk_room, admin_pb2.GetDiskUseRequest(by_topic=True)),
            answers.append,
        )
        node.wake()
        world.run_until(lambda answers=answers: bool(answers))  # type: ignore[misc]
        use = answers[0]
        assert isinstance(use, admin_pb2.DiskUse), use
        assert use.node_id == node.name
        assert {"journal", "wheel/hours"} <= {part.name for part in use.parts}
        assert sum(part.bytes for part in use.parts) > 0
        assert {item.hour for item in use.hours} == {hour}
        assert next(part.bytes for part in use.parts if part.name == "wheel/hours") == sum(h.bytes for h in use.hours)
        assert {item.topic: item.messages for item in use.topics} == {"t": 300, "u": 100}
        assert all(item.bytes == 97 * item.messages for item in use.topics)
        assert use.next_hour == 0


def test_a_merge_without_a_descriptor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried again and again without a word, while clients heard of a full buffer."""
    world = World(config=replace(CONFIG, buffer_bytes_max=1 << 12))
    client = Client(world)
    node = world.elect()
    merges = MergeJob.run

    def none_left(_: MergeJob) -> None:
        raise NoDescriptorError("cannot open 'wheel/hours/1/0.log': Too many open files")

    monkeypatch.setattr(MergeJob, "run", none_left)
    assert node.host is not None
    background = node.host.core.background
    client.schedule([3_600_000] * 50)
    world.run_until(lambda: bool(background.held_up))
    assert background.held_up == (
        "a merge failed and is tried again: cannot open 'wheel/hours/1/0.log': Too many open files; raise the limit of "
        "open files (LimitNOFILE)"
    )
    monkeypatch.setattr(MergeJob, "run", merges)
    world.run_until(lambda: not background.held_up)
