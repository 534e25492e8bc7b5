"""Requests that take several steps, written as coroutines. The core runs them itself: there is no asyncio here, so the
simulation steps them like everything else.

A coroutine of the core awaits only promises. It is resumed inside the call that keeps the promise, not in a later
tick, so it sees exactly the state that its callback would have seen. A refusal is raised as RequestError.
`Serving.start` runs a coroutine.

Every promise is kept exactly once. A part that holds one back keeps it with a failure when mastership ends
(`Part.end`); the proposer, the log and the background answer every call. If a mistake prevents that, `Serving` closes
the coroutine, so its `finally` blocks run. Only a stopped node leaves promises: the workers' answers come no more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar, cast

from tickwheel.node.failure import Failure, RequestError

T = TypeVar("T")


class Reply(NamedTuple, Generic[T]):
    """Where the outcome of a request goes that is served by callbacks. One of the two is called, once; `fail` may be
    called after that, for a later mistake."""

    done: Callable[[T], None]
    fail: Callable[[Failure], None]

    @classmethod
    def either(cls, tell: Callable[[T | Failure], None]) -> Reply[T]:
        """The outcome goes to `tell`, whichever it is."""
        return cls(tell, tell)


UNHEARD: Reply[Any] = Reply.either(lambda outcome: None)
"""For a command whose outcome shows in the state, or does not matter."""


class Promise(Generic[T]):
    """A value that will come, or an error instead of it. At most one coroutine awaits it."""

    __slots__ = ("_error", "_kept", "_resume", "_value")

    def __init__(self) -> None:
        self._kept = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._resume: Callable[[], None] | None = None

    def keep(self, value: T) -> None:
        """Give the value to the awaiting coroutine, and resume it at once. Called once."""
        assert not self._kept, "a promise is kept once"
        self._kept = True
        self._value = value
        if self._resume is not None:
            self._resume()

    def fail(self, error: BaseException) -> None:
        """Raise an error in the awaiting coroutine, instead of a value. Called once, and not beside `keep`."""
        self._error = error
        self.keep(cast(T, None))

    def refuse(self, failure: Failure) -> None:
        """Raise a failure as RequestError in the awaiting coroutine. As `fail`."""
        self.fail(RequestError(failure))

    @property
    def reply(self) -> Reply[T]:
        """Keeps the promise by a reply."""
        return Reply(self.keep, self.refuse)

    def answered(self, value: T | None, error: BaseException | None) -> None:
        """Keep the promise by a worker's answer: a callback for `Executor.submit`."""
        if error is None:
            self.keep(cast(T, value))
        else:
            self.fail(error)

    def when_kept(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the promise is kept."""
        self._resume = resume

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self._kept:
            yield self
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


async def answer_of(start: Callable[[Reply[T]], None]) -> T:
    """What `start` replies, at once or later. Raises RequestError for a failure."""
    promise: Promise[T] = Promise()
    start(promise.reply)
    return await promise
