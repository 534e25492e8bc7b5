"""The master's filter sweep: settles ready messages that a group's filter rejects and that no dispatch has checked.

Such messages exist before a group that starts in the past, has fallen behind its window, got another filter or was
reset. A step reads units (never payloads) and judges them as arrays. Rejected messages go into the log as runs of
positions: one command for thousands of messages, whether anybody consumes or not. Each subscription has at most one
step under way, and all together few; the one that waits longest is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.work import Background, RemovedError
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.failure import Failure
from tickwheel.node.state.filtering import runs_of
from tickwheel.node.state.machine import CommandResult, StateMachine
from tickwheel.node.state.schema import REPLAYS_LEVEL
from tickwheel.proto.log_pb2 import Command, Filtered
from tickwheel.storage.disk import DiskFullError
from tickwheel.wheel.filters import filter_of
from tickwheel.wheel.units import Units

STEP_MESSAGES_MAX = 4_096
STEPS_MAX = 4
"""Steps under way at a time: their reads share the worker with deliveries."""
LOOK_PERIOD_MS = 20
LOOKS_MAX = 256
"""Subscriptions looked at in one turn."""
PAUSE_MS = 200
"""Pause after a failed step."""


class FilterSkips(Part):
    """Works only while the node leads. `wake` is called with the id of each group for which messages were decided."""

    of_master = True

    def __init__(
        self,
        state: StateMachine,
        proposer: Proposer,
        background: Background,
        wake: Callable[[int], None],
        fatal: Callable[[str, BaseException | None], None],
        all_understand: Callable[[int], bool],
    ) -> None:
        """`all_understand` tells whether every member reads a log of a level."""
        self._state = state
        self._proposer = proposer
        self._background = background
        self._wake = wake
        self._fatal = fatal
        self._all_understand = all_understand
        self._waiting: deque[ChannelKey] = deque()
        self._stepping: set[ChannelKey] = set()
        self._behind = False
        self._next_ms = 0
        self._mastership = 0

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        self._mastership += 1
        self._stepping.clear()
        self.refresh()

    def refresh(self) -> None:
        """Look at all groups again: some came, went or changed their filter."""
        self._waiting = deque(self._state.unchecked())
        self._next_ms = 0

    def subscribed(self, group_id: int) -> None:
        """Look at this group: it is new or has more topics."""
        if self._state.group_filter(group_id):
            known = {topic_id for of_group, topic_id in self._waiting if of_group == group_id}
            self._waiting.extend((group_id, t) for t in self._state.group_topics(group_id) if t not in known)
            self._next_ms = 0

    def tick(self, now: Now) -> None:
        """Begin steps for subscriptions that are behind."""
        if not now.acting or not self._waiting or now.cluster_ms < self._next_ms:
            return
        self._next_ms = now.cluster_ms + LOOK_PERIOD_MS
        self._behind = False
        for _ in range(min(LOOKS_MAX, len(self._waiting))):
            if len(self._stepping) >= STEPS_MAX:
                return
            key = self._waiting.popleft()
            if self._state.subscription(*key) is None:
                continue
            self._waiting.append(key)
            if key not in self._stepping and self._step(key):
                self._behind = True

    def wait_ms(self, now: Now) -> int | None:
        """Until the next look, if a subscription is behind; else the next ready messages bring a tick."""
        behind = self._behind or len(self._waiting) > LOOKS_MAX
        return self._next_ms - now.cluster_ms if now.acting and behind else None

    def _step(self, key: ChannelKey) -> bool:
        """Read and judge the next messages of one subscription; returns whether there were some."""
        subscription = self._state.subscription(*key)
        expression = self._state.group_filter(key[0])
        wanted_by = filter_of(expression)
        if subscription is None or wanted_by is None:
            return False
        first, ids = subscription.unchecked_ids(STEP_MESSAGES_MAX)
        if not len(ids):
            return False
        mastership = self._mastership
        self._stepping.add(key)

        def read(units: Units | None, error: BaseException | None) -> None:
            if mastership != self._mastership:
                return
            if units is None:
                self._stepping.discard(key)
                if isinstance(error, DiskFullError):  # no descriptor is left
                    self._next_ms += PAUSE_MS
                elif not isinstance(error, RemovedError):
                    self._next_ms += PAUSE_MS
                    self._fatal(
                        f"a message that is due cannot be read: {error}. Another node will deliver it; "
                        "replace this node's data (docs/DEPLOY.md, a node is dead)",
                        error,
                    )
                return
            self._proposer.serving.run(failed, partial(judge, units))

        def judge(units: Units) -> None:
            command = Filtered(
                group_id=key[0],
                topic_id=key[1],
                filter=expression,
                first=first,
                runs=runs_of(wanted_by.wanted(units)),
                ends_pauses=bool(subscription.pauses) and self._all_understand(REPLAYS_LEVEL),
            )
            self._proposer.submit(Command(filtered=command), Reply(applied, failed), may_gather=True)

        def failed(_: Failure) -> None:
            if mastership == self._mastership:
                self._stepping.discard(key)
                self._next_ms += PAUSE_MS

        def applied(result: CommandResult) -> None:
            if mastership == self._mastership:
                self._stepping.discard(key)
                self._wake(key[0])
                self._step(key)

        self._background.read_units(ids, read)
        return True
