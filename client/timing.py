"""The time by which a client waits for leases and time-outs of handlers: the machine's, or that of a cluster in memory.

Deadlines of calls and pauses between tries always pass in real time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """It does not come any more. Idempotent."""
        ...


class Time(Protocol):
    """For the thread of a running loop."""

    def monotonic_s(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call on this loop once so much time has passed."""
        ...

    def hold(self, work: object) -> None:
        """A handler begins its work: a clock that is moved by hand stands still until `release`."""
        ...

    def release(self, work: object) -> None:
        """It has ended. Idempotent."""
        ...


class RealTime:
    """The machine's."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, call)

    def hold(self, work: object) -> None:
        """Nobody stops it."""

    def release(self, work: object) -> None:
        """As `hold`."""


REAL = RealTime()


async def sleep(by: Time, delay_s: float) -> None:
    """Wait until so much time has passed."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = by.call_later(delay_s, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()
