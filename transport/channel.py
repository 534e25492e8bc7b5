"""A channel to a server: calls of all four kinds, on connections that it dials when they are needed.

Offers what generated stubs and this project's client use of grpc.aio.Channel, with the same errors: AioRpcError, and
CancelledError for a call that was cancelled on this side. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Sequence
from functools import partial, partialmethod
from typing import Any, Final

import grpc

from tickwheel.transport.client import (
    CLOSED,
    NO_ADDRESS,
    AddressError,
    Call,
    CallError,
    ClientConnection,
    Names,
    Place,
    connect,
)
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.limits import Limits
from tickwheel.transport.messages import metadata_block, prefixed, timeout_block

END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""The value that `read` of a stream returns once the server has ended it without an error."""

NO_CONNECTION = "no connection: "
"""Begins the details of a call that was certainly not sent."""
NO_ANSWER = "no answer to the attempt"
NO_ROOM = "the server takes no calls"
LOOK_UP_S = 5.0
STEP_S = 1.5
"""For each step of an attempt to connect: TCP, TLS, the server's settings. A far server takes long for all of them."""
STEP_PARTS = 6
"""A step's time passes in so many parts. A pause of this process takes one of them, however long it is: what the server
has answered meanwhile waits to be read."""
NEXT_PLACE_S = 0.25
"""After this time without a connection the next address of the host is tried beside the former (RFC 8305)."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 0.2
"""After a failed attempt calls fail at once for this long; twice as long after each further one."""
SILENCE_MS = 3_000
"""The kernel gives a connection up when what was sent is not acknowledged for this long."""
CLOSING_S = 0.5
"""A connection that is being closed is cut after this time: the server does not read, or does not end TLS."""


Requests = AsyncIterable[Any] | Iterable[Any] | None


class Method:
    """A method of a service, and the header fields of its calls."""

    __slots__ = ("fields", "parse", "path", "serialize", "unary")

    def __init__(
        self, path: str, serialize: Callable[[Any], bytes], parse: Callable[[bytes], Any], fields: bytes, *, unary: bool
    ) -> None:
        self.unary: Final = unary
        self.path: Final = path
        self.serialize: Final = serialize
        self.parse: Final = parse
        self.fields: Final = fields


class ChannelCall:
    """One call, begun when it is made. One task reads or awaits it to its end, one writes; who leaves it before cancels
    it, since what was not read takes room of the connection."""

    __slots__ = (
        "_answer",
        "_channel",
        "_error",
        "_feeding",
        "_method",
        "_opened",
        "_stream",
        "_timer",
        "_work",
        "cancelled_here",
    )

    def __init__(self, channel: Channel, method: Method, request: Any, timeout_s: float | None, *, one: bool) -> None:
        """`one`: `request` is the only one; else it is None, and requests are written."""
        self._channel = channel
        self._method = method
        self._stream: Call | None = None
        self._error: CallError | None = None
        """Why there is no stream."""
        self._opened: asyncio.Future[None] | None = None
        """Done when there is a stream or an error; None: it was there at once."""
        self._work: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answer: tuple[Any] | None = None
        """The only response, once the call was awaited."""
        self.cancelled_here = False
        data = prefixed(method.serialize(request)) if one else None
        fields = method.fields
        if timeout_s is not None:
            fields += timeout_block(timeout_s)
            self._timer = channel.loop.call_later(timeout_s, self._expire)
        connection = channel.connected
        if connection is None:
            self._opened = channel.loop.create_future()
            self._work = channel.loop.create_task(self._connect(fields, data))
        else:
            self._open(connection, fields, data)

    def _open(self, connection: ClientConnection, fields: bytes, data: bytes | None) -> None:
        method = self._method
        stream = self._stream = connection.call(method.path, method.serialize, method.parse, fields, unary=method.unary)
        if data is None:
            return
        if not stream.send_now(data, last=True):
            self._work = self._channel.loop.create_task(self._send(stream, data))

    @staticmethod
    async def _send(stream: Call, data: bytes) -> None:
        with contextlib.suppress(StreamOverError):  # its reader gets the reason
            await stream.send(data, last=True)

    async def _connect(self, fields: bytes, data: bytes | None) -> None:
        try:
            connection = await self._channel.connect()
            if self._error is None:
                self._open(connection, fields, data)
        except CallError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:  # a mistake of this side: nobody may wait for ever
            self._fail(CallError(grpc.StatusCode.INTERNAL, f"the call could not be begun: {error!r}"))
            raise
        self._known()

    def _known(self) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    def _fail(self, error: CallError) -> None:
        """End it with an error from this side, unless it is over."""
        if self._stream is not None:
            self._stream.give_up(error)
        elif self._error is None:
            self._error = error
            self._known()

    def _expire(self) -> None:
        self._fail(CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    async def _begun(self) -> Call:
        if self._opened is not None and not self._opened.done():
            await asyncio.wait({self._opened})
        if self._stream is None:
            assert self._error is not None
            raise self._error
        return self._stream

    def _over(self, error: CallError) -> BaseException:
        """The exception for who reads or awaits the call."""
        if self.cancelled_here or (self._channel.closed and error.code is grpc.StatusCode.CANCELLED):
            return asyncio.CancelledError()
        return _rpc_error(error)

    async def read(self) -> Any:
        """The next response, or END_OF_STREAM. Raises AioRpcError."""
        try:
            stream = self._stream or await self._begun()
            response = await stream.read()
        except CallError as error:
            self._ended()
            raise self._over(error) from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is None:
            self._ended()
            return END_OF_STREAM
        return response

    def _ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._feeding is not None:
            self._feeding.cancel()

    async def _one(self) -> Any:
        if self._answer is not None:
            return self._answer[0]
        response = await self.read()
        if response is END_OF_STREAM:
            raise _rpc_error(CallError(grpc.StatusCode.INTERNAL, "there is no response"))
        if await self.read() is not END_OF_STREAM:  # the status, which comes with it
            self.cancel()
            raise _rpc_error(CallError(grpc.StatusCode.INTERNAL, "there is more than one response"))
        self._answer = (response,)
        return response

    def __await__(self) -> Generator[Any, None, Any]:
        """The response of a call that has only one, also when it is awaited again. Raises AioRpcError."""
        return self._one().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The responses. The call ends with the iteration."""
        try:
            while (response := await self.read()) is not END_OF_STREAM:
                yield response
        finally:
            self.cancel()

    async def write(self, request: Any) -> None:
        """Send a request. Raises AioRpcError once the call is over. To cancel it ends the call: part of the request may
        have been sent."""
        try:
            await (self._stream or await self._begun()).write(request)
        except CallError as error:
            raise _rpc_error(error) from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    def feed(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Send all these requests, and no others. An error in the iteration ends the call."""
        self._feeding = self._channel.loop.create_task(self._feed(requests))

    async def _feed(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:  # of the iteration; the call has had its own by then, and keeps that
            self._fail(CallError(grpc.StatusCode.UNKNOWN, f"the requests ended by an error: {error!r}"))

    async def done_writing(self) -> None:
        """No request follows. Raises AioRpcError if the call could not be begun."""
        try:
            (self._stream or await self._begun()).end()
        except CallError as error:
            raise _rpc_error(error) from None

    def cancel(self) -> bool:
        """End it, and drop what was not read. False: it was over already."""
        over = self.done()
        self.cancelled_here = self.cancelled_here or not over
        self._ended()
        if self._stream is not None:
            self._stream.cancel()
        else:
            self._fail(CallError(grpc.StatusCode.CANCELLED, "the call was cancelled"))
        return not over

    def done(self) -> bool:
        """Whether it is over."""
        return self._error is not None if self._stream is None else self._stream.over

    def cancelled(self) -> bool:
        """Whether `cancel` ended it."""
        return self.cancelled_here


def _rpc_error(error: CallError) -> grpc.aio.AioRpcError:
    trailing: Any = grpc.aio.Metadata(*error.trailing)
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailing, error.details, None)


class Channel:
    """Use on one event loop, and `close` it."""

    def __init__(
        self,
        address: str,
        limits: Limits,
        *,
        secured: ssl.SSLContext | None = None,
        server_name: str = "",
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """`address`: host:port. `server_name`: expected in the server's certificate instead of the host. `metadata`
        goes with every call. Raises ValueError for metadata that cannot be sent."""
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._address = address
        self._host = address.rpartition(":")[0].strip("[]")
        self._limits = limits
        self._secured = secured
        self._server_name = server_name
        self._fields = metadata_block(metadata)
        self._names = Names()
        self._connections: set[ClientConnection] = set()
        self._dialling: asyncio.Task[None] | None = None
        self._greeting = 0
        """Attempts whose host answers, and that wait for TLS or the server's settings."""
        self._left: set[asyncio.Task[ClientConnection]] = set()
        """Attempts that another one has made needless, while they end."""
        self._pause_s = 0.0
        self._fails_until_s = 0.0
        self._failure = ""
        """Of the last attempt; empty: there was none."""

    # -- as grpc.aio.Channel

    def _single(
        self, path: str, request_serializer: Any, response_deserializer: Any, *, unary: bool = False, **_: Any
    ) -> Any:
        method = Method(path, request_serializer, response_deserializer, self._fields, unary=unary)

        def begin(request: Any, *, timeout: float | None = None) -> ChannelCall:
            return ChannelCall(self, method, request, timeout, one=True)

        return begin

    def _many(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        method = Method(path, request_serializer, response_deserializer, self._fields, unary=False)

        def begin(requests: Requests = None, *, timeout: float | None = None) -> ChannelCall:
            call = ChannelCall(self, method, None, timeout, one=False)
            if requests is not None:
                call.feed(requests)
            return call

        return begin

    unary_unary = partialmethod(_single, unary=True)
    unary_stream = _single
    stream_unary = stream_stream = _many

    def get_state(self) -> grpc.ChannelConnectivity:
        """READY while there is a connection, else CONNECTING while a host answers an attempt to connect."""
        if self.connected:
            return grpc.ChannelConnectivity.READY
        return grpc.ChannelConnectivity.CONNECTING if self._greeting else grpc.ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        """End all calls and connections. Idempotent."""
        self.closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        if self._left:
            await asyncio.wait(self._left)
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            lost = [connection.lost for connection in connections]
            _, left = await asyncio.wait(lost, timeout=CLOSING_S)
            for connection in connections:
                connection.cut_off()
            if left:
                await asyncio.wait(left)

    def retire(self) -> None:
        """Begin no further call on the connections that there are, and close each when its calls have ended."""
        for connection in list(self._connections):
            connection.retire()

    # -- connections

    @property
    def connected(self) -> ClientConnection | None:
        """A connection on which another call can begin now."""
        for connection in self._connections:
            if connection.has_room:
                return connection
        return None

    async def connect(self) -> ClientConnection:
        """A connection on which a call can begin; dials one if there is none. Raises CallError."""
        while not self.closed:
            connection = self.connected
            if connection is not None:
                return connection
            if self._dialling is None or self._dialling.done():
                if self._failure and self.loop.time() < self._fails_until_s:
                    break
                self._dialling = self.loop.create_task(self._dial())
            await asyncio.wait({self._dialling})
            if self._failure:
                break
        if self.closed:
            raise CallError(grpc.StatusCode.CANCELLED, "the channel is closed")
        raise CallError(grpc.StatusCode.UNAVAILABLE, f"{NO_CONNECTION}{self._address}: {self._failure}")

    async def _dial(self) -> None:
        try:
            connection = await self._reach()
        except OSError as error:
            self._failed(reason_of(error))
        except Exception as error:  # a mistake of this side: who waits is told, and the loop's handler
            self._failed(repr(error))
            raise
        else:
            if connection.has_room:
                self._pause_s, self._failure = 0.0, ""
                self._connections.add(connection)
                connection.when_gone = partial(self._gone, connection)
            else:  # it has ended since
                connection.close()
                self._failed(CLOSED)
        finally:
            self._dialling = None

    def _failed(self, reason: str) -> None:
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
        self._fails_until_s = self.loop.time() + self._pause_s
        self._failure = reason

    def _gone(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if connection.unused:  # who dialled it would dial again and again
            self._failed(CLOSED)

    async def _reach(self) -> ClientConnection:
        """Connect to the first address of the host that answers. Raises OSError."""
        try:
            async with asyncio.timeout(LOOK_UP_S):
                places = await self._names.find(self._address)
        except TimeoutError:
            raise AddressError(f"{NO_ADDRESS}: no answer in time") from None
        attempts: set[asyncio.Task[ClientConnection]] = set()
        problem: OSError = AddressError("the host has no address")
        left = deque(places)
        try:
            while left or attempts:
                if left:
                    attempts.add(self.loop.create_task(self._attempt(left.popleft())))
                pause_s = NEXT_PLACE_S if left else None
                done, _ = await asyncio.wait(attempts, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    attempts.discard(attempt)
                    try:
                        return attempt.result()
                    except OSError as error:
                        problem = error
            raise problem
        finally:
            self._left |= attempts
            for attempt in attempts:
                attempt.add_done_callback(self._unused)
                attempt.cancel()

    def _unused(self, attempt: asyncio.Task[ClientConnection]) -> None:
        self._left.discard(attempt)
        if not attempt.cancelled() and attempt.exception() is None:
            attempt.result().close()

    async def _attempt(self, place: Place) -> ClientConnection:
        reached = False
        async with asyncio.timeout(None) as limit:
            step = _Step(self.loop, limit)

            def host_answers() -> None:
                nonlocal reached
                reached = True
                self._greeting += 1
                step.next()

            try:
                connection = await connect(
                    place,
                    self._limits,
                    secured=self._secured,
                    host=self._host,
                    server_name=self._server_name,
                    silence_ms=SILENCE_MS,
                    reached=host_answers,
                )
                step.next()
                try:
                    await connection.wait_ready()
                    if not connection.has_room:
                        raise ConnectionError(NO_ROOM)
                except BaseException:
                    connection.cut_off()
                    raise
            finally:
                step.end()
                self._greeting -= reached
        return connection


class _Step:
    """The time of a step of an attempt. At its end the attempt is over, unless another step has begun."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: asyncio.Timeout) -> None:
        self._loop = loop
        self._limit = limit
        self._begin(STEP_PARTS)

    def _begin(self, parts: int) -> None:
        self._timer = self._loop.call_later(STEP_S / STEP_PARTS, self._passed, parts - 1)

    def _passed(self, parts_left: int) -> None:
        if parts_left:
            self._begin(parts_left)
        else:
            self._limit.reschedule(self._loop.time())

    def next(self) -> None:
        """The next step begins."""
        self.end()
        self._begin(STEP_PARTS)

    def end(self) -> None:
        """The attempt is over."""
        self._timer.cancel()


def reason_of(error: OSError) -> str:
    """Why there is no connection, in the words of the system or of the TLS library."""
    if isinstance(error, TimeoutError):
        return NO_ANSWER
    if error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
