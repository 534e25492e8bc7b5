"""Answers for awaiting calls: the only place in the server where a future gets its result.

A caller may be gone by the time the core answers: its task, and the future that it awaits, are cancelled at any moment.
Resolving such a future raises, and would do so inside the core's tick.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def resolve(future: asyncio.Future[T], result: T) -> bool:
    """Give a future its result. False: nobody waits for it any more, or it has one."""
    if future.done():
        return False
    future.set_result(result)
    return True


def fail(future: asyncio.Future[T], error: BaseException) -> bool:
    """Have a future raise; else like `resolve`."""
    if future.done():
        return False
    future.set_exception(error)
    return True
