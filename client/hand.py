"""What a consumer has in hand: batches under a lease, and the credits that they take.

Owns the count. Invariants: never more deliveries in hand than credits; a credit returns when its delivery has left the
hand, or when its lease is surely over. Credits that return are saved up and sent a quarter at a time, or as soon as
nothing is in hand. With `messages_max` no more than that are ever asked for. Used by `consumer.py` alone.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable

from tickwheel.client.delivery import DeliveredBatch

LEASE_MARGIN_S = 1.0
"""A lease counts as over so long after its end by this clock."""


class Hand:
    """One consumer's. `send` gives credits to the node of the open stream. `messages_max`: in all; 0: any."""

    def __init__(self, credits: int, send: Callable[[int], None], messages_max: int = 0) -> None:
        self._credits = credits
        self._send = send
        self._messages_max = messages_max
        self._taken = 0
        self._out = 0
        """Credits that the node of the open stream has."""
        self._owed = 0
        self._opening = 0
        self._leases: deque[tuple[float, DeliveredBatch]] = deque()
        """By their end, each with its batch."""

    @property
    def has_leases(self) -> bool:
        """Whether `expire` may have something to do."""
        return bool(self._leases)

    def opening(self) -> int:
        """Credits to open a stream with: those that nothing in hand takes. Whatever was owed goes with them."""
        self._owed = self._out = 0
        self._out = self._opening = self._wanted(self._free)
        return self._opening

    def opened(self) -> None:
        """The stream is open: give what has returned since."""
        self._owed = 0
        self._out = self._opening
        self._owe(max(0, self._free - self._opening))

    @property
    def _free(self) -> int:
        return max(0, self._credits - sum(batch.unsettled for _, batch in self._leases))

    @property
    def full(self) -> bool:
        """Whether all that were asked for have come."""
        return 0 < self._messages_max <= self._taken

    def _wanted(self, credits: int) -> int:
        if not self._messages_max:
            return credits
        return max(0, min(credits, self._messages_max - self._taken - self._out))

    def came(self, count: int, skipped: int) -> None:
        """So many came and took a credit each; those skipped are none of the consumer's."""
        self._out -= count
        self._taken += count - skipped

    def take(self, batch: DeliveredBatch, lease_s: float) -> None:
        """A batch has come, under a lease of so long."""
        bisect.insort(self._leases, (time.monotonic() + lease_s + LEASE_MARGIN_S, batch), key=_end_of)

    def give_back(self, batch: DeliveredBatch, count: int) -> None:
        """So many deliveries of it left the hand."""
        given = min(count, batch.unsettled)
        batch.unsettled -= given
        self._owe(given)

    def hold(self, batch: DeliveredBatch, lease_s: float) -> None:
        """The batch was given a longer lease; its credits stay taken until that is surely over."""
        for place, (before_s, held) in enumerate(self._leases):
            if held is batch:
                del self._leases[place]
                end_s = max(before_s, time.monotonic() + lease_s + LEASE_MARGIN_S)
                bisect.insort(self._leases, (end_s, batch), key=_end_of)
                return

    def expire(self) -> None:
        """Take back the credits of leases that are over."""
        now = time.monotonic()
        while self._leases and (not self._leases[0][1].unsettled or self._leases[0][0] <= now):
            _, batch = self._leases.popleft()
            count, batch.unsettled = batch.unsettled, 0
            self._owe(count)

    def _owe(self, count: int) -> None:
        self._owed += count
        if self._owed * 4 >= self._credits or (self._owed and not self._holds_any()):
            credits, self._owed = self._wanted(self._owed), 0
            if credits:
                self._out += credits
                self._send(credits)

    def _holds_any(self) -> bool:
        while self._leases and not self._leases[0][1].unsettled:
            self._leases.popleft()
        return bool(self._leases)


def _end_of(lease: tuple[float, DeliveredBatch]) -> float:
    return lease[0]
