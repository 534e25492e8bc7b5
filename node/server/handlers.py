"""Handlers that take more than one expression; the table of endpoints holds the others.

The first argument tells who runs a handler. `core`: the core, as a coroutine of its own that awaits promises only.
`node`: the loop of the server; these list page by page, read files, or know things that the core does not know.
A refusal is raised as RequestError. The table has asked for the caller's right; a handler asks again only for what the
request does not name.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from tickwheel.node.config.fields import parse_address
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.delivery.consumers import PullCaller
from tickwheel.node.core.kernel import told_by_master
from tickwheel.node.core.message_ids import fill_message_id, id_of, id_text, message_id_of
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, FIELD_BYTES, fitting
from tickwheel.node.core.promise import Promise, Reply, answer_of
from tickwheel.node.core.schedule.deleting import finished
from tickwheel.node.core.schedule.intake import (
    KIND_DELAY,
    KIND_DUE,
    KIND_LEVEL,
    IncomingBatch,
    Row,
    check_sender,
    from_batch,
    from_message,
    row_of,
)
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.core.watch.listings import groups_after, members_of, topics_after
from tickwheel.node.core.watch.status import VERSION
from tickwheel.node.failure import Failure, Permitted, RequestError, invalid, refuse, refused
from tickwheel.node.server.audit import AuditLog
from tickwheel.node.server.backup import Backups
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls, owner_of
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.server.errors import serialized_status
from tickwheel.node.server.plain import request_of
from tickwheel.node.server.schedule_stream import (
    ScheduleStreams,
    may_replace,
    may_schedule,
    read_batch,
    receipt_of,
    state_caller,
)
from tickwheel.node.server.status_stream import StatusStreams
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.rights import LIFETIME_MS_MAX, shown
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    common_pb2,
    consumer_pb2,
    scheduler_pb2,
    snapshot_pb2,
    staging_pb2,
)
from tickwheel.proto.access_pb2 import RIGHT_CANCEL, RIGHT_READ, Right
from tickwheel.proto.common_pb2 import KEY_FREE, KEY_REFUSED
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage.disk import DiskError

M = TypeVar("M", bound=Message)
P = TypeVar("P", snapshot_pb2.PinResponse, snapshot_pb2.PinSettledResponse)

OWNERS_MAX = 10_000
"""Pins whose owners are kept; more than can be open at a time."""
SECRET_PREFIX = "tw_"
"""Prefix of each secret, so that scanners for leaked secrets can recognize it."""
SECRET_BYTES = 32
AUDIT_LIMIT_DEFAULT, AUDIT_LIMIT_MAX = 100, 1_000
ROWS_MAX = 500
"""Messages in one call of CancelMany or RescheduleMany: some milliseconds of work, and all refusals fit an answer."""
LIST_TURN_S = 0.005
"""A listing yields to heartbeats and deliveries after this long."""
WHEN_KINDS = {"due_ms": KIND_DUE, "delay_ms": KIND_DELAY, "delay_level": KIND_LEVEL}


class PinOwners:
    """The user of each pin. A pin holds what its owner may read, and its number can be guessed."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def take(self, pin_id: int, caller: Caller) -> None:
        """Note that the caller made this pin."""
        self._names[pin_id] = caller.name
        if len(self._names) > OWNERS_MAX:
            self._names.popitem(last=False)

    def check(self, pin_id: int, caller: Caller) -> None:
        """Raise RequestError with RIGHT_REQUIRED if the caller may not read a pin."""
        refusal = None if self._names.get(pin_id) == caller.name else caller.everything(RIGHT_READ)
        if refusal is not None:
            raise RequestError(refusal)


@dataclass(slots=True, eq=False)
class Node:
    """The objects that handlers of the server's loop use."""

    calls: Calls
    audit: AuditLog
    schedule_streams: ScheduleStreams
    consumers: ConsumerStreams
    status: StatusStreams
    backups: Backups
    tls: bool
    """Whether the client port speaks TLS."""
    pins: PinOwners = field(default_factory=PinOwners)

    @property
    def core(self) -> NodeCore:
        """The current core. Raises RequestError: it serves no more."""
        core = self.calls.core
        refuse(core.serving.closed)
        return core


def permitted(caller: Caller, right: Right.ValueType, named: str = "") -> Permitted:
    """The check of the caller's right to a message or schedule, by its topic. `named`: the topic, if the request names
    it; a refusal says no other."""
    check = caller.topic if named else caller.topic_of_named
    return lambda topic: check(right, topic)


async def page(found: Iterable[M], wanted: Callable[[M], bool] = lambda one: True) -> tuple[list[M], bool]:
    """(the wanted items that fit one answer, but at least one; whether further wanted items follow). Blocks the loop
    for LIST_TURN_S at a time."""
    loop = asyncio.get_running_loop()
    gathered: list[M] = []
    left = ANSWER_BYTES_MAX
    until = loop.time() + LIST_TURN_S
    for one in found:
        if wanted(one):
            left -= one.ByteSize() + FIELD_BYTES
            if gathered and left < 0:
                return gathered, True
            gathered.append(one)
        if loop.time() >= until:
            await asyncio.sleep(0)
            until = loop.time() + LIST_TURN_S
    return gathered, False


# -- messages


def schedule(
    node: Node,
    request: scheduler_pb2.ScheduleRequest | Row,
    caller: Caller,
    reply: Reply[scheduler_pb2.ScheduleReceipt | bytes],
) -> None:
    """A function with callbacks: this is called for each message."""
    core = node.core
    wheel_group = core.identity.wheel_group

    def placed(number: int, due_ms: int, level: int, delay_ms: int, key_outcome: int = KEY_FREE) -> None:
        if not (level or key_outcome):
            reply.done(_plain_receipt(number, due_ms, wheel_group))
            return
        receipt = scheduler_pb2.ScheduleReceipt(due_ms=due_ms)
        fill_message_id(receipt.id, number, wheel_group)
        if level:
            receipt.delay_level, receipt.delay_ms = level, delay_ms
        if key_outcome:
            receipt.key_outcome = key_outcome  # type: ignore[assignment]
        reply.done(receipt)

    settings = core.state.settings
    if isinstance(request, Row) and len(request.payload) <= settings.payload_bytes_max:
        _schedule_row(node, request, placed, caller, reply.fail)
        return
    whole = request_of(request) if isinstance(request, Row) else request
    row = row_of(whole, settings)
    if row is not None:
        _schedule_row(node, row, placed, caller, reply.fail)
        return
    batch = read_batch(core, from_message, whole, caller)
    refuse(told_by_master(core, may_replace(batch, caller)))
    state_caller(batch, caller, whole.producer_owner)

    def done(outcome: BatchOutcome) -> None:
        key_outcome = KEY_FREE if outcome.keys is None else int(outcome.keys[0])
        if key_outcome == KEY_REFUSED:
            taken = _key_taken(batch, outcome, wheel_group)
            reply.fail(core.parts.senders.told(Sender(whole.producer_id, whole.sequence), taken))
            return
        level = delay_ms = 0
        if outcome.levels is not None:
            level, delay_ms = int(outcome.levels.levels[0]), int(outcome.levels.delays_ms[0])
        placed(int(outcome.ids[0]), int(outcome.due_ms[0]), level, delay_ms, key_outcome)

    placing = Reply(done, reply.fail)
    node.calls.serve_for_log(placing.fail, core.parts.publisher.schedule, batch, placing)


_receipt = scheduler_pb2.ScheduleReceipt()
_receipt_id = _receipt.id


def _plain_receipt(number: int, due_ms: int, wheel_group: int) -> bytes:
    """A receipt that has only id and due time, serialized: filled in the same message each time, which takes half as
    long as a new one."""
    _receipt.due_ms = due_ms
    fill_message_id(_receipt_id, number, wheel_group)
    return _receipt.SerializeToString()


def _schedule_row(
    node: Node, row: Row, placed: Callable[[int, int, int, int], None], caller: Caller, fail: Callable[[Failure], None]
) -> None:
    client, actor = caller.name or row.client_name, caller.actor
    whom = RowCaller(placed, fail, caller.connection)
    node.calls.serve_for_log(fail, node.calls.core.parts.publisher.schedule_row, row, client, actor, whom)


async def schedule_many(node: Node, request: scheduler_pb2.ScheduleBatch, caller: Caller) -> scheduler_pb2.BatchReceipt:
    core = node.core
    batch = read_batch(core, from_batch, request, caller)
    refuse(told_by_master(core, may_schedule(batch, caller)))
    state_caller(batch, caller, request.producer_owner)
    outcome: BatchOutcome = await node.calls.ask(lambda core, reply: core.parts.publisher.schedule(batch, reply))
    return receipt_of(batch, outcome)


def _key_taken(batch: IncomingBatch, outcome: BatchOutcome, wheel_group: int) -> Failure:
    """The refusal of a single message whose unique key another one holds."""
    assert batch.unique_keys is not None
    key, number = batch.unique_keys.first, int(outcome.ids[0])
    shown = id_text(number, wheel_group)
    facts = {"field": "meta.unique_key", "value": key, "id": shown, "due_ms": str(int(outcome.due_ms[0]))}
    text = f"message {shown} of topic {batch.topics[0]} holds the unique key {key}"
    return Failure(common_pb2.KEY_TAKEN, text, facts)


_OfOne = scheduler_pb2.CancelRequest | scheduler_pb2.RescheduleRequest | scheduler_pb2.GetRequest


def _by_key(request: _OfOne) -> bool:
    """Whether a request names its message by unique key. Raises RequestError: by id as well."""
    if request.HasField("id") and request.HasField("key"):
        raise invalid("key", request.key.unique_key, "only without id")
    return request.HasField("key")


async def cancel(core: NodeCore, request: scheduler_pb2.CancelRequest, caller: Caller) -> scheduler_pb2.CancelResponse:
    if _by_key(request):
        check_sender(request.producer_id, request.sequence, request.producer_owner)
        sender = Sender(request.producer_id, request.sequence, owner=owner_of(caller.name, request.producer_owner))
        done = await core.parts.by_key.cancel(request.key, permitted(caller, RIGHT_CANCEL, request.key.topic), sender)
        answer = scheduler_pb2.CancelResponse(outcome=done.outcome, remembered=done.remembered)
        if done.id:
            answer.id.CopyFrom(message_id_of(done.id, core.identity.wheel_group))
        return answer
    if request.producer_id or request.sequence or request.producer_owner:
        raise invalid("producer_id", request.producer_id, "unset with an id: a cancel by id may be repeated as it is")
    number = id_of(request.id, core.identity.wheel_group)
    outcome = await core.parts.requests.cancel(number, permitted(caller, RIGHT_CANCEL))
    return scheduler_pb2.CancelResponse(outcome=outcome)


async def reschedule(
    core: NodeCore, request: scheduler_pb2.RescheduleRequest, caller: Caller
) -> scheduler_pb2.RescheduleResponse:
    name = request.WhichOneof("when")
    if name is None:
        raise invalid("when", "absent", "due_ms, delay_ms or delay_level")
    check_sender(request.producer_id, request.sequence, request.producer_owner)
    owner = owner_of(caller.name, request.producer_owner)
    sender = Sender(request.producer_id, request.sequence, owner=owner)
    when, kind, may = getattr(request, name), WHEN_KINDS[name], permitted(caller, RIGHT_CANCEL, request.key.topic)
    if _by_key(request):
        result = await core.parts.by_key.reschedule(request.key, when, kind, may, sender)
    else:
        number = id_of(request.id, core.identity.wheel_group)
        result = await core.parts.requests.reschedule(number, when, kind, may, sender)
    response = scheduler_pb2.RescheduleResponse(
        outcome=result.outcome, due_ms=result.due_ms, remembered=result.remembered
    )
    if result.outcome == scheduler_pb2.RESCHEDULED:
        response.id.CopyFrom(message_id_of(result.new_id, core.identity.wheel_group))
    return response


def _check_rows(field: str, count: int) -> None:
    if not 1 <= count <= ROWS_MAX:
        raise invalid(field, count, f"1 to {ROWS_MAX}")


async def cancel_many(
    core: NodeCore, request: scheduler_pb2.CancelManyRequest, caller: Caller
) -> scheduler_pb2.CancelManyResponse:
    """Cancel each message by itself. Their commands wait together, so they share an entry of the log."""
    _check_rows("ids", len(request.ids))
    may = permitted(caller, RIGHT_CANCEL)

    async def one(message_id: common_pb2.MessageId) -> scheduler_pb2.CancelManyResponse.Result:
        try:
            outcome = await core.parts.requests.cancel(id_of(message_id, core.identity.wheel_group), may)
        except RequestError as error:
            return scheduler_pb2.CancelManyResponse.Result(error=serialized_status(error.failure))
        return scheduler_pb2.CancelManyResponse.Result(outcome=outcome)

    return scheduler_pb2.CancelManyResponse(results=await core.serving.each(map(one, request.ids)))


async def reschedule_many(
    core: NodeCore, request: scheduler_pb2.RescheduleManyRequest, caller: Caller
) -> scheduler_pb2.RescheduleManyResponse:
    """Move each message by itself. Their commands wait together, so they share an entry of the log."""
    _check_rows("requests", len(request.requests))

    async def one(row: scheduler_pb2.RescheduleRequest) -> scheduler_pb2.RescheduleManyResponse.Result:
        try:
            moved = await reschedule(core, row, caller)
        except RequestError as error:
            return scheduler_pb2.RescheduleManyResponse.Result(error=serialized_status(error.failure))
        return scheduler_pb2.RescheduleManyResponse.Result(response=moved)

    return scheduler_pb2.RescheduleManyResponse(results=await core.serving.each(map(one, request.requests)))


async def get(core: NodeCore, request: scheduler_pb2.GetRequest, caller: Caller) -> scheduler_pb2.GetResponse:
    may = permitted(caller, RIGHT_READ, request.key.topic)
    if _by_key(request):
        return await core.parts.by_key.get(request.key, request.content, may)
    return await core.parts.requests.get(id_of(request.id, core.identity.wheel_group), request.content, may)


async def list_sweeps(
    core: NodeCore, request: scheduler_pb2.ListSweepsRequest, caller: Caller
) -> scheduler_pb2.ListSweepsResponse:
    """The sweeps that the caller may see."""
    answer = await core.parts.sweeper.list()
    return scheduler_pb2.ListSweepsResponse(
        sweeps=[sweep for sweep in answer.sweeps if caller.topic(RIGHT_CANCEL, sweep.selection.topic) is None]
    )


async def stage(core: NodeCore, request: staging_pb2.StageRequest, caller: Caller) -> staging_pb2.StagedJob:
    batch = from_batch(scheduler_pb2.ScheduleBatch(columns=request.columns), core.state.settings)
    batch.client, batch.actor = caller.name, caller.actor
    refuse(told_by_master(core, may_replace(batch, caller)))
    return await core.parts.staging.stage(request, batch, caller.actor)


# -- looks


def server_info(node: Node, services: Iterable[str]) -> admin_pb2.ServerInfo:
    """Version, set-up and services of this node."""
    core = node.core
    return admin_pb2.ServerInfo(
        version=VERSION,
        uptime_s=(core.monotonic_ns() - core.started_ns) / 1e9,
        cluster_id=core.identity.cluster_id,
        node_id=core.identity.node_id,
        rights=core.state.settings.rights,
        tls=node.tls,
        delivery_order=core.config.delivery_order.value,
        services=services,
    )


async def list_topics(node: Node, request: admin_pb2.ListTopicsRequest, caller: Caller) -> admin_pb2.ListTopicsResponse:
    """The topics that the caller may see."""
    free, rights = caller.free, caller.rights
    found = topics_after(node.core, request.after_id)
    topics, more = await page(found, lambda topic: free or rights.sees_topic(topic.name))
    return admin_pb2.ListTopicsResponse(topics=topics, more=more)


async def list_groups(node: Node, request: admin_pb2.ListGroupsRequest, caller: Caller) -> admin_pb2.ListGroupsResponse:
    """The groups that the caller may see."""
    free, rights = caller.free, caller.rights
    found = groups_after(node.core, request.after_id)
    groups, more = await page(found, lambda group: free or rights.sees_group(group.name))
    return admin_pb2.ListGroupsResponse(groups=groups, more=more)


async def trace(core: NodeCore, request: admin_pb2.TraceRequest, caller: Caller) -> admin_pb2.TraceResponse:
    """The events of messages in topics that the caller may read. Messages whose topic no event names are left out."""
    answer = await core.parts.tracer.trace(request)
    if caller.free:
        return answer

    def key(event: admin_pb2.TraceEvent) -> tuple[int, int]:
        return event.id.hour, event.id.index

    allowed = {key(event) for event in answer.events if event.topic and caller.topic(RIGHT_READ, event.topic) is None}
    events = [event for event in answer.events if key(event) in allowed]
    del answer.events[:]
    answer.events.extend(events)
    return answer


# -- changes of the cluster


async def change(core: NodeCore, command: AdminCommand, caller: Caller) -> AdminResult:
    """Put a command into the log. Raises RequestError for a refusal, also one of apply."""
    command.actor = caller.actor
    return await core.parts.requests.admin(command)


async def change_named(
    core: NodeCore,
    command: AdminCommand,
    caller: Caller,
    kind: str,
    name: str,
    look: Callable[[NodeCore, str], M | None],
) -> M:
    """Change a topic or group (`kind`); returns it as it is now, unless another caller has just removed it."""
    await change(core, command, caller)
    found = look(core, name)
    if found is None:
        raise refused(common_pb2.UNKNOWN_NAME, f"{kind} {name} was removed", field="name", value=name)
    return found


async def add_member(core: NodeCore, request: admin_pb2.AddMemberRequest, caller: Caller) -> admin_pb2.MemberList:
    """Add a member at addresses that peers and clients can dial: they have nothing else of it."""
    for name in ("peer_address", "client_address"):
        address = getattr(request.member, name)
        try:
            parse_address(address)
        except ValueError:
            raise invalid(f"member.{name}", address, "host:port or [ipv6]:port, a port from 1 to 65535") from None
    return await change_members(core, AdminCommand(add_member=request.member), caller)


async def change_members(core: NodeCore, command: AdminCommand, caller: Caller) -> admin_pb2.MemberList:
    """Add or remove a member; returns all."""
    await change(core, command, caller)
    return members_of(core)


async def update_settings(core: NodeCore, request: admin_pb2.Settings, caller: Caller) -> admin_pb2.Settings:
    await change(core, AdminCommand(settings=request), caller)
    return core.state.settings.message()


async def transfer_master(
    core: NodeCore, request: admin_pb2.TransferMasterRequest, caller: Caller
) -> admin_pb2.TransferMasterResponse:
    """Hand over by plan; returns once another node leads."""
    began_ns = core.monotonic_ns()
    await core.parts.mastership.transfer(request.target_id or None)
    status = core.log.status()
    pause_ms = (core.monotonic_ns() - began_ns) // 1_000_000
    return admin_pb2.TransferMasterResponse(master_id=status.master_id or "", term=status.term, pause_ms=pause_ms)


async def delete_topic(
    core: NodeCore, request: admin_pb2.DeleteTopicRequest, caller: Caller
) -> admin_pb2.DeleteTopicResponse:
    return admin_pb2.DeleteTopicResponse(**_deleted(await core.parts.deleter.topic(request)))


def _deleted(job: scheduler_pb2.Sweep) -> dict[str, Any]:
    """What a deletion has done so far, as fields of its answer."""
    counts = {"cancelled": job.done, "undelivered": job.undelivered, "dead": job.dead}
    return {"job_id": job.job_id, "finished": finished(job), **counts}


async def delete_group(
    core: NodeCore, request: admin_pb2.DeleteGroupRequest, caller: Caller
) -> admin_pb2.DeleteGroupResponse:
    return admin_pb2.DeleteGroupResponse(**_deleted(await core.parts.deleter.group(request)))


async def pull(node: Node, request: consumer_pb2.PullRequest, caller: Caller) -> consumer_pb2.DeliverBatch:
    """Pull a batch. A caller that goes away meanwhile takes no message along, unless the answer is under way: what it
    holds comes again when its lease ends."""
    waits = PullCaller()
    try:
        return await node.calls.answer(lambda core: core.parts.consumers.pull(request, caller.actor, waits))
    except asyncio.CancelledError:
        node.calls.serve(lambda failure: None, waits.leave)
        node.calls.wake()
        raise


async def settle(node: Node, request: consumer_pb2.SettleBatch, caller: Caller) -> consumer_pb2.SettleReceipt:
    return await node.calls.ask(lambda core, reply: core.parts.consumers.settle(request, reply))


async def extend(core: NodeCore, request: consumer_pb2.ExtendBatch, caller: Caller) -> consumer_pb2.ExtendReceipt:
    return core.parts.consumers.extend(request)


# -- bulk load


async def send_bundle(node: Node, pieces: AsyncIterator[bulk_pb2.BundleData]) -> bulk_pb2.BundleState:
    """Take the pieces of one bundle."""
    state: bulk_pb2.BundleState | None = None
    async for piece in pieces:
        if state is not None and piece.name != state.name:
            raise invalid("name", piece.name, f"{state.name}, as before in this stream")
        state = await node.calls.answer(partial(_take_piece, piece))
        if state.held or state.bytes != piece.offset + len(piece.data):
            break
    if state is None:
        raise invalid("pieces", 0, "one or more")
    return state


async def _take_piece(piece: bulk_pb2.BundleData, core: NodeCore) -> bulk_pb2.BundleState:
    size = piece.total_bytes
    return await answer_of(
        lambda reply: core.parts.bulk.take(piece.name, size, piece.offset, piece.data, piece.crc32c, reply)
    )


# -- pins


async def pin(node: Node, request: snapshot_pb2.PinRequest, caller: Caller) -> snapshot_pb2.PinResponse:
    return await _pinned(node, request.pin_id, caller, lambda core: core.parts.pins.pin(request))


async def _pinned(
    node: Node, pin_id: int, caller: Caller, make: Callable[[NodeCore], Coroutine[Promise[Any], None, P]]
) -> P:
    """The answer about a pin. `pin_id`: of one that is there, which its owner asks about again; 0: a new one."""
    if pin_id:
        node.pins.check(pin_id, caller)
    pinned = await node.calls.answer(make)
    if not pin_id:
        node.pins.take(pinned.pin_id, caller)
    return pinned


async def read_pinned(node: Node, request: snapshot_pb2.ReadPinnedRequest, caller: Caller) -> snapshot_pb2.PinnedPage:
    node.pins.check(request.pin_id, caller)
    return await node.calls.answer(lambda core: core.parts.pins.read(request))


async def unpin(node: Node, request: snapshot_pb2.UnpinRequest, caller: Caller) -> snapshot_pb2.UnpinResponse:
    node.pins.check(request.pin_id, caller)
    for pins in (node.core.parts.pins, node.core.parts.settled_pins):
        pins.unpin(request.pin_id)
    return snapshot_pb2.UnpinResponse()


async def pin_settled(
    node: Node, request: snapshot_pb2.PinSettledRequest, caller: Caller
) -> snapshot_pb2.PinSettledResponse:
    return await _pinned(node, request.pin_id, caller, lambda core: core.parts.settled_pins.pin(request))


async def read_settled(
    node: Node, request: snapshot_pb2.ReadSettledRequest, caller: Caller
) -> snapshot_pb2.SettledPage:
    node.pins.check(request.pin_id, caller)
    return await node.calls.answer(lambda core: core.parts.settled_pins.read(request))


# -- users


async def change_access(core: NodeCore, command: access_pb2.AccessCommand, caller: Caller) -> AdminResult:
    """Put a command about users into the log."""
    return await change(core, AdminCommand(access=command), caller)


async def _changed_user(core: NodeCore, command: access_pb2.AccessCommand, caller: Caller) -> access_pb2.User:
    """As `change_access`; returns the user as it is now."""
    result = await change_access(core, command, caller)
    assert result.user is not None
    return result.user


async def set_user(core: NodeCore, request: access_pb2.SetUserRequest, caller: Caller) -> access_pb2.User:
    wanted = access_pb2.StoredUser(name=request.name, roles=request.roles, quotas=request.quotas)
    return await _changed_user(core, access_pb2.AccessCommand(set_user=wanted), caller)


async def delete_user(
    core: NodeCore, request: access_pb2.DeleteUserRequest, caller: Caller
) -> access_pb2.DeleteUserResponse:
    await change_access(core, access_pb2.AccessCommand(delete_user=request.name), caller)
    return access_pb2.DeleteUserResponse()


async def list_users(node: Node, request: access_pb2.ListUsersRequest, caller: Caller) -> access_pb2.ListUsersResponse:
    stored = node.core.state.access.users()
    users, more = await page(shown(user) for user in stored if user.name > request.after)
    return access_pb2.ListUsersResponse(users=users, more=more)


async def create_token(
    node: Node, request: access_pb2.CreateTokenRequest, caller: Caller
) -> access_pb2.CreateTokenResponse:
    if not 0 <= request.lifetime_ms <= LIFETIME_MS_MAX:
        raise invalid("lifetime_ms", request.lifetime_ms, f"0 to {LIFETIME_MS_MAX}")
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    sha256 = hashlib.sha256(secret.encode()).digest()
    expires_ms = node.core.clock.now_ms() + request.lifetime_ms if request.lifetime_ms else 0
    stored = access_pb2.StoredToken(token=access_pb2.Token(label=request.label, expires_ms=expires_ms), sha256=sha256)
    command = access_pb2.AddToken(user=request.user, token=stored)
    added = access_pb2.AccessCommand(add_token=command)
    user = await node.calls.answer(lambda core: _changed_user(core, added, caller))
    return access_pb2.CreateTokenResponse(token=user.tokens[-1], secret=secret)


async def revoke_token(core: NodeCore, request: access_pb2.RevokeTokenRequest, caller: Caller) -> access_pb2.User:
    command = access_pb2.RevokeToken(user=request.user, token_id=request.token_id)
    return await _changed_user(core, access_pb2.AccessCommand(revoke_token=command), caller)


async def set_role(core: NodeCore, request: access_pb2.SetRoleRequest, caller: Caller) -> access_pb2.AccessRole:
    result = await change_access(core, access_pb2.AccessCommand(set_role=request.role), caller)
    assert result.role is not None
    return result.role


async def delete_role(
    core: NodeCore, request: access_pb2.DeleteRoleRequest, caller: Caller
) -> access_pb2.DeleteRoleResponse:
    await change_access(core, access_pb2.AccessCommand(delete_role=request.name), caller)
    return access_pb2.DeleteRoleResponse()


async def list_roles(node: Node, request: access_pb2.ListRolesRequest, caller: Caller) -> access_pb2.ListRolesResponse:
    """The built-in role comes first, whatever its name is."""
    found = node.core.state.access.roles()
    names = [role.name for role in found]
    behind = names.index(request.after) + 1 if request.after in names else 0
    if request.after and not behind:
        behind = 1 + sum(name < request.after for name in names[1:])
    roles, more = await page(found[behind:])
    return access_pb2.ListRolesResponse(roles=roles, more=more)


async def list_audit(node: Node, request: access_pb2.ListAuditRequest, caller: Caller) -> access_pb2.ListAuditResponse:
    limit = request.limit or AUDIT_LIMIT_DEFAULT
    if limit > AUDIT_LIMIT_MAX:
        raise invalid("limit", limit, f"1 to {AUDIT_LIMIT_MAX}")
    try:
        records = await node.audit.newest(limit, request.before_ms)
    except DiskError as error:
        raise refused(common_pb2.WRONG_STATE, f"the audit log cannot be read: {error}") from error
    told = fitting(records, access_pb2.AuditRecord.ByteSize, ANSWER_BYTES_MAX)
    return access_pb2.ListAuditResponse(records=told, full=len(told) < len(records))
