"""The gate: establishes who calls, and checks the right that the table of endpoints asks for.

Owns the check of rights, the notes in the audit log, and the number of streams that a user holds open. A handler checks
rights itself only where the gate cannot know the name: for batches of a stream, and for topics of messages named by id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from tickwheel.node.failure import Failure, RequestError, limit_reached, refuse
from tickwheel.node.server.audit import REQUEST_LENGTH_MAX, AuditLog
from tickwheel.node.server.callers import Caller, Callers
from tickwheel.node.server.door import Requests
from tickwheel.node.server.endpoints import Right
from tickwheel.node.state.view import StateView
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.server import AbortedError
from tickwheel.transport.server import ServerStream as Context

SHOWN_BYTES_MAX = 8 << 10
"""For a larger request the audit log shows only the size."""


class Gate:
    def __init__(
        self,
        callers: Callers,
        state: Callable[[], StateView],
        audit: AuditLog,
        connect: Callable[[str, str, int], Failure | None],
        outdated: Callable[[], Failure | None],
    ) -> None:
        """`connect(user, caller, connections_max)`: the refusal if the user's quota allows no further connection.
        `outdated`: why another node may know of changes that this one does not; None: this one surely leads."""
        self._callers = callers
        self._state = state
        self._audit = audit
        self._connect = connect
        self._outdated = outdated
        self._open: Counter[str] = Counter()
        """Number of open streams, by user."""

    def admit(self, method: str, right: Right, request: Any, context: Context, *, master: bool) -> Caller:
        """The caller. Raises RequestError if it is unknown, lacks the right, or has too many connections.

        `master`: the method is the master's. Then another node refuses for that alone: a right that was given a moment
        ago, or while this node was away, is not known here yet.
        """
        try:
            found = self._callers.of(context, right.needed)
        except RequestError as error:
            self._pass_on(master)
            raise self._refused(method, right, "", "none", request, context, error.failure) from None
        if not found.free:
            refusal = right.check(found, None if isinstance(request, Requests) else request, self._state())
            if refusal is not None:
                self._pass_on(master)
                raise self._refused(method, right, found.name, found.by, request, context, refusal)
            connections_max = found.quotas.connections_max
            full = self._connect(found.name, context.peer(), connections_max) if connections_max else None
            if full is not None:
                raise RequestError(full)
        return found

    def _pass_on(self, master: bool) -> None:
        if master and self._callers.enforced:
            refuse(self._outdated())

    def take_place(self, caller: Caller) -> str:
        """Count one more open stream of the caller's user, for `give_back`; empty: not counted. Raises RequestError if
        the user has too many."""
        name = caller.actor
        limit = caller.quotas.streams_max if name else 0
        if limit and self._open[name] >= limit:
            raise RequestError(limit_reached("quotas.streams_max", limit, 1_000))
        if name:
            self._open[name] += 1
        return name

    def give_back(self, name: str) -> None:
        """A stream that `take_place` counted has ended."""
        if name:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    def _refused(
        self, method: str, right: Right, name: str, by: str, request: Any, context: Context, failure: Failure
    ) -> RequestError:
        if self._callers.enforced:
            # Other requests may hold payloads, which must not appear in a log.
            noted = shown(request) if right.audited else ""
            self._audit.refused(name, by, context.peer(), _short(method), noted, f"refused: {failure.message}")
        return RequestError(failure)

    async def audited(self, method: str, caller: Caller, request: Any, context: Context, answer: Awaitable[Any]) -> Any:
        """Wait for the answer to a request, and note its result in the audit log."""
        result = "the caller was gone before the answer"
        try:
            response = await answer
            result = "OK"
            return response
        except RequestError as error:
            result = f"{error.failure.grpc_code_name}: {error.failure.message}"
            raise
        except (AbortedError, StreamOverError):
            raise
        except Exception:
            result = "INTERNAL: a mistake in the node"
            raise
        finally:
            await self._audit.changed(caller.name, caller.by, context.peer(), _short(method), shown(request), result)


def _short(method: str) -> str:
    """`/tickwheel.v1.Admin/DeleteTopic` as `Admin/DeleteTopic`."""
    return method.rpartition(".")[2]


def shown(request: Any) -> str:
    """A request as the audit log has it: JSON without the content of messages, cut after REQUEST_LENGTH_MAX."""
    if not isinstance(request, Message):
        return ""
    size = request.ByteSize()
    if size > SHOWN_BYTES_MAX:
        return f"{size} bytes"
    noted = type(request)()
    noted.CopyFrom(request)
    _leave_content_out(noted)
    return MessageToJson(noted, indent=None, preserving_proto_field_name=True)[:REQUEST_LENGTH_MAX]


def _leave_content_out(message: Message) -> None:
    """Clear what belongs to messages of users, as in the definition of a recurring schedule: payload and meta."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_BYTES or field.message_type is MessageMeta.DESCRIPTOR:
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _leave_content_out(part)
