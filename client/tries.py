"""Tries of unary calls that wait for an answer: one that waits long is abandoned if another node has become master.

One timer checks all tries of a client. Nearly every try is answered long before a check is needed, and a separate timer
and time-out would cost each try a tenth of what the whole call costs the client.

A node that answers any try does not hang. So the nodes are asked for the master only while no try is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from tickwheel.client.errors import Fault

A = TypeVar("A")

LOOK_S = 0.05
"""Pause between two checks while a try has waited for long. Young tries need none: nearly all are answered before."""


class TryLeftError(Exception):
    """Another node became master while a try waited for its answer."""


class TryFailedError(Exception):
    """A try ended with a fault that is not the status of its call."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Try:
    __slots__ = ("address", "began_s", "cancelling", "left", "stays", "task")

    def __init__(self, address: str, began_s: float, stays: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.address = address
        self.began_s = began_s
        self.stays = stays
        self.task = task
        self.cancelling = task.cancelling()
        """The number of cancellations that the task had received before this try."""
        self.left = False

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self.task.cancel()


class Tries:
    """The waiting tries of one client."""

    def __init__(
        self,
        patience_s: float,
        master: Callable[[], str | None],
        watch: Callable[[Hashable, Callable[[str], None]], None],
        unwatch: Callable[[Hashable], None],
    ) -> None:
        """`patience_s`: tries that have waited for less are not abandoned. `master`: returns the known master.

        `watch`: has all nodes asked for the master, and calls back with a new one, until `unwatch`.
        """
        self._patience_s = patience_s
        self._master = master
        self._watch = watch
        self._unwatch = unwatch
        self._waiting: dict[_Try, None] = {}
        """The waiting tries, the oldest first."""
        self._answered_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, address: str, work: Awaitable[A], *, stays: bool = False) -> A:
        """Wait for the answer of a try at this node. Raises TryLeftError if the try is abandoned. `stays`: it never is,
        since another master is what it asks for."""
        loop = asyncio.get_running_loop()
        attempt = _Try(address, loop.time(), stays)
        self._waiting[attempt] = None
        if self._timer is None:
            self._timer = loop.call_later(self._patience_s, self._look, loop)
        try:
            answer = await work
        except asyncio.CancelledError:
            if attempt.left and attempt.task.cancelling() - 1 <= attempt.cancelling:
                raise TryLeftError from None
            raise
        finally:
            del self._waiting[attempt]
            if attempt.left:
                attempt.task.uncancel()
        self._answered_s = loop.time()
        return answer

    def close(self) -> None:
        """Stop the checks. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        self._leave(self._master(), now)
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            self._unwatch(self)
            return
        pause_s = LOOK_S
        if now - max(oldest.began_s, self._answered_s) >= self._patience_s:
            self._watch(self, lambda master: self._leave(master, loop.time()))
        else:
            self._unwatch(self)
            pause_s = max(LOOK_S, oldest.began_s + self._patience_s - now)
        self._timer = loop.call_later(pause_s, self._look, loop)

    def _leave(self, master: str | None, now: float) -> None:
        """Abandon tries at nodes other than the master, if they have waited for `patience_s`."""
        for attempt in self._waiting:
            if now - attempt.began_s < self._patience_s:
                return
            if master is not None and attempt.address != master and not attempt.stays:
                attempt.leave()
