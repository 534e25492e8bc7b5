"""The deliveries that a consumer holds: batches under a lease, and the credits that they take.

Owns the count, and the end of each lease. Invariants: there are never more held deliveries than credits. A credit
returns when its delivery is settled, or when its lease is certainly over. Returned credits are collected and sent a
quarter at a time, or soon after nothing was held, and after `stop` not any more. With `messages_max` no more than that
are ever requested. No lease is renewed once its batch was held for `hold_s`. Used by `consumer.py` only.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tickwheel.client.delivery import DeliveredBatch
from tickwheel.client.timing import REAL

LEASE_MARGIN_S = 1.0
"""A lease counts as over this long after its end by this clock."""
REST_S = 0.05
"""Credits are sent so long after nothing was held, if they are not a quarter by then. A message of their own for each
batch that is settled at once would cost a node as much as the settlement."""
RENEW_AFTER = 1 / 3
"""Fraction of a lease after which it is renewed: a lost renewal can be repeated once before the lease ends."""


@dataclass(slots=True, eq=False)
class HeldBatch:
    """A batch that is held."""

    batch: DeliveredBatch
    taken_s: float
    lease_s: float
    end_s: float
    """When the lease is certainly over, by `now_s` of its holder."""
    asked: bool = False
    """Whether a renewal is under way."""
    left_alone: bool = False
    """Whether the lease is no longer renewed."""

    def lasts(self, from_s: float, lease_s: float) -> None:
        """The lease lasts `lease_s` from `from_s`; a call never shortens it."""
        end_s = from_s + lease_s + LEASE_MARGIN_S
        if end_s > self.end_s:
            self.lease_s, self.end_s = lease_s, end_s

    @property
    def renew_s(self) -> float:
        """When the lease must be renewed, by the same time."""
        return self.end_s - LEASE_MARGIN_S - self.lease_s * (1 - RENEW_AFTER)


class HeldDeliveries:
    """The held deliveries of one consumer. `send` grants credits over the open stream.

    `messages_max`: deliveries in total; 0 for no limit. `hold_s`: how long after it came a delivery's lease is renewed.
    `now_s`: seconds by which leases pass. `later` calls something after so many seconds.
    """

    def __init__(
        self,
        credits: int,
        send: Callable[[int], None],
        messages_max: int = 0,
        hold_s: float = 0.0,
        now_s: Callable[[], float] = REAL.monotonic_s,
        later: Callable[[float, Callable[[], None]], object] = REAL.call_later,
    ) -> None:
        self._now_s = now_s
        self._later = later
        self._credits = credits
        self._send = send
        self._messages_max = messages_max
        self._hold_s = hold_s
        self._stopped = False
        self._taken = 0
        self._out = 0
        """Credits that the node of the open stream has."""
        self._owed = 0
        self._resting = False
        """Whether `_grant` will be called."""
        self._opening = 0
        self._held: list[HeldBatch] = []
        """Ordered by the ends of their leases."""

    @property
    def next_end_s(self) -> float | None:
        """Seconds until `expire` may have something to do; None: nothing is held."""
        return max(0.0, self._held[0].end_s - self._now_s()) if self._held else None

    def opening(self) -> int:
        """The credits for a new stream: all that no held delivery takes, credits not yet sent included."""
        self._owed = self._out = 0
        self._out = self._opening = self._wanted(self._free)
        return self._opening

    def opened(self) -> None:
        """The stream is open: grant the credits that have returned since `opening`."""
        self._owed = 0
        self._out = self._opening
        self._owe(max(0, self._free - self._opening))

    @property
    def _free(self) -> int:
        return max(0, self._credits - sum(held.batch.unsettled for held in self._held))

    @property
    def full(self) -> bool:
        """Whether `messages_max` deliveries have come."""
        return 0 < self._messages_max <= self._taken

    def stop(self) -> None:
        """Ask for nothing more. Messages for which a node has credits may still come."""
        self._stopped = True

    def _wanted(self, credits: int) -> int:
        if self._stopped:
            return 0
        if not self._messages_max:
            return credits
        return max(0, min(credits, self._messages_max - self._taken - self._out))

    def came(self, count: int, skipped: int) -> None:
        """`count` deliveries came and took a credit each; skipped ones do not count against `messages_max`."""
        self._out -= count
        self._taken += count - skipped

    def take(self, batches: Iterable[DeliveredBatch], lease_s: float) -> None:
        """Batches have come, under a lease of `lease_s`."""
        now = self._now_s()
        end_s = now + lease_s + LEASE_MARGIN_S
        place = bisect.bisect(self._held, end_s, key=_end_of)
        self._held[place:place] = [HeldBatch(batch, now, lease_s, end_s) for batch in batches]

    def give_back(self, count: int) -> None:
        """`count` deliveries are no longer held."""
        self._owe(count)

    def hold(self, batch: DeliveredBatch, lease_s: float) -> None:
        """The batch got a longer lease; its credits stay taken until that is certainly over."""
        self.renewed((held for held in self._held if held.batch is batch), self._now_s(), lease_s)

    def to_renew(self) -> list[HeldBatch]:
        """The batches whose leases must be renewed now."""
        now = self._now_s()
        due = [
            held
            for held in self._held
            if held.batch.unsettled and not held.asked and not held.left_alone and held.renew_s <= now
        ]
        for held in due:
            held.left_alone = now - held.taken_s >= self._hold_s
        return due

    def renewed(self, some: Iterable[HeldBatch], from_s: float, lease_s: float) -> None:
        """The leases of these batches last `lease_s` from `from_s`."""
        for held in some:
            held.lasts(from_s, lease_s)
        self._held.sort(key=_end_of)

    def expire(self) -> None:
        """Take back the credits of leases that are certainly over."""
        now = self._now_s()
        place = 0
        while place < len(self._held) and (not self._held[place].batch.unsettled or self._held[place].end_s <= now):
            place += 1
        ended, self._held = self._held[:place], self._held[place:]
        if ended:
            self._owe(sum(held.batch.leave(None) for held in ended))

    def _owe(self, count: int) -> None:
        self._owed += count
        if self._owed * 4 >= self._credits:
            self._grant()
        elif self._owed and not self._resting and not self._holds_any():
            self._resting = True
            self._later(REST_S, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._grant()

    def _grant(self) -> None:
        credits, self._owed = self._wanted(self._owed), 0
        if credits:
            self._out += credits
            self._send(credits)

    def _holds_any(self) -> bool:
        if self._held and self._held[0].batch.unsettled:  # the commonest answer
            return True
        place = next((place for place, held in enumerate(self._held) if held.batch.unsettled), len(self._held))
        del self._held[:place]
        return bool(self._held)


def _end_of(held: HeldBatch) -> float:
    return held.end_s
