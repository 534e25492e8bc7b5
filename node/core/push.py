"""Push-first: what a dispatch will bring is worked out when it is proposed, and delivered before it is committed.

The master knows exactly what its dispatch will do if nothing that lies before it in the log can change that: no publish
under way that reaches below the new cursor, no cancel, reschedule or administration under way. Then the units below the
new cursor are those pending now, and each topic's ready queue grows by them, in order. If that cannot be known the
dispatch is not pushed: its messages go out once it is committed, as in commit-first.

So settlements of pushed messages need no waiting (their command lies behind the dispatch in the same log), and when the
dispatch is applied, what it brings is compared with what was pushed: a difference is our bug and stops the node.

A commit may stay behind by `push_behind_ms`; while it does nothing more is pushed. What a master has pushed when it is
deposed may be dispatched again by the next one, at other positions: the leases of pushed messages therefore travel with
their ids in the 50 ms sync.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.announcements import PushedAhead
from tickwheel.node.core.kernel import Kernel
from tickwheel.wheel.units import CursorKey, Ids, Units, ids_of


@dataclass(slots=True)
class _Flight:
    """A dispatch under way: what it is expected to bring, by topic; `known` is False if that is not known."""

    target: CursorKey
    proposed_ms: int
    known: bool
    topics: dict[int, tuple[int, Ids]] = field(default_factory=dict)


class PushAhead:
    """One per node in push-first; `dispatched` and `answered` follow the dispatches in the order of their proposals."""

    def __init__(self, core: Kernel) -> None:
        self._config = core.config
        self._state = core.state
        self._wheel = core.wheel
        self._proposer = core.proposer
        self._announce = core.announcements.announce
        self._flights: deque[_Flight] = deque()
        self.pushed = 0
        """Messages handed to delivery before their dispatch was committed."""

    def reset(self) -> None:
        """A reign begins or ends."""
        self._flights.clear()

    def proposing(self, start: CursorKey, target: CursorKey, now_ms: int) -> None:
        """A dispatch from `start` to `target` is about to be proposed: push what it will bring, if that is known."""
        flight = _Flight(target, now_ms, known=False)
        units = self._expected(start, target, now_ms)
        self._flights.append(flight)
        if units is None:
            return
        flight.known = True
        topics = units["topic_id"]
        for topic_id in np.unique(topics).tolist():
            if not self._state.topic_name(topic_id):
                continue  # the topic is gone: they will be discarded
            of_topic = units[topics == topic_id]
            first = self._state.ready_count(topic_id) + sum(
                len(f.topics[topic_id][1]) for f in self._flights if topic_id in f.topics
            )
            flight.topics[topic_id] = (first, ids_of(of_topic))
            self.pushed += len(of_topic)
            self._announce(PushedAhead(topic_id, first, of_topic))

    def _expected(self, start: CursorKey, target: CursorKey, now_ms: int) -> Units | None:
        flights = self._flights
        if flights and now_ms - flights[0].proposed_ms > self._config.push_behind_ms:
            return None
        if not all(flight.known for flight in flights):
            return None
        if self._proposer.may_change_from_ms() <= target.due_ms:
            return None
        return self._wheel.peek(start, target)

    def dispatched(self, topic_id: int, first_position: int, units: Units) -> bool | None:
        """Units entered a ready queue: True if they were pushed, None if they were not what was pushed."""
        # Several may lie in one entry of the log, and are answered together after it: whose units these are says the
        # cursor, which has just moved to its target, or a little below if that was cut.
        flight = next((flight for flight in self._flights if flight.target >= self._wheel.cursor), None)
        if flight is None or not flight.known:
            return False
        expected = flight.topics.pop(topic_id, None)
        if expected is None or expected[0] != first_position or not np.array_equal(expected[1], ids_of(units)):
            return None
        return True

    def applied(self) -> bool:
        """The oldest dispatch under way was applied; False if something that was pushed did not come with it."""
        return not self._flights or not self._flights.popleft().topics

    def failed(self) -> None:
        """A dispatch was not applied, so none behind it that is under way brings what was expected of it."""
        self._flights.clear()
