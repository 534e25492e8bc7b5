"""A mistake in any later piece of any method of the client port fails that call, and the node goes on.

Walks the table of endpoints over a real core: a new method fails here until it has a request that the core takes up.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, cast

import google_crc32c
import pytest
from google.protobuf.message import Message

from tests.node.core.test_serving import (
    COLUMNS,
    ID,
    IDS,
    JOB,
    SELECTION,
    Mistake,
    raising,
    raising_reply,
    scheduled,
    world_with_messages,
)
from tests.node.core.test_serving import ask as ask_core
from tests.node.core.trio import Node as SimulatedNode
from tests.node.core.trio import World, digests
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import Row
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.backup import Backups
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.server.endpoints import SERVICES, DirectEndpoint
from tickwheel.node.server.handlers import Node
from tickwheel.node.server.schedule_stream import ScheduleStreams
from tickwheel.node.server.status_stream import StatusStreams
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    common_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    schedules_pb2,
    snapshot_pb2,
    staging_pb2,
)

DUE_MS = 1_800_003_700_000
NAMED = admin_pb2.SetPausedRequest(name="t", paused=True)
REQUESTS: dict[str, Message] = {
    "Schedule": scheduler_pb2.ScheduleRequest(message=common_pb2.Message(topic="t", payload=b"x", due_ms=DUE_MS)),
    "ScheduleStream": scheduler_pb2.ScheduleBatch(columns=COLUMNS),
    "ScheduleMany": scheduler_pb2.ScheduleBatch(columns=COLUMNS),
    "Cancel": scheduler_pb2.CancelRequest(id=ID),
    "CancelMany": scheduler_pb2.CancelManyRequest(ids=[ID, ID]),
    "Reschedule": scheduler_pb2.RescheduleRequest(id=ID, delay_ms=90_000),
    "RescheduleMany": scheduler_pb2.RescheduleManyRequest(
        requests=[scheduler_pb2.RescheduleRequest(id=ID, delay_ms=90_000 + row) for row in range(2)]
    ),
    "Get": scheduler_pb2.GetRequest(id=ID, content=True),
    "ListPending": scheduler_pb2.ListPendingRequest(content=True),
    "CountPending": scheduler_pb2.CountPendingRequest(bucket_ms=1_000),
    "BeginSweep": scheduler_pb2.BeginSweepRequest(job_id="s", selection=SELECTION, cancel=True),
    "GetSweep": scheduler_pb2.GetSweepRequest(job_id="s"),
    "ListSweeps": scheduler_pb2.ListSweepsRequest(),
    "StopSweep": scheduler_pb2.StopSweepRequest(job_id="s"),
    "Schedules.Put": schedules_pb2.PutScheduleRequest(
        definition=schedules_pb2.ScheduleDefinition(
            name="s", topic="t", payload=b"x", spec=schedules_pb2.ScheduleSpec(interval_ms=86_400_000)
        )
    ),
    "Schedules.Get": schedules_pb2.GetScheduleRequest(name="s"),
    "Schedules.List": schedules_pb2.ListSchedulesRequest(),
    "Schedules.Pause": schedules_pb2.PauseScheduleRequest(name="s"),
    "Schedules.Resume": schedules_pb2.ResumeScheduleRequest(name="s"),
    "Schedules.Trigger": schedules_pb2.TriggerScheduleRequest(name="s", request_id="a"),
    "Schedules.Backfill": schedules_pb2.BackfillScheduleRequest(name="s", request_id="b", from_ms=0, until_ms=1),
    "Schedules.Delete": schedules_pb2.DeleteScheduleRequest(name="s"),
    "Schedules.Preview": schedules_pb2.PreviewScheduleRequest(spec=schedules_pb2.ScheduleSpec(interval_ms=1_000)),
    "Consume": consumer_pb2.ConsumeRequest(open=consumer_pb2.OpenConsumer(group="new", topics=["new"], credits=1)),
    "Pull": consumer_pb2.PullRequest(group="pulling", topics=["t"], messages_max=1, wait_ms=50),
    "Settle": consumer_pb2.SettleBatch(group="g", topic="t", outcome=consumer_pb2.ACK, **IDS),
    "Extend": consumer_pb2.ExtendBatch(group="g", topic="t", lease_ms=5_000, **IDS),
    "GetStatus": admin_pb2.GetStatusRequest(),
    "AwaitMaster": admin_pb2.AwaitMasterRequest(),
    "WatchStatus": admin_pb2.WatchStatusRequest(),
    "GetServerInfo": admin_pb2.GetServerInfoRequest(),
    "TransferMaster": admin_pb2.TransferMasterRequest(),
    "AddMember": admin_pb2.AddMemberRequest(
        member=admin_pb2.Member(node_id="z", peer_address="p:1", client_address="c:1")
    ),
    "RemoveMember": admin_pb2.RemoveMemberRequest(node_id="z"),
    "CreateTopic": admin_pb2.CreateTopicRequest(name="another"),
    "DeleteTopic": admin_pb2.DeleteTopicRequest(name="another"),
    "ListTopics": admin_pb2.ListTopicsRequest(),
    "CreateGroup": admin_pb2.CreateGroupRequest(name="other", topics=["t"]),
    "UpdateGroup": admin_pb2.UpdateGroupRequest(name="g"),
    "DeleteGroup": admin_pb2.DeleteGroupRequest(name="other"),
    "SetGroupFilter": admin_pb2.SetGroupFilterRequest(name="g", filter="a"),
    "SetTopicPaused": NAMED,
    "SetGroupPaused": admin_pb2.SetPausedRequest(name="g", paused=True),
    "ResetGroup": admin_pb2.ResetGroupRequest(name="g"),
    "ListGroups": admin_pb2.ListGroupsRequest(),
    "GetSettings": admin_pb2.GetSettingsRequest(),
    "UpdateSettings": admin_pb2.Settings(attempts_max=9),
    "GetDiskUse": admin_pb2.GetDiskUseRequest(by_topic=True),
    "Backup": admin_pb2.BackupRequest(stale=True),
    "Trace": admin_pb2.TraceRequest(ids=[ID]),
    "GetDigest": admin_pb2.GetDigestRequest(),
    "Stage": staging_pb2.StageRequest(batch=1, attempt=1, sequence=1, columns=COLUMNS, **JOB),
    "Commit": staging_pb2.CommitStagedRequest(batch=1, **JOB),
    "Abort": staging_pb2.AbortStagedRequest(batch=1, **JOB),
    "GetStagedJob": staging_pb2.GetStagedJobRequest(batch=1, job_id="j"),
    "OfferBundle": bulk_pb2.BundleOffer(name="0" * 64, bytes=1),
    "SendBundle": bulk_pb2.BundleData(name="0" * 64, total_bytes=2, data=b"x", crc32c=google_crc32c.value(b"x")),
    "TakeOver": bulk_pb2.TakeOverRequest(job_id="j"),
    "GetLoad": bulk_pb2.GetLoadRequest(job_id="j"),
    "RegisterCold": cold_pb2.RegisterColdRequest(),
    "ListColdParts": cold_pb2.ListColdPartsRequest(),
    "ListColdMoved": cold_pb2.ListColdMovedRequest(),
    "ListDead": dead_pb2.ListDeadRequest(group="g"),
    "GetDead": dead_pb2.GetDeadRequest(group="g"),
    "ReplayDead": dead_pb2.ReplayDeadRequest(group="g"),
    "PurgeDead": dead_pb2.PurgeDeadRequest(group="g"),
    "Pin": snapshot_pb2.PinRequest(),
    "ReadPinned": snapshot_pb2.ReadPinnedRequest(pin_id=1),
    "Unpin": snapshot_pb2.UnpinRequest(pin_id=1),
    "AgreePin": snapshot_pb2.AgreePinRequest(name="a", pin_id=1),
    "PinSettled": snapshot_pb2.PinSettledRequest(group="g"),
    "ReadSettled": snapshot_pb2.ReadSettledRequest(pin_id=1),
    "WhoAmI": access_pb2.WhoAmIRequest(),
    "SetUser": access_pb2.SetUserRequest(),
    "DeleteUser": access_pb2.DeleteUserRequest(name="u"),
    "ListUsers": access_pb2.ListUsersRequest(),
    "CreateToken": access_pb2.CreateTokenRequest(user="u"),
    "RevokeToken": access_pb2.RevokeTokenRequest(user="u", token_id="x"),
    "SetRole": access_pb2.SetRoleRequest(),
    "DeleteRole": access_pb2.DeleteRoleRequest(name="r"),
    "ListRoles": access_pb2.ListRolesRequest(),
    "ListAudit": access_pb2.ListAuditRequest(),
}
"""A request of each method that the core takes up."""
BY_LOOP_ALONE = {
    *(
        "GetStatus",
        "AwaitMaster",
        "WatchStatus",
        "GetServerInfo",
        "ListTopics",
        "ListGroups",
        "GetSettings",
        "Backup",
    ),
    *("OfferBundle", "GetLoad", "Unpin", "WhoAmI", "ListUsers", "ListRoles", "ListAudit"),
}
"""No piece of these runs in the core after their handler has begun: test_boundary.py is about them."""
ANSWERED_AT_ONCE = {
    *("Get", "GetDead", "GetStagedJob", "GetSweep", "ListColdMoved", "ListColdParts", "ListDead", "ListSweeps"),
    *("Schedules.Get", "Schedules.List"),
    *("Pin", "PinSettled", "ReadPinned", "ReadSettled", "ReplayDead", "TakeOver", "SendBundle", "Settle", "Extend"),
}
"""The core answers the requests above without a wait: it has no later step of these."""
SCHEDULES = "tickwheel.v1.Schedules"
METHODS = {
    f"Schedules.{name}" if service == SCHEDULES else name: endpoint
    for service, methods in SERVICES.items()
    for name, endpoint in methods.items()
}
"""Names are unique but for those of schedules."""


@types.coroutine
def stumbling(steps: Coroutine[Any, None, Any], at: list[str]) -> Generator[Any, None, Any]:
    """A coroutine of the core with a mistake in its first step after a wait."""
    try:
        while True:
            try:
                awaited = steps.send(None)
            except StopIteration as end:
                return end.value
            yield awaited
            if at:
                at.clear()
                raise Mistake
    finally:
        steps.close()


class StumblingCalls(Calls):
    """The node's calls, with a mistake in what follows on the core's answer."""

    at: list[str]

    async def answered(self, begin: Callable[[NodeCore, Callable[[Any], None]], None]) -> Any:
        return await super().answered(lambda core, tell: begin(core, raising(tell, self.at)))


class Context:
    """Keeps what a stream answers."""

    server_connection = None

    def __init__(self) -> None:
        self.written: list[Message] = []

    async def write(self, message: Message) -> None:
        self.written.append(message)

    async def write_serialized(self, messages: Sequence[bytes]) -> None:
        self.written += map(scheduler_pb2.BatchReceipt.FromString, messages)


class Audit:
    """Holds nothing."""

    async def newest(self, limit: int, before_ms: int) -> list[Any]:
        """See AuditLog."""
        return []


class Once:
    """A stream with one request that stays open."""

    def __init__(self, request: Message) -> None:
        self._requests = [request]

    def now(self) -> Message | None:
        return self._requests.pop() if self._requests else None

    def __aiter__(self) -> Once:
        return self

    async def __anext__(self) -> Message:
        if not self._requests:
            await asyncio.Event().wait()
        return self._requests.pop()


def node_of(master: SimulatedNode, ended_by: list[BaseException]) -> tuple[Node, StumblingCalls]:
    """The server's side of a simulated node."""
    assert master.host is not None
    calls = StumblingCalls(
        lambda: cast(Any, master.host).core, master.wake, lambda wait_ms: master.wake(), ended_by.append
    )
    calls.at = []
    core = master.host.core
    node = Node(
        calls,
        cast(Any, Audit()),
        ScheduleStreams(calls, 8),
        ConsumerStreams(calls, 1 << 20),
        StatusStreams(calls, 8, lambda: ""),
        Backups(calls, core.disk, core.executor),
        tls=False,
    )
    node.pins.take(1, EVERYBODY)
    return node, calls


async def answered(world: World, node: Node, name: str, request: Message) -> list[Any]:
    """What a call of a method was told, after a while; the call is given up then."""
    context = Context()
    streams = name in ("ScheduleStream", "Consume", "SendBundle")
    endpoint = METHODS[name]
    serving: Awaitable[Any]
    if isinstance(endpoint, DirectEndpoint):
        begin = endpoint.handler
        serving = node.calls.answered(lambda _, tell: begin(node, request, EVERYBODY, Reply.either(tell)))
    else:
        serving = endpoint.serve(node, Once(request) if streams else request, EVERYBODY, cast(Any, context))
    task = asyncio.ensure_future(serving)
    for _ in range(20):
        for _ in range(5):
            await asyncio.sleep(0)
        if task.done():
            break
        world.run(20)
    if not task.done():
        task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return context.written
    error = task.exception()
    if isinstance(error, RequestError):
        return [*context.written, error.failure]
    if error is not None:
        raise error
    return [*context.written, task.result()]


def is_node_fault(answer: Any) -> bool:
    """Whether this says that a call failed by a mistake: as a refusal, or in a receipt."""
    if isinstance(answer, scheduler_pb2.BatchReceipt):
        return b"NODE_FAULT" in answer.error
    return isinstance(answer, Failure) and answer.reason == common_pb2.NODE_FAULT


@pytest.mark.parametrize("where", ["step", "answer"])
async def test_a_mistake_in_a_later_piece_fails_its_call(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of the coroutine after a wait, and in what follows on the core's answer: for each method of the
    table."""
    assert list(REQUESTS) == list(METHODS), "each method has a request here"
    world, master, reported = world_with_messages()
    assert master.host is not None
    core = master.host.core
    ended_by: list[BaseException] = []
    node, calls = node_of(master, ended_by)
    at: list[str] = []
    start, schedule = core.serving.start, core.parts.publisher.schedule
    if where == "step":
        monkeypatch.setattr(core.serving, "start", lambda steps, done: start(stumbling(steps, at), done))
        # Messages are no coroutine.
        monkeypatch.setattr(
            core.parts.publisher, "schedule", lambda batch, reply: schedule(batch, raising_reply(reply, at))
        )
        schedule_row = core.parts.publisher.schedule_row

        def stumbling_row(row: Row, client: str, actor: str, caller: RowCaller) -> None:
            schedule_row(row, client, actor, RowCaller(raising(caller.placed, at), caller.fail))

        monkeypatch.setattr(core.parts.publisher, "schedule_row", stumbling_row)
    else:
        calls.at = at
    met: set[str] = set()
    unmet = BY_LOOP_ALONE | (ANSWERED_AT_ONCE if where == "step" else {"Consume", "ScheduleStream"})
    # After a transfer this node serves no more changes.
    for name in sorted(METHODS, key=lambda name: name == "TransferMaster"):
        at[:] = [name]
        before = set(reported)
        answers = await answered(world, node, name, REQUESTS[name])
        if at:
            at.clear()
            continue
        met.add(name)
        assert master.host is not None and not ended_by, (name, master.fatal, ended_by)
        new = set(reported) - before
        assert len(new) == 1 and isinstance(reported[new.pop()], Mistake), (name, answers)
        assert any(is_node_fault(answer) for answer in answers), (name, answers)
    assert set(METHODS) - met == unmet, "its mistake was never made: give the method a request that gets there"
    monkeypatch.undo()
    world.run(2_000)
    after = ask_core(world.elect(), scheduled)
    world.run(500)
    assert len(after) == 1 and not isinstance(after[0], Failure)
    world.run_until(lambda: len(digests(world)) == 1)
