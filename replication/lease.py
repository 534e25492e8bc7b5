"""The master's lease: until when it may act without fear of another master.

A slave that answers a question sent at time t, by the master's clock, votes for nobody else before t plus the shortest
election timeout, since it received the question at t or later. If it loses its connection to the master, it waits only
for `RaftConfig.lease_over_ms` of the lease that the master tells. So the answers of a majority let the master act until
the time of its questions plus a lease that is shorter than both. The lease counts from when a question was sent, never
from when its answer came. After a gap in the master's own loop it needs a new round of answers.
"""

from __future__ import annotations

from collections.abc import Collection

from tickwheel.replication.ports import NS_PER_MS


class Lease:
    """For each voter, when its newest answered question was sent. Times are the master's monotonic_ns."""

    def __init__(self, lease_ms: int) -> None:
        self._lease_ns = lease_ms * NS_PER_MS
        self._answered: dict[str, int] = {}
        self._not_before_ns = 0
        self._oldest: tuple[Collection[str], int] | None = None
        """Cache until the next answer, as the lease is read very often: (voters, sending time of the oldest question
        that the newest majority has answered)."""
        self.given_up = False
        """Set when a planned handover has ended the lease: answers no longer renew it in this term."""

    def reset(self, now_ns: int) -> None:
        """A term of mastership begins or ends. Only requests sent from now on count: a slave that is in the new term
        already may still answer one of the term before, and promises nothing by that."""
        self._answered.clear()
        self._oldest = None
        self._not_before_ns = now_ns
        self.given_up = False

    def note(self, peer_id: str, sent_ns: int) -> None:
        """A voter has answered a request that was sent at `sent_ns`."""
        if sent_ns > self._answered.get(peer_id, 0):
            self._answered[peer_id] = sent_ns
            self._oldest = None

    def invalidate(self, now_ns: int) -> None:
        """The loop stood still: only requests sent from now on count."""
        self._not_before_ns = now_ns

    def until_ns(self, others: Collection[str], now_ns: int) -> int:
        """When the lease ends if no more answers come; 0 if it is not held. `others`: the voters but the master."""
        if self.given_up:
            return 0
        needed = (len(others) + 1) // 2
        if needed == 0:
            return now_ns + self._lease_ns
        if self._oldest is None or self._oldest[0] is not others:
            sent = sorted((self._answered.get(peer, 0) for peer in others), reverse=True)
            self._oldest = (others, sent[needed - 1])
        oldest_ns = self._oldest[1]
        if oldest_ns == 0 or oldest_ns < self._not_before_ns:
            return 0
        until_ns = oldest_ns + self._lease_ns
        return until_ns if until_ns > now_ns else 0
