"""Calls to a gRPC server on the event loop: one connection, streams of messages both ways.

A connection is not dialled again when it ends: `channel.Channel` does that for clients, nodes do it for their peers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

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
    metadata_of,
    prefixed,
    status_text,
)
from tickwheel.transport.turns import CONNECTION_WORK, Turns
from tickwheel.transport.wire import ErrorCode

_CODES = {int(code.value[0]): code for code in grpc.StatusCode}
_RESET_CODES = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
"""Statuses of streams that were reset (gRPC's PROTOCOL-HTTP2); any other code means INTERNAL."""
_HTTP_CODES = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "429": grpc.StatusCode.UNAVAILABLE,
    "502": grpc.StatusCode.UNAVAILABLE,
    "503": grpc.StatusCode.UNAVAILABLE,
    "504": grpc.StatusCode.UNAVAILABLE,
}
"""Statuses of answers that a proxy gave (gRPC's http-grpc-status-mapping); any other means UNKNOWN."""


CLOSED = "the server closed the connection"
OTHER_PROTOCOL = "the server does not speak HTTP/2"
NO_ADDRESS = "no such host"


class CallError(Exception):
    """A call ended with another status than OK, or could not be made."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: MetadataPairs = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.trailing = trailing


class Call(Stream):
    """One call under way. One task writes, one reads."""

    __slots__ = ("_deserialize", "_error", "_messages", "_serialize", "_status", "_trailing", "_waiter", "unary")

    def __init__(
        self,
        connection: ClientConnection,
        stream_id: int,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        *,
        unary: bool,
    ) -> None:
        super().__init__(connection, stream_id)
        self.unary = unary
        self._serialize = serialize
        self._deserialize = deserialize
        self._messages = Messages(connection.limits.message_bytes_max)
        self._waiter: asyncio.Future[None] | None = None
        self._status: dict[bytes, bytes] | None = None
        self._trailing: MetadataPairs = ()
        self._error: CallError | None = None

    async def write(self, message: Any) -> None:
        """Send a message. Raises CallError once the call has ended."""
        try:
            await self.send(prefixed(self._serialize(message)))
        except StreamOverError:
            raise self._error or CallError(grpc.StatusCode.CANCELLED, "the call has ended") from None

    def write_now(self, message: Any) -> bool:
        """Send a message, if the windows have room for it. False: they have not, or the call has ended; nothing was
        sent. Not while a `write` waits."""
        return self.send_now(prefixed(self._serialize(message)))

    def end(self) -> None:
        """No message follows."""
        if not self.over and not self.local_ended:
            self.local_ended = True
            self.connection.put(wire.frame(wire.DATA, wire.END_STREAM, self.stream_id))

    async def read(self) -> Any:
        """The next message; None after the last one. Raises CallError if the call ended with an error."""
        ready = self._messages.ready
        while not ready:
            if self._error is not None:
                raise self._error
            if self.remote_ended:
                return None
            waiter = self._waiter = self.connection.loop.create_future()
            await waiter
        data = ready.popleft()
        self.connection.read(self, len(data) + PREFIX_BYTES)
        try:
            return self._deserialize(data)
        except Exception as error:  # whatever it is: the bytes are the other side's
            self._error = CallError(grpc.StatusCode.INTERNAL, f"an answer that cannot be read: {error}")
            self.cancel()
            raise self._error from error

    def cancel(self) -> None:
        """End the call now, and drop what was not read. Idempotent."""
        self.give_up(CallError(grpc.StatusCode.CANCELLED, "the call was cancelled"))
        self._messages.ready.clear()
        self.connection.read(self, self.unread_bytes)

    def give_up(self, error: CallError) -> None:
        """End the call now, unless it is over, and have its reader raise this after what has come."""
        if not self.over:
            self._error = self._error or error
            self.connection.reset(self.stream_id, ErrorCode.CANCEL)

    # -- what comes

    def take_fields(self, fields: Fields, *, end: bool) -> None:
        found = dict(fields)
        if b"grpc-status" in found:
            if not end:
                raise MalformedError("trailers end a response")
            self._status = found
            if found[b"grpc-status"] != b"0":
                try:
                    self._trailing = metadata_of(fields)
                except ValueError as error:
                    raise MalformedError(str(error)) from error
        elif found.get(b":status", b"200") != b"200":
            status = found[b":status"].decode("ascii", "replace")
            self._fail(_HTTP_CODES.get(status, grpc.StatusCode.UNKNOWN), f"no gRPC answer, but HTTP {status}")
        elif end:
            raise MalformedError("a response without a status")
        elif not found.get(b"content-type", b"").startswith(b"application/grpc"):
            self._fail(grpc.StatusCode.UNKNOWN, "no gRPC answer, but another content type")

    def take_data(self, data: bytes) -> None:
        waiting = len(self._messages.ready)
        try:
            size = self._messages.take(data)
        except MessageError as error:
            limit = self.connection.limits.message_bytes_max
            allowed = f"an answer of {error.size} bytes, {limit} are allowed"
            what = "a compressed message" if error.compressed else allowed
            self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
            return
        self.unread_bytes += size
        self.connection.unread_bytes += size
        self.connection.work_left -= (len(self._messages.ready) - waiting) // MESSAGES_PER_WORK
        if size:
            self._wake_reader()

    def take_end(self) -> None:
        if self._status is None:
            raise MalformedError("a response without a status")
        number = self._status[b"grpc-status"]
        code = _CODES.get(int(number)) if number.isdigit() and len(number) <= 2 else None
        if code is not grpc.StatusCode.OK:
            text = status_text(self._status.get(b"grpc-message", b""))
            self._error = CallError(code or grpc.StatusCode.UNKNOWN, text, self._trailing)
        if not self.local_ended:
            self.connection.put(wire.rst_stream(self.stream_id, ErrorCode.NO_ERROR))
        self.connection.forget(self, peer_knows=True)
        self._wake_reader()

    def cut(self, code: ErrorCode | None) -> None:
        if self._error is None:
            if code is None:
                self._error = CallError(grpc.StatusCode.UNAVAILABLE, "the connection is lost")
            else:
                status = _RESET_CODES.get(code, grpc.StatusCode.INTERNAL)
                self._error = CallError(status, f"the stream was reset: {code.name}")
        self._wake_reader()

    def _fail(self, code: grpc.StatusCode, text: str) -> None:
        self._error = CallError(code, text)
        self.connection.reset(self.stream_id, ErrorCode.CANCEL)

    def _wake_reader(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ClientConnection(Connection):
    """A connection that this side has dialled. Use as a context manager, or call `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, authority: str, scheme: str) -> None:
        super().__init__(loop, limits, Turns(limits.requests_bytes))
        self._next = 1
        self._head: Final = (
            wire.indexed(3) + wire.field(b":scheme", scheme.encode()) + wire.field(b":authority", authority.encode())
        )
        self._tail: Final = wire.field(b"te", b"trailers") + wire.field(b"content-type", b"application/grpc")
        self._looking: asyncio.TimerHandle | None = None
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._goes_away = False
        """No further calls: it closes when those under way have ended."""
        self.lost: Final[asyncio.Future[None]] = loop.create_future()
        """Done when the connection is gone."""
        self.when_gone: Callable[[], None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether another call can begin now."""
        return (
            self.ready
            and not self._goes_away
            and self.transport is not None
            and self.closing_s is None
            and len(self.streams) < self.peer_streams_max
        )

    @property
    def unused(self) -> bool:
        """Whether no call was ever begun on it."""
        return self._next == 1

    async def wait_ready(self) -> None:
        """Return when the server has greeted. Raises OSError if it has closed the connection instead."""
        await asyncio.shield(self._greeted)

    def greeted(self) -> None:
        self._greeted.set_result(None)

    def shut(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        if not self._greeted.done() and code is not ErrorCode.NO_ERROR:
            self._refuse(ConnectionError(OTHER_PROTOCOL))
        super().shut(code, reason)

    def _refuse(self, error: OSError) -> None:
        self._greeted.set_exception(error)
        self._greeted.exception()  # nobody need wait for it

    def greeting(self) -> bytes:
        return wire.PREFACE

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look()

    def _look(self) -> None:
        try:
            self._look_at_peer()
        except Exception:
            self.cut_off()  # else nobody would notice that the peer is gone
            raise

    def _look_at_peer(self) -> None:
        now_s, limits = self.loop.time(), self.limits
        if (self.pinged_s is not None and now_s - self.pinged_s > limits.dead_s) or (
            self.closing_s is not None and now_s - self.closing_s > limits.linger_s
        ):
            self.cut_off()
        elif self.pinged_s is None and now_s - self.heard_s > limits.ask_alive_s and self._awaits_sign(now_s):
            self.ping()
        if self.transport is not None:
            waits = self.pinged_s is not None or self.closing_s is not None
            pause_s = (min(limits.dead_s, limits.linger_s) if waits else limits.ask_alive_s) / 4
            self._looking = self.loop.call_later(pause_s, self._look)

    def _awaits_sign(self, now_s: float) -> bool:
        """Whether a call under way cannot do without a sign of the server any longer."""
        late = now_s - self.heard_s > self.limits.ask_alive_unary_s
        return any(late or not call.unary for call in self.streams.values())

    def eof_received(self) -> None:
        """Nothing more comes. TLS ends the connection next, whatever waits; answers that came still count."""
        while self.waits:
            self.turns.leave(self)
            self.read_on(CONNECTION_WORK)

    def gone(self, error: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if not self._greeted.done():
            self._greeted.set_exception(error if isinstance(error, OSError) else ConnectionResetError(CLOSED))
            self._greeted.exception()  # nobody need wait for it
        self.lost.set_result(None)
        if self.when_gone is not None:
            self.when_gone()

    def _known_idle(self, stream_id: int) -> bool:
        return stream_id >= self._next or stream_id % 2 == 0

    def open_stream(self, stream_id: int, block: Block, *, end: bool) -> None:
        if self._known_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"an answer on stream {stream_id}, which was never opened")

    def peer_goes_away(self, last_stream_id: int) -> None:
        for stream in [stream for stream in self.streams.values() if stream.stream_id > last_stream_id]:
            self.forget(stream, peer_knows=True)
            stream.cut(ErrorCode.REFUSED_STREAM)
        self.retire()

    def retire(self) -> None:
        """Begin no further call, and close when those under way have ended."""
        self._goes_away = True
        if not self.streams:
            self.shut()

    def forget(self, stream: Stream, *, peer_knows: bool) -> None:
        super().forget(stream, peer_knows=peer_knows)
        if self._goes_away and not self.streams:
            self.shut()

    def call(
        self,
        path: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        fields: bytes = b"",
        *,
        unary: bool = False,
    ) -> Call:
        """Begin a call, with further header fields. `unary`: it has one request and one answer, and its caller bounds
        its time. Raises CallError if the connection is lost."""
        if self.transport is None or self.closing_s is not None:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the connection is lost")
        stream_id, self._next = self._next, self._next + 2
        call = self.streams[stream_id] = Call(self, stream_id, serialize, deserialize, unary=unary)
        block = self._head + wire.field(b":path", path.encode()) + self._tail + fields
        self.put(wire.header_frames(stream_id, block, end_stream=False))
        if self._next > wire.STREAM_ID_MAX:
            self.retire()
        return call

    def close(self) -> None:
        """Cancel all calls and close. Idempotent."""
        for stream in list(self.streams.values()):
            stream.cancel()
        self.shut()

    async def __aenter__(self) -> ClientConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AddressError(OSError):
    """An address that nobody can have."""


Place = tuple[socket.AddressFamily, tuple[Any, ...]]
"""An address that a socket can connect to, and its family."""


class Names:
    """Looks up hosts. The system's resolver cannot be interrupted, and few look-ups run at a time: each address has one
    at most, which outlives those who wait for it."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Task[list[Place]]] = {}

    async def find(self, address: str) -> list[Place]:
        """The places of `host:port`, in the order to try them. Raises AddressError."""
        task = self._asked.get(address)
        if task is None:
            task = self._asked[address] = asyncio.get_running_loop().create_task(_look_up(address))
            task.add_done_callback(lambda ended: self._answered(address, ended))
        return await asyncio.shield(task)

    def _answered(self, address: str, task: asyncio.Task[list[Place]]) -> None:
        del self._asked[address]
        if not task.cancelled():
            task.exception()  # or asyncio reports it when everybody who waited has left


async def _look_up(address: str) -> list[Place]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not (host and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65_536):
        raise AddressError(f"{address!r} is no host:port")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (ValueError, OverflowError, socket.gaierror) as error:
        raise AddressError(f"{address!r}: {NO_ADDRESS}: {error}") from error
    return [(family, place) for family, _, _, _, place in found]


async def connect(
    place: Place,
    limits: Limits,
    *,
    secured: ssl.SSLContext | None = None,
    host: str = "",
    server_name: str = "",
    silence_ms: int = 0,
    reached: Callable[[], None] | None = None,
) -> ClientConnection:
    """Dial. `host`: what the place was looked up by. `server_name`: expected in the other side's certificate instead of
    it. `silence_ms`: the kernel, if it is Linux, gives the connection up when sent bytes stay unacknowledged for this
    long. `reached`: called when the TCP connection is there, before TLS.

    Raises ssl.SSLError or another OSError.
    """
    loop = asyncio.get_running_loop()
    family, (ip, port, *_) = place
    host = host or ip
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = "https" if secured else "http"
    more: dict[str, Any] = {} if secured is None else {"ssl": secured, "server_hostname": server_name or host}
    # With the protocol named asyncio turns Nagle's algorithm off: small frames must not wait for acknowledgements.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, place[1])
        if reached is not None:
            reached()
        if silence_ms and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
        transport, connection = await loop.create_connection(
            lambda: ClientConnection(loop, limits, authority, scheme), sock=sock, **more
        )
    except UnicodeError as error:
        sock.close()
        raise AddressError(f"{more.get('server_hostname', host)!r} is no name of a host: {error}") from error
    except BaseException:
        sock.close()
        raise
    if secured is not None and transport.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
        transport.abort()
        raise ConnectionError(OTHER_PROTOCOL)
    return connection
