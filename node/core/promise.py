"""Requests that take several steps, written as coroutines. The core runs them itself: there is no asyncio here, so the
simulation steps them like everything else.

A coroutine of the core awaits only promises. It is resumed inside the call that keeps the promise, not in a later
tick, so it sees exactly the state that its callback would have seen. A refusal is raised as RequestError.
`Serving.start` runs a coroutine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar, cast

from tickwheel.node.core.failure import Failure, RequestError

T = TypeVar("T")


class Promise(Generic[T]):
    """A value that will come, or the failure instead of it. At most one coroutine awaits it."""

    __slots__ = ("_kept", "_resume", "_value")

    def __init__(self) -> None:
        self._kept = False
        self._value: T | Failure | None = None
        self._resume: Callable[[], None] | None = None

    def keep(self, value: T | Failure) -> None:
        """Give the value, or a Failure that the awaiting coroutine gets as RequestError. Resumes it at once.

        Called once.
        """
        assert not self._kept, "a promise is kept once"
        self._kept = True
        self._value = value
        if self._resume is not None:
            self._resume()

    def when_kept(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the promise is kept."""
        self._resume = resume

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self._kept:
            yield self
        if isinstance(self._value, Failure):
            raise RequestError(self._value)
        return cast(T, self._value)


async def answer_of(start: Callable[[Callable[[T | Failure], None]], None]) -> T:
    """The value that `start` passes to its callback, at once or later. A Failure is raised as RequestError."""
    promise: Promise[T] = Promise()
    start(promise.keep)
    return await promise
