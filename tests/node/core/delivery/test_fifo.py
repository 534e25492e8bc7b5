"""FIFO topics on three simulated nodes: order within a message group, whatever becomes of its messages."""

from __future__ import annotations

import numpy as np
import pytest

from tests.node.core.delivery.test_retries import ACK, Picky, admin, settlement
from tests.node.core.trio import World, digests
from tickwheel.node.core.delivery import fifo
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.promise import UNHEARD
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch, MetaColumns
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage.tags import tag_mask

POLICY = admin_pb2.RetryPolicy(
    exponential=admin_pb2.ExponentialBackoff(initial_ms=300, factor=1.0, max_ms=300), attempts_max=3
)


class Ordered(Picky):
    """Schedules messages of message groups; notes every delivery and every acknowledgement in order."""

    def schedule_of(self, groups: list[str], delay_ms: int = 50, tags: list[list[str]] | None = None) -> None:
        """One message for each name, in this order, all due at the same time."""
        master = self.world.elect()
        assert master.host is not None
        tags = tags or [[] for _ in groups]
        metas = [
            common_pb2.MessageMeta(message_group=group, tags=some).SerializeToString()
            for group, some in zip(groups, tags, strict=True)
        ]
        payloads = [b"%s-%d" % (group.encode(), self.count + place) for place, group in enumerate(groups)]
        self.count += len(groups)
        records = [meta + payload for meta, payload in zip(metas, payloads, strict=True)]
        columns = MetaColumns.none(len(groups))
        columns.sizes = np.array([len(meta) for meta in metas], np.uint32)
        columns.tag_masks = np.array([tag_mask(some) for some in tags], np.uint64)
        batch = IncomingBatch(
            producer_id="",
            sequence=0,
            count=len(groups),
            topics=["t"],
            topic_of=None,
            when=np.full(len(groups), self.world.now_ms + delay_ms, np.int64),
            kinds=KIND_DUE,
            sizes=np.array([len(record) for record in records], np.uint32),
            records=b"".join(records),
            metas=columns,
        )
        master.host.core.parts.publisher.schedule(batch, UNHEARD)
        master.wake()

    def by_group(self) -> dict[str, list[tuple[int, int]]]:
        """(number, attempt) of the deliveries of each message group, in the order of time."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for record, seen in self.got.items():
            name, _, number = record.rpartition(b"-")
            key = name[-1:].decode()
            found.setdefault(key, []).extend((when, int(number), attempt) for when, attempt, _ in seen)
        return {key: [(number, attempt) for _, number, attempt in sorted(rows)] for key, rows in found.items()}


def cluster(seed: int) -> tuple[World, Ordered]:
    """A FIFO topic, a group with short pauses and three attempts."""
    world = World(seed)
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=True))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], retry=POLICY))
    return world, Ordered(world, lambda record, attempt: ACK)


def test_a_nack_blocks_its_message_group_and_nobody_else() -> None:
    """In order, one at a time; the nacked one comes again in place after its pause, the other groups go on."""
    world, client = cluster(1)
    client.judge = lambda record, attempt: settlement(consumer_pb2.RETRY) if b"a-1" in record and attempt == 1 else ACK
    client.consume()
    client.schedule_of(["a", "a", "b", "a", "b", "c"])
    world.run(200)
    assert client.by_group() == {"a": [(0, 1), (1, 1)], "b": [(2, 1), (4, 1)], "c": [(5, 1)]}
    world.run(500)
    assert client.by_group()["a"] == [(0, 1), (1, 1), (1, 2), (3, 1)]
    (times,) = [seen for record, seen in client.got.items() if b"a-1" in record]
    assert 300 <= times[1][0] - times[0][0] <= 400
    assert len(digests(world)) == 1


def test_a_blocked_message_keeps_no_record_but_its_own_in_memory() -> None:
    """Records read together with it are forgotten once they are settled, or many blocked message groups would take
    more memory than is counted."""
    world, client = cluster(8)
    client.judge = lambda record, attempt: None if b"hold" in record else ACK
    client.consume()
    for part in range(3):
        client.schedule_of([f"hold{part}", *["b"] * 20])
        world.run_until(lambda part=part: len(client.got) == 21 * (part + 1))  # type: ignore[misc]
    world.run(200)
    master = world.elect()
    assert master.host is not None
    [channel] = master.host.core.parts.delivery.channels
    assert isinstance(channel, FifoChannel)
    waiting = [one for lane in channel._lanes.values() for one in lane.waiting]
    assert len(waiting) == 3
    records = {id(one.prefetched): one.prefetched.records or [] for one in waiting}
    assert sum(len(record) for some in records.values() for record in some) == channel._bytes > 0


def test_death_and_expiry_unblock_their_message_group() -> None:
    """After attempts_max it is a dead letter and the next one goes; a lease that runs out is a retry in place."""
    world, client = cluster(2)

    def judge(record: bytes, attempt: int) -> consumer_pb2.SettleBatch | None:
        if b"a-0" in record:
            return settlement(consumer_pb2.RETRY, reason="no")
        return None if attempt == 1 and b"b-" in record else ACK

    client.judge = judge
    client.consume(lease_ms=400)
    client.schedule_of(["a", "a", "b", "b"])
    world.run(4_000)
    assert client.by_group() == {
        "a": [(0, 1), (0, 2), (0, 3), (1, 1)],
        "b": [(2, 1), (2, 2), (3, 1), (3, 2)],
    }
    master = world.elect()
    assert master.host is not None and master.host.core.state.dead_letters_kept() == 1
    assert len(digests(world)) == 1


def test_order_and_pause_hold_through_a_loss_of_the_master() -> None:
    """P8, P1: the next master keeps the blocked group blocked until its pause is over, and the order."""
    world, client = cluster(3)
    pause = settlement(consumer_pb2.RETRY, delay_ms=4_000)
    client.judge = lambda record, attempt: pause if record.endswith(b"a-0") and attempt == 1 else ACK
    client.consume()
    client.schedule_of(["a", "b"] * 10)
    world.run(300)
    master = world.elect()
    began_ms = world.now_ms
    master.kill()
    world.elect()
    master.start()
    world.run(2_500)
    assert client.by_group()["a"] == [(0, 1)]
    assert client.by_group()["b"] == [(number, 1) for number in range(1, 20, 2)]
    world.run(4_000)
    assert client.by_group()["a"] == [(0, 1), (0, 2)] + [(number, 1) for number in range(2, 20, 2)]
    (times,) = [seen for record, seen in client.got.items() if record.endswith(b"a-0")]
    assert times[1][0] - began_ms >= 3_500
    assert len(digests(world)) == 1


def test_what_is_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: a blocked group with many messages takes a bounded place; when it goes on, all come, in order."""
    world, client = cluster(4)
    monkeypatch.setattr(fifo, "AHEAD_MAX", 20)
    client.judge = lambda record, attempt: (
        settlement(consumer_pb2.RETRY) if record.endswith(b"a-0") and attempt == 1 else ACK
    )
    client.consume()
    client.schedule_of(["a"] * 60 + ["b"])
    world.run(200)
    master = world.elect()
    assert master.host is not None
    channel = master.host.core.parts.delivery.channels.made((1, 1))
    assert isinstance(channel, FifoChannel) and channel.prefetched_count <= 20
    world.run(3_000)
    assert [number for number, _ in client.by_group()["a"]] == [0, *range(60)]
    assert client.by_group()["b"] == [(60, 1)]


def test_what_an_earlier_master_handed_out_counts_as_out() -> None:
    """The limit of what a group has out holds through a loss of the master, until those leases are over."""
    world, client = cluster(9)
    admin(world, settings=admin_pb2.Settings(group_in_flight_max=2))
    client.judge = lambda record, attempt: None
    client.consume(lease_ms=4_000)
    client.schedule_of(["a", "b", "c", "d", "a"])
    world.run(300)
    assert sorted(client.by_group()) == ["a", "b"]
    master = world.elect()
    master.kill()
    world.elect()
    master.start()
    world.run(2_000)
    assert sorted(client.by_group()) == ["a", "b"]
    client.judge = lambda record, attempt: ACK
    world.run_until(lambda: len(client.got) == 5)
    assert client.by_group()["a"] == [(0, 1), (0, 2), (4, 1)]


@pytest.mark.parametrize("outcome", [consumer_pb2.ACK, consumer_pb2.RETRY])
def test_an_answer_to_the_next_master_ends_what_the_last_ones_lease_holds(
    outcome: consumer_pb2.Outcome.ValueType,
) -> None:
    """The consumer answers for what the lost master had given it, under a lease of a minute: its message group goes on
    at once, and after a nack the message comes again after its pause, not after the lease."""
    world, client = cluster(10)
    client.judge = lambda record, attempt: None
    client.consume(lease_ms=60_000)
    client.schedule_of(["a", "a"])
    world.run(300)
    assert client.by_group() == {"a": [(0, 1)]}
    master = world.elect()
    master.kill()
    world.elect()
    master.start()
    world.run(1_500)
    assert client.by_group() == {"a": [(0, 1)]} and client.session is not None and client.at is not None
    client.judge = lambda record, attempt: ACK
    ((ids,),) = (client.ids.values(),)
    settle = consumer_pb2.SettleBatch(group="g", topic="t", outcome=outcome)
    settle.ids, settle.attempts = np.array([*ids], "<u8").tobytes(), np.array([1], "<u4").tobytes()
    client._settle(client.session, settle)
    client.at.wake()
    world.run(100)
    again = outcome == consumer_pb2.RETRY
    assert client.by_group()["a"] == ([(0, 1)] if again else [(0, 1), (1, 1)])
    world.run(400)
    assert client.by_group()["a"] == ([(0, 1), (0, 2), (1, 1)] if again else [(0, 1), (1, 1)])


def test_what_was_read_ahead_meets_a_changed_filter() -> None:
    """The head of a message group ends in the same moment as the filter changes: what waits behind it, read for the
    old one, meets the new one before it leaves. It was handed out under the new filter, which does not take it."""
    world, client = cluster(12)
    admin(world, set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="a"))
    client.judge = lambda record, attempt: None
    client.consume(lease_ms=60_000)
    client.schedule_of(["x"] * 4, tags=[["a"], ["a"], ["a", "b"], ["b"]])
    world.run(300)
    assert client.by_group() == {"x": [(0, 1)]} and client.session is not None and client.at is not None
    master = world.elect()
    assert client.at is master and master.host is not None
    channel = master.host.core.parts.delivery.channels.made((1, 1))
    assert isinstance(channel, FifoChannel) and channel.prefetched_count == 2, "two more were read for the old filter"
    client.judge = lambda record, attempt: ACK
    changed: list[object] = []
    change = AdminCommand(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="b"))
    master.host.core.serving.start(master.host.core.parts.requests.admin(change), changed.append)
    ((ids,),) = (client.ids.values(),)
    settle = consumer_pb2.SettleBatch(group="g", topic="t", outcome=consumer_pb2.ACK)
    settle.ids, settle.attempts = np.array([*ids], "<u8").tobytes(), np.array([1], "<u4").tobytes()
    client._settle(client.session, settle)
    master.wake()
    world.run(1_000)
    assert changed and client.by_group() == {"x": [(0, 1), (2, 1)]}, "the fourth had been skipped by the old filter"
    subscription = master.host.core.state.subscription(1, 1)
    assert subscription is not None and subscription.floor == 4
    assert len(digests(world)) == 1


def test_a_pause_ends_with_a_message_that_a_changed_filter_skips() -> None:
    """P11, P8: the message waits for its retry in place when the group gets a filter that does not take it. Nothing is
    left of the pause, on no node and after a start from a checkpoint; the pause of one that is taken goes on."""
    world, client = cluster(13)
    client.judge = lambda record, attempt: settlement(consumer_pb2.RETRY, delay_ms=60_000)
    client.consume()
    client.schedule_of(["x", "y"], tags=[["a"], ["b"]])
    world.run(300)

    def pauses() -> list[list[int]]:
        hosts = [node.host for node in world.nodes.values() if node.host is not None]
        found = [host.core.state.subscription(1, 1) for host in hosts]
        return [sorted(subscription.pauses) for subscription in found if subscription is not None]

    assert pauses() == [[0, 1]] * 3
    admin(world, set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="b"))
    world.run_until(lambda: pauses() == [[1]] * 3, 2_000)
    assert len(digests(world)) == 1


@pytest.mark.parametrize("fifo", [True, False], ids=["fifo", "plain"])
def test_what_a_changed_filter_skips_is_not_taken_for_read_ahead(fifo: bool) -> None:
    """Two of six are out, as `group_in_flight_max` allows, and four are read ahead. A changed filter skips two of
    these; that makes no room for the last two."""
    world = World(14)
    admin(world, settings=admin_pb2.Settings(group_in_flight_max=2))
    admin(world, create_topic=admin_pb2.CreateTopicRequest(name="t", fifo=fifo))
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"], retry=POLICY))
    client = Ordered(world, lambda record, attempt: None)
    client.consume(lease_ms=60_000)
    client.schedule_of(["a", "b", "c", "d", "e", "f"], tags=[["x"], ["x"], ["y"], ["y"], ["x"], ["x"]])
    world.run(300)
    assert set(client.by_group()) == {"a", "b"}
    admin(world, set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="x"))
    world.run(1_000)
    assert set(client.by_group()) == {"a", "b"}
