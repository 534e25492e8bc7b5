"""Runs the core's `tick` on the node's loop: after input, and at the time that the core asked for.

Invariants: at most one tick in a pass of the loop, however much input came. After a stall (the loop ran later than it
should) input that waits in sockets is read before timers run, so that a queued heartbeat is seen before the election
timeout that it prevents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tickwheel.node.metrics import TimeCounts
from tickwheel.replication.ports import Clock

STALL_NS = 20_000_000
"""A deadline missed by more than this is a stall. It exceeds the longest slice of work on the loop."""

DRAIN_PASSES = 6
"""Passes of the loop after a stall before timers run: sockets are read, TLS is decrypted, and a large frame may come in
several reads."""

TICK_GAP_NS = 1_000_000
"""Least time between ticks: all input in between shares one tick. Equals a step of the loop's timers."""

LONG_TICK_NS = 5_000_000
"""After a tick as long as this the loop rests for TICK_GAP_NS, even if there is more to do. gRPC's own thread needs the
interpreter for each event; without the rest it would get it too seldom while a log is replayed, and answer nobody."""


class LoopDriver:
    """Calls `tick` on the loop: it gets whether input has come since the last call that is not for the log alone, and
    returns the monotonic_ns of its next call at the latest."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        tick: Callable[[bool], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._tick = tick
        self._failed = failed
        self._running = False
        self._queued = False
        self._deadline_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drain_passes_left = 0
        self._woken = False
        """Whether `wake` or `wake_within` was called since the last tick began."""
        self._ticked_ns = 0
        self.lag = TimeCounts()
        """How late the loop ran due work."""
        self.took = TimeCounts()
        """How long ticks took."""
        self.stalls = 0
        self._stall_ns = 0
        """How late the loop was when it stalled last, and when that ended."""
        self._stalled_ns = 0

    def start(self) -> None:
        """Start ticking, from the next pass of the loop on."""
        self._running = True
        self._deadline_ns = self._clock.monotonic_ns()
        self.wake()

    def stop(self) -> None:
        """Stop ticking: no tick follows. Idempotent."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def overdue_ns(self) -> int:
        """How long the next tick has been due without coming; 0 while it need not come."""
        return max(0, self._clock.monotonic_ns() - self._deadline_ns) if self._running else 0

    def stall_ms(self, within_ms: int) -> int:
        """How late the loop was when it stalled last, if that was at most so long ago; else 0."""
        past_ns = self._clock.monotonic_ns() - self._stalled_ns
        return self._stall_ns // 1_000_000 if past_ns <= within_ms * 1_000_000 else 0

    def wake(self) -> None:
        """Input has come: tick once the rest of this pass of the loop has run, or TICK_GAP_NS after the last tick."""
        self._woken = True
        self.wake_log()

    def wake_log(self) -> None:
        """As `wake`, for a frame or an answer to the log. The core itself knows which frames concern its parts."""
        if not self._running or self._queued:
            return
        self._queued = True
        if self._drain_passes_left or self._clock.monotonic_ns() - self._ticked_ns >= TICK_GAP_NS:
            self._loop.call_soon(self._run)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(TICK_GAP_NS / 1e9, self._on_timer)

    def wake_within(self, wait_ms: int) -> None:
        """Input has come that may wait: tick in `wait_ms` milliseconds, or sooner with whatever else comes."""
        self._woken = True
        wait_ns = wait_ms * 1_000_000
        if wait_ns <= TICK_GAP_NS:
            self.wake()
        elif self._running and not self._queued and self._clock.monotonic_ns() + wait_ns < self._deadline_ns:
            self._deadline_ns = self._clock.monotonic_ns() + wait_ns
            self._arm()

    def _on_timer(self) -> None:
        self._timer = None
        if self._running:
            self._queued = True
            self._run()

    def _run(self) -> None:
        self._queued = False
        if not self._running:
            return
        now_ns = self._clock.monotonic_ns()
        if self._drain_passes_left > 0:
            self._drain_passes_left -= 1
            if self._drain_passes_left > 0:
                self.wake_log()
                return
        else:
            late_ns = now_ns - self._deadline_ns
            if late_ns >= 0:
                self.lag.note(late_ns)
            if late_ns > STALL_NS:
                self.stalls += 1
                self._stall_ns, self._stalled_ns = late_ns, now_ns
                self._drain_passes_left = DRAIN_PASSES
                self.wake_log()
                return
        self._ticked_ns = now_ns
        woken, self._woken = self._woken, False
        try:
            self._deadline_ns = self._tick(woken)
        except Exception as error:  # a bug, or a fault that must stop the node: `failed` ends the process
            self.stop()
            self._failed(error)
            return
        self.took.note(self._clock.monotonic_ns() - now_ns)
        self._arm()

    def _arm(self) -> None:
        if self._queued:
            return  # input came during the tick: `wake` has seen to the next one
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = self._clock.monotonic_ns()
        wait_ns = self._deadline_ns - now_ns
        if wait_ns <= 0:
            # The core asked to be called again at once, so this tick is not late.
            if now_ns - self._ticked_ns >= LONG_TICK_NS:
                self._deadline_ns = now_ns + TICK_GAP_NS
                self._timer = self._loop.call_later(TICK_GAP_NS / 1e9, self._on_timer)
                return
            self._deadline_ns = now_ns
            self.wake_log()
            return
        # libuv's timers have steps of 1 ms and round to the nearest: round up, or the loop would spin.
        wait_ms = -(-wait_ns // 1_000_000)
        self._timer = self._loop.call_later(wait_ms / 1_000, self._on_timer)
