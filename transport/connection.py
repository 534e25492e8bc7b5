"""One HTTP/2 connection, without what distinguishes server and client: frames, windows, limits (RFC 9113).

`Connection` is an asyncio protocol. In one pass of the loop it handles as much of what a read brought as it gets of its
server's budget (turns.py); the rest waits for its turn, and nothing more is read until then. Everything written in a
pass leaves with one write at its end. A peer that breaks the protocol loses the stream or the connection, as the RFC
says; one that exceeds `Limits` loses the connection.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, cast

from hpack import Decoder, HPACKError
from hpack.table import HeaderTable

from tickwheel.transport import wire
from tickwheel.transport.limits import Limits
from tickwheel.transport.turns import Turns
from tickwheel.transport.wire import ErrorCode

FLUSH_BYTES = 256 << 10
"""Most bytes of one pass that are written at once, so that the transport can ask for a pause."""
COPIED_BYTES = 4 << 10
"""A smaller payload is joined with the head of its frame; a larger one is copied once, when the pass is written."""
OPENING_WORK = 4
"""Of a HEADERS frame that opens a stream, beside the frame itself."""
ENDING_WORK = 6
"""Of a frame that ends a call: its handler is cancelled."""
BYTES_PER_WORK = 8
"""Bytes of settings, or of a field block that is decoded, that cost as much as a small frame. So does each field."""
MESSAGES_PER_WORK = 4
"""Cutting this many messages from one frame costs as much as one small frame."""
ENDED_KEPT = 1_024
"""Ended streams whose late frames are told apart from frames of streams that never were."""
BLOCKS_KEPT = 64
"""Field blocks of a connection kept decoded: a client sends the same for every call of a method."""
BLOCKS_KEPT_BYTES = 64 << 10
"""Of all of them: encoded, decoded, and what is made of that, with FIELD_BYTES for each field, twice."""
FIELD_BYTES = 32
"""What a field counts in addition to its name and value (RFC 7541, 4.1)."""
RESIZES_MAX = 2
"""Changes of the table's size in one block: its least size since the last block, then its size (RFC 7541, 4.2)."""
STREAMS_PER_CONTROL = 16
"""New settings of windows reach every open stream. This many streams cost as much as one frame without content."""
BURST = 10
"""A rate may be exceeded in a burst of this many seconds' worth."""

Fields = tuple[tuple[bytes, bytes], ...]


class ConnectionFault(Exception):  # not an error of ours: the peer's
    """The peer broke the protocol; the connection ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamOverError(Exception):
    """The stream has ended, so nothing can be sent on it: the other side or its connection is gone."""


class MalformedError(Exception):
    """A message that is malformed in the words of RFC 9113: its stream is reset with PROTOCOL_ERROR."""


class Allowance:
    """A rate with a burst. `take` returns False when it is used up."""

    def __init__(self, per_s: int, now_s: float) -> None:
        self._per_s = per_s
        self._left = float(per_s * BURST)
        self._at_s = now_s

    def take(self, now_s: float, count: int = 1) -> bool:
        self._left = min(self._per_s * BURST, self._left + (now_s - self._at_s) * self._per_s) - count
        self._at_s = now_s
        return self._left >= 0


class _CountingTable(HeaderTable):
    """Counts its changes: a block means the same as long as there are none."""

    changes = 0
    resizes = 0
    """In the block that is being decoded."""

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, size: int) -> None:
        self.changes += 1
        self.resizes += 1
        if self.resizes > RESIZES_MAX:
            raise HPACKError("the table changes its size again and again")
        cast(Any, HeaderTable).maxsize.fset(self, size)


class Block:
    """A field block, decoded."""

    __slots__ = ("fields", "meaning")

    def __init__(self, fields: Fields) -> None:
        self.fields: Final = fields
        self.meaning: Any = None
        """What the side that serves has made of the fields; None: nothing yet."""


class FieldDecoder:
    """The header decoder of a connection. Blocks that come again are not decoded again."""

    def __init__(self, header_bytes_max: int) -> None:
        self._decoder = Decoder(max_header_list_size=header_bytes_max)
        self._table = self._decoder.header_table = _CountingTable()
        self.known: dict[bytes, Block] = {}
        """Encoded blocks, as `decode` would decode them now."""
        self._known_bytes = 0

    def decode(self, data: bytes) -> Block:
        """Decode a block that is not known. Raises ConnectionFault: after an error the two sides' tables differ."""
        changes, self._table.resizes = self._table.changes, 0
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(data, raw=True))
        except HPACKError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"header fields: {error}") from error
        block = Block(fields)
        if self._table.changes != changes:
            self._forget()
        else:
            self._keep(data, block)
        return block

    def _forget(self) -> None:
        self.known.clear()
        self._known_bytes = 0

    def _keep(self, data: bytes, block: Block) -> None:
        size = len(data) + 2 * size_of(block.fields)
        if size > BLOCKS_KEPT_BYTES // 4:
            return
        if len(self.known) >= BLOCKS_KEPT or self._known_bytes + size > BLOCKS_KEPT_BYTES:
            self._forget()
        self.known[data] = block
        self._known_bytes += size


def size_of(fields: Fields) -> int:
    """The size of decoded fields (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + FIELD_BYTES for name, value in fields)


class Stream:
    """Flow control and state of one stream. Subclasses receive what comes."""

    __slots__ = (
        "connection",
        "local_ended",
        "over",
        "receive_window",
        "remote_ended",
        "send_window",
        "stream_id",
        "unread_bytes",
    )

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.connection: Final = connection
        self.stream_id: Final = stream_id
        self.send_window = connection.peer_window
        """Bytes that the peer still takes."""
        self.receive_window = connection.limits.stream_window_bytes
        """Bytes that the peer may still send."""
        self.unread_bytes = 0
        """Bytes of complete messages that were not read yet."""
        self.remote_ended = False
        self.local_ended = False
        self.over = False
        """Nothing is sent or received any more."""

    def take_fields(self, fields: Fields, *, end: bool) -> None:
        """A further field block. Raises MalformedError."""
        raise NotImplementedError

    def take_data(self, data: bytes) -> None:
        raise NotImplementedError

    def take_whole(self, data: bytes) -> bool:
        """As `take_data` and the peer's end, if this side can serve the whole call by that at once. False: nothing was
        taken."""
        return False

    def take_end(self) -> None:
        """The peer has ended its side. Raises MalformedError."""
        raise NotImplementedError

    def cut(self, code: ErrorCode | None) -> None:
        """The peer reset the stream, or (None) its connection is gone. The stream is already `over`."""
        raise NotImplementedError

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes as DATA, as far as windows allow; one call at a time. `last`: this side sends no more. Raises
        StreamOverError when it is over."""
        if self.over:
            raise StreamOverError
        if self.send_now(data, last=last):
            return
        connection, size = self.connection, len(data)
        view, at = memoryview(data), 0
        while at < size:
            room = min(wire.FRAME_BYTES, self.send_window, connection.send_window, size - at)
            if room <= 0 or connection.paused:
                await connection.wait_for_room(self)
                if self.over:
                    raise StreamOverError
                continue
            at += room
            self._put_data(view[at - room : at], last=last and at == size)

    def send_now(self, data: bytes, *, last: bool = False) -> bool:
        """Send bytes as `send` does, if it need not wait. False: it would, or the stream is over; nothing was sent. Not
        while a `send` waits."""
        size = len(data)
        if self.over or size > self.send_window or not self.connection.can_send(size):
            return False
        if size <= wire.FRAME_BYTES:
            self._put_data(data, last=last)
        else:
            view = memoryview(data)
            for at in range(0, size, wire.FRAME_BYTES):
                self._put_data(view[at : at + wire.FRAME_BYTES], last=last and at + wire.FRAME_BYTES >= size)
        return True

    def _put_data(self, data: bytes | memoryview, *, last: bool) -> None:
        size, connection = len(data), self.connection
        flags = wire.END_STREAM if last else 0
        if last:
            self.local_ended = True
        self.send_window -= size
        connection.send_window -= size
        if size < COPIED_BYTES:
            connection.put(wire.frame(wire.DATA, flags, self.stream_id, bytes(data)))
        else:
            connection.put(wire.data_head(self.stream_id, size, flags))
            connection.put(data)


class Connection(asyncio.Protocol):
    """The side of HTTP/2 that both roles share. `limits`: what the peer may cost. `turns`: the server's; a client's
    connection has its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, turns: Turns) -> None:
        now_s = loop.time()
        self.loop = loop
        self.limits = limits
        self.turns: Final = turns
        self.transport: Any = None
        self.streams: dict[int, Any] = {}
        self.send_window = wire.WINDOW_DEFAULT
        self.peer_window = wire.WINDOW_DEFAULT
        self.peer_streams_max = wire.STREAM_ID_MAX
        self.paused = False
        """The transport holds as many unsent bytes as it may."""
        self.unread_bytes = 0
        self.heard_s = now_s
        self.opened_s = now_s
        self.ready = False
        """The peer's first settings have come."""
        self.closing_s: float | None = None
        """When this side began to close the connection."""
        self.pinged_s: float | None = None
        self._asking: list[Callable[[], None]] = []
        """Called when anything comes."""
        self.last_peer_stream = 0
        self._receive_window = limits.connection_window_bytes
        self._decoder = FieldDecoder(limits.header_bytes_max)
        self.work_left = 0
        """Of what the connection may handle now, in small frames' worth."""
        self.waits = False
        """It has whole frames and waits for its turn. Reading is paused until then."""
        self._input = b""
        self._at = 0
        """The frames that wait are in `_input` from this place on."""
        self._rest = bytearray()
        """The beginning of a frame, or, while frames wait, what came behind them."""
        self._need = 0
        """Bytes in `_rest` that make the next frame whole."""
        self._block: tuple[int, bool, bytearray] | None = None
        """Stream, its end, and what came of a field block that continues."""
        self._ended: OrderedDict[int, bool] = OrderedDict()
        """Streams that ended last -> whether this side ended them without the peer, so that it may not know yet."""
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._waiting: dict[Stream, asyncio.Future[None]] = {}
        self._resets = Allowance(limits.resets_per_s, now_s)
        self._controls = Allowance(limits.controls_per_s, now_s)
        self._replies_left = limits.replies_bytes_max

    # -- roles

    def open_stream(self, stream_id: int, block: Block, *, end: bool) -> None:
        """A field block for a stream that is not open."""
        raise NotImplementedError

    def gone(self, error: Exception | None) -> None:
        """The connection is lost, by this error; all its streams were cut."""

    def greeted(self) -> None:
        """The peer's first settings have come."""

    # -- the transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(self.limits.unsent_bytes_max)
        values = {
            wire.ENABLE_PUSH: 0,
            wire.MAX_CONCURRENT_STREAMS: self.limits.streams_max,
            wire.INITIAL_WINDOW_SIZE: self.limits.stream_window_bytes,
            wire.MAX_HEADER_LIST_SIZE: self.limits.header_bytes_max,
        }
        self.put(self.greeting() + wire.settings(values))
        self.put(wire.window_update(0, self.limits.connection_window_bytes - wire.WINDOW_DEFAULT))

    def greeting(self) -> bytes:
        """The bytes in front of the first settings."""
        return b""

    def connection_lost(self, error: Exception | None) -> None:
        self._drop_rest()
        self.transport = None
        for stream in list(self.streams.values()):
            self.forget(stream, peer_knows=True)
            stream.cut(None)
        self.gone(error)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._replies_left = self.limits.replies_bytes_max
        self._wake_all()

    # -- writing

    def put(self, data: bytes | memoryview) -> None:
        """Write at the end of this pass, joined with what else is written until then."""
        if not self._out:
            self.loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        out, self._out, self._out_bytes = self._out, [], 0
        transport = self.transport
        # One that has failed and has not told of it yet would log a warning for each write.
        if out and transport is not None and self.closing_s is None and not transport.is_closing():
            transport.write(b"".join(out) if len(out) > 1 else out[0])

    def _reply(self, data: bytes) -> None:
        """Write what the peer demanded. A peer that demands and does not read is cut off."""
        if self.paused:
            self._replies_left -= len(data)
            if self._replies_left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many demands, and the replies are not read")
        self.put(data)

    def can_send(self, size: int) -> bool:
        return size <= self.send_window and not self.paused and self.transport is not None

    async def wait_for_room(self, stream: Stream) -> None:
        """Return when the stream may be able to send, or is over."""
        assert stream not in self._waiting, "a stream has one writer"
        waiter = self._waiting[stream] = self.loop.create_future()
        try:
            await waiter
        finally:
            self._waiting.pop(stream, None)

    def _wake(self, stream: Stream) -> None:
        waiter = self._waiting.get(stream)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _wake_all(self) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(None)

    def shut(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Say goodbye and close. Idempotent."""
        if self.transport is None or self.closing_s is not None:
            return
        self.put(wire.goaway(self.last_peer_stream, code, reason))
        self._flush()
        self._drop_rest()
        self.transport.resume_reading()  # TLS closes properly only while it reads
        self.closing_s = self.loop.time()
        self.transport.close()

    def cut_off(self) -> None:
        """Close at once; what is unsent is lost."""
        if self.transport is not None:
            self._drop_rest()
            self.transport.abort()

    def ping(self) -> None:
        self.pinged_s = self.loop.time()
        self.put(wire.frame(wire.PING, 0, 0, bytes(8)))

    def ask(self, answers: Callable[[], None]) -> None:
        """Call `answers` once anything comes from the peer, which gets a ping for that; never if the connection ends
        before. A late answer does not end the connection: much may lie before the ping on a slow way."""
        self._asking.append(answers)
        if len(self._asking) == 1:
            self.put(wire.frame(wire.PING, 0, 0, bytes(8)))

    # -- streams

    def forget(self, stream: Stream, *, peer_knows: bool) -> None:
        """A stream has ended. `peer_knows`: it cannot send any more."""
        if self.streams.pop(stream.stream_id, None) is not None:
            stream.over = True
            self._note_ended(stream.stream_id, ignore=not peer_knows)
            if self._waiting:
                self._wake(stream)

    def _note_ended(self, stream_id: int, *, ignore: bool) -> None:
        self._ended[stream_id] = ignore
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream from this side; what still comes of it is ignored."""
        self.put(wire.rst_stream(stream_id, code))
        stream = self.streams.get(stream_id)
        if stream is not None:
            self.forget(stream, peer_knows=False)
            stream.cut(code)
        else:
            self._note_ended(stream_id, ignore=True)

    def fault(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream because its peer broke a rule. Counts like a stream that the peer has reset: either way it
        can make this side begin work without end (CVE-2023-44487, CVE-2025-8671)."""
        self.count_reset()
        self.reset(stream_id, code)

    def count_reset(self) -> None:
        """The peer has ended a call before its answer. Raises ConnectionFault."""
        if not self._resets.take(self.heard_s):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset")

    def read(self, stream: Stream, size: int) -> None:
        """Bytes of a stream were taken by its reader, and the peer may send as many again."""
        stream.unread_bytes -= size
        self.unread_bytes -= size
        if not stream.over:
            self._grant(stream)
        self._grant_connection()

    def _grant(self, stream: Stream) -> None:
        window = self.limits.stream_window_bytes
        free = window - stream.unread_bytes - stream.receive_window
        if free >= window >> 2 and not stream.remote_ended:
            stream.receive_window += free
            self.put(wire.window_update(stream.stream_id, free))

    def _grant_connection(self) -> None:
        window = self.limits.connection_window_bytes
        free = window - self.unread_bytes - self._receive_window
        if free >= window >> 2:
            self._receive_window += free
            self.put(wire.window_update(0, free))

    # -- reading

    def data_received(self, data: bytes) -> None:
        if self.closing_s is not None:
            return
        rest = self._rest
        if rest or self.waits:
            rest += data
            if self.waits or len(rest) < self._need:
                return
            data = bytes(rest)
            rest.clear()
        self._input, self._at = data, 0
        work = self.turns.work()
        if work:
            self._handle(work)
        else:
            self._wait()

    def _wait(self) -> None:
        self.waits = True
        self.turns.wait_to_read(self)
        self.transport.pause_reading()

    def _handle(self, work: int) -> None:
        """Handle frames of `_input` as far as `work` goes; the rest waits."""
        self.heard_s = self.loop.time()
        self.pinged_s = None  # also for what waited: this side was late, not the peer
        if self._asking:
            asking, self._asking = self._asking, []
            for answers in asking:
                answers()
        self.work_left = work
        try:
            self._at = self._take(self._input, self._at)
        except ConnectionFault as fault:
            self.shut(fault.code, fault.reason)
            return
        finally:
            self.turns.spend(work - self.work_left)
        left = len(self._input) - self._at
        if self.closing_s is not None or self.transport is None:
            left = 0
        elif left and left >= self._need:
            self._wait()
            return
        if left:
            self._rest += self._input[self._at :]
        self._input, self._at = b"", 0

    def read_on(self, work: int) -> None:
        """Its turn has come: handle more of what was read. When nothing whole is left, reading goes on."""
        self.waits = False
        if self._rest:
            self._input, self._at = self._input[self._at :] + self._rest, 0
            self._rest.clear()
        try:
            self._handle(work)
        except Exception:
            self.cut_off()  # as the loop does with what raises while it reads: what is left begins with no frame
            raise
        if not self.waits and self.transport is not None:
            self.transport.resume_reading()

    def _drop_rest(self) -> None:
        """Nothing that was read is handled any more."""
        self._input, self._at = b"", 0
        self._rest.clear()
        self.waits = False
        self.turns.leave(self)

    def take_preface(self, data: bytes) -> int:
        """Bytes in front of the first frame that are in `data`; -1: not all of them yet."""
        return 0

    def _take(self, data: bytes, at: int) -> int:
        """Handle the frames from a place on that are complete, as far as `work_left` goes; returns how far it came."""
        end = len(data)
        if not self.ready and not at:
            at = self.take_preface(data)
            if at < 0:
                self._need = end + 1
                return 0
        while True:
            if end - at < wire.HEADER_BYTES:
                self._need = wire.HEADER_BYTES
                return at
            size_and_kind, flags, stream_id = wire.frame_head(data, at)
            size, kind = size_and_kind >> 8, size_and_kind & 0xFF
            if size > wire.FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes, {wire.FRAME_BYTES} allowed"
                )
            stop = at + wire.HEADER_BYTES + size
            if stop > end or self.work_left <= 0:
                self._need = stop - at
                return at
            self.work_left -= 1
            stream_id &= wire.STREAM_ID_MAX
            payload = data[at + wire.HEADER_BYTES : stop]
            at = stop
            if self._block is not None and (kind != wire.CONTINUATION or stream_id != self._block[0]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a field block was interrupted")
            if not self.ready and kind != wire.SETTINGS:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            if kind == wire.DATA:
                self._take_data(flags, stream_id, payload)
            elif kind == wire.WINDOW_UPDATE:
                self._take_window(stream_id, payload)
            elif kind == wire.HEADERS:
                self._take_headers(flags, stream_id, payload)
            else:
                self._control()
                take = self._OTHERS.get(kind)
                if take is not None:
                    take(self, flags, stream_id, payload)
            if self.closing_s is not None:
                return end

    def _control(self, count: int = 1) -> None:
        if not self._controls.take(self.heard_s, count):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames without content")

    def _known_idle(self, stream_id: int) -> bool:
        """Whether no such stream was opened yet."""
        raise NotImplementedError

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA without a stream")
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
        if flags & wire.PADDED:
            if not size or payload[0] >= size:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
            payload = payload[1 : size - payload[0]]
        if not payload and not flags & wire.END_STREAM:
            self._control()
        stream = self.streams.get(stream_id)
        if stream is None or stream.remote_ended:
            self._take_stray(stream_id, stream, "DATA")
            self._grant_connection()
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self.fault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if not (flags & wire.END_STREAM and stream.take_whole(payload)):
            if payload:
                stream.take_data(payload)
            if flags & wire.END_STREAM and not stream.over:
                self.end_of(stream)
            if not stream.over:
                self._grant(stream)
        self._grant_connection()

    def end_of(self, stream: Any) -> None:
        """The peer has ended its side of a stream."""
        stream.remote_ended = True
        try:
            stream.take_end()
        except MalformedError:
            self.fault(stream.stream_id, ErrorCode.PROTOCOL_ERROR)

    def _take_stray(self, stream_id: int, stream: Stream | None, what: str) -> None:
        """A frame for a stream that cannot take it."""
        if stream is not None:
            self.fault(stream_id, ErrorCode.STREAM_CLOSED)
        elif self._known_idle(stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} for stream {stream_id}, which was never opened")
        elif not self._ended.get(stream_id, False):
            self.fault(stream_id, ErrorCode.STREAM_CLOSED)

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS without a stream")
        if flags & wire.PADDED:
            if not payload or payload[0] >= len(payload):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
            payload = payload[1 : len(payload) - payload[0]]
        if flags & wire.WITH_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            if int.from_bytes(payload[:4], "big") & wire.STREAM_ID_MAX == stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        end = bool(flags & wire.END_STREAM)
        if flags & wire.END_HEADERS:
            self._take_block(stream_id, payload, end=end)
        else:
            self._block = (stream_id, end, bytearray(payload))
            self._check_block(len(payload))

    def _check_block(self, size: int) -> None:
        if size > self.limits.header_bytes_max:
            text = f"header fields of more than {self.limits.header_bytes_max} bytes"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, text)

    def _take_continuation(self, flags: int, _: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        stream_id, end, block = self._block
        block += payload
        self._check_block(len(block))
        if flags & wire.END_HEADERS:
            self._block = None
            self._take_block(stream_id, bytes(block), end=end)

    def _take_block(self, stream_id: int, data: bytes, *, end: bool) -> None:
        block = self._decoder.known.get(data)
        if block is None:
            self._check_block(len(data))
            block = self._decoder.decode(data)  # also of streams that are over: the table must keep up
            self.work_left -= len(block.fields) + len(data) // BYTES_PER_WORK
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._ended.get(stream_id, False):
                return
            if stream_id in self._ended:
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS for stream {stream_id}, which has ended")
            self.work_left -= OPENING_WORK
            self.open_stream(stream_id, block, end=end)
        elif stream.remote_ended:
            self.fault(stream_id, ErrorCode.STREAM_CLOSED)
        else:
            try:
                stream.take_fields(block.fields, end=end)
            except MalformedError:
                self.fault(stream_id, ErrorCode.PROTOCOL_ERROR)
            if end and not stream.over:
                self.end_of(stream)

    def _take_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            self.fault(stream_id, ErrorCode.FRAME_SIZE_ERROR)
        elif int.from_bytes(payload[:4], "big") & wire.STREAM_ID_MAX == stream_id:
            self.fault(stream_id, ErrorCode.PROTOCOL_ERROR)

    def _take_reset(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM must have four bytes")
        if not stream_id or (self._known_idle(stream_id) and stream_id not in self.streams):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM for a stream that was never opened")
        self.count_reset()
        stream = self.streams.get(stream_id)
        if stream is not None:
            self.work_left -= ENDING_WORK
            self.forget(stream, peer_knows=True)
            number = int.from_bytes(payload, "big")
            stream.cut(ErrorCode(number) if number <= max(ErrorCode) else ErrorCode.INTERNAL_ERROR)

    def _take_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS for a stream")
        if flags & wire.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of settings with content")
            if not self.ready:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
            return
        if len(payload) % 6:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a length that is no multiple of six")
        self.work_left -= len(payload) // BYTES_PER_WORK
        window = self.peer_window
        for at in range(0, len(payload), 6):
            name, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            self._check_setting(name, value)
            if name == wire.INITIAL_WINDOW_SIZE:
                window = value
        if window != self.peer_window:
            self._move_windows(window)
        if not self.ready:
            self.ready = True
            self.greeted()
        self._reply(wire.frame(wire.SETTINGS, wire.ACK, 0))

    def _move_windows(self, window: int) -> None:
        self._control(len(self.streams) // STREAMS_PER_CONTROL)
        more, self.peer_window = window - self.peer_window, window
        for stream in self.streams.values():
            stream.send_window += more
            if stream.send_window > wire.WINDOW_MAX:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if more > 0:
            self._wake_all()

    def _check_setting(self, name: int, value: int) -> None:
        if name == wire.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH = {value}, not 0 or 1")
        if name == wire.INITIAL_WINDOW_SIZE:
            if value > wire.WINDOW_MAX:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE = {value}")
        elif name == wire.MAX_CONCURRENT_STREAMS:
            self.peer_streams_max = value
        elif name == wire.MAX_FRAME_SIZE and not wire.FRAME_BYTES <= value <= wire.FRAME_BYTES_MOST:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE = {value}")

    def _take_push(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not allowed here")

    def _take_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING for a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING must have eight bytes")
        if not flags & wire.ACK:
            self._reply(wire.frame(wire.PING, wire.ACK, 0, payload))

    def _take_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY for a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self.peer_goes_away(int.from_bytes(payload[:4], "big") & wire.STREAM_ID_MAX)

    def peer_goes_away(self, last_stream_id: int) -> None:
        """The peer takes no streams above this one any more."""

    def _take_window(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have four bytes")
        more = int.from_bytes(payload, "big") & wire.WINDOW_MAX
        if not stream_id:
            empty = self.send_window <= 0
            self.send_window += more
            if not more or self.send_window > wire.WINDOW_MAX:
                code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
                raise ConnectionFault(code, f"WINDOW_UPDATE by {more}")
            if empty:  # else nobody waits for it
                self._wake_all()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._known_idle(stream_id):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE for a stream that was never opened")
            return
        stream.send_window += more
        if not more:
            self.fault(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream.send_window > wire.WINDOW_MAX:
            self.fault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        elif self._waiting:
            self._wake(stream)

    _OTHERS: Final = {
        wire.CONTINUATION: _take_continuation,
        wire.PRIORITY: _take_priority,
        wire.RST_STREAM: _take_reset,
        wire.SETTINGS: _take_settings,
        wire.PUSH_PROMISE: _take_push,
        wire.PING: _take_ping,
        wire.GOAWAY: _take_goaway,
    }
