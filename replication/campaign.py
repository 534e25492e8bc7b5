"""The way to an election: how long a slave waits for its master, the pre-vote question, and the votes.

A node raises its term only once a majority has said that it would vote for it. So a node that comes back from a
partition deposes no master. It asks again every round, and counts answers to the last few rounds, since an answer may
take longer than a round. In the election each voter counts once a term.

Nodes that ask at the same time would split the votes. So a node that asks refuses another that comes after it in the
order of logs and ids, and a node that agrees gives way: it does not ask itself for a round. Both end after a while,
since the other may be unable to win, say because it cannot hear the answers.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from tickwheel.replication.config import RaftConfig
from tickwheel.replication.ports import NS_PER_MS

ROUNDS_OPEN = 3
"""Answers to older questions do not count: an answer says what the peer thought at some time after the question."""
WAYS_APART = 10
"""Rounds between two times that a node gives way."""


class Next(enum.Enum):
    """The next step of a node that wants to campaign."""

    ASK = "ask"
    WAIT = "wait"
    CAMPAIGN = "campaign"


class Campaign:
    """Pre-vote answers and counted votes of one node. Times are monotonic_ns."""

    def __init__(self, round_ns: int) -> None:
        self._round_ns = round_ns
        self._first_ns = 0
        """When the first question since `end` was asked; 0 for none."""
        self._asked_ns = 0
        """When the current round began; 0 for none."""
        self._answers: dict[str, tuple[int, bool]] = {}
        """For each peer its newest answer: (when the question was asked, whether the peer would vote)."""
        self._gave_way_ns = 0
        """When this node last gave way; 0 for never."""
        self._votes: set[str] = set()
        self._votes_term = 0

    def next(self, others: Collection[str], now_ns: int) -> Next:
        """Called once the election timeout has passed. ASK begins a new round: ask each of `others` now."""
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
        """A peer has answered the question asked at `asked_ns`. Its answer to a later question replaces this one."""
        if self._first_ns and asked_ns >= max(self._first_ns, self._answers.get(peer_id, (0, False))[0]):
            self._answers[peer_id] = (asked_ns, would_vote)

    def insists(self, now_ns: int) -> bool:
        """Whether this node has begun to ask so recently that it refuses a node that comes after it. Asks again, since
        the other node has just shown that it does not hear a master either."""
        if not self._first_ns or now_ns - self._first_ns > ROUNDS_OPEN * self._round_ns:
            return False
        self._asked_ns = 0
        return True

    def gives_way(self, now_ns: int) -> bool:
        """This node would vote for another: whether it ends its own round for that and waits. It does so once in a
        while only, so that a node that asks again and again without success keeps nobody from asking."""
        if self._gave_way_ns and now_ns - self._gave_way_ns < WAYS_APART * self._round_ns:
            return False
        self._gave_way_ns = now_ns
        self.end()
        return True

    def end(self) -> None:
        """A master is known, or an election begins: end the round. Late answers to it no longer count."""
        self._first_ns = self._asked_ns = 0
        self._answers.clear()

    def wanted_ns(self) -> int:
        """When the current round ends; 0 for none."""
        return self._asked_ns + self._round_ns if self._asked_ns else 0

    def is_new(self, voter: str, term: int) -> bool:
        """Whether this is the voter's first vote in the term. Counts it, so a second call returns False."""
        if self._votes_term != term:
            self._votes_term = term
            self._votes.clear()
        if voter in self._votes:
            return False
        self._votes.add(voter)
        return True


WINDOW_NS = 30_000 * NS_PER_MS
"""A gap counts for one to two windows."""

GAPS_WAITED = 2
"""A node waits this many times the longest gap. A pause that grows by less than that between two windows, as load does,
elects nobody."""

ADDED_TIMES_MAX = 1.5
"""Most that is added, as a multiple of the shortest election timeout."""


class Lateness:
    """How late frames came lately, and how much longer a node waits because of that before it gives another up.

    On a busy machine whole processes stand still for hundreds of milliseconds. A slave that takes such a pause for the
    loss of its master elects another, which costs more than the pause did; and so does a master that steps down because
    its slaves pause. So a node remembers the longest gap between frames that it then heard after all, over the last one
    or two windows, and waits twice as long. Where frames come on time, nothing is added: a lost master is replaced as
    quickly as the configured timeouts allow.

    Waiting longer never endangers the master's lease. A slave only stands later than it might. A master that waits
    leads in name: it acts only within its lease, which is not prolonged. Times are monotonic_ns.
    """

    def __init__(self, config: RaftConfig, timeout_ms: int) -> None:
        """`timeout_ms`: how long the node waits where frames come on time."""
        self._timeout_ns = timeout_ms * NS_PER_MS
        self._added_ns_max = int(ADDED_TIMES_MAX * config.election_timeout_ms_min * NS_PER_MS)
        self._outage_ns = config.election_timeout_ms_max * NS_PER_MS
        """A longer gap is an outage and says nothing about how late frames usually are."""
        self._window_ns = 0
        """When the current window began."""
        self._longest_ns = self._longest_before_ns = 0
        """In the current window, and in the one before."""

    def note(self, gap_ns: int, now_ns: int) -> None:
        """In the same term a frame came `gap_ns` after the one before, or after it was asked for."""
        if gap_ns > self._outage_ns:
            return
        self._turn(now_ns)
        self._longest_ns = max(self._longest_ns, gap_ns)

    def added_ns(self, now_ns: int) -> int:
        """Time to add to the timeout; 0 where frames come on time."""
        self._turn(now_ns)
        longest_ns = max(self._longest_ns, self._longest_before_ns)
        return min(max(0, GAPS_WAITED * longest_ns - self._timeout_ns), self._added_ns_max)

    def _turn(self, now_ns: int) -> None:
        windows = (now_ns - self._window_ns) // WINDOW_NS
        if windows:
            self._longest_before_ns = self._longest_ns if windows == 1 else 0
            self._longest_ns = 0
            self._window_ns = now_ns
