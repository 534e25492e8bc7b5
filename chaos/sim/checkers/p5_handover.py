"""P5 of planned handovers: the next master knows the deliveries in flight of the old one and does not repeat them.

Judged only if no other fault is active or was a moment ago, so that the handover alone changed the term. Then neither
the closing of the old master's sessions nor a lease unknown to the next master is a reason for a duplicate.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded, HandoverEnded
from tickwheel.chaos.sim.history_machines import Booted, RoleSeen, Stopped
from tickwheel.chaos.sim.history_messages import Delivered, SessionClosed, SessionOver, SettleSent
from tickwheel.chaos.sim.world import MS, SECOND

CALM_NS = 3 * SECOND
"""Time since any other event that could have changed the master, or kept a sync from a slave."""

_Key = tuple[str, int, int]
"""(group, uid, epoch)"""


class HandedOver(Checker):
    """Does not judge broadcasts, nor push-first dispatch, which may lose dispatches."""

    promise = "P5"

    def __init__(self) -> None:
        self._active: set[str] = set()
        self._stirred_ns = 0
        self._masters: dict[int, tuple[str, int]] = {}
        """By term: its master, and the time at which that was first seen."""
        self._last: dict[_Key, Delivered] = {}
        self._nacked: dict[_Key, int] = {}
        self._left: set[int] = set()
        """Sessions that their consumers gave up, before their node closed them."""
        self._closed: set[int] = set()
        self._again: dict[tuple[int, int], list[tuple[Delivered, Delivered]]] = {}
        """By (term before, term): duplicates without another reason."""
        self._handed: set[tuple[int, int]] = set()
        """Changes of the term that were planned, in calm."""

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.outcome != "ACK":
            key = (record.group, record.uid, record.epoch)
            self._nacked[key] = max(record.attempt, self._nacked.get(key, 0))

    def _on_session_over(self, record: SessionOver) -> None:
        if record.session not in self._closed:
            self._left.add(record.session)

    def _on_session_closed(self, record: SessionClosed) -> None:
        self._closed.add(record.session)

    def _on_role_seen(self, record: RoleSeen) -> None:
        if record.role == "master":
            self._masters.setdefault(record.term, (record.node, record.at_ns))

    def _on_booted_or_stopped(self, record: Booted | Stopped) -> None:
        self._stirred_ns = record.at_ns

    def _on_fault_began_or_fault_ended(self, record: FaultBegan | FaultEnded) -> None:
        known = self._active.add if isinstance(record, FaultBegan) else self._active.discard
        known(record.fault)
        if " handover" not in record.fault:
            self._stirred_ns = record.at_ns

    def _on_delivered(self, record: Delivered) -> None:
        if record.broadcast or self.run.push_first:
            return
        key = (record.group, record.uid, record.epoch)
        before = self._last.get(key)
        self._last[key] = record
        if before is None or before.term >= record.term or before.attempt > record.attempt:
            return
        error_ms = before.clock_error_ms + record.clock_error_ms
        over = (before.lease_until_ms - self.run.start_wall_ms - error_ms) * MS <= record.at_ns
        if not over and self._nacked.get(key, 0) < before.attempt and before.session not in self._left:
            self._again.setdefault((before.term, record.term), []).append((before, record))
            self._judge((before.term, record.term))

    def _on_handover_ended(self, record: HandoverEnded) -> None:
        terms = [term for term, (_, since_ns) in self._masters.items() if record.asked_ns <= since_ns]
        led = [term for term, (node, _) in self._masters.items() if node == record.node and term not in terms]
        alone = all(" handover" in fault for fault in self._active)
        calm = alone and record.asked_ns - self._stirred_ns >= CALM_NS
        if record.came_about and calm and len(terms) == 1 and led:
            change = (max(led), terms[0])
            self._handed.add(change)
            self._judge(change)

    def _judge(self, change: tuple[int, int]) -> None:
        if change not in self._handed or change not in self._again:
            return
        before, again = self._again[change][0]
        self.broken(
            f"message {again.uid} to {again.group} attempt {again.attempt} by {again.node} in term {again.term}, after "
            f"attempt {before.attempt} by {before.node} at {before.at_ns / SECOND:.6f} s: {before.node} handed over as "
            "planned, and its lease holds"
        )
