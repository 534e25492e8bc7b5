"""The real clock, executor and random numbers of a node.

Owns the worker threads. Only `BootClock` reads a clock in a node. There are two executors, so that an fdatasync never
waits for a cold read or a merge.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from tickwheel.node.metrics import TimeCounts

T = TypeVar("T")


STEP_BACK_NS = 10_000_000
"""Readings of several threads may reach `BootClock` in another order than they were taken, but by less than this."""


class BootClock:
    """CLOCK_BOOTTIME, which counts while the machine sleeps, and the machine's wall clock.

    A kernel or hypervisor at fault may set CLOCK_BOOTTIME back. The reading then goes on from where it was: ages and
    time-outs are never negative, and nothing waits until the clock has caught up.
    """

    def __init__(self) -> None:
        self._read_ns = 0
        self._ahead_ns = 0

    def monotonic_ns(self) -> int:
        read_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if read_ns < self._read_ns - STEP_BACK_NS:
            self._ahead_ns += self._read_ns - read_ns
        self._read_ns = read_ns
        return read_ns + self._ahead_ns

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


_CLOCK = BootClock()


class ThreadExecutor:
    """Runs work in threads and its `done` on the loop, followed by `after` (the driver's wake).

    The standard library's pool creates a future with a lock and a condition for each piece of work. For an fdatasync on
    a fast disk that takes longer than the disk.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`failed` ends the process: it is called if a `done` raises, which may leave the node's state half changed."""
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = loop
        self._failed = failed
        self._after = after
        self._stopped = False
        self.waiting = 0
        """Number of submitted pieces of work whose `done` has not been called."""
        self.took = TimeCounts()
        """How long the pieces of work ran, without their wait for a thread."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while True:
            work = self._works.get()
            if work is None:
                return
            work()
            del work  # or its objects stay alive until the next work comes

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        self.waiting += 1

        def run() -> None:
            begun_ns = _CLOCK.monotonic_ns()
            try:
                result, error = work(), None
            except BaseException as raised:  # `done` decides what to do
                result, error = None, raised
            took_ns = _CLOCK.monotonic_ns() - begun_ns
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish, done, result, error, took_ns)

        self._works.put(run)

    def _finish(
        self,
        done: Callable[[T | None, BaseException | None], None],
        result: T | None,
        error: BaseException | None,
        took_ns: int,
    ) -> None:
        self.waiting -= 1
        self.took.note(took_ns)
        if self._stopped:
            return
        try:
            done(result, error)
        except Exception as raised:
            self._failed(raised)
            return
        self._after()

    def stop(self) -> None:
        """Wait for running work and drop the rest; no `done` is called any more. Idempotent."""
        self._stopped = True
        with contextlib.suppress(Empty):
            while True:
                self._works.get_nowait()
        for _ in self._threads:
            self._works.put(None)
        for thread in self._threads:
            thread.join()


def system_random() -> random.Random:
    """Random numbers of the operating system."""
    return random.SystemRandom()
