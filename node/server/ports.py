"""The real clock, executor and randomness of a node.

Owns the worker threads. `BootClock` is the only place of a node that reads a clock. Two executors exist side by
side so that an fdatasync never waits behind a cold read or a merge.
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

T = TypeVar("T")


class BootClock:
    """CLOCK_BOOTTIME, which counts while the machine sleeps, and the machine's wall clock."""

    def monotonic_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ThreadExecutor:
    """Runs works in threads; their `done` on the loop, followed by `after` (the driver's wake).

    A pool of the standard library makes a future with a lock and a condition for each work, which for an fdatasync on
    a fast disk costs more time than the disk takes.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`failed` ends the process: a `done` raised, and may have left the node's state half changed."""
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = loop
        self._failed = failed
        self._after = after
        self._stopped = False
        self.waiting = 0
        """Works submitted whose `done` has not been called."""
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
            del work  # or it keeps what it worked on until the next one comes

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """See the Executor port."""
        self.waiting += 1

        def run() -> None:
            try:
                result, error = work(), None
            except BaseException as raised:  # handed to `done`, which decides
                result, error = None, raised
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish, done, result, error)

        self._works.put(run)

    def _finish(
        self, done: Callable[[T | None, BaseException | None], None], result: T | None, error: BaseException | None
    ) -> None:
        self.waiting -= 1
        if self._stopped:
            return
        try:
            done(result, error)
        except Exception as raised:
            self._failed(raised)
            return
        self._after()

    def stop(self) -> None:
        """Idempotent. Waits for running works; those that wait are dropped, no `done` comes any more."""
        self._stopped = True
        with contextlib.suppress(Empty):
            while True:
                self._works.get_nowait()
        for _ in self._threads:
            self._works.put(None)
        for thread in self._threads:
            thread.join()


def system_random() -> random.Random:
    """Randomness from the operating system."""
    return random.SystemRandom()
