"""Whether a message is not settled yet.

A message whose hour was removed may still be owed: one that failed waits for its next attempt as a unit of its own.
"""

from __future__ import annotations

from tickwheel.node.state.groups import Groups
from tickwheel.node.state.ports import WheelPort

DISPATCHED = ("ALREADY_DISPATCHED", "NOT_FOUND")
"""How a message stands that was dispatched: with its hour, and without."""


def unsettled(groups: Groups, wheel: WheelPort, topic_id: int, id: int, due_ms: int) -> bool:
    """Whether a message is pending, or a group of its topic has not settled it. `id` and `due_ms` as it was scheduled
    or moved."""
    id, due_ms, outcome = wheel.standing(id, due_ms)
    if outcome is None:
        return True
    return outcome.name in DISPATCHED and owed(groups, wheel, topic_id, id, due_ms)


def owed(groups: Groups, wheel: WheelPort, topic_id: int, id: int, due_ms: int) -> bool:
    """Whether a group of the topic has not settled a dispatched message. `id` and `due_ms`: of its own unit."""
    cursor = wheel.cursor
    for subscription in groups.of_topic(topic_id):
        group = groups.get(subscription.group_id)
        if group is not None and group.waiting.used and group.waiting.of(id, cursor) is not None:
            return True
        if subscription.holds(id, due_ms):
            return True
    return False
