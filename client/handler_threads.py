"""Threads for handlers that are no coroutines.

They are daemons: a handler that hangs does not keep its process from ending, which a thread of the standard library's
pool does. Threads are made when needed, at most as many as handlers run at a time, and end with `stop`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue

Ended = tuple[object, BaseException | None]
"""What a call returned, and what it raised."""


class HandlerThreads:
    """The threads of one worker. For its loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = 0
        """Threads that wait for a call, or will once they have seen their last one's end."""
        self._made = 0

    def run(self, call: Callable[[], object]) -> asyncio.Future[Ended]:
        """Begin a call. The future never has an exception of the call; it may be cancelled, and the call goes on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ended] = loop.create_future()
        context = contextvars.copy_context()

        def ended(result: Ended) -> None:
            self._free += 1
            if not future.done():
                future.set_result(result)

        def work() -> None:
            result: Ended
            try:
                result = context.run(call), None
            except BaseException as error:
                result = None, error
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended, result)

        if self._free:
            self._free -= 1
        else:
            self._made += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._made}", daemon=True).start()
        self._calls.put(work)
        return future

    def stop(self) -> None:
        """End the threads, each after the call that it runs."""
        for _ in range(self._made):
            self._calls.put(None)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
            del work  # or what the call held stays alive until the next one comes
