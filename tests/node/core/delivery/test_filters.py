"""Filters on three simulated nodes: one message of a hundred, old messages, a lost master, who is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.core.delivery.agenda import Pace
from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.delivery.prefetched import Prefetched, measure
from tickwheel.node.core.delivery.recent_units import RecentUnits
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.failure import Failure
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.wheel.units import UNIT


def publish(node: Node, tags: list[list[str]], delay_ms: int = 50) -> None:
    """Schedule messages with these tags; the payload says which."""
    assert node.host is not None
    messages = [
        common_pb2.Message(
            topic="t",
            payload="+".join(names).encode() or b"-",
            due_ms=node.world.now_ms + delay_ms,
            meta=common_pb2.MessageMeta(tags=names),
        )
        for names in tags
    ]
    batch = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages))
    answers: list[object] = []
    node.host.core.parts.publisher.schedule(
        from_batch(batch, node.host.core.state.settings), Reply.either(answers.append)
    )
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert not isinstance(answers[0], Failure), answers


def admin(node: Node, command: AdminCommand) -> AdminResult:
    """Carry out one command."""
    assert node.host is not None
    answers: list[AdminResult | Failure] = []
    node.host.core.serving.start(node.host.core.parts.requests.admin(command), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], AdminResult), answers
    return answers[0]


def group(node: Node, filter: str, name: str = "g") -> None:
    """Create a group with a filter."""
    request = admin_pb2.CreateGroupRequest(name=name, topics=["t"], filter=filter)
    assert admin(node, AdminCommand(create_group=request)).failure is None


def floor(node: Node) -> tuple[int, int]:
    """Where the only group's floor is, and how many messages entered the ready queue."""
    assert node.host is not None
    state = node.host.core.state
    subscription = state.subscription(1, 1)
    assert subscription is not None
    return subscription.floor, state.ready_count(1)


def test_one_of_a_hundred_with_one_credit() -> None:
    """A consumer that takes one message at a time gets its 20 of 2,000; nobody's credit is spent on the others."""
    world = World(41)
    client = Client(world)
    master = world.elect()
    group(master, "a")
    client.consume(credits=1)
    for _ in range(20):
        publish(master, [["b"]] * 99 + [["a", "x"]])
    world.run_until(lambda: len(client.got) == 1 and floor(master) == (2_000, 2_000), 5_000)
    assert sum(len(seen) for seen in client.got.values()) == 20
    assert all(record.endswith(b"a+x") for record in client.got)
    world.run_until(lambda: len(digests(world)) == 1, 300)


def test_push_first_waits_for_the_filter() -> None:
    """What goes out ahead of its commit has not met the filter: a filtered group waits for that, others do not."""
    world = World(46, config=replace(CoreConfig(), delivery_order=DeliveryOrder.PUSH_FIRST, segment_bytes=1 << 20))
    client = Client(world)
    master = world.elect()
    group(master, "a")
    client.consume()
    got: list[consumer_pb2.DeliverBatch] = []
    assert master.host is not None
    request = consumer_pb2.OpenConsumer(group="all", topics=["t"], credits=10_000)
    master.host.core.serving.start(
        master.host.core.parts.consumers.open(request, got.append, lambda failure: None), lambda session: None
    )
    for _ in range(30):
        publish(master, [["b"]] * 9 + [["a"]], 40)
        world.run(20)
    world.run(1_000)
    assert master.fatal == ""
    assert sum(len(seen) for seen in client.got.values()) == 30
    assert all(record.endswith(b"a") for record in client.got)
    assert sum(len(batch.ids) // 8 for batch in got) == 300
    assert len(digests(world)) == 1


def test_nobody_consumes_and_the_floor_advances() -> None:
    """What does not match is settled with no consumer attached, also what lay there before the group was made."""
    world = World(42)
    master = world.elect()
    for _ in range(3):
        publish(master, [["b"]] * 4_000, 10)
    world.run(500)
    group(master, "a")
    publish(master, [["b"], ["a"]], 10)
    world.run_until(lambda: floor(master) == (12_001, 12_002), 5_000)
    assert master.host is not None
    assert master.host.core.state.filtered == 12_001


def test_the_master_dies_while_it_sweeps() -> None:
    """P1, P8: the next one goes on where the log says; each matching message comes, no other does."""
    world = World(43)
    client = Client(world)
    master = world.elect()
    for _ in range(5):
        publish(master, [["b"]] * 3_999 + [["a"]], 10)
    world.run(500)
    group(master, "a")
    world.run(8)
    assert 0 < floor(master)[0] < 20_000
    master.kill()
    client.consume()
    world.run_until(lambda: world.master() is not None, 3_000)
    successor = world.master()
    assert successor is not None
    world.run_until(lambda: floor(successor) == (20_000, 20_000), 10_000)
    master.start()
    world.run(2_000)
    assert list(client.got) and all(record.endswith(b"a") for record in client.got)
    assert sum(len(seen) for seen in client.got.values()) == 5
    assert len(digests(world)) == 1


def opened(node: Node, filter: str, closed: list[Failure], got: list[consumer_pb2.DeliverBatch]) -> object:
    """Open a consumer of the group that states a filter."""
    assert node.host is not None
    answers: list[ConsumerHandle | Failure] = []
    request = consumer_pb2.OpenConsumer(group="g", topics=["t"], credits=100, filter=filter)
    node.host.core.serving.start(
        node.host.core.parts.consumers.open(request, got.append, closed.append), answers.append
    )
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def test_who_states_another_filter_is_refused() -> None:
    """A typed refusal naming both; when the filter is changed, those that had stated the old one are told so."""
    world = World(44)
    master = world.elect()
    closed: list[Failure] = []
    closed_silent: list[Failure] = []
    got: list[consumer_pb2.DeliverBatch] = []
    assert isinstance(opened(master, "b || a", closed, []), ConsumerHandle)
    assert isinstance(opened(master, "", closed_silent, got), ConsumerHandle)
    refused = opened(master, "*", [], [])
    assert isinstance(refused, Failure)
    assert refused.reason == common_pb2.FILTER_DIFFERS
    assert (refused.metadata["value"], refused.metadata["limit"]) == ("*", "a || b")
    bad = opened(master, "a ||", [], [])
    assert isinstance(bad, Failure) and bad.reason == common_pb2.INVALID_FIELD
    admin(master, AdminCommand(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter="c")))
    assert [failure.reason for failure in closed] == [common_pb2.FILTER_DIFFERS]
    publish(master, [["a"], ["c"], ["b"]])
    world.run_until(lambda: bool(got), 2_000)
    world.run(200)
    assert not closed_silent
    assert [(batch.filter, len(np.frombuffer(batch.ids, "<u8"))) for batch in got] == [("c", 1)]


def test_tags_that_could_not_be_filtered_are_refused() -> None:
    """An empty tag, one with a bar, too many: the producer is told which."""
    world = World(45)
    master = world.elect()
    assert master.host is not None
    settings = master.host.core.state.settings
    for tags in ([""], ["a|b"], ["*"], [f"t{n}" for n in range(65)]):
        meta = common_pb2.MessageMeta(tags=tags)
        message = common_pb2.Message(topic="t", payload=b"x", delay_ms=1, meta=meta)
        try:
            from_batch(scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=[message])), settings)
        except Exception as error:
            assert "tags[0]" in str(error)
        else:
            raise AssertionError(tags)


def test_what_was_read_meets_a_changed_filter() -> None:
    """Messages that were read for a group under its old filter do not leave under the new one before they have met it:
    the rest of what is read waits, and goes when it is checked."""
    world = World(43)
    client = Client(world)
    master = world.elect()
    group(master, "a")
    client.consume(credits=1)
    publish(master, [["a"]])
    world.run_until(lambda: len(client.got) == 1)
    assert master.host is not None
    subscription = master.host.core.state.subscription(1, 1)
    assert subscription is not None
    channel = Channel(
        key=(1, 1),
        group="g",
        topic="t",
        subscription=subscription,
        recent=RecentUnits(),
        config=CoreConfig(),
        fetch=lambda channel, prefetched: None,
        pace=Pace(0, open=True),
    )
    units = np.zeros(2, UNIT)
    units["size"] = 1
    prefetched = Prefetched(np.array([5, 6], np.uint64), np.array([5, 6], np.uint64), np.ones(2, np.uint32), units)
    prefetched.records = [b"x", b"y"]
    measure([prefetched])
    channel._prefetched.append(prefetched)
    channel._prefetched_count = 2
    subscription.checked = 5
    assert channel.take(10, 10) is None and channel.earliest_ms() is None
    subscription.checked = 6
    share = channel.take(10, 10)
    assert share is not None and share.records == [b"x"]
    subscription.checked = 7
    assert channel.take(20, 10) is not None
