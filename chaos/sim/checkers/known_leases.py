"""What each node knows of the leases that others gave, as a bystander can tell; checkers of P5 and P11 ask for it."""

from __future__ import annotations

from tickwheel.chaos.sim.history_machines import Booted, DiskWiped, LeasesGathered, LeasesKept, LeasesUnread, SyncHeard
from tickwheel.chaos.sim.history_messages import Delivered, Extended
from tickwheel.chaos.sim.world import MS

# A lease given while a sync was being put together may be in that sync or in the next.
SYNC_SLACK_NS = 2 * MS
TOLD_AGAIN_NS = 200 * MS
"""From the first sync after lost ones (as while a slave installs a checkpoint): a sync that leaves later has told what
they told. The master learns of the loss by the answer to that first one."""

_Known = dict[tuple[str, int], int]
"""By (master, term): leases that it gave before then are known."""

Telling = Booted | DiskWiped | LeasesUnread | LeasesGathered | LeasesKept | SyncHeard
"""Records that change what a node knows, besides the leases that it gives itself."""


class KnownLeases:
    """Fed by `take` with every record of `Telling`, and every delivery and extension."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        """By node: its knowledge of leases in its present boot."""
        self._heard: dict[str, dict[tuple[str, int], tuple[int, int]]] = {}
        """By node, in its present boot, and by (master, term): when the newest sync left, and from when on syncs have
        told again what was lost."""
        self._gathered: dict[str, _Known] = {}
        self._kept: dict[str, _Known] = {}
        """By node: the knowledge of leases on its disk."""
        self._led: dict[str, set[int]] = {}
        """Terms in which a node delivered or extended in its present boot."""

    def take(self, record: Telling | Delivered | Extended) -> None:
        """Note what a record tells."""
        node = record.node
        match record:
            case Delivered() | Extended():
                self._led.setdefault(node, set()).add(record.term)
            case SyncHeard():
                self._hear(record)
            case Booted():
                self._heard.pop(node, None)
                self._known[node] = dict(self._kept.get(node, {}))
                self._led[node] = set()
            case DiskWiped():
                self._kept.pop(node, None)
            case LeasesUnread():
                self._known[node] = {}
            case LeasesGathered():
                own = {(node, term): record.at_ns for term in self._led.get(node, ())}
                self._gathered[node] = self._known.get(node, {}) | own
            case LeasesKept():
                self._kept[node] = self._gathered[node]

    def knows(self, node: str, giver: str, term: int, given_ns: int) -> bool:
        """Whether a node has heard in this boot, or had on its disk, what another gave in a term."""
        return given_ns < self._known.get(node, {}).get((giver, term), 0) - SYNC_SLACK_NS

    def _hear(self, record: SyncHeard) -> None:
        known, heard = self._known.setdefault(record.node, {}), self._heard.setdefault(record.node, {})
        source = record.master, record.term
        newest_ns, whole_from_ns = heard.get(source, (record.before_ns, 0))
        if record.before_ns > newest_ns:
            whole_from_ns = record.at_ns + TOLD_AGAIN_NS
        heard[source] = record.sent_ns, whole_from_ns
        if record.complete and record.sent_ns >= whole_from_ns:
            known[source] = max(record.sent_ns, known.get(source, 0))
