"""Refusals by limits and rights that change: a node that does not surely lead may know old ones, and leaves the refusal
to the master; and what was accepted before a limit was lowered stays accepted."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.node.core.trio import Node, World
from tickwheel.node.core.kernel import not_current, told_by_master
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import from_batch, from_message
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.access import Access, Permission
from tickwheel.node.server.callers import EVERYBODY, Caller, Callers
from tickwheel.node.server.checks import somewhere
from tickwheel.node.server.endpoints import Right
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.schedule_stream import may_schedule, read_batch
from tickwheel.node.state.rights import ADMINISTRATOR
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_SCHEDULE, AccessCommand, StoredUser
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.log_pb2 import AdminCommand

LARGE = b"x" * 100


def request_of(payload: bytes, sequence: int = 1) -> scheduler_pb2.ScheduleBatch:
    message = common_pb2.Message(topic="t", payload=payload, delay_ms=3_600_000)
    return scheduler_pb2.ScheduleBatch(
        producer_id="p", sequence=sequence, rows=scheduler_pb2.RowBatch(messages=[message])
    )


def two(payload: bytes, sequence: int) -> scheduler_pb2.ScheduleBatch:
    request = request_of(payload, sequence)
    request.rows.messages.append(request.rows.messages[0])
    return request


def core_of(node: Node) -> Any:
    return cast(Any, node.host).core


def change(world: World, **fields: Any) -> None:
    """Settings that every node but one that is cut off knows afterwards."""
    administer(world, AdminCommand(settings=Settings(**fields)))


def administer(world: World, command: AdminCommand) -> None:
    core = core_of(world.elect())
    done: list[Any] = []
    core.serving.start(core.parts.requests.admin(command), done.append)
    world.run_until(lambda: bool(done))
    assert not isinstance(done[0], Failure), done
    world.run(200)


def refusal_of(node: Node, request: scheduler_pb2.ScheduleBatch) -> Failure:
    with pytest.raises(RequestError) as refused:
        read_batch(core_of(node), from_batch, request, EVERYBODY)
    return refused.value.failure


def test_a_node_that_has_not_heard_of_a_limit_does_not_refuse_by_it() -> None:
    """A client takes INVALID_FIELD as final: the batch was refused though the limit had been raised before."""
    world = World(81)
    change(world, payload_bytes_max=10)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    world.cut_off(slave.name)
    change(world, payload_bytes_max=1_000)
    assert core_of(slave).state.settings.payload_bytes_max == 10
    assert refusal_of(slave, request_of(LARGE)).reason in (common_pb2.NOT_MASTER, common_pb2.NO_MASTER)
    assert read_batch(core_of(master), from_batch, request_of(LARGE), EVERYBODY).count == 1
    assert refusal_of(master, request_of(LARGE * 11)).reason == common_pb2.INVALID_FIELD


@pytest.mark.parametrize("limit", [{"payload_bytes_max": 10}, {"batch_messages_max": 1}])
def test_what_was_accepted_is_answered_whatever_the_limits_are_now(limit: dict[str, int]) -> None:
    """The repeat of an accepted batch was refused, so its client never learned that it had been accepted."""
    world = World(82)
    core = core_of(world.elect())
    first, other, following = (two(payload, number) for payload, number in ((LARGE, 1), (b"y" * 100, 1), (LARGE, 2)))
    outcomes: list[Any] = []

    def send(request: scheduler_pb2.ScheduleBatch) -> Any:
        outcomes.clear()
        batch = read_batch(core, from_batch, request, EVERYBODY)
        core.parts.publisher.schedule(batch, Reply.either(outcomes.append))
        world.run_until(lambda: bool(outcomes))
        return outcomes[0]

    accepted = send(first)
    change(world, **limit)
    again = send(first)
    assert again.repeated and (again.ids == accepted.ids).all()
    assert refusal_of(world.elect(), other).reason == common_pb2.SEQUENCE_TAKEN, "other content, the same sequence"
    refusal = refusal_of(world.elect(), following)
    assert refusal.reason == common_pb2.INVALID_FIELD and refusal.metadata["accepted_sequence"] == "1"


def test_the_unary_call_repeats_too() -> None:
    """As above, for a single message."""
    world = World(83)
    core = core_of(world.elect())
    message = common_pb2.Message(topic="t", payload=LARGE, delay_ms=3_600_000)
    request = scheduler_pb2.ScheduleRequest(message=message, producer_id="p", sequence=1)
    outcomes: list[Any] = []
    core.parts.publisher.schedule(read_batch(core, from_message, request, EVERYBODY), Reply.either(outcomes.append))
    world.run_until(lambda: bool(outcomes))
    change(world, payload_bytes_max=10)
    assert read_batch(core, from_message, request, EVERYBODY).count == 1
    request.producer_id = "q"
    with pytest.raises(RequestError, match="payload"):
        read_batch(core, from_message, request, EVERYBODY)


class Context:
    """A caller with a certificate of this name."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5"


class Noted:
    """An audit log that only counts."""

    def __init__(self) -> None:
        self.lines = 0

    def refused(self, *line: str) -> None:
        self.lines += 1


def test_a_node_that_may_not_know_a_right_does_not_refuse_for_it() -> None:
    """A node that was away said that a valid token was not known, and clients take that as final."""
    world = World(84)
    administer(world, AdminCommand(access=AccessCommand(set_user=StoredUser(name="root", roles=[ADMINISTRATOR]))))
    change(world, rights=True)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)

    def admit(node: Node, *, for_master: bool) -> tuple[int, int]:
        core, noted = core_of(node), Noted()
        access = Access(tls=False, admin_names=())
        callers = Callers(access, lambda: core.state.access, lambda: core.state.settings.rights, lambda: 0)
        gate = Gate(callers, lambda: core.state, cast(Any, noted), lambda *_: None, lambda: not_current(core))
        right = Right(somewhere(RIGHT_SCHEDULE), Permission.CLIENT)
        with pytest.raises(RequestError) as refused:
            gate.admit("/x.Y/Z", right, None, cast(Any, Context()), master=for_master)
        return refused.value.failure.reason, noted.lines

    assert admit(master, for_master=True) == (common_pb2.UNAUTHENTICATED, 1)
    assert admit(slave, for_master=True) == (common_pb2.NOT_MASTER, 0)
    assert admit(slave, for_master=False) == (common_pb2.UNAUTHENTICATED, 1), "it answers this itself"


def test_a_node_that_may_not_know_the_right_to_a_topic_does_not_refuse_for_it() -> None:
    """A role with one topic passes the gate, which looks for a right somewhere; the topic's own is looked at later."""
    world = World(85)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    core = core_of(master)
    caller = Caller("somebody", "certificate", unrestricted=False, control=core.state.access, enforced=lambda: True)
    batch = from_batch(request_of(LARGE), core.state.settings)
    refusal = may_schedule(batch, caller)
    assert refusal is not None and refusal.reason == common_pb2.RIGHT_REQUIRED
    assert told_by_master(core, refusal) is refusal and told_by_master(core_of(slave), None) is None
    told = told_by_master(core_of(slave), refusal)
    assert told is not None and told.reason == common_pb2.NOT_MASTER
