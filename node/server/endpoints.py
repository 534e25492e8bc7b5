"""The table of all methods of the client port: right, whether it needs the master, handler, and whether the audit log
notes its calls. Types of requests and responses are those of the descriptors.

Each row states who runs the handler: `by_core` a coroutine of the core, `by_loop` the server's loop, `by_stream` the
loop with the context, for streams. `direct` is for methods that are called for each message: a plain function, which
gets a callback for the answer. door.py decodes, asks for the right, runs the handler, and turns refusals into
statuses: once, for every row. A node does not start if a method of a service has no row, and tests compare rows and
handlers with the descriptors.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.schedule.recurring import ScheduleRequests
from tickwheel.node.core.watch.disk_use import disk_use
from tickwheel.node.core.watch.listings import named_group, named_topic
from tickwheel.node.failure import Permitted
from tickwheel.node.server import handlers
from tickwheel.node.server.access import Permission
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.checks import (
    Check,
    by_group,
    by_message,
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
from tickwheel.node.server.plain import plain_batch, plain_request
from tickwheel.proto import access_pb2
from tickwheel.proto.access_pb2 import RIGHT_ADMINISTER, RIGHT_CANCEL, RIGHT_CONSUME, RIGHT_READ, RIGHT_SCHEDULE
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.transport.server import ServerStream as Context


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

    right: Right
    needs: Needs
    handler: Callable[..., Any]
    plain: Callable[[bytes], Any] | None = field(default=None, kw_only=True)
    """Reads the bytes of most requests into something simpler, which the right and the handler take as well. What it
    returns None for the door reads."""


@dataclass(frozen=True, slots=True)
class AwaitedEndpoint(Endpoint):
    """A method whose calls are tasks."""

    serve: Callable[[Node, Any, Caller, Context], Awaitable[Any]]
    """Gets the request, or an iterator of requests. Returns the response; None if it was written to the context."""


@dataclass(frozen=True, slots=True)
class DirectEndpoint(Endpoint):
    """A method whose calls need no task. It is not audited."""

    handler: Callable[[Node, Any, Caller, Reply[Any]], None]
    """Gets the request, and what takes the response. May raise RequestError instead. Asks for the master itself."""


def by_core(
    right: Right, needs: Needs, handler: Callable[[NodeCore, Any, Caller], Coroutine[Promise[Any], None, Message]]
) -> AwaitedEndpoint:
    """A row whose handler the core runs."""
    master = needs is MASTER

    def serve(node: Node, asked: Any, caller: Caller, context: Context) -> Awaitable[Message]:
        return node.calls.answer(lambda core: handler(core, asked, caller), master=master)

    return AwaitedEndpoint(right, needs, handler, serve)


def by_loop(right: Right, needs: Needs, handler: Callable[[Node, Any, Caller], Awaitable[Message]]) -> AwaitedEndpoint:
    """A row whose handler the loop runs."""

    def serve(node: Node, asked: Any, caller: Caller, context: Context) -> Awaitable[Message]:
        return handler(node, asked, caller)

    async def serve_by_master(node: Node, asked: Any, caller: Caller, context: Context) -> Message:
        node.core.require_master()
        return await handler(node, asked, caller)

    return AwaitedEndpoint(right, needs, handler, serve_by_master if needs is MASTER else serve)


def by_stream(
    right: Right,
    needs: Needs,
    handler: Callable[[Node, Any, Caller, Context], Awaitable[Message | None]],
    *,
    plain: Callable[[bytes], Any] | None = None,
) -> AwaitedEndpoint:
    """A row for a method with a stream of requests or responses. Its handler asks for the master itself, since that may
    change while the stream is open."""
    assert needs is not MASTER
    return AwaitedEndpoint(right, needs, handler, handler, plain=plain)


def of_schedules(
    right: Right,
    needed: access_pb2.Right.ValueType,
    method: Callable[[ScheduleRequests], Callable[[Any, Permitted], Coroutine[Promise[Any], None, Message]]],
) -> AwaitedEndpoint:
    """A row of a method on one recurring schedule or several, which asks for the right to the topic of each."""
    return by_core(
        right, MASTER, lambda core, request, caller: method(core.parts.schedules)(request, permitted(caller, needed))
    )


def shown(right: Right, look: Callable[[Node, Any, Caller], Message]) -> AwaitedEndpoint:
    """A row of a read that each node answers at once."""

    async def handler(node: Node, asked: Any, caller: Caller) -> Message:
        return look(node, asked, caller)

    return by_loop(right, ANY_NODE, handler)


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


def changing(kind: str, change: str, look: Callable[[NodeCore, str], Message | None], right: Right) -> AwaitedEndpoint:
    """A row of a change of the topic or group (`kind`) that the request names; the answer is that after it. `change`:
    the field of AdminCommand that takes the request."""

    async def handler(core: NodeCore, asked: Any, caller: Caller) -> Message:
        return await handlers.change_named(core, AdminCommand(**{change: asked}), caller, kind, asked.name, look)

    return by_core(right, MASTER, handler)


def changing_topic(change: str) -> AwaitedEndpoint:
    """As `changing`."""
    return changing("topic", change, named_topic, ONE_TOPIC)


def changing_group(change: str, right: Right = ONE_GROUP) -> AwaitedEndpoint:
    """As `changing`."""
    return changing("group", change, named_group, right)


SERVICES: dict[str, dict[str, AwaitedEndpoint | DirectEndpoint]] = {
    "tickwheel.v1.Scheduler": {
        "Schedule": DirectEndpoint(
            Right(topic(RIGHT_SCHEDULE, by_message)),
            MASTER_EACH,
            handlers.schedule,
            plain=plain_request,
        ),
        "ScheduleStream": by_stream(
            STAGES,
            MASTER_EACH,
            lambda node, batches, caller, context: node.schedule_streams.serve(batches, caller, context),
            plain=plain_batch,
        ),
        "ScheduleMany": by_loop(STAGES, MASTER_EACH, handlers.schedule_many),
        "Cancel": by_core(CANCELS, MASTER, handlers.cancel),
        "CancelMany": by_core(CANCELS, MASTER_EACH, handlers.cancel_many),
        "Reschedule": by_core(CANCELS, MASTER, handlers.reschedule),
        "RescheduleMany": by_core(CANCELS, MASTER_EACH, handlers.reschedule_many),
        "Get": by_core(READS, MASTER, handlers.get),
        "ListPending": by_core(PENDING, MASTER, lambda core, request, caller: core.parts.pending.page(request)),
        "CountPending": by_core(PENDING, MASTER, lambda core, request, caller: core.parts.pending.count(request)),
        "BeginSweep": by_core(
            Right(topic(RIGHT_CANCEL, lambda request: request.selection.topic), audited=True),
            MASTER,
            lambda core, request, caller: core.parts.sweeper.begin_sweep(request),
        ),
        "GetSweep": by_core(
            Right(sweeping), MASTER, lambda core, request, caller: core.parts.sweeper.get(request.job_id)
        ),
        "ListSweeps": by_core(CANCELS, MASTER, handlers.list_sweeps),
        "StopSweep": by_core(
            Right(sweeping, audited=True), MASTER, lambda core, request, caller: core.parts.sweeper.stop(request.job_id)
        ),
    },
    "tickwheel.v1.Schedules": {
        "Put": by_core(
            Right(topic(RIGHT_SCHEDULE, lambda request: request.definition.topic or "(none)"), audited=True),
            MASTER,
            lambda core, request, caller: core.parts.schedules.put(
                request, caller.actor, permitted(caller, RIGHT_SCHEDULE)
            ),
        ),
        "Get": of_schedules(READS, RIGHT_READ, lambda schedules: schedules.get),
        "List": of_schedules(READS, RIGHT_READ, lambda schedules: schedules.page),
        "Pause": of_schedules(CHANGES_RUNS, RIGHT_SCHEDULE, lambda schedules: schedules.pause),
        "Resume": of_schedules(CHANGES_RUNS, RIGHT_SCHEDULE, lambda schedules: schedules.resume),
        "Trigger": of_schedules(CHANGES_RUNS, RIGHT_SCHEDULE, lambda schedules: schedules.trigger),
        "Backfill": of_schedules(CHANGES_RUNS, RIGHT_SCHEDULE, lambda schedules: schedules.backfill),
        "Delete": of_schedules(CHANGES_RUNS, RIGHT_SCHEDULE, lambda schedules: schedules.delete),
        "Preview": by_core(KNOWN, MASTER, lambda core, request, caller: core.parts.schedules.preview(request)),
    },
    "tickwheel.v1.Consumer": {
        "Consume": by_stream(
            Right(somewhere(RIGHT_CONSUME)),
            MASTER_EACH,
            lambda node, requests, caller, context: node.consumers.serve(requests, caller, context),
        ),
        "Pull": by_loop(Right(consuming), MASTER, handlers.pull),
        "Settle": by_loop(Right(settling), MASTER_EACH, handlers.settle),
        "Extend": by_core(Right(settling), MASTER_EACH, handlers.extend),
    },
    "tickwheel.v1.Admin": {
        "GetStatus": shown(KNOWN, lambda node, request, caller: node.status.status()),
        "AwaitMaster": by_loop(KNOWN, ANY_NODE, lambda node, request, caller: node.status.await_master(request)),
        "WatchStatus": by_stream(
            KNOWN, ANY_NODE, lambda node, request, caller, context: node.status.serve(request, context)
        ),
        "GetServerInfo": shown(READS, lambda node, request, caller: handlers.server_info(node, SERVICES)),
        "TransferMaster": by_core(CHANGES, MASTER, handlers.transfer_master),
        "AddMember": by_core(CHANGES, MASTER, handlers.add_member),
        "RemoveMember": by_core(
            CHANGES,
            MASTER,
            lambda core, request, caller: handlers.change_members(core, AdminCommand(remove_member=request), caller),
        ),
        "CreateTopic": changing_topic("create_topic"),
        "DeleteTopic": by_core(ONE_TOPIC, MASTER, handlers.delete_topic),
        "ListTopics": by_loop(KNOWN, ANY_NODE, handlers.list_topics),
        "CreateGroup": changing_group("create_group", Right(creating_group, Permission.ADMIN, audited=True)),
        "UpdateGroup": changing_group("update_group"),
        "DeleteGroup": by_core(ONE_GROUP, MASTER, handlers.delete_group),
        "SetGroupFilter": changing_group("set_group_filter"),
        "SetTopicPaused": changing_topic("set_topic_paused"),
        "SetGroupPaused": changing_group("set_group_paused"),
        "ResetGroup": changing_group("reset_group"),
        "ListGroups": by_loop(KNOWN, ANY_NODE, handlers.list_groups),
        "GetSettings": shown(KNOWN, lambda node, request, caller: node.core.state.settings.message()),
        "UpdateSettings": by_core(CHANGES, MASTER, handlers.update_settings),
        "GetDiskUse": by_core(
            Right(cluster), ANY_NODE, lambda core, request, caller: disk_use(core, core.parts.disk_room, request)
        ),
        "Backup": by_stream(
            CHANGES, ANY_NODE, lambda node, request, caller, context: node.backups.serve(request, context)
        ),
        "Trace": by_core(READS, ANY_NODE, handlers.trace),
        "GetDigest": by_core(LOOKS, ANY_NODE, lambda core, request, caller: core.parts.digests.get()),
    },
    "tickwheel.v1.Staging": {
        "Stage": by_core(
            Right(topic(RIGHT_SCHEDULE, lambda request: request.columns.topic or "(none)")), MASTER, handlers.stage
        ),
        "Commit": by_core(
            STAGES, MASTER, lambda core, request, caller: core.parts.staging.commit(request, caller.actor)
        ),
        "Abort": by_core(STAGES, MASTER, lambda core, request, caller: core.parts.staging.abort(request, caller.actor)),
        "GetStagedJob": by_core(
            STAGES, MASTER, lambda core, request, caller: core.parts.staging.job(request, caller.actor)
        ),
    },
    "tickwheel.v1.Bulk": {
        "OfferBundle": shown(
            LOOKS, lambda node, request, caller: node.core.parts.bulk.offer(request.name, request.bytes)
        ),
        "SendBundle": by_stream(
            LOOKS, ANY_NODE, lambda node, pieces, caller, context: handlers.send_bundle(node, pieces)
        ),
        "TakeOver": by_core(CHANGES, MASTER, lambda core, request, caller: core.parts.bulk.take_over(request)),
        "GetLoad": shown(LOOKS, lambda node, request, caller: node.core.parts.bulk.load(request.job_id)),
    },
    "tickwheel.v1.Cold": {
        "RegisterCold": by_core(CHANGES, MASTER, lambda core, request, caller: core.parts.cold.register(request)),
        "ListColdParts": by_core(LOOKS, MASTER, lambda core, request, caller: core.parts.cold.parts(request)),
        "ListColdMoved": by_core(LOOKS, MASTER, lambda core, request, caller: core.parts.cold.moved(request)),
    },
    "tickwheel.v1.DeadLetters": {
        "ListDead": by_core(DEAD, MASTER, lambda core, request, caller: core.parts.dead.list(request)),
        "GetDead": by_core(DEAD, MASTER, lambda core, request, caller: core.parts.dead.get(request)),
        "ReplayDead": by_core(CHANGES_DEAD, MASTER, lambda core, request, caller: core.parts.dead.replay(request)),
        "PurgeDead": by_core(CHANGES_DEAD, MASTER, lambda core, request, caller: core.parts.dead.purge(request)),
    },
    "tickwheel.v1.Snapshot": {
        "Pin": by_loop(Right(pinning), ANY_NODE, handlers.pin),
        "ReadPinned": by_loop(READS, ANY_NODE, handlers.read_pinned),
        "Unpin": by_loop(READS, ANY_NODE, handlers.unpin),
        "AgreePin": by_core(READS, MASTER, lambda core, request, caller: core.parts.pins.agree(request)),
        "PinSettled": by_loop(Right(reading_settled), ANY_NODE, handlers.pin_settled),
        "ReadSettled": by_loop(READS, ANY_NODE, handlers.read_settled),
    },
    "tickwheel.v1.Access": {
        "WhoAmI": shown(KNOWN, lambda node, request, caller: caller.message()),
        "SetUser": by_core(CHANGES, MASTER, handlers.set_user),
        "DeleteUser": by_core(CHANGES, MASTER, handlers.delete_user),
        "ListUsers": by_loop(LOOKS, ANY_NODE, handlers.list_users),
        "CreateToken": by_loop(CHANGES, MASTER, handlers.create_token),
        "RevokeToken": by_core(CHANGES, MASTER, handlers.revoke_token),
        "SetRole": by_core(CHANGES, MASTER, handlers.set_role),
        "DeleteRole": by_core(CHANGES, MASTER, handlers.delete_role),
        "ListRoles": by_loop(LOOKS, ANY_NODE, handlers.list_roles),
        "ListAudit": by_loop(LOOKS, ANY_NODE, handlers.list_audit),
    },
}
"""By full name of the service, in the order in which methods are looked up, and name of the method."""
