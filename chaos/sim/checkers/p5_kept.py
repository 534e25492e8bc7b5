"""P5, the loss of all nodes: a node has written down each lease that it gave at most two seconds ago.

Judged while nothing but kills disturbs the node: a slow, full or failing disk, a frozen process and a wrong clock may
delay the file (lease_file.py), and then more comes again.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded
from tickwheel.chaos.sim.history_machines import Booted, LeasesGathered, LeasesKept
from tickwheel.chaos.sim.history_messages import Delivered
from tickwheel.chaos.sim.world import SECOND

KEPT_WITHIN_NS = 2 * SECOND
HARMLESS = frozenset({"kill", "kill-all", "kill-returning", "handover"})
"""Faults that delay no file of a node that runs."""
HUNG = "hung-disk"
HUNG_NS_MOST = 4 * SECOND
"""A disk may hang so long. At the end of a run this fault ends before the disk goes on."""


class LeasesWritten(Checker):
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
