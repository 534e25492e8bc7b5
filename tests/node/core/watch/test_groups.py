"""Metrics of consumer groups: right, of the master alone, and bounded however many groups and topics there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.node.core.schedule.test_pending import core_of, schedule
from tests.node.core.test_many_topics import create
from tests.node.core.trio import Client, World
from tickwheel.node.core.watch import groups
from tickwheel.node.core.watch.status import node_metrics
from tickwheel.proto.admin_pb2 import CreateGroupRequest, DeleteGroupRequest
from tickwheel.proto.log_pb2 import AdminCommand


def rows(world: World, name: str) -> Mapping[str, float]:
    """Group -> value on the master's page."""
    found: Any = node_metrics(core_of(world))["group_" + name]
    return {group: value for (group,), value in found.items()}


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
    assert not core_of(world).parts.delivery.counters.redelivered_by_group


def test_more_groups_than_a_page_names_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones keep their rows; the age is that of what was looked at."""
    monkeypatch.setattr(groups, "GROUPS_MAX", 3)
    monkeypatch.setattr(groups, "LOOKS_MAX", 2)
    world = ready()
    for number in range(5):
        create(world, AdminCommand(create_group=CreateGroupRequest(name=f"g{number}", topics=["t"])))
    schedule(world, [("t", 100, "k", [])])
    world.run(5_000)
    assert rows(world, "backlog_messages") == {"g0": 1, "g1": 1, "g2": 1}
    assert node_metrics(core_of(world))["groups_left_out"] == 2
    ages = rows(world, "oldest_unsettled_age_seconds")
    assert ages["g0"] > 4 and ages["g2"] == 0
