"""The turns of a server's connections: what they may cost in one pass of the event loop, all together.

Two things cost a server: frames, counted in work, and requests that are begun, counted in bytes. Each has a budget that
is renewed with every pass. A connection that finds it used up waits in a queue, and nothing more is read from it. In
each pass the connections at the head of the queue go on, a slice of the budget each, and then wait behind the others if
they have more. Large requests do not hold up frames: they wait in a queue of their own, where each connection has one
place, however many it sent.

So however many connections send whatever they can, a pass of the loop costs two budgets, and one frame and one request
more: what reaches the end of a budget is still handled whole. Between two turns the loop runs everything else once.
Reading from sockets, and decrypting what was read, is in no budget: the loop does it before it asks.

Owned by a server or a client's connection, and called by connections alone. Runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import perf_counter
from typing import Any, Final, Protocol

PASS_WORK = 1_000
"""Work on frames in one pass of the loop, in small frames' worth: some 5 ms."""
CONNECTION_WORK = 500
"""The most of it that one connection gets at a time."""
SLICE_WORK = 50
"""The least that a connection gets in its turn, however many wait: a turn itself costs about one small frame."""
REQUEST_BYTES_LEAST = 512
"""What the smallest request counts as."""
REQUESTS_S = 0.005
"""Once the requests of a turn have taken this long, the others wait, whatever their bytes."""


class Reading(Protocol):
    """A connection with frames that wait."""

    def read_on(self, work: int) -> None:
        """Handle frames, as far as `work` goes. What is left waits again (`Turns.wait_to_read`)."""


class Beginning(Protocol):
    """A connection with requests that wait."""

    def begin_one(self) -> None:
        """Begin a request. If there are more they wait again (`Turns.wait_to_begin`)."""


class Turns:
    """The budgets of a pass, and who waits for the next one."""

    def __init__(self, requests_bytes: int) -> None:
        """`requests_bytes`: of requests that are begun in one pass, as far as they are more than one."""
        self.requests_bytes: Final = requests_bytes
        self.work_left = PASS_WORK
        self.bytes_left = requests_bytes
        self._lent = 0
        """Bytes of requests that tasks begin in the next pass."""
        self._reading: OrderedDict[Reading, None] = OrderedDict()
        self._beginning: OrderedDict[Beginning, None] = OrderedDict()
        self._renewal: asyncio.Handle | None = None

    def work(self) -> int:
        """What a connection that has read something may spend on it now; 0: it has to wait."""
        left = self.work_left
        return CONNECTION_WORK if left > CONNECTION_WORK else left if left > 0 else 0

    def spend(self, work: int) -> None:
        """Count work on frames."""
        self.work_left -= work
        if self._renewal is None:
            self._plan()

    def spend_bytes(self, size: int) -> None:
        """Count a request that begins in this pass."""
        self.bytes_left -= max(size, REQUEST_BYTES_LEAST)
        if self._renewal is None:
            self._plan()

    def lend(self, size: int) -> None:
        """Count a request that a task begins in the next pass, since it has just been woken."""
        self._lent += max(size, REQUEST_BYTES_LEAST)
        self.spend_bytes(size)

    def hold(self) -> None:
        """A task goes on with a large request in the next pass: no other one begins until then."""
        self._lent = max(self._lent, self.requests_bytes)
        self.spend_bytes(0)

    def wait_to_read(self, connection: Reading) -> None:
        """`read_on` of this connection is called once, in its turn."""
        self._reading[connection] = None
        if self._renewal is None:
            self._plan()

    def wait_to_begin(self, connection: Beginning) -> None:
        """`begin_one` of this connection is called once, in its turn. A place that it has it keeps."""
        self._beginning.setdefault(connection)
        if self._renewal is None:
            self._plan()

    def leave(self, connection: Any) -> None:
        """The connection closes."""
        self._reading.pop(connection, None)
        self._beginning.pop(connection, None)

    def _plan(self) -> None:
        self._renewal = asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """A new pass: new budgets, and turns for those who wait."""
        self._renewal = None
        self.work_left, self.bytes_left, self._lent = PASS_WORK, self.requests_bytes - self._lent, 0
        if self._reading or self._beginning or self.bytes_left < self.requests_bytes:
            self._plan()
        for _ in range(len(self._reading)):
            if self.work_left <= 0 or not self._reading:
                break
            share = self.work_left // len(self._reading)
            connection, _ = self._reading.popitem(last=False)
            connection.read_on(min(CONNECTION_WORK, max(SLICE_WORK, share)))
        began_s = perf_counter()
        while self._beginning and self.bytes_left > 0 and perf_counter() - began_s < REQUESTS_S:
            self._beginning.popitem(last=False)[0].begin_one()
