"""Before an election and in it: who would vote, and who did.

The question before (pre-vote): a node raises its term only when a majority has said within one round that it would
vote for it, so one that comes back from a partition deposes nobody. Votes count once a voter and term.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class Next(enum.Enum):
    """What a node that wants to campaign does now."""

    ASK = "ask"
    WAIT = "wait"
    CAMPAIGN = "campaign"


class Campaign:
    """See the module; times in monotonic_ns."""

    def __init__(self, round_ns: int) -> None:
        self._round_ns = round_ns
        self._asked_ns = 0
        """When the round under way began; 0: none is."""
        self._willing: set[str] = set()
        self._votes: set[str] = set()
        self._votes_term = 0

    def next(self, others: Collection[str], now_ns: int) -> Next:
        """The election timeout has passed. ASK: a new round begins now, ask each of `others`."""
        if not others:
            return Next.CAMPAIGN
        if self._asked_ns and now_ns - self._asked_ns < self._round_ns:
            if len(self._willing & set(others)) < (len(others) + 1) // 2:
                return Next.WAIT
            self.end()
            return Next.CAMPAIGN
        self._asked_ns = now_ns
        self._willing.clear()
        return Next.ASK

    def would_vote(self, peer_id: str, asked_ns: int) -> None:
        """A peer answers a question of that time: it would."""
        if self._asked_ns and asked_ns >= self._asked_ns:
            self._willing.add(peer_id)

    def end(self) -> None:
        """There is a master, or an election: no round is under way."""
        self._asked_ns = 0
        self._willing.clear()

    def wanted_ns(self) -> int:
        """When the round under way is over; 0: none is."""
        return self._asked_ns + self._round_ns if self._asked_ns else 0

    def is_new(self, voter: str, term: int) -> bool:
        """Whether this vote of this term was not counted yet; it is now."""
        if self._votes_term != term:
            self._votes_term = term
            self._votes.clear()
        if voter in self._votes:
            return False
        self._votes.add(voter)
        return True
