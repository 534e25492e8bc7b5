"""The table of all methods of the client port: request, right, whether it needs the master, handler, and whether the
audit log notes its calls.

Each row states who runs the handler: `by_core` a coroutine of the core, `by_loop` the server's loop, `by_stream` the
loop with the context, for streams. `direct` is for methods that are called for each message: a plain function, which
gets a callback for the answer. door.py decodes, asks for the right, runs the handler, and turns refusals into
statuses: once, for every row. A node does not start if a method of a service has no row, and a test compares the rows
with the descriptors.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.watch.disk_use import disk_use
from tickwheel.node.server import handlers
from tickwheel.node.server.access import Permission
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.checks import (
    Check,
    by_group,
    by_name,
    by_topic,
    cluster,
    consuming,
    creating_group,
    group,
    known,
    pinning,
    reading_settled,
    settling,
    somewhere,
    sweeping,
    topic,
)
from tickwheel.node.server.handlers import Node, permitted
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    schedules_pb2,
    snapshot_pb2,
    staging_pb2,
)
from tickwheel.proto.access_pb2 import RIGHT_ADMINISTER, RIGHT_CANCEL, RIGHT_CONSUME, RIGHT_READ, RIGHT_SCHEDULE
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.transport.server import ServerStream as Context

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
N = TypeVar(
    "N",
    bound=admin_pb2.CreateTopicRequest
    | admin_pb2.CreateGroupRequest
    | admin_pb2.UpdateGroupRequest
    | admin_pb2.SetGroupFilterRequest
    | admin_pb2.SetPausedRequest
    | admin_pb2.ResetGroupRequest,
)
"""A request that changes the topic or group of its `name`."""


@dataclass(frozen=True, slots=True)
class Right:
    """The right that a caller needs for a method."""

    check: Check
    needed: Permission = Permission.CLIENT
    """The role needed while the setting `rights` is off."""
    audited: bool = False


class Needs(enum.Enum):
    """Which node serves a method."""

    ANY_NODE = "each node, from what it has applied"
    MASTER = "the master; the table refuses on other nodes, before the handler runs"
    MASTER_EACH = "the master; each message is refused by itself, with what is known of it"


ANY_NODE, MASTER, MASTER_EACH = Needs


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method; what its calls do is in the two kinds below."""

    request: type[Message]
    response: type[Message]
    right: Right
    needs: Needs


@dataclass(frozen=True, slots=True)
class AwaitedEndpoint(Endpoint):
    """A method whose calls are tasks."""

    serve: Callable[[Node, Any, Caller, Context], Awaitable[Any]]
    """Gets the request, or an iterator of requests. Returns the response; None if it was written to the context."""


@dataclass(frozen=True, slots=True)
class DirectEndpoint(Endpoint):
    """A method whose calls need no task. It is not audited."""

    begin: Callable[[Node, Any, Caller, Reply[Any]], None]
    """Gets the request, and what takes the response. May raise RequestError instead."""


def direct(
    request: type[Q],
    response: type[A],
    right: Right,
    needs: Needs,
    handler: Callable[[Node, Q, Caller, Reply[A]], None],
) -> DirectEndpoint:
    """A row whose handler begins a call and ends it later, and asks for the master itself."""
    assert needs is not MASTER, request
    return DirectEndpoint(request, response, right, needs, handler)


def by_core(
    request: type[Q],
    response: type[A],
    right: Right,
    needs: Needs,
    handler: Callable[[NodeCore, Q, Caller], Coroutine[Promise[Any], None, A]],
) -> AwaitedEndpoint:
    """A row whose handler the core runs."""
    master = needs is MASTER

    def serve(node: Node, asked: Q, caller: Caller, context: Context) -> Awaitable[A]:
        return node.calls.answer(lambda core: handler(core, asked, caller), master=master)

    return AwaitedEndpoint(request, response, right, needs, serve)


def by_loop(
    request: type[Q],
    response: type[A],
    right: Right,
    needs: Needs,
    handler: Callable[[Node, Q, Caller], Awaitable[A]],
) -> AwaitedEndpoint:
    """A row whose handler the loop runs."""

    def serve(node: Node, asked: Q, caller: Caller, context: Context) -> Awaitable[A]:
        return handler(node, asked, caller)

    async def serve_by_master(node: Node, asked: Q, caller: Caller, context: Context) -> A:
        node.core.require_master()
        return await handler(node, asked, caller)

    return AwaitedEndpoint(request, response, right, needs, serve_by_master if needs is MASTER else serve)


def by_stream(
    request: type[Q],
    response: type[A],
    right: Right,
    needs: Needs,
    handler: Callable[[Node, Any, Caller, Context], Awaitable[A | None]],
) -> AwaitedEndpoint:
    """A row for a method with a stream of requests or responses. Its handler asks for the master itself, since that may
    change while the stream is open."""
    assert needs is not MASTER, request
    return AwaitedEndpoint(request, response, right, needs, handler)


def shown(request: type[Q], response: type[A], right: Right, look: Callable[[Node, Q, Caller], A]) -> AwaitedEndpoint:
    """A row of a read that each node answers at once."""

    async def handler(node: Node, asked: Q, caller: Caller) -> A:
        return look(node, asked, caller)

    return by_loop(request, response, right, ANY_NODE, handler)


KNOWN = Right(known)
CHANGES = Right(cluster, Permission.ADMIN, audited=True)
LOOKS = Right(cluster, Permission.ADMIN)
ONE_TOPIC = Right(topic(RIGHT_ADMINISTER, by_name), Permission.ADMIN, audited=True)
ONE_GROUP = Right(group(RIGHT_ADMINISTER, by_name), Permission.ADMIN, audited=True)
DEAD = Right(group(RIGHT_READ, by_group))
CHANGES_DEAD = Right(group(RIGHT_ADMINISTER, by_group), Permission.ADMIN, audited=True)
PENDING = Right(topic(RIGHT_READ, by_topic))
STAGES = Right(somewhere(RIGHT_SCHEDULE))
READS = Right(somewhere(RIGHT_READ))
CHANGES_RUNS = Right(somewhere(RIGHT_SCHEDULE), audited=True)
CANCELS = Right(somewhere(RIGHT_CANCEL))


def changing_topic(request: type[N], command: Callable[[N], AdminCommand]) -> AwaitedEndpoint:
    """A row of a change of the topic that the request names; the answer is the topic after it."""
    return by_core(
        request,
        admin_pb2.Topic,
        ONE_TOPIC,
        MASTER,
        lambda core, asked, caller: handlers.change_topic(core, command(asked), asked.name, caller),
    )


def changing_group(request: type[N], command: Callable[[N], AdminCommand], right: Right = ONE_GROUP) -> AwaitedEndpoint:
    """As `changing_topic`, for a group."""
    return by_core(
        request,
        admin_pb2.Group,
        right,
        MASTER,
        lambda core, asked, caller: handlers.change_group(core, command(asked), asked.name, caller),
    )


SERVICES: dict[str, dict[str, AwaitedEndpoint | DirectEndpoint]] = {
    "tickwheel.v1.Scheduler": {
        "Schedule": direct(
            scheduler_pb2.ScheduleRequest,
            scheduler_pb2.ScheduleReceipt,
            Right(topic(RIGHT_SCHEDULE, lambda request: request.message.topic or "(none)")),
            MASTER_EACH,
            handlers.schedule,
        ),
        "ScheduleStream": by_stream(
            scheduler_pb2.ScheduleBatch,
            scheduler_pb2.BatchReceipt,
            STAGES,
            MASTER_EACH,
            lambda node, batches, caller, context: node.schedule_streams.serve(batches, caller, context),
        ),
        "ScheduleMany": by_loop(
            scheduler_pb2.ScheduleBatch, scheduler_pb2.BatchReceipt, STAGES, MASTER_EACH, handlers.schedule_many
        ),
        "Cancel": by_core(scheduler_pb2.CancelRequest, scheduler_pb2.CancelResponse, CANCELS, MASTER, handlers.cancel),
        "CancelMany": by_core(
            scheduler_pb2.CancelManyRequest,
            scheduler_pb2.CancelManyResponse,
            CANCELS,
            MASTER_EACH,
            handlers.cancel_many,
        ),
        "Reschedule": by_core(
            scheduler_pb2.RescheduleRequest, scheduler_pb2.RescheduleResponse, CANCELS, MASTER, handlers.reschedule
        ),
        "RescheduleMany": by_core(
            scheduler_pb2.RescheduleManyRequest,
            scheduler_pb2.RescheduleManyResponse,
            CANCELS,
            MASTER_EACH,
            handlers.reschedule_many,
        ),
        "Get": by_core(scheduler_pb2.GetRequest, scheduler_pb2.GetResponse, READS, MASTER, handlers.get),
        "ListPending": by_core(
            scheduler_pb2.ListPendingRequest,
            scheduler_pb2.ListPendingResponse,
            PENDING,
            MASTER,
            lambda core, request, caller: core.parts.pending.page(request),
        ),
        "CountPending": by_core(
            scheduler_pb2.CountPendingRequest,
            scheduler_pb2.CountPendingResponse,
            PENDING,
            MASTER,
            lambda core, request, caller: core.parts.pending.count(request),
        ),
        "BeginSweep": by_core(
            scheduler_pb2.BeginSweepRequest,
            scheduler_pb2.Sweep,
            Right(topic(RIGHT_CANCEL, lambda request: request.selection.topic), audited=True),
            MASTER,
            lambda core, request, caller: core.parts.sweeper.begin_sweep(request),
        ),
        "GetSweep": by_core(
            scheduler_pb2.GetSweepRequest,
            scheduler_pb2.Sweep,
            Right(sweeping),
            MASTER,
            lambda core, request, caller: core.parts.sweeper.get(request.job_id),
        ),
        "ListSweeps": by_core(
            scheduler_pb2.ListSweepsRequest, scheduler_pb2.ListSweepsResponse, CANCELS, MASTER, handlers.list_sweeps
        ),
        "StopSweep": by_core(
            scheduler_pb2.StopSweepRequest,
            scheduler_pb2.Sweep,
            Right(sweeping, audited=True),
            MASTER,
            lambda core, request, caller: core.parts.sweeper.stop(request.job_id),
        ),
    },
    "tickwheel.v1.Schedules": {
        "Put": by_core(
            schedules_pb2.PutScheduleRequest,
            schedules_pb2.PutScheduleResponse,
            Right(topic(RIGHT_SCHEDULE, lambda request: request.definition.topic or "(none)"), audited=True),
            MASTER,
            lambda core, request, caller: core.parts.schedules.put(
                request, caller.actor, permitted(caller, RIGHT_SCHEDULE)
            ),
        ),
        "Get": by_core(
            schedules_pb2.GetScheduleRequest,
            schedules_pb2.GetScheduleResponse,
            READS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.get(request, permitted(caller, RIGHT_READ)),
        ),
        "List": by_core(
            schedules_pb2.ListSchedulesRequest,
            schedules_pb2.ListSchedulesResponse,
            READS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.page(request, permitted(caller, RIGHT_READ)),
        ),
        "Pause": by_core(
            schedules_pb2.PauseScheduleRequest,
            schedules_pb2.Schedule,
            CHANGES_RUNS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.pause(request, permitted(caller, RIGHT_SCHEDULE)),
        ),
        "Resume": by_core(
            schedules_pb2.ResumeScheduleRequest,
            schedules_pb2.Schedule,
            CHANGES_RUNS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.resume(request, permitted(caller, RIGHT_SCHEDULE)),
        ),
        "Trigger": by_core(
            schedules_pb2.TriggerScheduleRequest,
            schedules_pb2.TriggerScheduleResponse,
            CHANGES_RUNS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.trigger(request, permitted(caller, RIGHT_SCHEDULE)),
        ),
        "Backfill": by_core(
            schedules_pb2.BackfillScheduleRequest,
            schedules_pb2.BackfillScheduleResponse,
            CHANGES_RUNS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.backfill(request, permitted(caller, RIGHT_SCHEDULE)),
        ),
        "Delete": by_core(
            schedules_pb2.DeleteScheduleRequest,
            schedules_pb2.DeleteScheduleResponse,
            CHANGES_RUNS,
            MASTER,
            lambda core, request, caller: core.parts.schedules.delete(request, permitted(caller, RIGHT_SCHEDULE)),
        ),
        "Preview": by_core(
            schedules_pb2.PreviewScheduleRequest,
            schedules_pb2.PreviewScheduleResponse,
            KNOWN,
            MASTER,
            lambda core, request, caller: core.parts.schedules.preview(request),
        ),
    },
    "tickwheel.v1.Consumer": {
        "Consume": by_stream(
            consumer_pb2.ConsumeRequest,
            consumer_pb2.ConsumeResponse,
            Right(somewhere(RIGHT_CONSUME)),
            MASTER_EACH,
            lambda node, requests, caller, context: node.consumers.serve(requests, caller, context),
        ),
        "Pull": by_core(
            consumer_pb2.PullRequest,
            consumer_pb2.DeliverBatch,
            Right(consuming),
            MASTER,
            lambda core, request, caller: core.parts.consumers.pull(request, caller.actor),
        ),
        "Settle": by_loop(
            consumer_pb2.SettleBatch,
            consumer_pb2.SettleReceipt,
            Right(settling),
            MASTER_EACH,
            lambda node, request, caller: node.calls.ask(
                lambda core, reply: core.parts.consumers.settle(request, reply)
            ),
        ),
        "Extend": by_core(
            consumer_pb2.ExtendBatch, consumer_pb2.ExtendReceipt, Right(settling), MASTER_EACH, handlers.extend
        ),
    },
    "tickwheel.v1.Admin": {
        "GetStatus": shown(
            admin_pb2.GetStatusRequest,
            admin_pb2.NodeStatus,
            KNOWN,
            lambda node, request, caller: node.status.status(),
        ),
        "AwaitMaster": by_loop(
            admin_pb2.AwaitMasterRequest,
            admin_pb2.AwaitMasterResponse,
            KNOWN,
            ANY_NODE,
            lambda node, request, caller: node.status.await_master(request),
        ),
        "WatchStatus": by_stream(
            admin_pb2.WatchStatusRequest,
            admin_pb2.NodeStatus,
            KNOWN,
            ANY_NODE,
            lambda node, request, caller, context: node.status.serve(request, context),
        ),
        "GetServerInfo": shown(
            admin_pb2.GetServerInfoRequest,
            admin_pb2.ServerInfo,
            READS,
            lambda node, request, caller: handlers.server_info(node, SERVICES),
        ),
        "TransferMaster": by_core(
            admin_pb2.TransferMasterRequest, admin_pb2.TransferMasterResponse, CHANGES, MASTER, handlers.transfer_master
        ),
        "AddMember": by_core(
            admin_pb2.AddMemberRequest,
            admin_pb2.MemberList,
            CHANGES,
            MASTER,
            handlers.add_member,
        ),
        "RemoveMember": by_core(
            admin_pb2.RemoveMemberRequest,
            admin_pb2.MemberList,
            CHANGES,
            MASTER,
            lambda core, request, caller: handlers.change_members(core, AdminCommand(remove_member=request), caller),
        ),
        "CreateTopic": changing_topic(admin_pb2.CreateTopicRequest, lambda request: AdminCommand(create_topic=request)),
        "DeleteTopic": by_core(
            admin_pb2.DeleteTopicRequest, admin_pb2.DeleteTopicResponse, ONE_TOPIC, MASTER, handlers.delete_topic
        ),
        "ListTopics": by_loop(
            admin_pb2.ListTopicsRequest, admin_pb2.ListTopicsResponse, KNOWN, ANY_NODE, handlers.list_topics
        ),
        "CreateGroup": changing_group(
            admin_pb2.CreateGroupRequest,
            lambda request: AdminCommand(create_group=request),
            Right(creating_group, Permission.ADMIN, audited=True),
        ),
        "UpdateGroup": changing_group(admin_pb2.UpdateGroupRequest, lambda request: AdminCommand(update_group=request)),
        "DeleteGroup": by_core(
            admin_pb2.DeleteGroupRequest, admin_pb2.DeleteGroupResponse, ONE_GROUP, MASTER, handlers.delete_group
        ),
        "SetGroupFilter": changing_group(
            admin_pb2.SetGroupFilterRequest, lambda request: AdminCommand(set_group_filter=request)
        ),
        "SetTopicPaused": changing_topic(
            admin_pb2.SetPausedRequest, lambda request: AdminCommand(set_topic_paused=request)
        ),
        "SetGroupPaused": changing_group(
            admin_pb2.SetPausedRequest, lambda request: AdminCommand(set_group_paused=request)
        ),
        "ResetGroup": changing_group(admin_pb2.ResetGroupRequest, lambda request: AdminCommand(reset_group=request)),
        "ListGroups": by_loop(
            admin_pb2.ListGroupsRequest, admin_pb2.ListGroupsResponse, KNOWN, ANY_NODE, handlers.list_groups
        ),
        "GetSettings": shown(
            admin_pb2.GetSettingsRequest,
            admin_pb2.Settings,
            KNOWN,
            lambda node, request, caller: node.core.state.settings.message(),
        ),
        "UpdateSettings": by_core(admin_pb2.Settings, admin_pb2.Settings, CHANGES, MASTER, handlers.update_settings),
        "GetDiskUse": by_core(
            admin_pb2.GetDiskUseRequest,
            admin_pb2.DiskUse,
            Right(cluster),
            ANY_NODE,
            lambda core, request, caller: disk_use(core, core.parts.disk_room, request),
        ),
        "Backup": by_stream(
            admin_pb2.BackupRequest,
            admin_pb2.BackupChunk,
            CHANGES,
            ANY_NODE,
            lambda node, request, caller, context: node.backups.serve(request, context),
        ),
        "Trace": by_core(admin_pb2.TraceRequest, admin_pb2.TraceResponse, READS, ANY_NODE, handlers.trace),
        "GetDigest": by_core(
            admin_pb2.GetDigestRequest,
            admin_pb2.StateDigest,
            LOOKS,
            ANY_NODE,
            lambda core, request, caller: core.parts.digests.get(),
        ),
    },
    "tickwheel.v1.Staging": {
        "Stage": by_core(
            staging_pb2.StageRequest,
            staging_pb2.StagedJob,
            Right(topic(RIGHT_SCHEDULE, lambda request: request.columns.topic or "(none)")),
            MASTER,
            handlers.stage,
        ),
        "Commit": by_core(
            staging_pb2.CommitStagedRequest,
            staging_pb2.StagedJob,
            STAGES,
            MASTER,
            lambda core, request, caller: core.parts.staging.commit(request, caller.actor),
        ),
        "Abort": by_core(
            staging_pb2.AbortStagedRequest,
            staging_pb2.StagedJob,
            STAGES,
            MASTER,
            lambda core, request, caller: core.parts.staging.abort(request, caller.actor),
        ),
        "GetStagedJob": by_core(
            staging_pb2.GetStagedJobRequest,
            staging_pb2.StagedJob,
            STAGES,
            MASTER,
            lambda core, request, caller: core.parts.staging.job(request, caller.actor),
        ),
    },
    "tickwheel.v1.Bulk": {
        "OfferBundle": shown(
            bulk_pb2.BundleOffer,
            bulk_pb2.BundleState,
            LOOKS,
            lambda node, request, caller: handlers.bundle_state(
                node.core.parts.bulk.offer(request.name, request.bytes)
            ),
        ),
        "SendBundle": by_stream(
            bulk_pb2.BundleData,
            bulk_pb2.BundleState,
            LOOKS,
            ANY_NODE,
            lambda node, pieces, caller, context: handlers.send_bundle(node, pieces),
        ),
        "TakeOver": by_core(
            bulk_pb2.TakeOverRequest,
            bulk_pb2.LoadState,
            CHANGES,
            MASTER,
            lambda core, request, caller: core.parts.bulk.take_over(request),
        ),
        "GetLoad": shown(
            bulk_pb2.GetLoadRequest,
            bulk_pb2.LoadState,
            LOOKS,
            lambda node, request, caller: node.core.parts.bulk.load(request.job_id),
        ),
    },
    "tickwheel.v1.Cold": {
        "RegisterCold": by_core(
            cold_pb2.RegisterColdRequest,
            cold_pb2.ColdJob,
            CHANGES,
            MASTER,
            lambda core, request, caller: core.parts.cold.register(request),
        ),
        "ListColdParts": by_core(
            cold_pb2.ListColdPartsRequest,
            cold_pb2.ColdParts,
            LOOKS,
            MASTER,
            lambda core, request, caller: core.parts.cold.parts(request),
        ),
        "ListColdMoved": by_core(
            cold_pb2.ListColdMovedRequest,
            cold_pb2.ColdMoved,
            LOOKS,
            MASTER,
            lambda core, request, caller: core.parts.cold.moved(request),
        ),
    },
    "tickwheel.v1.DeadLetters": {
        "ListDead": by_core(
            dead_pb2.ListDeadRequest,
            dead_pb2.ListDeadResponse,
            DEAD,
            MASTER,
            lambda core, request, caller: core.parts.dead.list(request),
        ),
        "GetDead": by_core(
            dead_pb2.GetDeadRequest,
            dead_pb2.DeadLetter,
            DEAD,
            MASTER,
            lambda core, request, caller: core.parts.dead.get(request),
        ),
        "ReplayDead": by_core(
            dead_pb2.ReplayDeadRequest,
            dead_pb2.ChangeDeadResponse,
            CHANGES_DEAD,
            MASTER,
            lambda core, request, caller: core.parts.dead.replay(request),
        ),
        "PurgeDead": by_core(
            dead_pb2.PurgeDeadRequest,
            dead_pb2.ChangeDeadResponse,
            CHANGES_DEAD,
            MASTER,
            lambda core, request, caller: core.parts.dead.purge(request),
        ),
    },
    "tickwheel.v1.Snapshot": {
        "Pin": by_loop(snapshot_pb2.PinRequest, snapshot_pb2.PinResponse, Right(pinning), ANY_NODE, handlers.pin),
        "ReadPinned": by_loop(
            snapshot_pb2.ReadPinnedRequest, snapshot_pb2.PinnedPage, READS, ANY_NODE, handlers.read_pinned
        ),
        "Unpin": by_loop(snapshot_pb2.UnpinRequest, snapshot_pb2.UnpinResponse, READS, ANY_NODE, handlers.unpin),
        "AgreePin": by_core(
            snapshot_pb2.AgreePinRequest,
            snapshot_pb2.AgreePinResponse,
            READS,
            MASTER,
            lambda core, request, caller: core.parts.pins.agree(request),
        ),
        "PinSettled": by_loop(
            snapshot_pb2.PinSettledRequest,
            snapshot_pb2.PinSettledResponse,
            Right(reading_settled),
            ANY_NODE,
            handlers.pin_settled,
        ),
        "ReadSettled": by_loop(
            snapshot_pb2.ReadSettledRequest, snapshot_pb2.SettledPage, READS, ANY_NODE, handlers.read_settled
        ),
    },
    "tickwheel.v1.Access": {
        "WhoAmI": shown(
            access_pb2.WhoAmIRequest, access_pb2.Caller, KNOWN, lambda node, request, caller: caller.message()
        ),
        "SetUser": by_core(access_pb2.SetUserRequest, access_pb2.User, CHANGES, MASTER, handlers.set_user),
        "DeleteUser": by_core(
            access_pb2.DeleteUserRequest, access_pb2.DeleteUserResponse, CHANGES, MASTER, handlers.delete_user
        ),
        "ListUsers": by_loop(
            access_pb2.ListUsersRequest, access_pb2.ListUsersResponse, LOOKS, ANY_NODE, handlers.list_users
        ),
        "CreateToken": by_loop(
            access_pb2.CreateTokenRequest, access_pb2.CreateTokenResponse, CHANGES, MASTER, handlers.create_token
        ),
        "RevokeToken": by_core(access_pb2.RevokeTokenRequest, access_pb2.User, CHANGES, MASTER, handlers.revoke_token),
        "SetRole": by_core(access_pb2.SetRoleRequest, access_pb2.AccessRole, CHANGES, MASTER, handlers.set_role),
        "DeleteRole": by_core(
            access_pb2.DeleteRoleRequest, access_pb2.DeleteRoleResponse, CHANGES, MASTER, handlers.delete_role
        ),
        "ListRoles": by_loop(
            access_pb2.ListRolesRequest, access_pb2.ListRolesResponse, LOOKS, ANY_NODE, handlers.list_roles
        ),
        "ListAudit": by_loop(
            access_pb2.ListAuditRequest, access_pb2.ListAuditResponse, LOOKS, ANY_NODE, handlers.list_audit
        ),
    },
}
"""By full name of the service, in the order in which methods are looked up, and name of the method."""
