"""Metrics of consumer groups: right, of the master alone, and bounded however many groups and topics there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.node.core.schedule.test_pending import core_of, schedule
from tests.node.core.test_many_topics import create
from tests.node.core.trio import Client, World
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.watch import listings, status
from tickwheel.node.core.watch.listings import groups_after, named_group
from tickwheel.node.core.watch.status import node_metrics
from tickwheel.proto.admin_pb2 import CreateGroupRequest, DeleteGroupRequest
from tickwheel.proto.log_pb2 import AdminCommand


def rows(world: World, name: str) -> Mapping[str, float]:
    """Group -> value on the master's page."""
    found: Any = node_metrics(core_of(world))["group_" + name]
    return {group: value for (group,), value in found.items()}


def oldest(core: NodeCore) -> Mapping[str, int]:
    """Group -> due time of its oldest unsettled message, as a listing has it; of groups that have one."""
    listed = groups_after(core)
    return {group.name: group.oldest_unsettled_ms for group in listed if group.HasField("oldest_unsettled_ms")}


def ready() -> World:
    """A master that knows the time."""
    world = World()
    world.elect()
    world.run(2_000)
    return world


def test_a_group_that_settles_nothing_is_seen_and_another_is_not_blamed() -> None:
    """Its backlog and the age of its oldest message grow; what is out and comes again is counted for it alone."""
    world = ready()
    for name in ("slow", "away"):
        create(world, AdminCommand(create_group=CreateGroupRequest(name=name, topics=["t", "u"])))
    client = Client(world)  # group g
    client.consume()
    schedule(world, [("t", 100, "k", [])] * 3 + [("u", 5_100, "k", [])] * 2)
    begun_ms = world.now_ms
    world.run(20_000)
    assert rows(world, "backlog_messages") == {"slow": 5, "away": 5, "g": 0}
    for name in ("slow", "away"):
        age_ms = rows(world, "oldest_unsettled_age_seconds")[name] * 1_000
        assert 0 <= age_ms - (world.now_ms - begun_ms - 100) <= core_of(world).state.settings.slot_ms
    assert rows(world, "oldest_unsettled_age_seconds")["g"] == 0
    client.settle = False
    schedule(world, [("t", 100, "k", [])])
    world.run(1_000)
    assert rows(world, "in_flight_messages") == {"slow": 0, "away": 0, "g": 1}
    world.run(70_000)
    again = rows(world, "redelivered_messages")
    assert again["g"] > 0 == again["slow"]
    assert set(rows(world, "dead_letters")) == {"slow", "away", "g"}
    for node in world.nodes.values():
        if node is not world.master():
            assert node.host is not None
            assert "group_backlog_messages" not in node_metrics(node.host.core), "only the master names groups"
    create(world, AdminCommand(delete_group=DeleteGroupRequest(name="g")))
    world.run(1_000)
    assert set(rows(world, "redelivered_messages")) == {"slow", "away"}
    assert not core_of(world).parts.counts.deliveries.redelivered_by_group


def test_more_groups_than_a_page_names_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones keep their rows; the age is that of what was looked at."""
    monkeypatch.setattr(status, "GROUPS_MAX", 3)
    monkeypatch.setattr(status, "LOOKS_MAX", 2)
    world = ready()
    for number in range(5):
        create(world, AdminCommand(create_group=CreateGroupRequest(name=f"g{number}", topics=["t"])))
    schedule(world, [("t", 100, "k", [])])
    world.run(5_000)
    assert rows(world, "backlog_messages") == {"g0": 1, "g1": 1, "g2": 1}
    assert node_metrics(core_of(world))["groups_left_out"] == 2
    ages = rows(world, "oldest_unsettled_age_seconds")
    assert ages["g0"] > 4 and ages["g2"] == 0


def test_a_listing_tells_the_oldest_message_of_each_backlog_on_every_node() -> None:
    """It is the first of all topics of the group that is not settled, as in the metric. No backlog: it is absent."""
    world = ready()
    create(world, AdminCommand(create_group=CreateGroupRequest(name="slow", topics=["t", "u"])))
    client = Client(world)  # group g, topic t
    client.consume()
    assert oldest(core_of(world)) == {}
    first_ms = world.now_ms + 100
    schedule(world, [("u", 100, "k", []), ("t", 2_100, "k", [])])
    world.run(4_000)
    slot_ms = core_of(world).state.settings.slot_ms
    for node in world.nodes.values():
        assert node.host is not None
        assert oldest(node.host.core) == {"slow": first_ms // slot_ms * slot_ms}, node.name
    now_ms = core_of(world).clock.now_ms()
    age_s = rows(world, "oldest_unsettled_age_seconds")["slow"]
    assert oldest(core_of(world))["slow"] == now_ms - age_s * 1_000
    one = named_group(core_of(world), "slow")
    assert one is not None and one.oldest_unsettled_ms == oldest(core_of(world))["slow"] and one.backlog == 2
    none = named_group(core_of(world), "g")
    assert none is not None and not none.HasField("oldest_unsettled_ms")


def test_a_listing_looks_at_a_bounded_number_of_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that would take more gets no figure, rather than that of some of its topics; the next smaller one does.
    Groups without a backlog take nothing."""
    monkeypatch.setattr(listings, "LOOKS_MAX", 4)
    world = ready()
    topics = {"idle": "xyz", "a": "tu", "b": "tuv", "c": "tv", "d": "t"}
    for name in topics:
        create(world, AdminCommand(create_group=CreateGroupRequest(name=name, topics=list(topics[name]))))
    schedule(world, [(topic, 100, "k", []) for topic in "tuv"])
    world.run(3_000)
    backlogs = {group.name: group.backlog for group in groups_after(core_of(world))}
    assert backlogs == {"idle": 0, "a": 2, "b": 3, "c": 2, "d": 1}
    assert set(oldest(core_of(world))) == {"a", "c"}
