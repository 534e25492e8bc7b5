"""What one connection may cost. Every limit protects against a known attack or accident."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    message_bytes_max: int = 4 << 20
    """The largest gRPC message that is read. A larger one ends its call with RESOURCE_EXHAUSTED."""
    streams_max: int = 1_000
    """Calls under way on a connection; further ones are refused and may be tried again."""
    calls_max: int = 10_000
    """Calls under way on all connections of a server."""
    stream_window_bytes: int = 4 << 20
    """Complete messages that wait in a stream for its handler, in bytes. A message larger than this still arrives. A
    stream moves at most this much in a round trip: 40 MB a second over 100 ms."""
    connection_window_bytes: int = 32 << 20
    """The same for all streams of a connection together."""
    header_bytes_max: int = 32 << 10
    """A call's header fields: encoded, and decoded with 32 bytes a field (against decompression bombs)."""
    held_bytes_max: int = 256 << 20
    """Requests in memory that no handler has taken yet, of all connections of a server. Above it larger calls are
    refused."""
    requests_bytes: int = 256 << 10
    """Requests that a server begins in one pass of the loop, of all connections; the one that reaches it is still
    taken. Some 5 ms if they are nothing but small elements."""
    unsent_bytes_max: int = 4 << 20
    """Above this many unsent bytes writers of the connection wait (against readers that do not read)."""
    replies_bytes_max: int = 256 << 10
    """Unsent bytes of replies that a peer can demand without limit (pings, settings); more end the connection."""
    resets_per_s: int = 500
    """Streams that a peer may cancel in a second, after a first burst of ten times as many (CVE-2023-44487)."""
    controls_per_s: int = 1_000
    """Frames that carry no call, in a second, after a first burst of ten times as many. Window updates are free."""
    handshake_s: float = 10.0
    """Until TLS, the preface and the first settings have come."""
    message_s: float = 60.0
    """From the first byte of a message, or the opening of a stream, until a message is whole (`overdue_s`). Otherwise
    calls that never begin would hold all places and all memory for requests."""
    idle_s: float = 0.0
    """A connection without a call is closed after this time; 0: never."""
    ask_alive_s: float = 60.0
    """A connection that was silent for this long gets a ping."""
    ask_alive_unary_s: float = 60.0
    """The same of a client whose only calls bring one answer each: their callers bound how long they wait."""
    dead_s: float = 20.0
    """A connection is closed this long after a ping without any answer."""
    linger_s: float = 5.0
    """A connection that is being closed is cut after this time, whether everything was sent or not."""
