"""Before an election and in it: who would vote, and who did.

The question before (pre-vote): a node raises its term only when a majority has said that it would vote for it, so one
that comes back from a partition deposes nobody. It asks again every round, and counts answers to what it asked in the
last few: they may take longer than a round. Votes count once a voter and term.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

ROUNDS_OPEN = 3
"""A question stays open for so many rounds. Its answer says what the peer thought at some time since."""


class Next(enum.Enum):
    """What a node that wants to campaign does now."""

    ASK = "ask"
    WAIT = "wait"
    CAMPAIGN = "campaign"


class Campaign:
    """See the module; times in monotonic_ns."""

    def __init__(self, round_ns: int) -> None:
        self._round_ns = round_ns
        self._first_ns = 0
        """When the first question since the last master was asked; 0: none was."""
        self._asked_ns = 0
        """When the round under way began; 0: none is."""
        self._answers: dict[str, tuple[int, bool]] = {}
        """Of each peer the youngest question that it answered, by when it was asked, and whether it would vote."""
        self._votes: set[str] = set()
        self._votes_term = 0

    def next(self, others: Collection[str], now_ns: int) -> Next:
        """The election timeout has passed. ASK: a new round begins now, ask each of `others`."""
        if not others:
            return Next.CAMPAIGN
        open_ns = now_ns - ROUNDS_OPEN * self._round_ns
        answers = [self._answers.get(peer_id, (0, False)) for peer_id in others]
        if sum(would for asked_ns, would in answers if asked_ns > open_ns) >= (len(others) + 1) // 2:
            self.end()
            return Next.CAMPAIGN
        if self._asked_ns and now_ns - self._asked_ns < self._round_ns:
            return Next.WAIT
        self._asked_ns = now_ns
        self._first_ns = self._first_ns or now_ns
        return Next.ASK

    def answered(self, peer_id: str, asked_ns: int, would_vote: bool) -> None:
        """A peer answers a question of that time; what it answers to a younger one takes the place of this."""
        if self._first_ns and asked_ns >= max(self._first_ns, self._answers.get(peer_id, (0, False))[0]):
            self._answers[peer_id] = (asked_ns, would_vote)

    def end(self) -> None:
        """There is a master, or an election: no round is under way, and late answers count no more."""
        self._first_ns = self._asked_ns = 0
        self._answers.clear()

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
