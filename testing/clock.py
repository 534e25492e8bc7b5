"""The clocks of clusters in memory."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TypedDict, Unpack

from tickwheel.client.errors import refused
from tickwheel.client.moments import span_ms_of
from tickwheel.testing.node import MemoryNode
from tickwheel.testing.virtual_time import MS

WAIT_S = 5.0
"""Real time that the clock gives handlers to end."""
EPOCH = datetime.fromtimestamp(0, UTC)


class Span(TypedDict, total=False):
    """Parts of a span of time; they add up."""

    days: float
    hours: float
    minutes: float
    seconds: float
    milliseconds: float


class _Shown:
    """What a clock shows."""

    def __init__(self, node: MemoryNode) -> None:
        self._node = node

    @property
    def now(self) -> datetime:
        """The cluster's time, in UTC."""
        return EPOCH + timedelta(milliseconds=self.now_ms)

    @property
    def now_ms(self) -> int:
        """The same in milliseconds since the Unix epoch."""
        return self._node.time.wall_ms()

    def _after(self, by: timedelta, span: Span) -> int:
        whole = by + timedelta(**span)
        if whole < timedelta(0):
            raise refused("by", whole, "0 or more: time does not go back")
        return self._node.time.now_ns + span_ms_of("by", whole) * MS

    def _at(self, at: datetime) -> int:
        left_ms = milliseconds_of("at", at) - self.now_ms
        if left_ms < 0:
            raise refused("at", at, f"{self.now} or later: time does not go back")
        return self._node.time.now_ns + left_ms * MS


class Clock(_Shown):
    """Stands still until it is moved. For tests with a loop."""

    async def advance(self, by: timedelta = timedelta(0), *, wait_s: float = WAIT_S, **span: Unpack[Span]) -> None:
        """Let so much time pass: `advance(minutes=30)`. All that is due meanwhile happens in order, each at its moment:
        messages are delivered, handlers run, leases end, retries come.

        Returns once nothing more happens. A handler of a Worker or of `Consumer.run` is waited for before time passes
        on, for `wait_s` of real time at most; one that waits for the test itself needs `wait_s=0`. Without a span no
        time passes, but for a message that is scheduled for now after a delivery at this very millisecond: it comes a
        millisecond later, and so does the clock. Raises RequestRefused for a negative span.
        """
        await self._pass_to(self._after(by, span), wait_s)

    async def advance_to(self, at: datetime, *, wait_s: float = WAIT_S) -> None:
        """As `advance`, to a moment with a time zone."""
        await self._pass_to(self._at(at), wait_s)

    async def _pass_to(self, until_ns: int, wait_s: float) -> None:
        self._node.know(asyncio.get_running_loop())
        await asyncio.wrap_future(self._node.begin(self._node.advance(until_ns, wait_s)))


class SyncClock(_Shown):
    """As Clock, for tests without a loop."""

    def advance(self, by: timedelta = timedelta(0), *, wait_s: float = WAIT_S, **span: Unpack[Span]) -> None:
        """As `Clock.advance`. Handlers run meanwhile in the threads of their workers."""
        self._pass_to(self._after(by, span), wait_s)

    def advance_to(self, at: datetime, *, wait_s: float = WAIT_S) -> None:
        """As `advance`, to a moment with a time zone."""
        self._pass_to(self._at(at), wait_s)

    def _pass_to(self, until_ns: int, wait_s: float) -> None:
        self._node.begin(self._node.advance(until_ns, wait_s)).result()


def milliseconds_of(field: str, at: datetime) -> int:
    """A moment in milliseconds since the Unix epoch, rounded up. Raises RequestRefused if it has no time zone."""
    if at.tzinfo is None:
        raise refused(field, at, "a time with a time zone")
    return -((EPOCH - at) // timedelta(milliseconds=1))
