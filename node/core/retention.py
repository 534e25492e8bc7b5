"""When hours go: the master proposes to remove those that nobody needs any more, or that retention is over for.

An hour is not needed when every group of every topic has settled what was due in it; a
topic without a group retains. Retention (a replicated setting) is the limit for all of them: what a group has not
settled by then is removed, and counted; it begins when a message is dispatched, also if it was due long before it was
scheduled. Hours near the cursor stay, so that a message can still be looked up a while
after it was delivered. Removal itself is a command of the log: the same on every node, at the same place in it. It says
which hours go because retention is over for them, and which only if nobody needs them when it is applied: a group may
have been created since the master looked. Dead letters hold no hour; those that died before the retention reaches back
go with the same command, also when no hour does.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.node.core.part import Part
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.world import ClusterMs
from tickwheel.node.state.machine import StateMachine
from tickwheel.proto.log_pb2 import AdminCommand, Command, RemoveHours
from tickwheel.wheel.units import HOUR_MS


class Retention(Part):
    """One per node; works only while the node leads."""

    def __init__(
        self, state: StateMachine, proposer: Proposer, cursor_ms: Callable[[], int], period_ms: int, hours_kept: int
    ) -> None:
        self._state = state
        self._proposer = proposer
        self._cursor_ms = cursor_ms
        self._period_ms = period_ms
        self._hours_kept = hours_kept
        self._next_ms = 0
        self._proposed = False

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """This node leads: what was proposed before is another reign's."""
        self._next_ms = 0
        self._proposed = False

    def begin_again(self) -> None:
        """A look went wrong: the next one, a period later, takes nothing of it for done."""
        self._proposed = False

    def tick(self, now_ms: ClusterMs) -> None:
        """Once a period: propose what can go, if anything can."""
        if self._proposed or now_ms < self._next_ms or not self._state.created:
            return
        self._next_ms = now_ms + self._period_ms
        forced, below = self.hours_below(now_ms)
        dead_before_ms = max(0, now_ms - self._state.settings.retention_ms)
        death_ms = self._state.oldest_death_ms()
        if below <= self._state.hour_min_kept and (death_ms is None or death_ms >= dead_before_ms):
            return
        self._proposed = True

        def removed(_: object) -> None:
            self._proposed = False

        removal = RemoveHours(hour_min_kept=below, forced_below=forced, dead_before_ms=dead_before_ms)
        self._proposer.submit(Command(admin=AdminCommand(remove_hours=removal)), removed, may_gather=True)

    def hours_below(self, now_ms: int) -> tuple[int, int]:
        """Hours below the first are over for retention, hours below the second can go."""
        latest = max(0, self._cursor_ms() // HOUR_MS - self._hours_kept)
        oldest = max(0, (now_ms - self._state.settings.retention_ms) // HOUR_MS)
        over = self._state.retention_over(oldest)
        return min(oldest, latest), min(max(self._state.removable_hours(), over), latest)
