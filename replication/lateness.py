"""How late a master's frames came lately, and how much longer a slave therefore waits before it stands for election.

On a busy machine whole processes stand still for hundreds of milliseconds. A slave that takes such a pause for the loss
of its master elects another, which costs more than the pause did. So a slave remembers the longest gap between frames
of a master that it then heard again, and waits twice as long. Where frames come on time, nothing is added: a lost
master is replaced as quickly as the configured timeouts allow.

Waiting longer never endangers the master's lease: a slave only stands later than it might. A master waits no longer for
its slaves' answers: it has to step down before others may elect, and they need not have been late to each other.
"""

from __future__ import annotations

from tickwheel.replication.config import RaftConfig

NS_PER_MS = 1_000_000

WINDOW_NS = 30_000 * NS_PER_MS
"""A gap counts for one to two windows."""

GAPS_WAITED = 2
"""A slave waits this many times the longest gap. A pause that grows by less than that between two windows, as load
does, elects nobody."""

ADDED_TIMES_MAX = 1.5
"""Most that is added, as a multiple of the shortest election timeout."""


class Lateness:
    """The longest gap between two frames of a master, over the last one or two windows. Times are monotonic_ns."""

    def __init__(self, config: RaftConfig) -> None:
        self._timeout_ns = config.election_timeout_ms_min * NS_PER_MS
        self._outage_ns = config.election_timeout_ms_max * NS_PER_MS
        """A longer gap is an outage and says nothing about how late frames usually are."""
        self._window_ns = 0
        """When the current window began."""
        self._longest_ns = self._longest_before_ns = 0
        """In the current window, and in the one before."""

    def note(self, gap_ns: int, now_ns: int) -> None:
        """The master was heard `gap_ns` after the time before, in the same term."""
        if gap_ns > self._outage_ns:
            return
        self._turn(now_ns)
        self._longest_ns = max(self._longest_ns, gap_ns)

    def added_ns(self, now_ns: int) -> int:
        """Time to add to the election timeout; 0 where frames come on time."""
        self._turn(now_ns)
        longest_ns = max(self._longest_ns, self._longest_before_ns)
        return min(max(0, GAPS_WAITED * longest_ns - self._timeout_ns), int(ADDED_TIMES_MAX * self._timeout_ns))

    def _turn(self, now_ns: int) -> None:
        windows = (now_ns - self._window_ns) // WINDOW_NS
        if windows:
            self._longest_before_ns = self._longest_ns if windows == 1 else 0
            self._longest_ns = 0
            self._window_ns = now_ns
