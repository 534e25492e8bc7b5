"""Results for awaiting calls: the only place in the server where a future gets its result.

A caller may be gone before the core answers: its task, and the future that the task awaits, can be cancelled at any
moment. To resolve a cancelled future raises, which would happen inside the core's tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, cast

from tickwheel.replication.ports import Executor

T = TypeVar("T")


def resolve(future: asyncio.Future[T], result: T) -> bool:
    """Give a future its result. False: it was cancelled or has a result already."""
    if future.done():
        return False
    future.set_result(result)
    return True


def fail(future: asyncio.Future[T], error: BaseException) -> bool:
    """Give a future an exception instead of a result; else like `resolve`."""
    if future.done():
        return False
    future.set_exception(error)
    return True


async def in_worker(executor: Executor, work: Callable[[], T]) -> T:
    """What the work returns or raises, done by a worker."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: T | None, error: BaseException | None) -> None:
        if error is not None:
            fail(future, error)
        else:
            resolve(future, cast(T, result))

    executor.submit(work, done)
    return await future
