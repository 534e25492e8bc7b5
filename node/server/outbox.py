"""What waits to go out on one consumer's stream, and how many credits the core may see meanwhile.

Owns the bound on memory of a slow consumer. A client may hand out 100,000 credits for messages of 4 MiB; the core
gets them in slices that fit `bytes_max` by the sizes seen so far, more only as batches really leave.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tickwheel.node.core.failure import invalid
from tickwheel.node.core.sessions import CREDITS_MAX
from tickwheel.proto.consumer_pb2 import ConsumeResponse

SIZE_FIRST_BYTES = 64 << 10
"""Assumed size of a message before one was seen."""

SLICE_MIN = 16
"""At least so many credits are with the core, or small slices would cost throughput."""


class CreditGate:
    """Client credits on one side, what the core is told on the other. Pure."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._with_core = 0
        self._waiting = 0
        self._size_bytes = float(SIZE_FIRST_BYTES)

    @property
    def held(self) -> int:
        """Credits of the client not yet passed on."""
        return self._held

    def add(self, credits: int) -> int:
        """The client gives credits; returns how many to pass to the core now. RequestError beyond CREDITS_MAX."""
        outstanding = self._held + self._with_core + credits
        if outstanding > CREDITS_MAX:
            raise invalid("credits", outstanding, f"at most {CREDITS_MAX} outstanding")
        self._held += credits
        return self._pass()

    def queued(self, messages: int, size_bytes: int) -> None:
        """The core delivered a batch that now waits to be written."""
        self._with_core -= messages
        self._waiting += messages
        if messages:
            mean = size_bytes / messages
            # Up at once, down slowly: a row of small ones must not open the gate for large ones.
            self._size_bytes = max(mean, self._size_bytes + (mean - self._size_bytes) / 4)

    def written(self, messages: int) -> int:
        """A batch left; returns how many credits to pass to the core now."""
        self._waiting -= messages
        return self._pass()

    def _pass(self) -> int:
        room = max(SLICE_MIN, int(self._bytes_max / max(1.0, self._size_bytes)))
        free = room - self._with_core - self._waiting
        passed = max(0, min(self._held, free))
        self._held -= passed
        self._with_core += passed
        return passed


class Outbox:
    """Responses in order, for one writer."""

    def __init__(self) -> None:
        self._responses: deque[ConsumeResponse] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self.bytes = 0

    def put(self, response: ConsumeResponse) -> None:
        """Queue a response; after `end` it is dropped."""
        if self._ended:
            return
        self._responses.append(response)
        self.bytes += response.ByteSize()
        self._changed.set()

    def end(self) -> None:
        """Nothing more comes; what is queued still leaves."""
        self._ended = True
        self._changed.set()

    async def next(self) -> ConsumeResponse | None:
        """The next response; None after the last one."""
        while not self._responses:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        response = self._responses.popleft()
        self.bytes -= response.ByteSize()
        return response
