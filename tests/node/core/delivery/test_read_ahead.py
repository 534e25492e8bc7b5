"""What a channel reads ahead is bounded by bytes as well as by number, and everything is delivered all the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.delivery.prefetched import Prefetched
from tickwheel.node.core.promise import UNHEARD
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.proto import admin_pb2, consumer_pb2

ROOM = 256 << 10
LARGEST = 300 << 10


class Sized(Client):
    """Schedules messages of given sizes."""

    def schedule_sizes(self, sizes: list[int]) -> None:
        """All due at the same time."""
        master = self.world.elect()
        assert master.host is not None
        records = [(b"m%d-" % (self.count + place)).ljust(size, b".") for place, size in enumerate(sizes)]
        self.count += len(sizes)
        batch = IncomingBatch(
            producer_id="",
            sequence=0,
            count=len(sizes),
            topics=["t"],
            topic_of=None,
            when=np.full(len(sizes), self.world.now_ms, np.int64),
            kinds=KIND_DUE,
            sizes=np.array([len(record) for record in records], np.uint32),
            records=b"".join(records),
        )
        master.host.core.parts.publisher.schedule(batch, UNHEARD)
        master.wake()
        self.world.run(50)


def held(channel: Channel) -> int:
    """Bytes of the records that a channel has read and not handed out."""
    lanes = channel._lanes.values() if isinstance(channel, FifoChannel) else ()
    return sum(waiting.size for lane in lanes for waiting in lane.waiting) + sum(
        len(record)
        for prefetched in (*channel._urgent, *channel._prefetched)
        for record in (prefetched.records or [])[prefetched.taken :]
    )


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever records arrive."""
    whole = Channel.fetched

    def fetched(channel: Channel, prefetched: Prefetched, records: list[bytes]) -> None:
        whole(channel, prefetched, records)
        assert held(channel) <= max(ROOM, LARGEST)

    monkeypatch.setattr(Channel, "fetched", fetched)


def cluster(seed: int, *, fifo: bool = False, batch_messages_max: int = 4_096) -> tuple[World, Sized]:
    """With little room for what is read ahead."""
    config = CoreConfig(segment_bytes=1 << 20, staged_bytes_max=ROOM, batch_messages_max=batch_messages_max)
    world = World(seed, config=config)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    return world, Sized(world)


def sizes_of(seed: int, count: int) -> list[int]:
    """Some larger than all of the room, most small."""
    rng = Random(seed)
    return [rng.choice((20, 20, 500, 30_000, 100_000, LARGEST)) for _ in range(count)]


@pytest.mark.parametrize("fifo", [False, True])
def test_messages_of_all_sizes_come_once_within_the_bound(fifo: bool) -> None:
    """To a consumer that takes as many as come; and the counts end at nothing."""
    world, client = cluster(1, fifo=fifo)
    for part in range(4):
        client.schedule_sizes(sizes_of(part, 20))
    client.consume()
    world.run_until(lambda: len(client.got) == 80)
    assert not client.repeated()
    world.run(200)
    master = world.elect()
    assert master.host is not None
    for channel in master.host.core.parts.delivery.channels:
        assert (channel._bytes, channel._parked) == (0, 0)


def test_a_new_master_reads_the_backlog_within_the_bound() -> None:
    """It has the units of none of these messages in memory."""
    world, client = cluster(2)
    for part in range(4):
        client.schedule_sizes(sizes_of(part, 20))
    master = world.elect()
    master.kill()
    world.run_until(lambda: world.master() not in (None, master))
    client.consume()
    world.run_until(lambda: len(client.got) == 80)
    assert not client.repeated()


@pytest.mark.parametrize("fifo", [False, True])
def test_later_messages_do_not_take_the_room_of_earlier_ones(fifo: bool) -> None:
    """A new master has to look for the units of the backlog, while it has those of newer messages in memory. The newer
    ones cannot leave first, so they must not fill the room."""
    world, client = cluster(5, fifo=fifo, batch_messages_max=10)
    client.schedule_sizes([60_000] * 20)
    master = world.elect()
    master.kill()
    world.run_until(lambda: world.master() not in (None, master))
    client.schedule_sizes([60_000] * 20)
    client.consume()
    world.run_until(lambda: len(client.got) == 40)
    assert not client.repeated()


def test_what_comes_back_is_read_within_the_bound() -> None:
    """A consumer leaves with what it has, again and again; the next one gets all of it."""
    world, client = cluster(3)
    client.settle = False
    client.schedule_sizes(sizes_of(5, 40))
    client.consume()
    for _ in range(3):
        world.run_until(lambda: client.session is not None and len(client.got) == 40)
        assert client.session is not None
        client.session.close()
        client.got.clear()
        client.session, client.closed = None, True
    client.settle = True
    world.run_until(lambda: len(client.got) == 40)


def test_one_pull_reads_no_more_than_there_is_room_for() -> None:
    """However many messages it asks for; the following pulls bring the rest, in order."""
    world, client = cluster(4)
    for part in range(3):
        client.schedule_sizes([60_000 + part] * 20)
    master = world.elect()
    assert master.host is not None
    sizes: list[int] = []
    for _ in range(60):
        answers: list[object] = []
        request = consumer_pb2.PullRequest(group="g", topics=["t"], messages_max=1_024, wait_ms=1_000)
        master.host.core.serving.start(master.host.core.parts.consumers.pull(request), answers.append)
        master.wake()
        world.run_until(lambda answers=answers: bool(answers))  # type: ignore[misc]
        [batch] = answers
        assert isinstance(batch, consumer_pb2.DeliverBatch), batch
        sizes += np.frombuffer(batch.sizes, "<u4").tolist()
        if len(sizes) == 60:
            break
    assert sizes == [60_000] * 20 + [60_001] * 20 + [60_002] * 20
