"""Time that passes only when a test says so: what a node reads, and timers of clients in any thread.

A node reads the time on its own thread, clients on theirs. `changed` is called for whatever may give somebody something
to do.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable

MS = 1_000_000
SECOND = 1_000 * MS
FIRST_NS = SECOND


class VirtualTimer:
    """A `client.timing.Timer`."""

    __slots__ = ("_call", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call: Callable[[], None] | None = call

    @property
    def pending(self) -> bool:
        """Whether it is neither cancelled nor over."""
        return self._call is not None and not self._loop.is_closed()

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        """Have it called on its loop."""
        if self.pending:
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class VirtualTime:
    """A `replication.ports.Clock` for a node, and a `client.timing.Time` for its clients."""

    def __init__(self, start_ms: int, changed: Callable[[], None]) -> None:
        """`start_ms`: the wall clock's time now."""
        self._changed = changed
        self._start_ms = start_ms
        self.now_ns = FIRST_NS
        """Full milliseconds whenever a test sees it."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._working: dict[int, object] = {}

    # -- for a node

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ms(self) -> int:
        return self._start_ms + (self.now_ns - FIRST_NS) // MS

    # -- for clients

    def monotonic_s(self) -> float:
        return self.now_ns / SECOND

    def wall_s(self) -> float:
        return self.wall_ms() / 1_000

    def call_later(self, delay_s: float, call: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(asyncio.get_running_loop(), call)
        # Rounded up to full milliseconds: a timer is never early.
        when_ns = self.now_ns + -(round(-delay_s * SECOND) // MS) * MS
        with self._lock:
            heapq.heappush(self._timers, (max(when_ns, self.now_ns), next(self._numbers), timer))
        self._changed()
        return timer

    def hold(self, work: object) -> None:
        self._working[id(work)] = work

    def release(self, work: object) -> None:
        if self._working.pop(id(work), None) is not None:
            self._changed()

    @property
    def working(self) -> dict[int, object]:
        """What runs now, by id: time should not pass meanwhile."""
        return dict(self._working)

    # -- for whoever moves it

    def next_timer_ns(self) -> int | None:
        """When the next timer is due; None: there is none."""
        with self._lock:
            while self._timers and not self._timers[0][2].pending:
                heapq.heappop(self._timers)
            return self._timers[0][0] if self._timers else None

    def pass_to(self, when_ns: int) -> None:
        """It is this late now, rounded up to a full millisecond, and never earlier than before.

        A wall clock of full milliseconds is then exact, and a delay that a node counts from the next full millisecond
        begins now.
        """
        self.now_ns = max(self.now_ns, -(-when_ns // MS) * MS)

    def fire_due(self) -> None:
        """Call the timers that are due."""
        while (due_ns := self.next_timer_ns()) is not None and due_ns <= self.now_ns:
            with self._lock:
                _, _, timer = heapq.heappop(self._timers)
            self._changed()
            timer.fire()
