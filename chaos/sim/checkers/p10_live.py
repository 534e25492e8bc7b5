"""P10 and P11: work resumes and goes on, and everything stays within its limits."""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import Drained, FaultBegan, FaultEnded, HandoverEnded, Healed
from tickwheel.chaos.sim.history_log import AskedUnread, ProposalEnded, SentAgain
from tickwheel.chaos.sim.history_machines import Booted, DiskWiped, LeaseSeen, RoleSeen, SizesSeen, Stopped
from tickwheel.chaos.sim.history_messages import ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.world import MS, SECOND

RESUME_NS_MOST = 4 * SECOND
COPY_TURNS = 20
"""Turns of a loop beyond that: a majority may need a slave that has to copy a checkpoint first, piece by piece."""
LEASE_NS_SETTLED = 300 * MS
"""After a lease was held this long without a break, a majority has heard of its master."""
CALM_NS = 3 * SECOND
"""No effect of a fault lasts longer than this after its end."""
RESTARTS = "restart from the checkpoint"
"""The reason given by a process that ends because it takes a peer's checkpoint."""


class Live(Checker):
    """P10: with everything healed, work resumes soon and all due messages are delivered.

    Also, nothing happens without a cause: no election while a master holds its lease, none with unread input, no
    process that stops itself, no planned handover that fails in a cluster without a fault.

    `resumed_after_ns` is how long the first acknowledgement after the heal took, since it was asked for.
    """

    promise = "P10"

    def __init__(self) -> None:
        self.resumed_after_ns: int | None = None
        self._healed_ns: int | None = None
        self._asked_ns: int | None = None
        """Time of the first schedule request after the heal: in a long run producers may pause first."""
        self._terms: set[int] = set()
        self._leases: dict[str, tuple[int, int]] = {}  # node -> (held since, until)
        self._active: set[str] = set()
        self._wiped: set[str] = set()
        """Nodes that lost their disk: they may stand for election in vain, since nobody hears them."""
        self._stirred_ns = 0

    def _on_healed(self, record: Healed) -> None:
        self._healed_ns = record.at_ns

    def _on_schedule_sent(self, record: ScheduleSent) -> None:
        if self._healed_ns is not None and self._asked_ns is None and record.node:
            self._asked_ns = record.at_ns

    def _on_schedule_acknowledged(self, record: ScheduleAcknowledged) -> None:
        self._accepted(record.at_ns)

    def _on_proposal_ended(self, record: ProposalEnded) -> None:
        if record.outcome == "COMMITTED":
            self._accepted(record.at_ns)

    def _on_asked_unread(self, record: AskedUnread) -> None:
        self.broken(f"{record.node} asks for an election with {record.waiting} inputs unread")

    def _on_stopped(self, record: Stopped) -> None:
        self._stirred_ns = record.at_ns
        self._leases.pop(record.node, None)
        if record.why == "fatal" and not record.explained and not record.reason.startswith(RESTARTS):
            self.broken(f"{record.node} stops itself: {record.reason}")

    def _on_disk_wiped(self, record: DiskWiped) -> None:
        self._wiped.add(record.node)

    def _on_booted(self, record: Booted) -> None:
        self._stirred_ns = record.at_ns

    def _on_fault_began(self, record: FaultBegan) -> None:
        self._active.add(record.fault)
        self._stir(record.fault, record.at_ns)

    def _on_fault_ended(self, record: FaultEnded) -> None:
        self._active.discard(record.fault)
        self._stir(record.fault, record.at_ns)

    def _on_role_seen(self, record: RoleSeen) -> None:
        if record.role == "candidate" and record.node not in self._wiped:
            self._stands(record)
        if record.role == "master":
            self._terms.add(record.term)
            if not self.run.faults and len(self._terms) > 1:
                self.broken(f"{record.node} was elected without any fault")

    def _on_drained(self, record: Drained) -> None:
        if record.reason:
            self.broken(f"does not come to rest after the heal: {record.reason}")

    def _accepted(self, at_ns: int) -> None:
        if self._healed_ns is not None and self.resumed_after_ns is None:
            self.resumed_after_ns = at_ns - (self._asked_ns or self._healed_ns)

    def _on_lease_seen(self, record: LeaseSeen) -> None:
        since_ns, until_ns = self._leases.get(record.node, (record.at_ns, record.at_ns))
        if record.at_ns >= until_ns:
            since_ns = record.at_ns
        self._leases[record.node] = (since_ns, record.until_ns)

    def _stands(self, record: RoleSeen) -> None:
        for master, (since_ns, until_ns) in self._leases.items():
            if master != record.node and until_ns > record.at_ns and record.at_ns - since_ns >= LEASE_NS_SETTLED:
                self.broken(
                    f"{record.node} stands for election in term {record.term}; {master} has held the lease "
                    f"since {since_ns / SECOND:.6f} s"
                )

    def _on_handover_ended(self, record: HandoverEnded) -> None:
        alone = len(self._active) <= 1 and record.asked_ns - self._stirred_ns >= CALM_NS
        if alone and not record.came_about:
            self.broken(f"{record.node} was asked to hand over; no other fault was there, and it failed")
        self._stirred_ns = record.at_ns

    def _stir(self, fault: str, at_ns: int) -> None:
        if " handover" not in fault:
            self._stirred_ns = at_ns

    def settle_accounts(self, at_ns: int) -> None:
        if self._healed_ns is None:
            return
        if self.resumed_after_ns is None:
            self.broken("nothing was accepted after the heal")
        if self.resumed_after_ns > RESUME_NS_MOST + COPY_TURNS * self.run.loop_gap_ns:
            self.broken(f"the first acknowledgement after the heal took {self.resumed_after_ns / SECOND:.3f} s")


class Bounded(Checker):
    """P11: every queue, buffer, batch and map stays within its limit; nothing is sent twice unasked.

    `most` is the highest fill seen of each thing.
    """

    promise = "P11"

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def _on_sent_again(self, record: SentAgain) -> None:
        self.broken(
            f"{record.node} sends entry {record.index} to {record.peer} again; it has sent up to "
            f"{record.sent_before} on this connection"
        )

    def _on_sizes_seen(self, record: SizesSeen) -> None:
        for name, now, limit in record.sizes:
            if now > self.most.get(name, -1):
                self.most[name] = now
            if now > limit:
                self.broken(f"{record.node}: {name} holds {now}, its limit is {limit}")
