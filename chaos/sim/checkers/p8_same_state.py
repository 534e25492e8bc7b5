"""P8: equal digest of the logical state on every node at equal applied index, and equal units of each entry."""

from __future__ import annotations

from collections import OrderedDict

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history_machines import ContentSeen, DigestSeen

INDEXES_KEPT = 20_000


class SameState(Checker):
    """Compares whatever digests are taken, whenever they are taken."""

    promise = "P8"

    def __init__(self) -> None:
        self._digests: OrderedDict[int, DigestSeen] = OrderedDict()
        self._contents: OrderedDict[int, ContentSeen] = OrderedDict()

    def _on_digest_seen(self, record: DigestSeen) -> None:
        known = self._digests.get(record.applied_index)
        if known is None:
            self._digests[record.applied_index] = record
            if len(self._digests) > INDEXES_KEPT:
                self._digests.popitem(last=False)
            return
        if known.digest != record.digest:
            ours, theirs = dict(record.parts), dict(known.parts)
            parts = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            self.broken(
                f"at index {record.applied_index} {record.node} (boot {record.boot}) and {known.node} "
                f"(boot {known.boot}, at {known.at_ns / 1e9:.6f} s) differ in {', '.join(parts) or 'their digest'}"
            )

    def _on_content_seen(self, record: ContentSeen) -> None:
        known = self._contents.setdefault(record.index, record)
        if known is record and len(self._contents) > INDEXES_KEPT:
            self._contents.popitem(last=False)
        if known.checksum != record.checksum:
            self.broken(
                f"entry {record.index} gives other units on {record.node} (boot {record.boot}) than on {known.node} "
                f"(boot {known.boot}, at {known.at_ns / 1e9:.6f} s)"
            )
