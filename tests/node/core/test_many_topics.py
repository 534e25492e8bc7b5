"""What a node does all the time costs nothing that grows with topics times groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import pytest

from tests.counting import calls_of
from tests.node.core.schedule.test_pending import core_of, schedule
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.delivery.channels import Channels
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch import status
from tickwheel.node.core.watch.listings import named_topic, topics_after
from tickwheel.node.core.watch.status import node_metrics, node_status
from tickwheel.node.state import snapshot
from tickwheel.node.state.groups import Groups
from tickwheel.node.state.topics import Topics
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest, SetPausedRequest, Settings
from tickwheel.proto.log_pb2 import AdminCommand, Command

TOPICS = 300


def create(world: World, command: AdminCommand) -> Node:
    """Put into the log by the master, and applied."""
    master = world.elect()
    assert master.host is not None
    results: list[object] = []
    master.host.core.proposer.submit(Command(admin=command), Reply.either(results.append))
    master.wake()
    world.run_until(lambda: bool(results))
    return master


def crowded() -> World:
    """Groups that have many topics each, and a client that uses one of them."""
    world = World()
    names = [f"t{n}" for n in range(TOPICS)]
    for number in range(5):
        create(world, AdminCommand(create_group=CreateGroupRequest(name=f"g{number}", topics=names)))
    create(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=["t", *names])))
    return world


def test_nothing_walks_over_all_subscriptions_or_topics_while_a_node_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks, upkeep, status, metrics, schedules, dispatches, deliveries, settlements, and names that are created."""
    world = crowded()
    client = Client(world)
    client.consume()
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 1)
    world.run(2_000)  # once a minute retention looks at each topic

    def walked(_: object) -> Iterator[object]:
        raise AssertionError("something walks over all of them")

    monkeypatch.setattr(Groups, "subscriptions", walked)
    monkeypatch.setattr(Topics, "__iter__", walked)
    client.schedule([20 * n for n in range(100)])
    create(world, AdminCommand(create_topic=CreateTopicRequest(name="one-more")))
    create(world, AdminCommand(create_group=CreateGroupRequest(name="one-more", topics=["t1", "t2"])))
    for _ in range(5):
        world.run(500)
        for node in world.nodes.values():
            assert node.host is not None, node.fatal
            node_status(node.host.core)
            node_metrics(node.host.core)
    assert len(client.got) == 101 and not client.repeated()


def busy(topics: int) -> World:
    """Each topic has had a message in the last seconds, which its group has not settled."""
    world = World()
    names = [f"t{n:04}" for n in range(topics)]
    groups = 4
    for number in range(groups):
        create(world, AdminCommand(create_group=CreateGroupRequest(name=f"g{number}", topics=names[number::groups])))
    settings = "*=100000 " + " ".join(f"{name}={10_000 + number}" for number, name in enumerate(names[:20]))
    create(world, AdminCommand(settings=Settings(topic_pending_max=settings)))
    world.run(100)
    schedule(world, [(name, 500, "k", []) for name in names])
    schedule(world, [(name, 60_000, "k", []) for name in names])
    world.run(2_000)
    assert core_of(world).state.backlog.total == topics
    return world


def test_what_watches_costs_what_it_shows_and_not_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status, a page of metrics, one topic, the first topics of a list: with 2,000 busy topics as with 200."""
    monkeypatch.setattr(status, "LOOKS_MAX", 100)
    cost: list[dict[str, int]] = []
    for topics in (200, 2_000):
        core = core_of(busy(topics))
        looks: dict[str, Callable[[], object]] = {
            "status": partial(node_status, core),
            "metrics": partial(node_metrics, core),
            "topic": partial(named_topic, core, "t0150"),
            "topics": partial(lambda core: list(islice(topics_after(core), 100)), core),
        }
        cost.append({name: calls_of(look) for name, look in looks.items()})
        shown = node_status(core).topics
        assert [topic.backlog for topic in shown] == [1] * 100
        assert all(topic.schedule_rate > 0 for topic in shown)
        limits = node_metrics(core)["topic_pending_limit"]
        assert isinstance(limits, dict) and len(limits) == 100
    few, many = cost
    assert all(many[name] <= 1.1 * few[name] for name in many), cost


def test_a_change_has_no_group_look_at_topics_in_which_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group with consumers goes over its topics after an election, and after each change of a topic or group."""
    world = crowded()
    client = Client(world)
    client.consume()
    world.run(300)
    looked: list[int] = []
    is_open = Channels.is_open

    def look(channels: Channels, group_id: int, topic_id: int) -> bool:
        looked.append(topic_id)
        return is_open(channels, group_id, topic_id)

    monkeypatch.setattr(Channels, "is_open", look)
    create(world, AdminCommand(set_topic_paused=SetPausedRequest(name="t5", paused=True)))
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 1)
    assert len(looked) < 10


def test_a_topic_that_gets_messages_keeps_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in it is settled at each upkeep. A topic with one message a second had a new channel for each."""
    world = crowded()
    client = Client(world)
    client.consume()
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 1)
    made: list[object] = []
    make = Channels.make

    def noted(channels: Channels, key: tuple[int, int]) -> object:
        made.append(key)
        return make(channels, key)

    monkeypatch.setattr(Channels, "make", noted)
    for count in range(2, 7):
        client.schedule([900])
        world.run_until(lambda count=count: len(client.got) == count)  # type: ignore[misc]
        world.run(50)
    assert not made


def test_a_consumer_makes_channels_only_for_topics_that_have_something_for_it() -> None:
    world = crowded()
    client = Client(world)
    client.consume()
    client.schedule([100 + n for n in range(50)])
    world.run_until(lambda: len(client.got) == 50)
    master = world.elect()
    assert master.host is not None
    delivery = master.host.core.parts.delivery
    assert len([*delivery.channels]) <= 1
    world.run(2_500)
    assert not [*delivery.channels]  # what is settled needs none
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 51)
    assert not client.repeated()


def test_a_new_master_takes_over_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    world = crowded()
    client = Client(world)
    client.consume()
    client.settle = False
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 1)

    def walked(_: object) -> Iterator[object]:
        raise AssertionError("something walks over all of them")

    monkeypatch.setattr(Groups, "subscriptions", walked)
    before = world.elect()
    world.cut_off(before.name)
    world.run_until(lambda: world.master() not in (None, before))
    client.settle = True
    world.run(200)
    client.schedule([100])
    world.run_until(lambda: len(client.got) == 2)


def test_nothing_is_applied_while_a_checkpoint_is_captured_and_the_master_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of thousands of subscriptions take longer to copy than a lease lasts: it is done in turns."""
    monkeypatch.setattr(snapshot, "TURN_TOPICS", 1)
    monkeypatch.setattr(snapshot, "TURN_SUBSCRIPTIONS", 2)
    world = crowded()
    client = Client(world)
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    changes = core.parts.mastership.changes
    written: list[object] = []
    core.checkpointer.request(Reply.either(written.append))
    master.wake()
    world.run_until(lambda: core.checkpointer.capturing)
    client.schedule([50])
    world.run(10)
    assert core.checkpointer.capturing and not client.acked
    world.run_until(lambda: bool(client.acked) and bool(written))
    assert core.parts.mastership.changes == changes and core.leading
    core.checkpointer.copied(written[0])
    before = digests(world)
    master.kill()
    master.start()
    world.run_until(lambda: digests(world) == before or len(digests(world)) == 1)


def test_the_end_of_a_checkpoint_takes_turns_and_entries_are_applied_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic with new messages has files to be noted as durable. What is dispatched meanwhile is in the next one,
    and a start from that brings back everything."""
    monkeypatch.setattr(snapshot, "TURN_FLUSHES", 1)
    world = crowded()
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    for _ in range(2):
        schedule(world, [(f"t{number}", 50, "k", []) for number in range(TOPICS)])
        world.run(1_000)
        written: list[object] = []
        core.checkpointer.request(Reply.either(written.append))
        master.wake()
        world.run_until(lambda: core.checkpointer._end is not None)
        applied = core.applied.index
        schedule(world, [(f"t{number}", 5, "k", []) for number in range(0, TOPICS, 2)])
        assert core.checkpointer._end is not None and core.applied.index > applied
        assert core.checkpointer.running and not written
        world.run_until(lambda written=written: bool(written) and not core.checkpointer.running)  # type: ignore[misc]
        core.checkpointer.copied(written[0])
        world.run(1_000)
    before = digests(world)
    assert len(before) == 1 and core.state.backlog.total == 6 * (2 * TOPICS + TOPICS)
    master.kill()
    master.start()
    world.run_until(lambda: master.host is not None and master.host.core.applied.index >= core.applied.index)
    world.run(500)
    assert len(digests(world)) == 1
