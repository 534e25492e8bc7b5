"""P5: a message is dispatched once, and comes again only for a reason; what nodes know and write down of leases."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.checkers.known_leases import KnownLeases, Telling
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded, HandoverEnded
from tickwheel.chaos.sim.history_machines import Booted, LeasesGathered, LeasesKept, RoleSeen, Stopped
from tickwheel.chaos.sim.history_messages import (
    DeadReplayAsked,
    Delivered,
    Extended,
    ScheduleAcknowledged,
    SessionClosed,
    SessionOver,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import MS, SECOND

FIRST = -1

_Message = tuple[str, int, int]
"""(group, uid, epoch)"""
_Chain = tuple[str, int, int, int]
"""Deliveries that are judged by each other: a message's, with FIRST; or those of a retry from an earlier epoch, with
the time it is due, which tells it from the message's other units; negative for the second of two units due together."""


class FewDuplicates(Checker):
    """P5: a message is dispatched once, and a group sees it again only for a reason.

    Reasons: a nack; the lease ran out; the consumer that had it left; a reset of the group; another term, and the new
    master did not know of the lease. A master knows a lease if it gave it itself in the boot it leads in, or if a sync
    of the old term that left after the delivery reached it in that boot, whoever has led in between. It also knows a
    lease if one of these held in an earlier boot when it last wrote its leases down (sync_files.py), and it could read
    them as it started. The same rules tell whether it knows the extension of a lease. A deposed node that closes the
    sessions of its consumers takes nothing from them: that is no reason. After a receipt for an acknowledgement there
    is no reason at all. Broadcasts are not judged here.

    A reset begins a new epoch of its group, which deliveries name and settlements repeat: deliveries, nacks and
    acknowledgements of one epoch say nothing about another. A reset brings messages back at their first places, and
    retries on their way come all the same, or again. So a retry of a message delivered in an earlier epoch is judged by
    itself: an acknowledgement of the message that the reset brought back does not cover it. Epochs must rise by resets
    alone, or any duplicate could hide behind a new one: that is judged too.

    `reasons` counts what explained the duplicates of a run.
    """

    promise = "P5"

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self._last: dict[_Chain, Delivered] = {}
        self._beside: dict[_Message, set[_Chain]] = {}
        """Chains of retries from an earlier epoch that have come in this one."""
        self._came: dict[tuple[str, int], dict[int, int]] = {}
        """By (group, message): the highest attempt delivered in each epoch."""
        self._retried: dict[_Message, set[int]] = {}
        """Attempts that such retries may follow: those of earlier epochs, and those of the retries themselves."""
        self._nacked: dict[_Message, int] = {}
        self._acknowledged: set[_Chain] = set()
        self._left: set[int] = set()
        """Sessions that their consumers ended."""
        self._cut: set[int] = set()
        """Sessions that their nodes ended. Their consumers keep the messages in their hands."""
        self._resetting: set[tuple[str, str]] = set()
        self._epochs: dict[tuple[str, str], int] = {}
        """By group and topic: the highest epoch seen."""
        self._may_rise: set[tuple[str, str]] = set()
        """Groups and topics with a reset asked for or under way since that epoch was seen."""
        self._leases = KnownLeases()
        self._extended: dict[tuple[str, int], Extended] = {}
        self._ids: dict[tuple[str, int], tuple[int, ...]] = {}

    def _on_delivered(self, record: Delivered) -> None:
        if record.broadcast:
            return
        self._leases.take(record)
        self._check_epoch(record)
        chain = self._chain(record)
        before = self._last.get(chain)
        self._last[chain] = record
        if before is not None:
            reason = self._reason(before, record, chain)
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _on_settle_sent(self, record: SettleSent) -> None:
        if record.outcome != "ACK":
            self._extended.pop((record.group, record.uid), None)
        if record.outcome == "RETRY":
            # A late one of an earlier attempt takes nothing back.
            key = (record.group, record.uid, record.epoch)
            self._nacked[key] = max(record.attempt, self._nacked.get(key, 0))

    def _on_dead_replay_asked(self, record: DeadReplayAsked) -> None:
        # A replayed letter counts its attempts from one again.
        for key in [key for key in self._nacked if key[0] == record.group and key[1] in record.uids]:
            del self._nacked[key]

    def _on_reset_asked(self, record: ResetAsked) -> None:
        self._resetting.add((record.group, record.topic))
        self._may_rise.add((record.group, record.topic))

    def _on_reset_answered(self, record: ResetAnswered) -> None:
        # Carried out at least once, and once more perhaps just now.
        self._resetting.discard((record.group, record.topic))
        self._may_rise.add((record.group, record.topic))

    def _on_session_closed(self, record: SessionClosed) -> None:
        if record.by_node:
            self._cut.add(record.session)
        elif record.session not in self._cut:
            self._left.add(record.session)

    def _on_known(self, record: Telling) -> None:
        self._leases.take(record)

    def _on_extended(self, record: Extended) -> None:
        self._leases.take(record)
        self._extended[record.group, record.uid] = record

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        ids = self._ids.setdefault((record.producer, record.sequence), record.ids)
        if ids != record.ids:
            self.broken(f"batch {record.producer}/{record.sequence} was acknowledged twice with other ids")

    def _check_epoch(self, record: Delivered) -> None:
        place = (record.group, record.topic)
        known = self._epochs.get(place, 0)
        if record.epoch <= known:
            return
        if place not in self._may_rise:
            self.broken(
                f"{record.node} delivers message {record.uid} to {record.group} in its epoch {record.epoch} of "
                f"{record.topic}, after {known}: nobody has reset it since"
            )
        self._epochs[place] = record.epoch
        if place not in self._resetting:
            self._may_rise.discard(place)

    def _chain(self, record: Delivered) -> _Chain:
        """The chain of attempts that a delivery belongs to."""
        message = (record.group, record.uid, record.epoch)
        came = self._came.setdefault(message[:2], {})
        retried = self._retried.get(message)
        if retried is None:
            earlier = max((attempt for epoch, attempt in came.items() if epoch < record.epoch), default=0)
            retried = self._retried[message] = set(range(1, earlier + 1))
        came[record.epoch] = max(record.attempt, came.get(record.epoch, 0))
        beside = (*message, record.due_ms)
        last = self._last.get(beside)
        if last is not None and last.attempt != record.attempt and last.at_ns == record.at_ns:
            # Two units: leases that ran out together bring a message and an earlier retry of it back together.
            beside = (*message, -record.due_ms)
        if beside not in self._last:
            if record.attempt - 1 not in retried:
                return (*message, FIRST)
            self._beside.setdefault(message, set()).add(beside)
        retried.add(record.attempt)
        return beside

    def _on_settled(self, record: Settled) -> None:
        if record.outcome not in ("ACK", "SKIP"):
            return
        message = (record.group, record.uid, record.epoch)
        chains = [chain for chain in ((*message, FIRST), *self._beside.get(message, ())) if chain in self._last]
        if len(chains) > 1:
            # Several chains of this message: the attempt may single one out.
            chains = [chain for chain in chains if self._last[chain].attempt == record.attempt]
        if len(chains) == 1:
            self._acknowledged.add(chains[0])

    def _reason(self, before: Delivered, again: Delivered, chain: _Chain) -> str:
        what = (
            f"message {again.uid} to {again.group} attempt {again.attempt} by {again.node} in term {again.term}, "
            f"after attempt {before.attempt} by {before.node} in term {before.term} at {before.at_ns / 1e9:.6f} s"
        )
        if before.id != again.id and not (self.run.push_first and before.term != again.term):
            # (In push-first a dispatch may be lost after its delivery, and the message moved by the next master.)
            self.broken(f"{what}: under another id ({before.id:#x}, {again.id:#x}): dispatched twice")
        if chain in self._acknowledged:
            self.broken(f"{what}: its acknowledgement was committed")
        if self._nacked.get((again.group, again.uid, again.epoch)) == before.attempt:
            return "nack"
        # Given by one clock and ended by another.
        clock_error_ms = before.clock_error_ms + again.clock_error_ms + 2 * self.run.clock_allowance_ms
        if self.true_ns(before.lease_until_ms) - clock_error_ms * MS <= again.at_ns:
            self._judge_extension(before, again, what)
            return "lease expired"
        if before.session in self._left:
            return "session closed"
        if before.term == again.term:
            self.broken(f"{what}: no nack, lease holds, same term")
        if (again.node, again.boot) == (before.node, before.boot):
            self.broken(f"{what}: {again.node} gave out the lease itself, and has not stopped since")
        if self._leases.knows(again.node, before.node, before.term, before.at_ns):
            self.broken(f"{what}: {again.node} had heard of its lease, or had it on its disk")
        return "failover"

    def _judge_extension(self, before: Delivered, again: Delivered, what: str) -> None:
        """The lease that was given is over: so must that be to which it was extended, as far as that is known."""
        held = self._extended.get((again.group, again.uid))
        if held is None or (held.attempt, held.epoch) != (before.attempt, before.epoch):
            return
        clock_error_ms = held.clock_error_ms + again.clock_error_ms + 2 * self.run.clock_allowance_ms
        holds = self.true_ns(held.until_ms) - clock_error_ms * MS > again.at_ns
        own = (held.node, held.boot) == (again.node, again.boot)
        if holds and (own or self._leases.knows(again.node, held.node, held.term, held.at_ns)):
            self.broken(f"{what}: {held.node} extended its lease before {held.at_ns / 1e9:.6f} s, and it holds")


CALM_NS = 3 * SECOND
"""Time since any other event that could have changed the master, or kept a sync from a slave."""

_Key = tuple[str, int, int]
"""(group, uid, epoch)"""


class HandedOver(Checker):
    """P5 of planned handovers: the next master knows the deliveries in flight of the old one and does not repeat them.

    Judged only if no other fault is active or was a moment ago, so that the handover alone changed the term. Then
    neither the closing of the old master's sessions nor a lease unknown to the next master is a reason for a duplicate.

    Does not judge broadcasts, nor push-first dispatch, which may lose dispatches.
    """

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
        over = self.true_ns(before.lease_until_ms) - error_ms * MS <= record.at_ns
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


KEPT_WITHIN_NS = 2 * SECOND
HARMLESS = frozenset({"kill", "kill-all", "kill-returning", "handover"})
"""Faults that delay no file of a node that runs."""
HUNG = "hung-disk"
HUNG_NS_MOST = 4 * SECOND
"""A disk may hang so long. At the end of a run this fault ends before the disk goes on."""


class LeasesWritten(Checker):
    """P5, the loss of all nodes: a node has written down each lease that it gave at most two seconds ago.

    Judged while nothing but kills disturbs the node: a slow, full or failing disk, a frozen process and a wrong clock
    may delay the file (sync_files.py), and then more comes again.
    """

    promise = "P5"

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}
        """By node: its first delivery that is in no file yet."""
        self._gathered: set[str] = set()
        """Nodes that are writing the file."""
        self._later: dict[str, int] = {}
        """By node: its first delivery since then."""
        self._faults: set[str] = set()
        self._disturbed_ns = 0
        """Until then at most a fault that has ended may delay files."""

    def _on_booted(self, record: Booted) -> None:
        for held in (self._owed, self._later):
            held.pop(record.node, None)
        self._gathered.discard(record.node)

    def _on_fault_began(self, record: FaultBegan) -> None:
        if record.fault.split()[1] not in HARMLESS:
            self._faults.add(record.fault)

    def _on_fault_ended(self, record: FaultEnded) -> None:
        if record.fault in self._faults:
            self._faults.discard(record.fault)
            hung_ns = HUNG_NS_MOST if record.fault.split()[1] == HUNG else 0
            self._disturbed_ns = max(self._disturbed_ns, record.at_ns + hung_ns)

    def _on_delivered(self, record: Delivered) -> None:
        self._judge(record.node, record.at_ns)
        waiting = self._later if record.node in self._gathered else self._owed
        waiting.setdefault(record.node, record.at_ns)

    def _on_leases_gathered(self, record: LeasesGathered) -> None:
        self._gathered.add(record.node)

    def _on_leases_kept(self, record: LeasesKept) -> None:
        self._judge(record.node, record.at_ns)
        self._gathered.discard(record.node)
        self._owed.pop(record.node, None)
        if record.node in self._later:
            self._owed[record.node] = self._later.pop(record.node)

    def _judge(self, node: str, at_ns: int) -> None:
        owed_ns = self._owed.get(node, at_ns)
        if at_ns - owed_ns <= KEPT_WITHIN_NS:
            return
        if self._faults or self._disturbed_ns >= owed_ns:
            self._owed[node] = at_ns
            return
        self.broken(f"{node} has not written down the lease that it gave at {owed_ns / 1e9:.6f} s")
