"""HTTP connections of the console and the gateway, bounded: idle and slow callers do not take the places of others.

uvicorn counts connections against `limit_concurrency`, but sets no time in which a request has to arrive, or an answer
to be taken. Here a request has RECEIVE_S, an answer that nobody reads has SEND_S, and one address has at most half of
the places. What is no HTTP is answered with the reason and ends its connection; it causes no traceback, and one line of
the log a minute.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import sys
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_S = 30.0
"""From a connection, or the first byte of a further request on it, until the request is there with its body. Between
two requests uvicorn's `timeout_keep_alive` counts."""
SEND_S = 60.0
"""In which a caller has to make room in full buffers, or to take the end of an answer whose connection ends."""
TOLD_EVERY_S = 60.0
"""Between two warnings of one kind."""

DESCRIPTORS_WANTED = 16_384
"""Of the process. Callers whose TLS handshake is under way need some before anything counts them."""
DESCRIPTORS_KEPT = 1_000
"""For users' connections to the nodes, for files, and for those callers."""

_DESCRIPTORS = resource.RLIMIT_NOFILE
_ARRIVING = (h11.IDLE, h11.SEND_BODY)
_UNANSWERED = (h11.IDLE, h11.SEND_RESPONSE)


class Seldom(logging.Filter):
    """Lets a warning of each kind pass once in TOLD_EVERY_S: anybody may cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Of logging. A kind is a text before its arguments are in it."""
        if record.levelno != logging.WARNING:
            return True
        now_s = time.monotonic()
        if now_s - self._told_s.get(record.msg, -TOLD_EVERY_S) < TOLD_EVERY_S:
            return False
        self._told_s[record.msg] = now_s
        return True

    def forget(self) -> None:
        """The next warning of each kind passes."""
        self._told_s.clear()


_log = logging.getLogger("tickwheel.http")
SELDOM = Seldom()
_log.addFilter(SELDOM)


def places(wanted: int) -> int:
    """As many connections as the process has descriptors for; raises its soft limit."""
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_DESCRIPTORS))
    raised = min(hard, DESCRIPTORS_WANTED)
    if soft < raised:
        resource.setrlimit(_DESCRIPTORS, (int(raised), resource.getrlimit(_DESCRIPTORS)[1]))
    soft = max(soft, raised)
    return int(min(wanted, soft - min(DESCRIPTORS_KEPT, soft // 2)))


def tell_faults(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The exception handler of a loop that listens: without descriptors asyncio has a traceback for each connection
    that waits, thousands a second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context:
        _log.warning("no connection can be accepted now: %s", error.strerror)
    else:
        loop.default_exception_handler(context)


class LimitedHttp(H11Protocol):
    """One connection."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        self.logger = _log
        super().connection_made(transport)
        places = self.limit_concurrency
        if places is not None and self.client is not None:
            peers = (getattr(other, "client", None) for other in self.connections)
            if sum(peer is not None and peer[0] == self.client[0] for peer in peers) > max(1, places // 2):
                _log.warning("closed a connection of %s: more than %d from one address", self._peer, places // 2)
                transport.close()
                return
        self._deadline = self.loop.call_later(RECEIVE_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        super().data_received(data)
        self._set_deadline(self.conn.their_state in _ARRIVING)

    def on_response_complete(self) -> None:
        """Of uvicorn: a request that came before the answer to the one before is read now."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()
        state = self.conn.their_state
        self._set_deadline(state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0])))

    def handle_events(self) -> None:
        """Of uvicorn. A request with two lengths ends its connection, as RFC 9112 (6.1) asks: whoever passed it on may
        have read another one than this."""
        super().handle_events()
        if self.cycle is not None and {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn, where the parser has refused what came."""
        error = sys.exception()
        if self.cycle is not None and not self.cycle.response_complete:  # its answer would go to a closed connection
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in _UNANSWERED:
            super().send_400_response(f"{msg} {error}\n"[:500].encode("ascii", "replace").decode())
        self._close()

    def timeout_keep_alive_handler(self) -> None:
        """Of uvicorn: no further request came."""
        super().timeout_keep_alive_handler()
        self._close()

    def pause_writing(self) -> None:
        """Of asyncio: the caller does not read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Of asyncio."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._set_deadline(False)
        super().connection_lost(exc)
        self._forget_unread()

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "a socket"

    def _set_deadline(self, arriving: bool) -> None:
        if not arriving or self.transport.is_closing():
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_S, self._too_slow)

    def _close(self) -> None:
        """Once what is written has been read."""
        self.transport.close()
        self._await_reader()

    def _await_reader(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(SEND_S, self._not_taken)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        self._deadline = None
        _log.warning("closed a connection of %s: no whole request within %g s", self._peer, RECEIVE_S)
        self._close()

    def _not_taken(self) -> None:
        self._unread = None
        _log.warning("closed a connection of %s: nothing of an answer was read within %g s", self._peer, SEND_S)
        self.transport.abort()  # a close would wait until the rest is read
