"""The log of errors that failed a request or a connection.

Those of requests have their ids, and one traceback per kind and place every few seconds.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from tickwheel.node.logs import logger
from tickwheel.proto.parsing import wants_memory
from tickwheel.replication.ports import Clock

REPEAT_NS = 5_000_000_000
"""Errors of one kind at one place get one traceback in this time; the others refer to the id that has it."""
PLACES_MAX = 1_024
MEMORY_ADVICE = (
    "raise the limit of the service (MemoryMax), the container or the process (ulimit -v), or give the machine more"
)

log = logger("faults")


class FaultLog:
    """Logs the errors that failed a request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written: dict[tuple[str, str, int], tuple[int, str]] = {}
        """By kind and place: (until when no further traceback is needed, the id that has one)."""

    def __call__(self, error_id: str, error: BaseException) -> None:
        """Log an error under its id."""
        if wants_memory(error):
            log.error("a request failed because no memory is left", id=error_id, reason=MEMORY_ADVICE)
            return
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


class LoopFaults:
    """The exception handler of a node's loop: callbacks and tasks that serve a connection, which has ended by the
    error. What must not end is watched by `NodeProcess`."""

    def __init__(self) -> None:
        self.count = 0
        """Errors that are mistakes of this node; those of the network are not."""

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that nothing else took."""
        error = context.get("exception")
        if isinstance(error, OSError):
            loop.default_exception_handler(context)
        else:
            self.count += 1
            log.error("a mistake of this node", where=context.get("message"), exc_info=error)
