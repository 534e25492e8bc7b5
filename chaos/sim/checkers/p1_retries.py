"""P1 and P3 of retries: a nacked message comes again, not before its pause is over; a dead one does not.

Judged by the consumer's requests and by committed receipts, in true time.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_messages import DeadReplayAsked, Delivered, Settled, SettleSent
from tickwheel.chaos.sim.world import MS

_Key = tuple[str, int]
"""(group, uid)"""


class RetriesCome(Checker):
    promise = "P1"
    what_is_owed = "retries (group, message)"

    def __init__(self) -> None:
        self._asked: dict[tuple[_Key, int], tuple[int, int, int]] = {}
        """By attempt nacked with a delay: end of the earliest pause asked for, its delay in ms, and the longest delay.
        Two masters in a row may both deliver an attempt, and it is not known which of two nacks counts."""
        self._committed: set[tuple[_Key, int]] = set()
        self._owed: dict[_Key, int] = {}
        """Attempts whose nack was committed, until the next one comes."""
        self._owed_from_ns: dict[_Key, int] = {}
        """End of the pause of each owed retry."""
        self._dead: dict[_Key, int] = {}
        self._replayed: set[_Key] = set()
        """Dead ones that were asked to be replayed, until they come."""
        self._newest: dict[_Key, int] = {}
        self._error_ms: dict[tuple[_Key, int], float] = {}
        """Clock error that the master reported at each delivery. The error at the nack was about the same."""

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.outcome == "RETRY" and record.delay_ms:
            asked = (record.group, record.uid), record.attempt
            over = record.at_ns + record.delay_ms * MS, record.delay_ms
            over_ns, delay_ms, longest_ms = self._asked.get(asked, (*over, 0))
            self._asked[asked] = (*min(over, (over_ns, delay_ms)), max(longest_ms, record.delay_ms))

    def _on_settled(self, record: Settled) -> None:
        key = (record.group, record.uid)
        if record.outcome == "RETRY" and (key, record.attempt) in self._asked:
            self._committed.add((key, record.attempt))
            if self._newest.get(key, 0) <= record.attempt:
                self._owed[key] = record.attempt
                self._owed_from_ns[key] = record.at_ns + self._asked[key, record.attempt][2] * MS
        elif record.outcome == "DEAD" and key not in self._replayed:
            self._dead[key] = record.attempt  # not the late answer of a settlement from before the replay

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        for uid in record.uids:
            self._dead.pop((record.group, uid), None)
            self._replayed.add((record.group, uid))

    def _on_delivered(self, record: Delivered) -> None:
        key = (record.group, record.uid)
        self._replayed.discard(key)
        if key in self._dead:
            self.broken(f"message {record.uid} to {record.group} comes again after its death was committed")
        self._newest[key] = max(record.attempt, self._newest.get(key, 0))
        if record.attempt > self._owed.get(key, record.attempt):
            del self._owed[key]
        nacked_ms = self._error_ms.get((key, record.attempt - 1), 0.0)
        before_ms = self._error_ms.get((key, record.attempt), 0.0)
        self._error_ms[key, record.attempt] = max(record.clock_error_ms, before_ms)
        asked = self._asked.get((key, record.attempt - 1))
        if asked is None or (key, record.attempt - 1) not in self._committed:
            return  # it may have come back on another way: given back, or its lease ran out
        over_ns, delay_ms, _ = asked
        error_ms = max(record.clock_error_ms, nacked_ms)
        allowed_ms = 2 * self.run.clock_allowance_ms + 2 * error_ms + CLOCK_STEP_MS
        early_ms = (over_ns - record.at_ns) / MS - allowed_ms
        if early_ms > 0:
            self.broken(
                f"message {record.uid} to {record.group}: attempt {record.attempt} comes {early_ms:.1f} ms before the "
                f"pause of {delay_ms} ms is over"
            )

    def owed(self, at_ns: int) -> list[_Key]:
        """Also while their pause lasts: the drain waits for them."""
        return sorted(self._owed)

    def settle_accounts(self, at_ns: int) -> None:
        late = [key for key in self.owed(at_ns) if self._owed_from_ns[key] < at_ns - LATE_NS]
        if late:
            group, uid = late[0]
            self.broken(f"{len(late)} nacked messages never came again: {uid} to {group}")


CLOCK_STEP_MS = 5
"""Most difference between two masters' readings of the cluster's time, beyond the errors that they report."""
LATE_NS = 2_000 * MS
"""Time allowed for a retry at the end: a slow consumer may nack when the run is nearly over."""
