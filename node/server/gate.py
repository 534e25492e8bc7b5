"""The gate: checks the right of every call on the client port, by the table in endpoints.py, before its service runs.

Owns the check of rights, the notes in the audit log, and the number of calls that a user holds open. A service gets the
caller from `caller()`. It checks rights itself only where the gate cannot know the name: for batches of a stream, and
for topics of messages named by id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from tickwheel.node.core.failure import Failure, limit_reached
from tickwheel.node.server.audit import REQUEST_LENGTH_MAX, AuditLog
from tickwheel.node.server.callers import Caller, Callers
from tickwheel.node.server.endpoints import ENDPOINTS, Endpoint
from tickwheel.node.server.errors import abort
from tickwheel.node.state.view import StateView

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Generator = Callable[[Any, Context], AsyncIterator[Any]]

SHOWN_BYTES_MAX = 64 << 10
"""For a larger request the audit log shows only the size."""

_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """The caller of the call being served; only valid within a handler behind the gate."""
    return _CALLER.get()


class Gate:
    def __init__(
        self,
        callers: Callers,
        state: Callable[[], StateView],
        audit: AuditLog,
        connect: Callable[[str, str, int], Failure | None],
    ) -> None:
        """`connect(user, caller, connections_max)`: the refusal if the user's quota allows no further connection."""
        self._callers = callers
        self._state = state
        self._audit = audit
        self._connect = connect
        self._open: Counter[str] = Counter()
        """Number of open streams, by user."""

    def guarded(self, method: str, behave: Any, *, generator: bool, streams: bool) -> Any:
        """Wrap the handler of a method with the gate. `streams`: requests or answers are a stream.

        Raises KeyError for a method that is missing in the table of endpoints: it must not be served.
        """
        endpoint = ENDPOINTS[method]
        if endpoint.check is None:
            return behave
        if generator:
            return self._generator(method, endpoint, behave)
        return self._stream(method, endpoint, behave) if streams else self._unary(method, endpoint, behave)

    def _unary(self, method: str, endpoint: Endpoint, behave: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            caller = await self._admit(method, endpoint, request, context)
            if not endpoint.audited:
                return await behave(request, context)
            return await self._audited(method, caller, behave, request, context)

        return guarded

    def _stream(self, method: str, endpoint: Endpoint, behave: Behaviour) -> Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            message = request if isinstance(request, Message) else None
            caller = await self._admit(method, endpoint, message, context)
            name = await self._take_place(caller, context)
            try:
                if not endpoint.audited:
                    return await behave(request, context)
                return await self._audited(method, caller, behave, request, context)
            finally:
                self._give_back(name)

        return guarded

    def _generator(self, method: str, endpoint: Endpoint, behave: Generator) -> Generator:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            message = request if isinstance(request, Message) else None
            caller = await self._admit(method, endpoint, message, context)
            name = await self._take_place(caller, context)
            try:
                async for response in behave(request, context):
                    yield response
            finally:
                self._give_back(name)

        return guarded

    async def _take_place(self, caller: Caller, context: Context) -> str:
        """Count one more open stream of the user, or refuse the call. Returns the user; empty: not counted."""
        name = caller.actor
        limit = caller.quotas.streams_max if name else 0
        if limit and self._open[name] >= limit:
            await abort(context, limit_reached("quotas.streams_max", limit, 1_000))
        if name:
            self._open[name] += 1
        return name

    def _give_back(self, name: str) -> None:
        if name:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    async def _admit(self, method: str, endpoint: Endpoint, request: Message | None, context: Context) -> Caller:
        found = self._callers.of(context, endpoint.needed)
        if isinstance(found, Failure):
            await self._refuse(method, "", "none", request, context, found)
            raise AssertionError("an aborted call does not return")
        if not found.free:
            assert endpoint.check is not None
            refusal = endpoint.check(found, request, self._state())
            if refusal is not None:
                await self._refuse(method, found.name, found.by, request, context, refusal)
            connections_max = found.quotas.connections_max
            full = self._connect(found.name, context.peer(), connections_max) if connections_max else None
            if full is not None:
                await abort(context, full)
        _CALLER.set(found)
        return found

    async def _refuse(
        self, method: str, name: str, by: str, request: Message | None, context: Context, failure: Failure
    ) -> None:
        if self._callers.enforced:
            # Other requests may hold payloads, which must not appear in a log.
            shown = _shown(request) if ENDPOINTS[method].audited else ""
            self._audit.refused(name, by, context.peer(), _short(method), shown, f"refused: {failure.message}")
        await abort(context, failure)

    async def _audited(self, method: str, caller: Caller, behave: Behaviour, request: Any, context: Context) -> Any:
        result = "the caller was gone before the answer"
        try:
            answer = await behave(request, context)
            result = "OK"
            return answer
        except Exception:
            code = context.code()
            name = code.name if isinstance(code, grpc.StatusCode) else str(code)
            result = f"{name}: {context.details()}"
            raise
        finally:
            shown = _shown(request if isinstance(request, Message) else None)
            await self._audit.changed(caller.name, caller.by, context.peer(), _short(method), shown, result)


def _short(method: str) -> str:
    """`/tickwheel.v1.Admin/DeleteTopic` as `Admin/DeleteTopic`."""
    return method.rpartition(".")[2]


def _shown(request: Message | None) -> str:
    if request is None:
        return ""
    size = request.ByteSize()
    if size > SHOWN_BYTES_MAX:
        return f"{size} bytes"
    return MessageToJson(request, indent=None, preserving_proto_field_name=True)[:REQUEST_LENGTH_MAX]
