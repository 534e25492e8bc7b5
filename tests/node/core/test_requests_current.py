"""A master without its lease does not say that something does not exist: another may lead by now and have it. Nor does
it extend a lease, of which the next master would not hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.node.core.delivery.test_retries import admin
from tests.node.core.trio import Client, World
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2, scheduler_pb2, staging_pb2
from tickwheel.proto.log_pb2 import AdminCommand

UNKNOWN = 5 << 32 | 7
COLD = 1 << 63 | 7


def deposed(*, auto_create: bool = True) -> tuple[World, NodeCore]:
    """A master whose lease has run out, cut off from the others; it does not know yet that it is one no more."""
    world = World(7)
    node = world.elect()
    core = node.host.core if node.host is not None else None
    assert isinstance(core, NodeCore)
    if not auto_create:
        fields = admin_pb2.Settings(topics_auto_create=False, groups_auto_create=False)
        answers: list[Any] = []
        core.serving.start(core.parts.requests.admin(AdminCommand(settings=fields)), answers.append)
        node.wake()
        world.run_until(lambda: bool(answers))
    lose_lease(world, core)
    return world, core


def known_and_deposed() -> tuple[World, NodeCore]:
    """As `deposed`, of a cluster with a topic t and a group g."""
    world = World(7)
    admin(world, create_group=admin_pb2.CreateGroupRequest(name="g", topics=["t"]))
    node = world.elect()
    assert node.host is not None
    lose_lease(world, node.host.core)
    return world, node.host.core


def lose_lease(world: World, core: NodeCore) -> None:
    """Nothing passes between a master and the others any more, but connections hold."""
    name = core.identity.node_id
    world.cut.update(frozenset((name, other)) for other in world.nodes if other != name)
    world.run_until(lambda: not core.log.lease_held())
    assert core.refusal() is None, "it takes itself for the master still"


def answer_of(world: World, core: NodeCore, begin: Callable[[Callable[[Any], None]], None]) -> Any:
    answers: list[Any] = []
    begin(answers.append)
    world.nodes[core.identity.node_id].wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.parts.requests.cancel(UNKNOWN),
        lambda core: core.parts.requests.get(UNKNOWN, False),
        lambda core: core.parts.requests.get(COLD, False),
        lambda core: core.parts.requests.reschedule(UNKNOWN, 1 << 40, KIND_DUE),
        lambda core: core.parts.pending.page(scheduler_pb2.ListPendingRequest(topic="t")),
        lambda core: core.parts.pending.count(scheduler_pb2.CountPendingRequest(topic="t")),
        lambda core: core.parts.sweeper.begin_sweep(
            scheduler_pb2.BeginSweepRequest(job_id="s", selection=scheduler_pb2.Selection(topic="t"), cancel=True)
        ),
        lambda core: core.parts.sweeper.get("s"),
        lambda core: core.parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t")),
        lambda core: core.parts.deleter.group(admin_pb2.DeleteGroupRequest(name="g")),
        lambda core: core.parts.dead.list(dead_pb2.ListDeadRequest(group="g")),
        lambda core: core.parts.dead.get(dead_pb2.GetDeadRequest(group="g", number=1)),
        lambda core: core.parts.staging.job(staging_pb2.GetStagedJobRequest(job_id="j")),
        lambda core: core.parts.consumers.pull(consumer_pb2.PullRequest(group="g", topics=["t"], messages_max=1)),
    ],
    ids=[
        *("cancel", "get", "get by a cold id", "reschedule", "list pending", "count pending", "begin a sweep"),
        *("look up a sweep", "delete a topic", "delete a group", "list dead letters", "get a dead letter"),
        *("look up a staged job", "pull"),
    ],
)
def test_what_is_not_here_may_be_elsewhere(ask: Any) -> None:
    """A node that stood still reads a cancel before the frames by which it would learn that it was deposed. It said
    NOT_FOUND for a message that the next master had acknowledged and delivered."""
    world, core = deposed(auto_create=False)
    answer = answer_of(world, core, lambda tell: serve(core, ask(core), tell))
    assert isinstance(answer, Failure), answer
    assert answer.reason == common_pb2.NO_MASTER


def test_a_topic_that_is_not_here_may_have_been_created_elsewhere() -> None:
    world, core = deposed(auto_create=False)
    batch = IncomingBatch(
        producer_id="",
        sequence=0,
        count=1,
        topics=["t"],
        topic_of=None,
        when=np.array([1 << 40], np.int64),
        kinds=KIND_DUE,
        sizes=np.array([1], np.uint32),
        records=b"m",
    )
    answer = answer_of(world, core, lambda tell: core.parts.publisher.schedule(batch, Reply.either(tell)))
    assert isinstance(answer, Failure) and answer.reason == common_pb2.NO_MASTER


def test_a_group_that_is_not_here_may_have_been_created_elsewhere() -> None:
    world, core = deposed()
    batch = consumer_pb2.SettleBatch(sequence=1, group="g", topic="t", outcome=consumer_pb2.ACK, ids=bytes(8))
    answer = answer_of(world, core, lambda tell: core.parts.consumers.settle(batch, Reply.either(tell)))
    assert isinstance(answer, Failure) and answer.reason == common_pb2.NO_MASTER


@pytest.mark.parametrize("several", [False, True], ids=["one topic", "several topics"])
def test_a_topic_of_a_group_may_have_been_created_elsewhere(several: bool) -> None:
    """Its settlement is repeated at the next master, and not taken for one that is refused or came too late."""
    world, core = known_and_deposed()
    batch = consumer_pb2.SettleBatch(sequence=1, group="g", outcome=consumer_pb2.ACK, ids=bytes(8), attempts=bytes(4))
    if several:
        batch.topics.append("new")
        batch.topic_counts, batch.epochs, batch.positions = (1).to_bytes(4, "little"), bytes(4), bytes(8)
    else:
        batch.topic = "new"
    answer = answer_of(world, core, lambda tell: core.parts.consumers.settle(batch, Reply.either(tell)))
    assert isinstance(answer, Failure) and answer.reason == common_pb2.NO_MASTER


@pytest.mark.parametrize(
    "ask",
    [
        lambda core: core.parts.pending.page(scheduler_pb2.ListPendingRequest(topic="t")),
        lambda core: core.parts.pending.count(scheduler_pb2.CountPendingRequest(topic="t")),
        lambda core: core.parts.dead.list(dead_pb2.ListDeadRequest(group="g")),
        lambda core: core.parts.sweeper.list(),
    ],
    ids=["list pending", "count pending", "list dead letters", "list sweeps"],
)
def test_what_a_list_leaves_out_may_be_elsewhere(ask: Any) -> None:
    """An empty list says that there is nothing."""
    world, core = known_and_deposed()
    answer = answer_of(world, core, lambda tell: serve(core, ask(core), tell))
    assert isinstance(answer, Failure) and answer.reason == common_pb2.NO_MASTER


def test_a_lease_that_nobody_else_hears_of_is_not_extended() -> None:
    """The next master would deliver the message while its consumer relies on the extension."""
    world = World(7)
    node = world.elect()
    assert node.host is not None
    core, client = node.host.core, Client(world)
    client.settle = False
    client.consume()
    world.run(100)
    client.schedule([50])
    world.run_until(lambda: bool(client.got))
    [lease] = core.parts.delivery.leases.held()
    subscription = core.state.subscription(*lease.channel)
    assert subscription is not None
    batch = consumer_pb2.ExtendBatch(
        group="g",
        topic="t",
        ids=subscription.ids_of(lease.positions).tobytes(),
        attempts=lease.attempts.tobytes(),
        positions=lease.positions.tobytes(),
        lease_ms=20_000,
    )
    lose_lease(world, core)
    with pytest.raises(RequestError) as refused:
        core.parts.consumers.extend(batch)
    assert refused.value.failure.reason == common_pb2.NO_MASTER
    assert [each.until_ms for each in core.parts.delivery.leases.held()] == [lease.until_ms]
    world.cut.clear()
    world.run_until(core.may_act)
    assert core.parts.consumers.extend(batch).extended == 1
