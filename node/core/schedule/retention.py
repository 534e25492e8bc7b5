"""Removal of hours: the master proposes to remove hours that nobody needs, or whose retention is over.

An hour is not needed once every group of every topic has settled the messages that were due in it; a topic without a
group keeps its messages. Retention (a replicated setting) limits all of that: messages that a group has not settled by
then are removed and counted. It begins when a message is dispatched, even if the message was due long before it was
scheduled. Hours near the cursor stay, so that a message can still be looked up a while after its delivery.

The removal is a command of the log: the same on every node, at the same place. It says which hours go because their
retention is over, and which go only if nobody needs them when it is applied: a group may have been created since the
master looked. Dead letters hold no hour. Letters that died before the retention period go with the same command, even
if no hour does.
"""

from __future__ import annotations

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.proto.log_pb2 import AdminCommand, Command, RemoveHours
from tickwheel.wheel.units import HOUR_MS


class Retention(Part):
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._state = core.state
        self._next_ms = 0
        self._proposed = False

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """Start afresh: a removal proposed in an earlier mastership does not count."""
        self._next_ms = 0
        self._proposed = False

    def upkeep(self, now: Now) -> None:
        """Propose a removal, once a period and if anything can go. An error leaves it for a later period."""
        if self._core.leading and self._core.clock.known:
            self._core.serving.side(self._failed, self._look, now.cluster_ms)

    def _failed(self) -> None:
        self._proposed = False

    def _look(self, now_ms: ClusterMs) -> None:
        if self._proposed or now_ms < self._next_ms or not self._state.created:
            return
        self._next_ms = now_ms + self._core.config.retention_period_ms
        forced, below = self.hours_below(now_ms)
        dead_before_ms = max(0, now_ms - self._state.settings.retention_ms)
        death_ms = self._state.oldest_death_ms()
        if below <= self._state.hour_min_kept and (death_ms is None or death_ms >= dead_before_ms):
            return
        self._proposed = True

        def removed(_: object) -> None:
            self._proposed = False

        removal = RemoveHours(hour_min_kept=below, forced_below=forced, dead_before_ms=dead_before_ms)
        command = Command(admin=AdminCommand(remove_hours=removal))
        self._core.proposer.submit(command, Reply.either(removed), may_gather=True)

    def hours_below(self, now_ms: int) -> tuple[int, int]:
        """Two hours: retention is over below the first; hours below the second can go."""
        latest = max(0, self._core.wheel.cursor.due_ms // HOUR_MS - self._core.config.hours_kept)
        oldest = max(0, (now_ms - self._state.settings.retention_ms) // HOUR_MS)
        over = self._state.retention_over(oldest)
        return min(oldest, latest), min(max(self._state.removable_hours(), over), latest)
