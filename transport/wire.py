"""HTTP/2 frames and header fields as bytes (RFC 9113, RFC 7541). Pure.

Field blocks written here use literals without indexing and the static table alone, so that the encoder has no state
and a block can be made once for all connections.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
"""Bytes in front of a frame's payload: length, kind, flags, stream id."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

_HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

WINDOW_DEFAULT = 65_535
"""Bytes of the flow control windows before settings and updates say otherwise."""
WINDOW_MAX = (1 << 31) - 1
FRAME_BYTES = 16_384
"""Payload of a frame that every receiver takes. Larger ones are neither allowed nor sent: they gain nothing here."""
FRAME_BYTES_MOST = (1 << 24) - 1
STREAM_ID_MAX = (1 << 31) - 1


class ErrorCode(IntEnum):
    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


_FRAME = struct.Struct(">LBL")
_FRAME_HEAD = _FRAME.pack
frame_head = _FRAME.unpack_from
"""What stands in front of a frame's payload: size << 8 | kind, flags, stream id with its reserved bit."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame; its payload must not exceed what the receiver takes."""
    return _FRAME_HEAD(len(payload) << 8 | kind, flags, stream_id) + payload


def data_head(stream_id: int, size: int, flags: int = 0) -> bytes:
    """What stands in front of the payload of a DATA frame."""
    return _FRAME_HEAD(size << 8 | DATA, flags, stream_id)


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode())


def integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """An integer as in RFC 7541, 5.1; `first` holds the bits in front of the prefix."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((first | value,))
    found = bytearray((first | most,))
    value -= most
    while value >= 128:
        found.append(value % 128 + 128)
        value //= 128
    found.append(value)
    return bytes(found)


def field(name: bytes, value: bytes) -> bytes:
    """A header field as a literal without indexing and without Huffman coding."""
    return b"\x00" + integer(len(name), 7) + name + integer(len(value), 7) + value


def indexed(index: int) -> bytes:
    """A header field of the static table (RFC 7541, appendix A)."""
    return integer(index, 7, 0x80)


STATUS_200 = indexed(8)


def fields(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(field(name, value) for name, value in pairs)


class Answer:
    """The frames of a whole answer: HEADERS, one gRPC message as DATA, and HEADERS that end the stream."""

    def __init__(self, first: bytes, last: bytes) -> None:
        """Field blocks of both HEADERS."""
        self._first = first
        self._last = last
        self._before = struct.Struct(f">LBL{len(first)}sLBLBL").pack
        self._behind = struct.Struct(f">LBL{len(last)}s").pack
        self._first_size = len(first) << 8 | HEADERS
        self._last_size = len(last) << 8 | HEADERS

    def frames(self, stream_id: int, message: bytes) -> bytes:
        """`message` and its prefix must fit one frame."""
        size = len(message)
        before = self._before(
            self._first_size, END_HEADERS, stream_id, self._first,
            (size + 5) << 8 | DATA, 0, stream_id, 0, size,
        )  # fmt: skip
        return before + message + self._behind(self._last_size, END_HEADERS | END_STREAM, stream_id, self._last)


def header_frames(stream_id: int, block: bytes, *, end_stream: bool) -> bytes:
    """A field block as HEADERS and, if it does not fit, CONTINUATION frames."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    pieces = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    out = [frame(HEADERS, flags, stream_id, pieces[0])]
    out += [frame(CONTINUATION, 0, stream_id, piece) for piece in pieces[1:-1]]
    out.append(frame(CONTINUATION, END_HEADERS, stream_id, pieces[-1]))
    return b"".join(out)
