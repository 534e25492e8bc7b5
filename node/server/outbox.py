"""The queue of responses to one consumer's stream, and the bound on its memory.

A client may grant 100,000 credits for messages of 4 MiB. The core gets these credits in slices that fit `bytes_max` by
the message sizes seen so far, and further ones only as batches leave for the network.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tickwheel.node.core.delivery.sessions import CREDITS_MAX
from tickwheel.node.failure import invalid
from tickwheel.proto.consumer_pb2 import ConsumeResponse

SIZE_FIRST_BYTES = 64 << 10
"""Assumed size of a message before the first delivery."""

SLICE_MIN = 16
"""Least number of credits that the core may have, since smaller slices would cost throughput."""


class CreditGate:
    """Takes credits from the client and passes them to the core in slices. Pure."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._with_core = 0
        self._waiting = 0
        self._size_bytes = float(SIZE_FIRST_BYTES)

    @property
    def held(self) -> int:
        """Credits of the client that are not yet passed to the core."""
        return self._held

    def add(self, credits: int) -> int:
        """Take credits of the client. Returns how many to pass to the core. Raises RequestError above CREDITS_MAX."""
        outstanding = self._held + self._with_core + credits
        if outstanding > CREDITS_MAX:
            raise invalid("credits", outstanding, f"at most {CREDITS_MAX} outstanding")
        self._held += credits
        return self._pass()

    def queued(self, messages: int, size_bytes: int) -> None:
        """The core has delivered a batch, which now waits to be written."""
        self._with_core -= messages
        self._waiting += messages
        if messages:
            mean = size_bytes / messages
            # Up at once, down slowly: a run of small messages must not let too many large ones in.
            self._size_bytes = max(mean, self._size_bytes + (mean - self._size_bytes) / 4)

    def written(self, messages: int) -> int:
        """A batch has left for the network. Returns how many credits to pass to the core now."""
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
    """A queue of responses for one writer, in order. `bytes`: their total size."""

    def __init__(self) -> None:
        self._responses: deque[tuple[ConsumeResponse, int]] = deque()
        """With their sizes: to count one costs as much as to serialize it."""
        self._changed = asyncio.Event()
        self._ended = False
        self.bytes = 0
        self.unwritten = 0
        """Responses that were put and not yet written."""

    def put(self, response: ConsumeResponse) -> None:
        """Queue a response; after `end` it is dropped."""
        if self._ended:
            return
        size = response.ByteSize()
        self._responses.append((response, size))
        self.bytes += size
        self.unwritten += 1
        self._changed.set()

    def end(self) -> None:
        """Take no more responses; queued ones are still sent."""
        self._ended = True
        self._changed.set()

    def written(self) -> None:
        """The response of the last `next` has been written."""
        self.unwritten -= 1

    async def next(self) -> ConsumeResponse | None:
        """The next response; None once the queue is empty after `end`."""
        while not self._responses:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        response, size = self._responses.popleft()
        self.bytes -= size
        return response
