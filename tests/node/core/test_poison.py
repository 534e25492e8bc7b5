"""What no node can read: it does not enter the log, and a log that holds it already ends no node."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.internal.encoder import _VarintBytes as varint  # type: ignore[attr-defined]  # the wire, by hand
from google.protobuf.message import DecodeError

from tests.node.core.test_proposer import Log, dispatch, proposer_with
from tests.node.core.trio import Client, World, digests
from tests.node.state.driver import admin
from tests.node.state.test_schema import FIELD_1000
from tickwheel.node.config import read_config
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.node.rebuild import rebuild
from tickwheel.node.refound import RefoundError, refound
from tickwheel.node.state.schema import command_problem, holds_requests, read_entry
from tickwheel.proto import admin_pb2, cold_pb2, scheduler_pb2, schedules_pb2, staging_pb2
from tickwheel.proto.log_pb2 import (
    AdminCommand,
    Command,
    Ingest,
    LogEntry,
    PutSchedule,
    ScheduleCommand,
    SweepCommand,
)
from tickwheel.replication.log import ProposalOutcome

GROUP = 900


def nested(depth: int) -> bytes:
    """An unknown field: groups in each other."""
    groups: bytes = varint(GROUP << 3 | 3) * depth + varint(GROUP << 3 | 4) * depth
    return groups


def message(field: int, content: bytes) -> bytes:
    """A message in another, by hand."""
    data: bytes = varint(field << 3 | 2) + varint(len(content)) + content
    return data


def poison(term: int) -> bytes:
    """The entry that CreateTopic with groups nested 98 deep once made: LogEntry, Command, AdminCommand, request."""
    request = b"\x0a\x06poison" + nested(98)
    command = message(AdminCommand.DESCRIPTOR.fields_by_name["create_topic"].number, request)
    entry = message(5, message(Command.DESCRIPTOR.fields_by_name["admin"].number, command))
    head: bytes = LogEntry(format_version=1, term=term, stamped_ms=1).SerializeToString()
    with pytest.raises(DecodeError):
        LogEntry.FromString(head + entry)
    return head + entry


def spoil(world: World) -> int:
    """Have a poisoned entry committed, as a master of an earlier version did; its index."""
    node = world.elect()
    assert node.host is not None
    outcomes: list[Any] = []
    node.host.core.log.propose(poison(node.host.core.term), outcomes.append)
    node.wake()
    world.run_until(lambda: bool(outcomes))
    assert outcomes[0].outcome is ProposalOutcome.COMMITTED
    return int(outcomes[0].index)


def test_a_log_that_holds_poison_goes_on() -> None:
    """Every node passes over it, when it comes and when it is replayed; it is told, and nothing else is lost."""
    world = World()
    client = Client(world)
    client.consume()
    world.elect()
    client.schedule([300, 6_000])
    world.run(500)
    index = spoil(world)
    client.schedule([300, 6_000])
    world.run(2_000)
    for node in world.nodes.values():
        assert node.host is not None and not node.fatal
        assert list(node.host.core.applied.passed_over) == [index]
        node.kill()
    for node in world.nodes.values():
        node.start()
    world.elect()
    client.schedule([300])
    world.run(6_000)
    assert len(client.acked) == 5 and not client.lost()
    assert len(digests(world)) == 1
    assert all(node.host is not None and index in node.host.core.applied.passed_over for node in world.nodes.values())


def test_what_is_no_entry_of_this_format_stops_a_node() -> None:
    """It may be a newer format, which others act on; only what begins as ours is known to be nobody's."""
    assert read_entry(poison(1)) is None
    assert command_problem(poison(1)) == ""
    with pytest.raises(DecodeError):
        read_entry(b"\x08\x02" + nested(200))
    assert "no entry" in command_problem(b"\x08\x02" + nested(200))


def test_a_command_that_cannot_be_read_back_is_refused_alone() -> None:
    """Whatever made it: those that would have shared its entry are proposed, in their order."""
    log = Log()
    proposer = proposer_with(log, 8)
    answers: dict[int, object] = {}
    deep, unknown = (
        admin(create_topic=admin_pb2.CreateTopicRequest.FromString(b"\x0a\x01t" + nested(depth))) for depth in (97, 2)
    )
    value = admin(create_group=admin_pb2.CreateGroupRequest(name="g", start_from=7))  # type: ignore[arg-type]
    for number, command in enumerate([dispatch(1), deep, dispatch(2), unknown, value, dispatch(3)]):
        proposer.submit(command, Reply.either(lambda result, number=number: answers.update({number: result})))  # type: ignore[misc]
    proposer.flush()
    assert [c.dispatch.due_ms for entry in log.entries for c in entry.commands] == [1, 2, 3]
    assert sorted(answers) == [1, 3, 4] and proposer.unsound_commands == 3
    for answer in answers.values():
        assert isinstance(answer, Failure) and answer.grpc_code_name == "INVALID_ARGUMENT"
    proposer.submit_alone(deep, Reply.either(lambda result: answers.update({9: result})), ["n1"])
    proposer.flush()
    assert isinstance(answers[9], Failure)
    while log.entries and proposer.entries_in_flight:
        log.answer()


@pytest.mark.parametrize(
    "command",
    [
        Command(admin=AdminCommand(create_topic=admin_pb2.CreateTopicRequest(name="t"))),
        Command(sweep=SweepCommand(begin=scheduler_pb2.Sweep(job_id="s"))),
        Command(staging=staging_pb2.StagingCommand(abort=staging_pb2.AbortStagedRequest(job_id="j"))),
        Command(cold=cold_pb2.ColdCommand(register=cold_pb2.RegisterColdRequest(job_id="j"))),
        Command(ingest=Ingest(job_id="j", cold=cold_pb2.ColdLoad())),
        Command(schedule=ScheduleCommand(put=PutSchedule(definition=schedules_pb2.ScheduleDefinition(name="s")))),
    ],
    ids=lambda command: command.WhichOneof("body"),
)
def test_each_command_that_holds_a_request_is_looked_through(command: Command) -> None:
    """An unknown field in the request, which the door refuses, would not reach the log without the door either."""
    assert holds_requests(command)
    part: Any = command
    while (inner := [value for field, value in part.ListFields() if field.message_type is not None]) != []:
        part = inner[0]
    part.MergeFromString(FIELD_1000)
    proposer, answers = proposer_with(Log(), 8), list[Any]()
    proposer.submit(command, Reply.either(answers.append))
    proposer.flush()
    assert isinstance(answers[0], Failure) and proposer.unsound_commands == 1


def poisoned_disk() -> tuple[Any, int, int]:
    """A stopped node of a cluster with ten pending messages and poison between them: the node, index, entries."""
    world = World()
    client = Client(world)
    world.elect()
    client.schedule([60_000] * 5)
    world.run(500)
    index = spoil(world)
    client.schedule([60_000] * 5)
    world.run(1_000)
    node = world.elect()
    assert node.host is not None and node.host.core.checkpointer.written == 0
    applied = node.host.core.applied.index
    node.kill()
    return node, index, applied


def configured(name: str) -> Any:
    """Of the cluster to be."""
    return read_config(None, {}, {"cluster.id": "anew", "node.id": name, "node.data_dir": "unused"})


def test_recover_and_rebuild_pass_over_poison_and_say_so() -> None:
    """They ended in tracebacks."""
    node, index, _ = poisoned_disk()
    found = refound(node.disk, configured(node.name))
    assert found.pending == 10
    assert [line.split(":")[0] for line in found.skipped] == [str(index)]
    node, _, applied = poisoned_disk()
    assert rebuild(node.disk, 1 << 20).entries >= applied


def test_recover_leaves_out_the_entries_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that apply cannot carry out is named with the option that leaves it out; then all others are there."""
    from tickwheel.node.state.machine import AnyResult, StateMachine

    node, index, applied = poisoned_disk()
    apply = StateMachine.apply
    bad = index + 1

    def fails(self: StateMachine, at: int, term: int, entry: LogEntry) -> list[AnyResult]:
        if at == bad:
            raise AssertionError("what apply never foresaw")
        return apply(self, at, term, entry)

    monkeypatch.setattr(StateMachine, "apply", fails)
    with pytest.raises(RefoundError, match=f"entry {bad} .*never foresaw.*--skip-entry {bad}"):
        refound(node.disk, configured(node.name))
    with pytest.raises(RefoundError, match="not among those"):
        refound(node.disk, configured(node.name), [applied + 1_000])
    found = refound(node.disk, configured(node.name), [bad])
    assert found.pending == 5
    assert [line.split(":")[0] for line in found.skipped] == [str(index), str(bad)]
    assert "publish" in found.skipped[1]
