"""The boundary of client calls: an error that a service raises ends that call only, and the node keeps running.

Handles an error in a handler, in the core's answer to it, or in a step of a stream. The call ends with NODE_FAULT and
an id, and the node's log has the traceback under this id. A refusal that a service raises ends the call with that
refusal. An error that the node cannot survive (serving.py, FATAL) ends the process, whichever call ran into it.

The door puts every method of every service behind this boundary.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from tickwheel.node.core.failure import Failure, RequestError
from tickwheel.node.logs import logger
from tickwheel.node.server.errors import abort
from tickwheel.replication.ports import Clock

REPEAT_NS = 5_000_000_000
"""Errors of one kind at one place get one traceback in this time; the others refer to the id that has it."""
PLACES_MAX = 1_024

Context = grpc.aio.ServicerContext[Any, Any]
Fault = Callable[[Exception], Failure]

log = logger("boundary")


class FaultLog:
    """Logs the errors that failed a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written: dict[tuple[str, str, int], tuple[int, str]] = {}
        """By kind and place: (until when no further traceback is needed, the id that has one)."""

    def __call__(self, error_id: str, error: BaseException) -> None:
        """Log an error under its id."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (type(error).__name__, frames[-1].filename, frames[-1].lineno or 0) if frames else (repr(error), "", 0)
        now_ns = self._clock.monotonic_ns()
        until_ns, first_id = self._written.get(place, (0, ""))
        if now_ns < until_ns:
            log.error("a request failed by a mistake of this node", id=error_id, error=repr(error), like=first_id)
            return
        if len(self._written) >= PLACES_MAX:
            self._written.clear()
        self._written[place] = (now_ns + REPEAT_NS, error_id)
        log.error("a request failed by a mistake of this node", id=error_id, exc_info=error)


def contained(behave: Any, fault: Fault) -> Any:
    """Wrap a handler so that its errors end its call only. `fault` reports an error and returns the caller's answer."""
    if inspect.isasyncgenfunction(behave):
        return _generator(behave, fault)
    return _coroutine(behave, fault)


def _coroutine(behave: Callable[[Any, Context], Awaitable[Any]], fault: Fault) -> Any:
    async def handler(request: Any, context: Context) -> Any:
        try:
            return await behave(request, context)
        except Exception as error:
            await _end(context, error, fault)

    return handler


def _generator(behave: Callable[[Any, Context], AsyncIterator[Any]], fault: Fault) -> Any:
    async def handler(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for response in behave(request, context):
                yield response
        except Exception as error:
            await _end(context, error, fault)

    return handler


async def _end(context: Context, error: Exception, fault: Fault) -> NoReturn:
    if isinstance(error, grpc.aio.BaseError):
        raise error  # the call was aborted on purpose, or its connection is gone
    if isinstance(error, RequestError):
        await abort(context, error.failure)
    if context.cancelled():
        fault(error)
        raise asyncio.CancelledError
    await abort(context, fault(error))
