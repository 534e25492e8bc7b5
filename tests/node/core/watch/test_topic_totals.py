"""Metrics of named topics: what the node counts, for these names and no other."""

from __future__ import annotations

from dataclasses import replace

from tests.node.core.schedule.test_pending import ask, core_of, schedule
from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.watch.status import node_metrics
from tickwheel.proto.admin_pb2 import CreateTopicRequest, DeleteTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand

NAMES = ("topic_dispatched_messages", "topic_delivered_messages", "topic_settled_messages", "topic_backlog_messages")


def world_with(*topics: str) -> World:
    """A master that knows the time, in a cluster whose nodes have metrics of these topics."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, metrics_topics=topics))
    world.elect()
    world.run(2_000)
    return world


def counts(core: NodeCore, topic: str) -> list[object]:
    """Of a topic: dispatched, delivered, settled, backlog."""
    metrics = node_metrics(core)
    found = []
    for name in NAMES:
        values = metrics[name]
        assert isinstance(values, dict)
        found.append(values[topic,])
    return found


def test_named_topics_are_counted_and_others_have_no_row() -> None:
    """Each count is that of the whole node, as far as it is the topic's. What was applied is counted on every node,
    deliveries where they are made."""
    world = world_with("t", "u", "never")
    client = Client(world)
    client.consume()
    world.run(100)
    schedule(world, [("t", 100, "k", [])] * 30 + [("u", 100, "k", [])] * 10 + [("other", 100, "k", [])] * 5)
    world.run(6_000)
    master = core_of(world)
    assert counts(master, "t") == [30, 30, 30, 0]
    assert counts(master, "u") == [10, 0, 0, 0]
    assert counts(master, "never") == [0, 0, 0, 0]
    for name in NAMES:
        assert set(node_metrics(master)[name]) == {("t",), ("u",), ("never",)}  # type: ignore[arg-type]
    metrics = node_metrics(master)
    assert (metrics["dispatched_messages"], metrics["settled_messages"]) == (45, 30)
    for node in world.nodes.values():
        assert node.host is not None
        if node is not world.master():
            assert counts(node.host.core, "t") == [30, 0, 30, 0]
    client.settle = False
    schedule(world, [("t", 100, "k", [])] * 3)
    world.run(3_000)
    assert counts(master, "t") == [33, 33, 30, 3]


def test_a_count_goes_on_when_its_topic_is_deleted_and_comes_again() -> None:
    """A counter that falls would be read as a restart."""
    world = world_with("t")
    schedule(world, [("t", 100, "k", [])] * 4)
    world.run(3_000)
    assert counts(core_of(world), "t") == [4, 0, 0, 0]
    for command in (
        AdminCommand(delete_topic=DeleteTopicRequest(name="t")),
        AdminCommand(create_topic=CreateTopicRequest(name="t")),
    ):
        ask(world, core_of(world).parts.requests.admin(command))
        world.run(1_500)
        assert counts(core_of(world), "t") == [4, 0, 0, 0]
    schedule(world, [("t", 100, "k", [])] * 3)
    world.run(3_000)
    assert counts(core_of(world), "t") == [7, 0, 0, 0]


def test_without_names_there_are_no_metrics_of_topics() -> None:
    """A page has no row that nobody asked for."""
    world = world_with()
    schedule(world, [("t", 100, "k", [])])
    world.run(3_000)
    assert not set(NAMES) & set(node_metrics(core_of(world)))
