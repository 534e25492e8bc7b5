"""gRPC on top of HTTP/2 streams: messages, metadata, time-outs, statuses (grpc's PROTOCOL-HTTP2). Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections import deque
from collections.abc import Iterable
from math import ceil
from urllib.parse import quote, unquote

from tickwheel.transport import wire
from tickwheel.transport.connection import Fields

PREFIX_BYTES = 5
PART_BYTES = 4 << 10
"""Smaller parts of a message are joined as they come: kept one by one they would take many times their bytes."""
TIMEOUT_UNITS_S = {b"H": 3_600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
TIMEOUT_MOST = 99_999_999
"""A time-out has up to eight digits."""
RESERVED = frozenset({b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"})
"""Fields that are not metadata of the caller."""
_TIMEOUT = re.compile(rb"[0-9]{1,8}[HMSmun]")
_KEY = re.compile(r"[0-9a-z_.-]+")
_PLAIN = "".join(chr(c) for c in range(0x20, 0x7F) if c != ord("%"))

MetadataPairs = tuple[tuple[str, str | bytes], ...]


class MessageError(Exception):
    """A message is compressed, or larger than allowed."""

    def __init__(self, *, compressed: bool, size: int) -> None:
        super().__init__()
        self.compressed = compressed
        self.size = size


class Messages:
    """The gRPC messages of one stream, cut from its bytes: a flag, four bytes of length, the message."""

    __slots__ = ("_bytes_max", "_need", "_parts", "partial_bytes", "ready")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        """What came of a message that is not whole."""
        self.partial_bytes = 0
        self._need = PREFIX_BYTES
        self.ready: deque[bytes] = deque()

    def take(self, data: bytes) -> int:
        """Add bytes; returns how many bytes of messages became ready. Raises MessageError."""
        parts = self._parts
        if not parts:
            size = len(data)
            if size >= 5 and not data[0] and int.from_bytes(data[1:5], "big") == size - 5 <= self._bytes_max:
                self.ready.append(data[5:])  # one frame, one message: nearly always
                return size
        self.partial_bytes += len(data)
        if parts and len(parts[-1]) < PART_BYTES:
            parts[-1] += data
        else:
            parts.append(data)
        if self.partial_bytes < self._need:
            return 0
        data = b"".join(parts)
        parts.clear()
        at, end = 0, len(data)
        self._need = PREFIX_BYTES
        while end - at >= PREFIX_BYTES:
            if data[at]:
                raise MessageError(compressed=True, size=0)
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if size > self._bytes_max:
                raise MessageError(compressed=False, size=size)
            stop = at + PREFIX_BYTES + size
            if stop > end:
                self._need = stop - at
                break
            self.ready.append(data[at + PREFIX_BYTES : stop])
            at = stop
        self.partial_bytes = end - at
        if at < end:
            parts.append(data[at:])
        return at


def prefixed(message: bytes) -> bytes:
    """A message with its prefix."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def timeout_s(text: bytes) -> float | None:
    """The value of grpc-timeout in seconds; None if it is none."""
    if _TIMEOUT.fullmatch(text) is None:
        return None
    return int(text[:-1]) * TIMEOUT_UNITS_S[text[-1:]]


def timeout_block(seconds: float) -> bytes:
    """The field for a time-out, rounded up to two digits at least: blocks that come again are cheap for the server."""
    ms = max(1, ceil(seconds * 1_000))
    step = 100 if ms > 1_000 else 10 if ms > 100 else 1
    ms = min(-(-ms // step) * step, TIMEOUT_MOST * 1_000)
    return wire.field(b"grpc-timeout", b"%dm" % ms if ms <= TIMEOUT_MOST else b"%dS" % -(-ms // 1_000))


def metadata_of(fields: Fields) -> MetadataPairs:
    """The caller's metadata among the fields of a block. Raises ValueError for one that cannot be decoded."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name[:1] == b":" or name in RESERVED:
            continue
        key = name.decode("ascii")
        if key.endswith("-bin"):
            found += [(key, _decoded(key, part)) for part in value.split(b",")]
        else:
            found.append((key, value.decode("ascii")))
    return tuple(found)


def _decoded(key: str, text: bytes) -> bytes:
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{key}: {error}") from error


def metadata_block(pairs: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Metadata as header fields. Raises ValueError for a key or value that cannot be sent."""
    out = []
    for key, value in pairs:
        if _KEY.fullmatch(key) is None:
            raise ValueError(f"metadata key {key!r}: only 0-9 a-z _ . - are allowed")
        if key.endswith("-bin"):
            data = value.encode() if isinstance(value, str) else value
            out.append(wire.field(key.encode(), base64.b64encode(data).rstrip(b"=")))
        else:
            text = value if isinstance(value, str) else value.decode("ascii")
            if not (text.isascii() and text.isprintable()):
                raise ValueError(f"metadata {key}: only printable ASCII is allowed")
            out.append(wire.field(key.encode(), text.encode()))
    return b"".join(out)


def status_block(code: int, text: str = "") -> bytes:
    """The fields with which a call ends."""
    block = wire.field(b"grpc-status", b"%d" % code)
    if text:
        block += wire.field(b"grpc-message", quote(text, safe=_PLAIN).encode())
    return block


def status_text(value: bytes) -> str:
    """The text of a grpc-message field."""
    return unquote(value.decode("ascii", "replace"))
