"""Calls from a client to a node in the same process, without sockets: a channel as of grpc.aio, and the node's side.

A channel serves clients of any loop; the node's handlers run on the node's loop. What is sent either way is serialized,
as on a wire, and arrives in order. Windows are without limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc

from tickwheel.transport.channel import END_OF_STREAM, NO_CONNECTION
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.server import AbortedError, DirectHandler, handle

MetadataPairs = Sequence[tuple[str, str | bytes]]

GONE = f"{NO_CONNECTION}the cluster in memory has ended"

_log = logging.getLogger("tickwheel.testing")


class Node(Protocol):
    """The node behind a channel."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where its handlers run."""
        ...

    @property
    def message_bytes_max(self) -> int:
        """The largest request."""
        ...

    def find(self, method: str) -> Any:
        """The handler of a method; None: there is none. On its loop."""
        ...

    def tell(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
        """Have something called on a loop. False: that loop has ended."""
        ...

    def note(self, call: ServerCall, *, ended: bool) -> None:
        """A call has begun or ended. On its loop."""
        ...


class ServerConnection:
    """What a call's consumer asks whether its client still answers: it runs in this process, so it does."""

    def ask(self, answers: Callable[[], None]) -> None:
        answers()


class ServerCall:
    """The node's side of a call, and the context that its handler gets. On the node's loop."""

    def __init__(self, node: Node, method: str, metadata: MetadataPairs, call: ClientCall) -> None:
        self._node = node
        self._method = method
        self._metadata = metadata
        self._call = call
        self.server_connection = ServerConnection()
        self._handler: Any = None
        self._requests: deque[bytes] = deque()
        self._ended_by_client = False
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._trailing: MetadataPairs = ()
        self._over = False
        self.ended: Callable[[], None] | None = None
        """Called when the call is over."""

    # -- what comes

    def begin(self) -> None:
        """The call has reached the node."""
        self._node.note(self, ended=False)
        self._handler = self._node.find(self._method)
        if self._handler is None:
            self._finish(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {self._method}")
        elif self._handler.request_streaming:
            self._task = asyncio.ensure_future(self._serve())

    def take(self, data: bytes) -> None:
        """A request message."""
        if self._over:
            return
        if len(data) > self._node.message_bytes_max:
            allowed = f"{self._node.message_bytes_max} are allowed"
            self.cut(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {len(data)} bytes, {allowed}")
            return
        self._requests.append(data)
        self._arrived.set()
        if type(self._handler) is DirectHandler:
            try:
                self._handler.begin(self._requests.popleft(), self)  # type: ignore[arg-type]
            except Exception as error:
                self._broken(error)
        elif self._task is None:
            self._task = asyncio.ensure_future(self._serve())

    def take_end(self) -> None:
        """There are no more requests."""
        self._ended_by_client = True
        self._arrived.set()

    def cut(self, code: grpc.StatusCode, details: str) -> None:
        """End it from outside its handler."""
        if not self._over:
            self._finish(code, details)
            if self._task is not None:
                self._task.cancel()

    # -- the handler

    async def _serve(self) -> None:
        try:
            await handle(self._handler, self, self._next)
            self._finish(grpc.StatusCode.OK, "")
        except asyncio.CancelledError:
            self._finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except AbortedError as aborted:
            self._finish(aborted.code, aborted.details)
        except StreamOverError:
            pass  # the caller is gone
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        _log.error("a handler of %s failed", self._method, exc_info=error)
        self._finish(grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}")

    async def _next(self) -> Any:
        while not self._requests:
            if self._over:
                raise StreamOverError
            if self._ended_by_client:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        read = self._handler.request_deserializer
        data = self._requests.popleft()
        return data if read is None else read(data)

    def take_now(self) -> Sequence[Any]:
        """Nothing: only a server on a wire saves work by that."""
        return ()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        if message is None:
            raise StopAsyncIteration
        return message

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        if self._over:
            return
        self._over = True
        self._arrived.set()
        self._node.note(self, ended=True)
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()
        self._node.tell(self._call.loop, partial(self._call.take_status, code, details, tuple(self._trailing)))

    # -- the context

    def answer(self, data: bytes) -> None:
        """The answer of a direct call."""
        if not self._over:
            self._send(data)
            self._finish(grpc.StatusCode.OK, "")

    def fail(self, code: grpc.StatusCode, details: str, trailing_metadata: MetadataPairs = ()) -> None:
        """End a direct call with another status than OK."""
        self._trailing = trailing_metadata
        self._finish(code, details)

    async def write(self, message: Any) -> None:
        """Send a response. Raises StreamOverError."""
        if self._over:
            raise StreamOverError
        serialize = self._handler.response_serializer
        self._send(message if serialize is None else serialize(message))

    async def write_serialized(self, messages: Sequence[bytes]) -> None:
        """As `write` for each of several messages that are bytes already."""
        for message in messages:
            if self._over:
                raise StreamOverError
            self._send(message)

    def _send(self, data: bytes) -> None:
        if not self._node.tell(self._call.loop, partial(self._call.take, data)):
            self.cut(grpc.StatusCode.CANCELLED, "the client's loop has ended")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: MetadataPairs = ()) -> NoReturn:
        self._trailing = (*self._trailing, *trailing_metadata)
        raise AbortedError(code, details)

    def set_trailing_metadata(self, metadata: MetadataPairs) -> None:
        self._trailing = metadata

    async def send_initial_metadata(self, metadata: MetadataPairs) -> None:
        """No client of this project reads any."""

    def invocation_metadata(self) -> MetadataPairs:
        return self._metadata

    def peer(self) -> str:
        return "unix:in-process"

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def cancelled(self) -> bool:
        return self._over

    def done(self) -> bool:
        return self._over


class ClientCall:
    """The client's side of a call, of any of the four kinds. On the loop that began it."""

    def __init__(
        self,
        node: Node,
        method: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: MetadataPairs,
        ended: Callable[[ClientCall], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._node = node
        self._serialize = serialize
        self._parse = parse
        self._ended = ended
        self._answers: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._status: tuple[grpc.StatusCode, str, MetadataPairs] | None = None
        self._answer: tuple[Any] | None = None
        """The only response, once the call was awaited."""
        self._cancelled = False
        self._feeding: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._server = ServerCall(node, method, metadata, self)
        self._tell(self._server.begin)
        if timeout_s is not None:
            self._deadline = self.loop.call_later(timeout_s, self._too_late)

    def _tell(self, call: Callable[[], None]) -> None:
        if self._status is None and not self._node.tell(self._node.loop, call):
            self.take_status(grpc.StatusCode.UNAVAILABLE, GONE, ())

    def send(self, request: Any) -> None:
        """Send one request message."""
        self._tell(partial(self._server.take, self._serialize(request)))

    def feed(self, requests: Any) -> None:
        """Send what an iterator of requests yields."""

        async def all_of_them() -> None:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    self.send(request)
            else:
                for request in requests:
                    self.send(request)
            self._tell(self._server.take_end)

        self._feeding = asyncio.ensure_future(all_of_them())

    # -- what comes

    def take(self, data: bytes) -> None:
        """A response."""
        if self._status is None:
            self._answers.append(data)
            self._arrived.set()

    def take_status(self, code: grpc.StatusCode, details: str, trailing: MetadataPairs) -> None:
        """The call is over. The first counts."""
        if self._status is not None:
            return
        self._status = code, details, trailing
        self._arrived.set()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
        self._ended(self)

    def _too_late(self) -> None:
        self._give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        self._tell(partial(self._server.cut, grpc.StatusCode.CANCELLED, "the caller has given up"))
        self.take_status(code, details, ())

    # -- as of a call of grpc.aio

    async def read(self) -> Any:
        """The next response; EOF at the end. Raises AioRpcError."""
        while not self._answers:
            if self._status is not None:
                if self._cancelled:
                    raise asyncio.CancelledError
                if self._status[0] is not grpc.StatusCode.OK:
                    raise self._error(*self._status)
                return END_OF_STREAM
            self._arrived.clear()
            await self._arrived.wait()
        return self._parse(self._answers.popleft())

    async def write(self, request: Any) -> None:
        """Send a request. Raises AioRpcError once the call is over."""
        if self._status is not None:
            code, details, trailing = self._status
            if code is grpc.StatusCode.OK:
                code, details = grpc.StatusCode.CANCELLED, "the call has ended"
            raise self._error(code, details, trailing)
        self.send(request)

    async def done_writing(self) -> None:
        """There are no more requests."""
        self._tell(self._server.take_end)

    def cancel(self) -> bool:
        """End it. False: it is over already."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._give_up(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def done(self) -> bool:
        """Whether it is over."""
        return self._status is not None

    def cancelled(self) -> bool:
        """Whether `cancel` ended it."""
        return self._cancelled

    async def _one(self) -> Any:
        if self._answer is not None:
            return self._answer[0]
        try:
            response = await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is END_OF_STREAM:
            raise self._error(grpc.StatusCode.INTERNAL, "there is no response", ())
        self._answer = (response,)
        return response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not END_OF_STREAM:
            yield response

    @staticmethod
    def _error(code: grpc.StatusCode, details: str, trailing: MetadataPairs) -> grpc.aio.AioRpcError:
        pairs: Any = grpc.aio.Metadata(*trailing)
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), pairs, details, None)


class MemoryChannel:
    """Behaves like a grpc.aio.Channel to a node, as far as stubs use one."""

    def __init__(self, node: Node, metadata: MetadataPairs) -> None:
        """`metadata` goes with every call."""
        self._node = node
        self._metadata = tuple(metadata)
        self._calls: set[ClientCall] = set()

    def _method(self, requests_stream: bool, method: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        serialize, parse = kwargs["request_serializer"], kwargs["response_deserializer"]

        def begin(request: Any = None, *, timeout: float | None = None) -> ClientCall:
            call = ClientCall(self._node, method, serialize, parse, timeout, self._metadata, self._calls.discard)
            if not call.done():
                self._calls.add(call)
            if not requests_stream:
                call.send(request)
            elif request is not None:
                call.feed(request)
            return call

        return begin

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        """As in grpc.aio.Channel; the same holds for the other three kinds of calls."""
        return self._method(False, method, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        return self._method(False, method, *args, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        return self._method(True, method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        return self._method(True, method, *args, **kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """It is always connected."""
        return grpc.ChannelConnectivity.READY

    async def close(self, grace: float | None = None) -> None:
        """End its calls."""
        for call in list(self._calls):
            call.cancel()
