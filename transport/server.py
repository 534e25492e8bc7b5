"""A gRPC server on the event loop.

Takes the handlers that generated code makes, and calls them like grpc.aio: with the request and a context, as
coroutines or generators. Each such call has a task. A `DirectHandler` or `StreamHandler` needs none. There are no
threads: what a read brings is handled in that pass of the loop, or piece by piece in the next ones if all connections
together bring much (turns.py). All answers of a pass leave with one write for each connection.

Messages are not compressed. A call with a compressed message ends with UNIMPLEMENTED, as gRPC says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final, NoReturn

import grpc

from tickwheel.transport import wire
from tickwheel.transport.connection import (
    MESSAGES_PER_WORK,
    Block,
    Connection,
    ConnectionFault,
    Fields,
    MalformedError,
    Stream,
    StreamOverError,
)
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import (
    PREFIX_BYTES,
    MessageError,
    Messages,
    MetadataPairs,
    metadata_block,
    metadata_of,
    prefixed,
    status_block,
    timeout_s,
)
from tickwheel.transport.turns import REQUEST_BYTES_LEAST, Turns
from tickwheel.transport.wire import ErrorCode

LOOK_S = 0.25
"""Pause between two looks at deadlines, idle and silent connections. Callers keep their own deadlines."""
LATER_S = 1.0
"""Until the next look at a connection without a handshake, or a stream that may be empty for now: what ends that state
asks for no look."""
LATE_MAX = 500
"""Calls that one look ends; the next one follows at once if there may be more."""
SOON_S = 0.001
BACKLOG = 1_024
OPENED_UNREAD = 2
"""Times `streams_max` calls that a caller may open while it does not read. One that keeps to `streams_max` opens no
more: calls of which it has not read the answer are still open to it."""
REFUSED = 2
"""Calls above `calls_max` are refused once their request begins. Above this many times that, streams are refused."""
SMALL_BYTES = 16 << 10
"""A request of this size is taken even when the server holds as much as it may."""
WAITING_BYTES = 64
"""What a message that waits for its handler costs in memory beside its content."""
TURN_MESSAGES = 64
"""Messages that a handler takes before everybody else gets a turn."""
TAKEN_BYTES = 64 << 10
"""Of small messages that a handler takes at once."""
LONG_S = 0.005
"""After a request took this long to decode, everybody else gets a turn before its handler."""
BEGINNING_WORK = 6
"""Of a call that begins, in small frames' worth. A direct handler may take as long; more counts as it takes."""
WORK_PER_S = 100_000
"""Of a direct handler that takes longer."""
GRPC_TYPE = b"application/grpc"

_log = logging.getLogger(__name__)

_HEADERS_OK = wire.STATUS_200 + wire.field(b"content-type", GRPC_TYPE)
_OK = status_block(0)
_ANSWER = wire.Answer(_HEADERS_OK, _OK)
_NOTHING = Messages(0)
"""Of a call of which no message came, or nothing is read any more. Never filled."""
LENGTH_DIGITS_MAX = 19
"""Of a content-length: 64 bits."""
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED = frozenset({b":method", b":scheme", b":path"})
_FORBIDDEN = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_UPPER = frozenset(range(ord("A"), ord("Z") + 1))

Handler = Any  # grpc.RpcMethodHandler, which is generic in the stubs alone, DirectHandler or StreamHandler


@dataclass(frozen=True, slots=True)
class DirectHandler:
    """A handler of calls with one message each way, without a task: for methods that are called for each message.

    `begin` gets the bytes of the request in the pass of the loop that handles their last frame, or in a later one if it
    has to wait for its turn. It calls `answer` or
    `fail` of the call, at once or later; a call that is over by then takes either without effect."""

    begin: Callable[[bytes, ServerStream], None]
    request_streaming: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """What serves one stream of a `StreamHandler`."""

    take: Callable[[Any], object]
    """Gets the bytes of each message, in order."""
    ended: Callable[[], None]
    """Called once when the call is over, however it ends."""


@dataclass(frozen=True, slots=True)
class StreamHandler:
    """A handler of calls with streams both ways, without a task: for messages that come all the time.

    `open` is called with the first message. Messages are taken like the requests of a `DirectHandler`. The call ends
    with OK when the caller has ended its side and every message is taken, if `finish` or `fail` has not ended it."""

    open: Callable[[ServerStream], Opened]
    request_streaming: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status other than OK."""

    code: grpc.StatusCode
    text: str

    @property
    def number(self) -> int:
        return int(self.code.value[0])


@dataclass(frozen=True, slots=True)
class Head:
    """The field block that opens a stream, decoded. `http_status`: the answer if it is no gRPC call; 0: it is one."""

    path: str
    metadata: MetadataPairs
    timeout_s: float | None
    content_length: int | None
    encoding: bytes
    http_status: int
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class _CallDetails:
    """The argument of generic handlers."""

    method: str
    invocation_metadata: MetadataPairs


def _checked(fields: Fields, *, trailers: bool) -> dict[bytes, bytes]:
    """The pseudo-header fields of a block (RFC 9113, 8.2 and 8.3). Raises MalformedError."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if not name:
            raise MalformedError("a field without a name")
        if name[0] == 0x3A:
            if regular or trailers or name not in _PSEUDO or name in pseudo:
                raise MalformedError(f"{name!r} must not stand there")
            pseudo[name] = value
            continue
        regular = True
        if not _UPPER.isdisjoint(name) or name in _FORBIDDEN or (name == b"te" and value != b"trailers"):
            raise MalformedError(f"{name!r} is not allowed")
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise MalformedError(f"{name!r} has a line break")
    if not trailers and (not pseudo.keys() >= _NEEDED or not pseudo[b":path"]):
        raise MalformedError("a request needs :method, :scheme and :path")
    return pseudo


def head_of(fields: Fields) -> Head:
    """Raises MalformedError."""
    pseudo = _checked(fields, trailers=False)
    content_type = encoding = b""
    timeout: float | None = None
    length: int | None = None
    http_status, refusal = 0, None
    for name, value in fields:
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout = timeout_s(value)
            if timeout is None:
                refusal = Refusal(grpc.StatusCode.INTERNAL, f"grpc-timeout {value[:20]!r} is no time-out")
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"content-length":
            if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX or (length is not None and length != int(value)):
                raise MalformedError("content-length is no number")
            length = int(value)
    if pseudo[b":method"] != b"POST":
        http_status = 405
    elif not content_type.startswith(GRPC_TYPE):
        http_status = 415
    metadata: MetadataPairs = ()
    path = ""
    try:
        path = pseudo[b":path"].decode("ascii")
        metadata = metadata_of(fields)
    except ValueError as error:
        refusal = Refusal(grpc.StatusCode.INTERNAL, f"metadata cannot be read: {error}")
    return Head(path, metadata, timeout, length, encoding, http_status, refusal)


class AbortedError(Exception):
    """A handler ended its call with `abort`."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


async def handle(handler: Handler, call: Any, next_request: Callable[[], Awaitable[Any]]) -> None:
    """Call a handler as grpc.aio does, and write its answers. `call`: its context, and its requests if many come."""
    if handler.response_streaming:
        if handler.request_streaming:
            answers = handler.stream_stream(call, call)
        else:
            answers = handler.unary_stream(await next_request(), call)
        if inspect.isasyncgen(answers):
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    await call.write(answer)
        else:
            await answers
    elif handler.request_streaming:
        await call.write(await handler.stream_unary(call, call))
    else:
        await call.write(await handler.unary_unary(await next_request(), call))


class ServerStream(Stream):
    """One call, and the context that its handler gets."""

    __slots__ = (
        "_caller",
        "_decoded",
        "_gone",
        "_handler",
        "_held_bytes",
        "_initial",
        "_left",
        "_messages",
        "_refusal",
        "_started",
        "_take",
        "_taken",
        "_task",
        "_trailing",
        "_turn",
        "_waiter",
        "deadline_s",
        "ended",
        "head",
        "progress_s",
        "server",
    )

    def __init__(self, connection: ServerConnection, stream_id: int, head: Head) -> None:
        super().__init__(connection, stream_id)
        self._caller: Final = connection
        self.server: Final = connection.server
        self.head: Final = head
        self.deadline_s = None if head.timeout_s is None else connection.heard_s + head.timeout_s
        self.progress_s = connection.heard_s
        """When the stream opened, or a message became whole or was taken."""
        self._taken = 0
        """Messages taken without a pause."""
        self._left = head.content_length
        """Bytes still to come, if the request said so."""
        self._messages = _NOTHING
        self._held_bytes = 0
        """Bytes of the request in memory, as counted by the server."""
        self._handler: Handler = None
        self._refusal: Refusal | None = None
        self._take: Callable[[bytes], object] | None = None
        """Of a `StreamHandler`, once it has begun."""
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._turn: asyncio.Future[None] | None = None
        """Done when the reader may take the next message."""
        self._decoded: tuple[Any] | None = None
        """The message of a reader that waits for everybody else; the next reader's if that one is cancelled."""
        self.ended: Callable[[], None] | None = None
        """Called once when the call is over, however it ends."""
        self._gone: asyncio.Future[None] | None = None
        self._started = False
        """The response's header fields were sent."""
        self._initial: Sequence[tuple[str, str | bytes]] = ()
        self._trailing: Sequence[tuple[str, str | bytes]] = ()

    # -- what comes

    def begin(self) -> None:
        """The stream is open: find its handler. It is called, or the call refused, when the request begins: grpc's
        client in Python takes an answer that overtakes its first message for an internal error."""
        head, server = self.head, self.server
        refusal = head.refusal
        if head.http_status:
            return  # answered at the end of the request
        if refusal is None and head.encoding not in (b"", b"identity"):
            refusal = Refusal(grpc.StatusCode.UNIMPLEMENTED, f"compression {head.encoding.decode('ascii', 'replace')}")
            self._trailing = (("grpc-accept-encoding", "identity"),)
        if refusal is None and server.calls > self.connection.limits.calls_max:
            refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node serves as many calls as it may")
        if refusal is None:
            self._handler = server.find(head)
            if self._handler is None:
                refusal = Refusal(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {head.path[:200]}")
        self._refusal = refusal

    def take_fields(self, fields: Fields, *, end: bool) -> None:
        """Trailers of a request: allowed, and they mean nothing to gRPC."""
        if not end:
            raise MalformedError("trailers end a request")
        _checked(fields, trailers=True)

    def take_data(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= len(data)
        if self.head.http_status:
            return
        if self._refusal is not None:
            self.refuse(self._refusal)
            return
        if self._messages is _NOTHING:
            self._messages = Messages(self.connection.limits.message_bytes_max)
        waiting = len(self._messages.ready)
        try:
            size = self._messages.take(data)
        except MessageError as error:
            self._refuse_message(error)
            return
        if size or self._messages.partial_bytes <= len(data):  # the message began with this data
            self.progress_s = self.connection.heard_s
        self.unread_bytes += size
        self.connection.unread_bytes += size
        self.connection.work_left -= (len(self._messages.ready) - waiting) // MESSAGES_PER_WORK
        if not self.account():
            self.refuse(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node holds as many requests as it may"))
        elif size and self._waiter is not None:
            self._wake_reader()
        elif size and type(self._handler) is StreamHandler:
            self._take_ready()
        elif size and self._task is None and self._handler.request_streaming:
            self._run()
        elif self._task is None and len(self._messages.ready) > 1 and not self._handler.request_streaming:
            self._finish(grpc.StatusCode.INTERNAL.value[0], "more than one request message")

    def take_whole(self, data: bytes) -> bool:
        """A direct call of a small message that comes in one frame: nearly always. It begins without being held."""
        handler, caller, size = self._handler, self._caller, len(data) - PREFIX_BYTES
        turns = caller.turns
        if (
            type(handler) is not DirectHandler
            or self._messages is not _NOTHING
            or not 0 <= size <= min(SMALL_BYTES, caller.limits.message_bytes_max)
            or int.from_bytes(data[:PREFIX_BYTES], "big") != size
            or (self._left is not None and self._left != len(data))
            or turns.bytes_left <= 0
            or caller.beginning
        ):
            return False
        self.remote_ended = True
        turns.spend_bytes(size)
        self._begin_with(handler, data[PREFIX_BYTES:])
        return True

    def overdue_s(self, now_s: float) -> float:
        """From when on the caller has left a message, or its first one, unfinished for too long, as it stands now. A
        stream may begin empty, as a producer's does that has nothing to send yet, while the server has places for
        others."""
        limits = self.connection.limits
        if not self.unread_bytes:
            if self._messages.partial_bytes:
                return self.progress_s + limits.message_s
            if self._task is None and self._take is None and not self.remote_ended:
                patient = self._handler is not None and self._handler.request_streaming
                if not patient or self.server.calls > limits.calls_max // 2:
                    return self.progress_s + limits.message_s
                return now_s + LATER_S
        return now_s + limits.message_s

    def _refuse_message(self, error: MessageError) -> None:
        self.connection.count_reset()
        if error.compressed:
            self._trailing = (("grpc-accept-encoding", "identity"),)
            self.refuse(Refusal(grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not read"))
        else:
            text = f"a message of {error.size} bytes, {self.connection.limits.message_bytes_max} are allowed"
            self.refuse(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, text))

    def account(self) -> bool:
        """Count what this call holds in memory. False: the server holds too much, and this call is to blame."""
        messages = self._messages
        held = self.unread_bytes + messages.partial_bytes + WAITING_BYTES * len(messages.ready)
        server = self.server
        server.held_bytes += held - self._held_bytes
        grown, self._held_bytes = held > self._held_bytes, held
        return not grown or held <= SMALL_BYTES or server.held_bytes <= self.connection.limits.held_bytes_max

    def drop(self) -> None:
        """The call is over: nobody reads what is left of its request."""
        if self._messages is not _NOTHING:
            self._messages = _NOTHING
            self.connection.read(self, self.unread_bytes)
            self.account()
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def until_over(self) -> asyncio.Future[None]:
        """Done when the call is over."""
        if self._gone is None:
            self._gone = self.connection.loop.create_future()
            if self.over:
                self._gone.set_result(None)
        return self._gone

    def take_end(self) -> None:
        if self._left:
            raise MalformedError("content-length does not match")
        if self.head.http_status:
            self._task = self.connection.loop.create_task(self._serve(self._answer_http))
        elif self._refusal is not None:
            self.refuse(self._refusal)
        elif self._messages.partial_bytes:
            self.refuse(Refusal(grpc.StatusCode.INTERNAL, "the request ends within a message"))
        elif self._waiter is not None:
            self._wake_reader()
        elif type(self._handler) is StreamHandler:
            if not self._messages.ready:
                self._finish(0, "")
        elif self._task is None:
            if self._messages.ready and type(self._handler) is DirectHandler:
                self._begin(self._handler)
            elif self._messages.ready or self._handler.request_streaming:
                self._run()
            else:
                self._finish(grpc.StatusCode.INTERNAL.value[0], "there is no request message")

    def cut(self, code: ErrorCode | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def refuse(self, refusal: Refusal) -> None:
        """End the call from outside its handler."""
        if not self.over:
            self._finish(refusal.number, refusal.text)
            if self._task is not None:
                self._task.cancel()

    # -- the handler

    def _begin(self, handler: DirectHandler) -> None:
        if not self._caller.may_begin(self, len(self._messages.ready[0])):
            return  # until `take_turn`
        self._begin_with(handler, self._next_data())

    def _begin_with(self, handler: DirectHandler, data: bytes) -> None:
        began_s = perf_counter()
        self._begin_now(handler, data)
        work = int((perf_counter() - began_s) * WORK_PER_S)
        self._caller.work_left -= work if work > BEGINNING_WORK else BEGINNING_WORK

    def _begin_now(self, handler: DirectHandler, data: bytes) -> None:
        try:
            handler.begin(data, self)
        except Exception as error:
            self._broken(error)

    def _take_ready(self) -> None:
        """Hand the messages that are there to a `StreamHandler`, as long as it is the turn of this connection."""
        while self._messages.ready:
            if self._caller.work_left <= 0:
                self._caller.wait_to_begin(self)
                return
            if not self._caller.may_begin(self, len(self._messages.ready[0])):
                return
            began_s = perf_counter()
            self._take_next()
            self._caller.work_left -= int((perf_counter() - began_s) * WORK_PER_S)

    def _take_next(self) -> None:
        data = self._next_data()
        try:
            if self._take is None:
                opened = self._handler.open(self)
                self._take, self.ended = opened.take, opened.ended
                if self.over:  # ended by `open` itself
                    self.drop()
            if not self.over:
                self._take(data)
        except Exception as error:
            self._broken(error)
        if self.remote_ended and not self._messages.ready:
            self._finish(0, "")

    def _next_data(self) -> bytes:
        """Take the next message from those that are there."""
        data = self._messages.ready.popleft()
        self._took(len(data) + PREFIX_BYTES)
        return data

    def _took(self, size: int) -> None:
        """So many bytes of messages were taken from those that are there."""
        self.progress_s = self.connection.heard_s
        self.connection.read(self, size)
        self.account()

    def take_turn(self) -> bool:
        """A request that waits begins, or the next message may be taken. False: the reader does not wait any more."""
        size, turns = len(self._messages.ready[0]), self._caller.turns
        if type(self._handler) is DirectHandler:
            turns.spend_bytes(size)
            self._begin_now(self._handler, self._next_data())
            return True
        if type(self._handler) is StreamHandler:
            turns.spend_bytes(size)
            self._take_next()
            if self._messages.ready:
                self._caller.wait_to_begin(self)
            return True
        turn, self._turn = self._turn, None
        if turn is None or turn.done():
            return False
        turns.lend(size)
        turn.set_result(None)
        return True

    def answer(self, data: bytes) -> None:
        """The answer of a direct call: the bytes of its message, and OK."""
        if self.over:
            return
        connection, size = self.connection, len(data) + PREFIX_BYTES
        if size <= wire.FRAME_BYTES and size <= self.send_window and connection.can_send(size):
            self.send_window -= size
            connection.send_window -= size
            connection.put(_ANSWER.frames(self.stream_id, data))
            connection.forget(self, peer_knows=True)
        else:
            self._task = connection.loop.create_task(self._serve(partial(self._answer, data)))

    async def _answer(self, data: bytes) -> None:
        await self._write(data)
        self._finish(0, "")

    def post(self, data: bytes) -> bool:
        """Send the bytes of a message to the caller of a `StreamHandler`. False: the windows have no room for it, or
        the call is over; nothing was sent."""
        if not self._started and not self.over:
            self._start()
        return self.send_now(prefixed(data))

    def finish(self) -> None:
        """End a call of a `StreamHandler` with OK."""
        self._finish(0, "")

    def fail(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        """End a call without a task with another status than OK."""
        self._trailing = tuple(trailing_metadata)
        self._finish(int(code.value[0]), details)

    def _run(self) -> None:
        self._caller.work_left -= BEGINNING_WORK
        self._task = self.connection.loop.create_task(self._serve(self._handle))

    async def _serve(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            if not self.over:  # its server stops, or its handler cancelled itself
                self._finish(grpc.StatusCode.CANCELLED.value[0], "the call was cancelled")
        except AbortedError as aborted:
            self._finish(int(aborted.code.value[0]), aborted.details)
        except StreamOverError:
            pass  # the caller is gone; noted by whoever cut the stream
        except Exception as error:
            self._broken(error)
        finally:
            self._task = None

    def _broken(self, error: Exception) -> None:
        _log.error("a handler failed", exc_info=error, extra={"method": self.head.path})
        self._finish(grpc.StatusCode.UNKNOWN.value[0], f"unexpected {type(error).__name__}")

    async def _handle(self) -> None:
        await handle(self._handler, self, self._next)
        self._finish(0, "")

    def _wake_reader(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _next(self) -> Any:
        """The next request message; None at the end. Raises StreamOverError if the caller is gone. Who is cancelled
        here takes nothing."""
        if self._decoded is not None:
            (message,), self._decoded = self._decoded, None
            return message
        if self._taken >= TURN_MESSAGES:
            self._taken = 0
            await asyncio.sleep(0)
        while True:
            while not self._messages.ready:  # what waited is dropped when the call ends
                if self.over:
                    raise StreamOverError
                if self.remote_ended:
                    return None
                waiter = self._waiter = self.connection.loop.create_future()
                self._taken = 0
                await waiter
            if self._caller.may_begin(self, len(self._messages.ready[0])):
                break
            turn = self._turn = self.connection.loop.create_future()
            self._taken = 0
            await turn
            if self._messages.ready:
                break
        data = self._next_data()
        self._taken += 1
        read = self._handler.request_deserializer
        if read is None:
            return data
        began_s = perf_counter()
        message = read(data)
        if perf_counter() - began_s > LONG_S:
            self._caller.turns.hold()
            self._decoded = (message,)
            await asyncio.sleep(0)
            self._decoded = None
        return message

    def take_now(self) -> Sequence[Any]:
        """Request messages that are there, if it is their turn: small ones, TAKEN_BYTES of them at most. Empty: `anext`
        waits for the next one. The caller may send as many again, so a reader that waits holds these beside a window.
        """
        ready, turns = self._messages.ready, self._caller.turns
        if not ready or self._caller.beginning or self._decoded is not None:
            return ()
        left, room = min(TAKEN_BYTES, turns.bytes_left), TURN_MESSAGES - self._taken
        taken: list[bytes] = []
        size = 0
        while ready and left > 0 and len(taken) < room and len(ready[0]) <= SMALL_BYTES:
            data = ready.popleft()
            taken.append(data)
            size += len(data)
            left -= max(len(data), REQUEST_BYTES_LEAST)
        if not taken:
            return ()
        self._taken += len(taken)
        turns.spend_bytes(max(size, REQUEST_BYTES_LEAST * len(taken)))
        self._took(size + PREFIX_BYTES * len(taken))
        read = self._handler.request_deserializer
        return taken if read is None else list(map(read, taken))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    # -- the answer

    async def write(self, message: Any) -> None:
        """Send a response message. Returns once the windows have room for it. Raises StreamOverError."""
        if self.over:
            raise StreamOverError
        serialize = self._handler.response_serializer
        await self._write(message if serialize is None else serialize(message))

    async def write_serialized(self, messages: Sequence[bytes]) -> None:
        """As `write` for each of several messages that are bytes already, with one write for all that the windows have
        room for."""
        if self.over:
            raise StreamOverError
        await self._write(*messages)

    async def _write(self, *messages: bytes) -> None:
        for data in messages:
            if len(data) > self.connection.limits.message_bytes_max:
                text = f"an answer of {len(data)} bytes, {self.connection.limits.message_bytes_max} are allowed"
                await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if self.over:
            raise StreamOverError
        if not self._started:
            self._start()
        await self.send(b"".join(map(prefixed, messages)) if len(messages) > 1 else prefixed(messages[0]))

    def _start(self) -> None:
        self._started = True
        block = _HEADERS_OK + metadata_block(self._initial) if self._initial else _HEADERS_OK
        connection = self.connection
        connection.put(wire.header_frames(self.stream_id, block, end_stream=False))

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        if self.over:
            raise StreamOverError
        self._initial = (*self._initial, *metadata)
        self._start()

    def _finish(self, number: int, text: str) -> None:
        if self.over:
            return
        block = status_block(number, text) if number or text else _OK
        if self._trailing:
            block += metadata_block(self._trailing)
        if not self._started:
            block = (_HEADERS_OK + metadata_block(self._initial) if self._initial else _HEADERS_OK) + block
        self._end(block)

    async def _answer_http(self) -> None:
        """The answer to a browser or a probe."""
        connection = self.connection
        block = wire.field(b":status", b"%d" % self.head.http_status) + wire.field(b"content-type", b"text/plain")
        connection.put(wire.header_frames(self.stream_id, block, end_stream=False))
        await self.send(b"This port serves gRPC: POST with content-type application/grpc.\n")
        connection.put(wire.frame(wire.DATA, wire.END_STREAM, self.stream_id))
        connection.forget(self, peer_knows=True)

    def _end(self, block: bytes) -> None:
        connection = self.connection
        connection.put(wire.header_frames(self.stream_id, block, end_stream=True))
        if not self.remote_ended:
            connection.put(wire.rst_stream(self.stream_id, ErrorCode.NO_ERROR))
        connection.forget(self, peer_knows=self.remote_ended)

    # -- the context of grpc.aio

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        if code is grpc.StatusCode.OK:
            raise ValueError("a call is not aborted with OK")
        self._trailing = (*self._trailing, *trailing_metadata)
        raise AbortedError(code, details)

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._trailing = tuple(metadata)

    def invocation_metadata(self) -> MetadataPairs:
        return self.head.metadata

    @property
    def server_connection(self) -> ServerConnection:
        """The caller's connection."""
        return self._caller

    def peer(self) -> str:
        """The caller's address in gRPC's notation."""
        return self._caller.caller

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The caller's certificate as `x509_pem_cert`; empty without one."""
        return self._caller.auth_context()

    def cancelled(self) -> bool:
        return self.over

    def done(self) -> bool:
        return self.over


def caller_of(name: Any) -> str:
    """A socket's address in gRPC's notation."""
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host = str(name[0]).removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{name[1]}" if ":" in host else f"ipv4:{host}:{name[1]}"


def check_free(host: str, port: int, *, dual: bool = True) -> None:
    """Raise OSError if nobody could listen at an address now. No caller notices. `dual`: [::] takes IPv4 as well."""
    _bound(host, port, dual=dual).close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0: any free one. Raises OSError."""
    bound = _bound(host, port, dual=True)
    try:
        bound.listen(BACKLOG)  # only this finds that somebody else is about to listen there
    except OSError:
        bound.close()
        raise
    return bound


def _bound(host: str, port: int, *, dual: bool) -> socket.socket:
    family, kind, number, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, number)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)  # of [::], which takes IPv4 as well
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class ServerConnection(Connection):
    """One caller's connection."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, server.limits, server.turns)
        self.server: Final = server
        self.caller = ""
        self.busy_s = self.opened_s
        """When the last call ended or began."""
        self._opened_unread = 0
        """Streams opened since the transport asked for a pause."""
        self.beginning: OrderedDict[ServerStream, None] = OrderedDict()
        """Streams whose next request waits for this connection's turn."""
        self._greeted = False
        self.look_s = 0.0
        """Nothing of this connection or its calls is late before. 0: something has changed, so look again."""
        self._auth: Mapping[str, Iterable[bytes]] | None = None

    def connection_made(self, transport: Any) -> None:
        self.caller = caller_of(transport.get_extra_info("peername"))
        secured = transport.get_extra_info("ssl_object")
        super().connection_made(transport)
        self.server.connections.add(self)
        if secured is not None and secured.session_reused:
            # Up to TLS 1.2 a session can be resumed, without a look at the caller's certificate: it may have expired,
            # or its authority may be trusted no more. An end without TLS's goodbye removes the session, so the caller's
            # next handshake is a whole one.
            self.transport.abort()
        elif secured is not None and secured.selected_alpn_protocol() != "h2":
            self.shut(ErrorCode.INADEQUATE_SECURITY, "ALPN must agree on h2")

    def gone(self, error: Exception | None) -> None:
        self.server.connections.discard(self)

    def take_preface(self, data: bytes) -> int:
        if self._greeted:
            return 0
        if not wire.PREFACE.startswith(data[: len(wire.PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 only")
        if len(data) < len(wire.PREFACE):
            return -1
        self._greeted = True
        return len(wire.PREFACE)

    def _known_idle(self, stream_id: int) -> bool:
        return stream_id > self.last_peer_stream or stream_id % 2 == 0

    def open_stream(self, stream_id: int, block: Block, *, end: bool) -> None:
        if stream_id % 2 == 0 or stream_id <= self.last_peer_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} cannot be opened")
        self.last_peer_stream = stream_id
        if self.paused:
            self._opened_unread += 1
            if self._opened_unread > OPENED_UNREAD * self.limits.streams_max:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many calls, and their answers are not read")
        most = self.limits.streams_max
        if len(self.streams) >= most or self.server.calls >= REFUSED * self.limits.calls_max or self.server.stopping:
            self._control()
            self.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if block.meaning is None:
            try:
                block.meaning = head_of(block.fields)
            except MalformedError:
                self.fault(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
        self.busy_s = self.heard_s
        self.look_s = 0.0
        stream = self.streams[stream_id] = ServerStream(self, stream_id, block.meaning)
        self.server.calls += 1
        stream.begin()
        if end and not stream.over:
            self.end_of(stream)
        elif end:
            self._ended[stream_id] = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self._opened_unread = 0

    def forget(self, stream: Any, *, peer_knows: bool) -> None:
        if stream.stream_id in self.streams:
            self.server.calls -= 1
            self.busy_s = self.heard_s
            self.look_s = 0.0
            super().forget(stream, peer_knows=peer_knows)
            if self.beginning:
                self.beginning.pop(stream, None)
            stream.drop()

    def may_begin(self, stream: ServerStream, size: int) -> bool:
        """Whether a stream may take its next request, of so many bytes, now. Otherwise its `take_turn` will be called,
        after those of the connection's streams that asked before."""
        if self.beginning or self.turns.bytes_left <= 0:
            self.wait_to_begin(stream)
            return False
        self.turns.spend_bytes(size)
        return True

    def wait_to_begin(self, stream: ServerStream) -> None:
        """A stream's `take_turn` will be called, after those of the streams that wait already."""
        self.beginning[stream] = None
        self.turns.wait_to_begin(self)

    def begin_one(self) -> None:
        """Its turn has come: the first request that waits begins."""
        while self.beginning:
            stream, _ = self.beginning.popitem(last=False)
            if self.beginning:
                self.turns.wait_to_begin(self)
            if stream.take_turn():
                return

    def shut(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        super().shut(code, reason)
        self.look_s = 0.0

    def look_at_peer(self, now_s: float) -> None:
        """End or ping a connection whose peer is too slow or silent. Sets `look_s`."""
        limits = self.limits
        if self.closing_s is not None:
            self.look_s = self.closing_s + limits.linger_s
            if now_s > self.look_s:
                self.cut_off()
        elif not self.ready:
            until_s = self.opened_s + limits.handshake_s
            self.look_s = min(until_s, now_s + LATER_S)
            if now_s > until_s and not self.waits:
                self.shut(ErrorCode.SETTINGS_TIMEOUT, "the handshake took too long")
        elif self.pinged_s is not None:
            self.look_s = self.pinged_s + limits.dead_s
            if now_s > self.look_s and not self.waits:
                self.cut_off()
        elif not self.streams and limits.idle_s and now_s - self.busy_s > limits.idle_s:
            self.look_s = now_s
            if not self.waits:
                self.shut(ErrorCode.NO_ERROR, "no call for a while")
        elif now_s - self.heard_s > limits.ask_alive_s:
            self.ping()
            self.look_s = now_s + limits.dead_s
        else:
            self.look_s = self.heard_s + limits.ask_alive_s
            if not self.streams and limits.idle_s:
                self.look_s = min(self.look_s, self.busy_s + limits.idle_s)

    def end_late(self, now_s: float, most: int) -> int:
        """End at most so many calls whose time is over; returns how many. Brings `look_s` forward to the next one's."""
        late = 0
        for stream in list(self.streams.values()):
            deadline_s, overdue_s = stream.deadline_s, stream.overdue_s(now_s)
            if deadline_s is not None and now_s > deadline_s:
                text = "the deadline has passed"
            elif now_s > overdue_s:
                text = f"the message did not arrive within {self.limits.message_s:.0f} s"
            else:
                self.look_s = min(self.look_s, overdue_s if deadline_s is None else min(overdue_s, deadline_s))
                continue
            stream.refuse(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, text))
            late += 1
            if late == most:
                break  # the end of a call asks for another look
        return late

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        if self._auth is None:
            secured = self.transport.get_extra_info("ssl_object") if self.transport is not None else None
            shown = secured.getpeercert(binary_form=True) if secured is not None else None
            self._auth = {"x509_pem_cert": (ssl.DER_cert_to_PEM_cert(shown).encode(),)} if shown else {}
        return self._auth


class Server:
    """Serves generic handlers on any number of addresses."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.turns = Turns(self.limits.requests_bytes)
        self.connections: set[ServerConnection] = set()
        self.calls = 0
        self.held_bytes = 0
        """Requests in memory that no handler has taken yet."""
        self.stopping = False
        self._handlers: list[Any] = []
        self._found: dict[str, Handler] = {}
        self._listening: list[asyncio.Server] = []
        self._sockets: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._looking: asyncio.TimerHandle | None = None

    # -- set up

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def listen(self, sock: socket.socket, secured: ssl.SSLContext | None = None) -> None:
        """Serve a bound socket from `start` on."""
        self._sockets.append((sock, secured))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for sock, secured in self._sockets:
            self._listening.append(
                await loop.create_server(
                    lambda: ServerConnection(self, loop),
                    sock=sock,
                    backlog=BACKLOG,
                    ssl=secured,
                    ssl_handshake_timeout=None if secured is None else self.limits.handshake_s,
                )
            )
        self._looking = loop.call_later(LOOK_S, self._look, loop)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no calls any more, give those under way `grace_s` to end, then cut them."""
        self.stopping = True
        for listening in self._listening:
            listening.close()
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self.connections):
            connection.put(wire.goaway(wire.STREAM_ID_MAX, ErrorCode.NO_ERROR))
            if not connection.streams:
                connection.shut()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        streams = [stream for connection in self.connections for stream in connection.streams.values()]
        tasks = [stream._task for stream in streams if stream._task is not None]  # noqa: SLF001
        calls = [stream.until_over() for stream in streams if stream._task is not None or stream.remote_ended]  # noqa: SLF001
        if calls and grace_s > 0:
            await asyncio.wait(calls, timeout=until_s - loop.time())
        for connection in list(self.connections):
            for stream in list(connection.streams.values()):
                stream.refuse(Refusal(grpc.StatusCode.UNAVAILABLE, "this node stops"))
            connection.shut()
        if tasks:
            await asyncio.wait(tasks)

    # -- calls

    def find(self, head: Head) -> Handler | None:
        """The handler of a method; None if there is none."""
        handler = self._found.get(head.path)
        if handler is None:
            details: Any = _CallDetails(head.path, head.metadata)
            for generic in self._handlers:
                handler = generic.service(details)
                if handler is not None:
                    self._found[head.path] = handler
                    break
        return handler

    # -- time

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, ended = loop.time(), 0
        for connection in [connection for connection in self.connections if connection.look_s <= now_s]:
            try:
                connection.look_at_peer(now_s)
                ended += connection.end_late(now_s, LATE_MAX - ended)
            except Exception:  # else no connection would be looked at any more
                _log.exception("a look at a connection failed: it is cut off")
                connection.cut_off()
            if ended == LATE_MAX:
                break
        self._looking = loop.call_later(LOOK_S if ended < LATE_MAX else SOON_S, self._look, loop)
