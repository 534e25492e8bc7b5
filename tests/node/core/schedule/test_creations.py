"""Names come into being at a bounded pace: whoever wants more is told when to come again, and nobody else waits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.node.core.trio import Client, World
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule import creations
from tickwheel.node.core.schedule.creations import ALLOWANCE_A_SECOND, ALLOWANCE_MAX, TOPIC_COST, TOPICS_PER_GROUP_MAX
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch, from_message
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest, Settings
from tickwheel.proto.log_pb2 import AdminCommand, Command

AT_ONCE = ALLOWANCE_MAX // TOPIC_COST
A_SECOND = ALLOWANCE_A_SECOND // TOPIC_COST


def schedule(world: World, names: list[str]) -> BatchOutcome | Failure:
    """One message to each topic, in one batch."""
    master = world.elect()
    assert master.host is not None
    batch = IncomingBatch(
        producer_id="",
        sequence=0,
        count=len(names),
        topics=names,
        topic_of=np.arange(len(names), dtype=np.uint32),
        when=np.full(len(names), world.now_ms + 3_600_000, np.int64),
        kinds=KIND_DUE,
        sizes=np.ones(len(names), np.uint32),
        records=b"x" * len(names),
    )
    answers: list[BatchOutcome | Failure] = []
    master.host.core.parts.publisher.schedule(batch, Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def administer(world: World, command: AdminCommand) -> object:
    """Its answer."""
    master = world.elect()
    assert master.host is not None
    answers: list[object] = []
    master.host.core.serving.start(master.host.core.parts.requests.admin(command), answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def topic_count(world: World) -> int:
    """At the master."""
    master = world.elect()
    assert master.host is not None
    return len(master.host.core.state.topics)


def test_a_batch_that_names_thousands_of_new_topics_gets_through_a_part_at_a_time() -> None:
    world = World()
    world.elect()
    names = [f"flood-{n}" for n in range(2_000)]
    world.run(1_000)
    began_ms, waited_ms, refused = world.now_ms, 0, 0
    while isinstance(answer := schedule(world, names), Failure):
        assert answer.reason == common_pb2.LIMIT_REACHED and answer.metadata["field"] == "names_created"
        assert answer.grpc_code_name == "RESOURCE_EXHAUSTED"
        refused += 1
        retry_ms = int(answer.metadata["retry_after_ms"])
        world.run(retry_ms)
        waited_ms += retry_ms
        seconds = (world.now_ms - began_ms) / 1_000
        assert topic_count(world) <= AT_ONCE + A_SECOND * seconds + 1
    assert len(answer.ids) == 2_000
    assert refused <= 2_000 // (AT_ONCE // 2) + 1 and waited_ms <= 2_000 * 1_000 // A_SECOND + 2_000


def test_who_uses_known_topics_does_not_wait_behind_who_wants_too_many_new_ones() -> None:
    world = World()
    world.elect()
    client = Client(world)
    client.schedule([1_000])
    world.run_until(lambda: len(client.acked) == 1)
    flood = schedule(world, [f"flood-{n}" for n in range(5_000)])
    assert isinstance(flood, Failure)
    client.schedule([1_000])
    world.run_until(lambda: len(client.acked) == 2, ms=50)


def test_groups_over_many_topics_are_rated_and_a_known_one_is_free() -> None:
    world = World()
    world.elect()
    names = [f"t{n}" for n in range(TOPICS_PER_GROUP_MAX)]
    wide = AdminCommand(create_group=CreateGroupRequest(name="g0", topics=names))
    assert not isinstance(administer(world, wide), Failure)
    other = AdminCommand(create_group=CreateGroupRequest(name="g1", topics=names))
    refused = administer(world, other)
    assert isinstance(refused, Failure) and refused.reason == common_pb2.LIMIT_REACHED
    world.run(int(refused.metadata["retry_after_ms"]))
    assert not isinstance(administer(world, other), Failure)
    for _ in range(10):
        assert not isinstance(administer(world, wide), Failure)
    too_wide = administer(world, AdminCommand(create_group=CreateGroupRequest(name="g2", topics=[*names, "one-more"])))
    assert isinstance(too_wide, Failure) and too_wide.metadata["field"] == "topics"


def test_there_are_at_most_so_many_subscriptions_and_what_is_deleted_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(creations, "SUBSCRIPTIONS_MAX", 5)
    world = World()
    world.elect()
    four = AdminCommand(create_group=CreateGroupRequest(name="g0", topics=["a", "b", "c", "d"]))
    two = AdminCommand(create_group=CreateGroupRequest(name="g1", topics=["a", "b"]))
    assert not isinstance(administer(world, four), Failure)
    refused = administer(world, two)
    assert isinstance(refused, Failure) and refused.metadata["limit"] == "5"
    delete = AdminCommand()
    delete.delete_topic.name = "c"
    assert not isinstance(administer(world, delete), Failure)
    world.run(1_000)
    assert not isinstance(administer(world, two), Failure)


def test_topics_beyond_their_number_are_refused_before_they_are_in_the_log() -> None:
    world = World()
    world.elect()
    assert not isinstance(administer(world, AdminCommand(settings=Settings(topics_max=3))), Failure)
    assert not isinstance(administer(world, AdminCommand(create_topic=CreateTopicRequest(name="a"))), Failure)
    master = world.elect()
    assert master.host is not None
    index = master.host.core.applied.index
    refused = schedule(world, ["b", "c", "d"])
    assert isinstance(refused, Failure) and refused.metadata["field"] == "topics_max"
    world.run(100)
    assert topic_count(world) == 1 and master.host.core.applied.index == index


def test_queues_of_dead_letters_are_no_topics() -> None:
    """Nobody sends to one or creates one. A topic that an earlier version let somebody create so is still consumed."""
    world = World(9)
    name = "%DLQ%g"
    for refused in (
        administer(world, AdminCommand(create_topic=CreateTopicRequest(name=name))),
        administer(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=["t", name]))),
    ):
        assert isinstance(refused, Failure) and refused.reason == common_pb2.INVALID_FIELD
        assert refused.metadata["value"] == name and "%DLQ%" in refused.metadata["limit"]
    assert topic_count(world) == 0
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    there: list[object] = []
    old = Command(admin=AdminCommand(create_topic=CreateTopicRequest(name=name)))
    core.serving.start(core.proposer.propose(old, AdminResult), there.append)
    master.wake()
    world.run_until(lambda: bool(there))
    assert topic_count(world) == 1
    made = administer(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=[name])))
    assert isinstance(made, AdminResult) and made.failure is None
    message = common_pb2.Message(topic=name, payload=b"x", delay_ms=1)
    with pytest.raises(RequestError, match="%DLQ%"):
        from_message(scheduler_pb2.ScheduleRequest(message=message), core.state.settings)
