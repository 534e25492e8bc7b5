"""HTTP connections of the console and the gateway, bounded: idle and slow callers do not take the places of others.

uvicorn counts connections against `limit_concurrency`, but sets no time in which a request has to arrive. Here it has
RECEIVE_S, and one address has at most half of the places.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger("tickwheel.http")

RECEIVE_S = 30.0
"""From a connection, or the first byte of a further request on it, until the request is there with its body. Between
two requests uvicorn's `timeout_keep_alive` counts."""
TOLD_EVERY_S = 60.0
"""Between two lines of the log about connections that were closed for one reason."""

_ARRIVING = (h11.IDLE, h11.SEND_BODY)


class LimitedHttp(H11Protocol):
    """One connection."""

    _told_s: ClassVar[dict[str, float]] = {}
    """Reason -> when it was logged last, by the monotonic clock; of all connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        super().connection_made(transport)
        places = self.limit_concurrency
        if places is not None and self.client is not None:
            peers = (getattr(other, "client", None) for other in self.connections)
            if sum(peer is not None and peer[0] == self.client[0] for peer in peers) > max(1, places // 2):
                self._close(f"more than {places // 2} connections from one address")
                return
        self._deadline = self.loop.call_later(RECEIVE_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        super().data_received(data)
        if self.conn.their_state not in _ARRIVING or self.transport.is_closing():
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self._close(f"no whole request within {RECEIVE_S:g} s")

    def _close(self, reason: str) -> None:
        self.transport.close()
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told_s[reason] = now_s
            _log.warning("closed a connection of %s: %s", self.client[0] if self.client else "a socket", reason)
