"""Push-first: works out the effect of a dispatch when it is proposed, and delivers before it is committed.

The master knows exactly what its dispatch will do if nothing before it in the log can change that: no publish under way
reaches below the new cursor, and no cancel, reschedule or administration is under way. Then the dispatch brings the
units now pending below the new cursor, and each topic's ready queue grows by them, in order. If the master cannot know
this, the dispatch is not pushed: its messages go out once it is committed, as in commit-first.

So settlements of pushed messages need no waiting: their command lies behind the dispatch in the same log. When the
dispatch is applied, its units are compared with those pushed: a difference is our bug and stops the node.

A commit may be late by `push_behind_ms`; while it is later, nothing more is pushed. If a master is deposed, the next
one may dispatch its pushed messages again, at other positions: therefore the leases of pushed messages travel with
their ids in the 50 ms sync.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.wheel.units import CursorKey, Ids, Units, ids_of, picked


@dataclass(slots=True)
class _Flight:
    """A dispatch under way. `topics`: topic -> first position and ids that it should bring; empty unless `known`."""

    target: CursorKey
    proposed_ms: int
    known: bool
    topics: dict[int, tuple[int, Ids]] = field(default_factory=dict)


class PushAhead:
    """Calls of `dispatched`, `applied` and `failed` follow the dispatches in the order of their proposals."""

    def __init__(self, core: Kernel, pushed: Callable[[int, int, Units], None], unpushed: Callable[[], None]) -> None:
        """`pushed` gets the units that a proposed dispatch will put into a topic's ready queue, from a position on:
        topic, position, units. `unpushed`: a dispatch was not applied, so none of them may come."""
        self._config = core.config
        self._state = core.state
        self._wheel = core.wheel
        self._proposer = core.proposer
        self._pushed = pushed
        self._unpushed = unpushed
        self._flights: deque[_Flight] = deque()
        self.pushed = 0
        """Messages given to delivery before their dispatch was committed."""

    def reset(self) -> None:
        """Forget the dispatches under way: a mastership begins or ends."""
        self._flights.clear()

    def proposing(self, start: CursorKey, target: CursorKey, now_ms: int) -> None:
        """Push the units that a dispatch from `start` to `target` will bring, if they are known. Called just before it
        is proposed."""
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
            of_topic = picked(units, topics == topic_id)
            first = self._state.ready_count(topic_id) + sum(
                len(f.topics[topic_id][1]) for f in self._flights if topic_id in f.topics
            )
            flight.topics[topic_id] = (first, ids_of(of_topic))
            self.pushed += len(of_topic)
            self._pushed(topic_id, first, of_topic)

    def _expected(self, start: CursorKey, target: CursorKey, now_ms: int) -> Units | None:
        flights = self._flights
        if flights and now_ms - flights[0].proposed_ms > self._config.push_behind_ms:
            return None
        if not all(flight.known for flight in flights):
            return None
        if self._proposer.may_change_from_ms() <= target.due_ms:
            return None
        return self._wheel.peek(start, target)

    def dispatched(self, topic_id: int, first_position: int, units: Units, cursor: CursorKey) -> bool | None:
        """Units entered a ready queue. True: exactly these were pushed. False: nothing was pushed. None: others were
        pushed. `cursor`: where their dispatch brought it."""
        # One entry of the log may contain several dispatches, all answered after it. The cursor tells whose units these
        # are: it moved to that dispatch's target, or a little below if the dispatch was cut.
        flight = next((flight for flight in self._flights if flight.target >= cursor), None)
        if flight is None or not flight.known:
            return False
        expected = flight.topics.pop(topic_id, None)
        if expected is None or expected[0] != first_position or not np.array_equal(expected[1], ids_of(units)):
            return None
        return True

    def applied(self) -> bool:
        """The oldest dispatch under way was applied. False: it did not bring everything that was pushed."""
        return not self._flights or not self._flights.popleft().topics

    def failed(self) -> None:
        """A dispatch was not applied, so those under way behind it bring other units than expected: forget them all."""
        self._flights.clear()
        self._unpushed()
