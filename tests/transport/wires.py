"""A connection without a socket: the tests write its bytes and look at what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpack import Encoder

from tickwheel.transport import wire
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server, ServerConnection

POST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Echo/Unary"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> wire.ErrorCode:
        """The error of RST_STREAM or GOAWAY."""
        return wire.ErrorCode(
            int.from_bytes(self.payload[4:8] if self.kind == wire.GOAWAY else self.payload[:4], "big")
        )


def frames(data: bytes) -> Iterator[Frame]:
    """The frames in bytes that hold whole ones."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        stream_id = int.from_bytes(data[at + 5 : at + 9], "big")
        yield Frame(data[at + 3], data[at + 4], stream_id, data[at + 9 : at + 9 + size])
        at += 9 + size
    assert at == len(data)


class Wire:
    """Stands in for the transport of a connection."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = self.aborted = False
        self.full = False
        """Nobody reads."""
        self.reading = True
        self.connection: Any = None

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1234) if name == "peername" else None


class Caller:
    """The other side of a server's connection, by hand."""

    def __init__(self, server: Server | None = None, limits: Limits | None = None, *, greet: bool = True) -> None:
        self.server = server or Server(limits)
        self.wire = Wire()
        self.connection = ServerConnection(self.server, asyncio.get_running_loop())
        self.connection.connection_made(self.wire)
        self.encoder = Encoder()
        if greet:
            self.send(wire.PREFACE + wire.settings({}))

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def headers(
        self, stream_id: int, pairs: list[tuple[str, str]] = POST, *, end: bool = False, flags: int = wire.END_HEADERS
    ) -> None:
        block = self.encoder.encode(pairs, huffman=stream_id % 4 == 1)
        self.send(wire.frame(wire.HEADERS, flags | (wire.END_STREAM if end else 0), stream_id, block))

    def data(self, stream_id: int, payload: bytes, *, end: bool = False) -> None:
        self.send(wire.frame(wire.DATA, wire.END_STREAM if end else 0, stream_id, payload))

    def window(self, stream_id: int, more: int) -> None:
        self.send(wire.window_update(stream_id, more))

    async def answered(self) -> list[Frame]:
        """What came since the last call, after the connection and the handlers had their turns."""
        for _ in range(100_000):
            if not self.connection.waits:
                break
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        data = bytes(self.wire.written)
        self.wire.written.clear()
        return list(frames(data))

    async def settled(self) -> None:
        """Forget the greeting."""
        await self.answered()
