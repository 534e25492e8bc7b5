"""Whether a message is not settled yet.

A message whose hour was removed may still be owed: one that failed waits for its next attempt as a unit of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.groups import Groups
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.subscription import Subscription
from tickwheel.wheel.units import Ids

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
    return bool(owed_many(groups, wheel, topic_id, np.array([id], np.uint64), np.array([due_ms], np.int64))[0])


def owed_many(
    groups: Groups, wheel: WheelPort, topic_id: int, ids: Ids, due_ms: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which of a topic's dispatched messages a group has not settled. Reads what the topic dispatched of one tick at
    most once, however many messages and groups that concerns; a retry is found among the topic's newest."""
    ids, first, back = np.unique(ids, return_index=True, return_inverse=True)
    due_ms = due_ms[first]
    found = np.zeros(len(ids), np.bool_)
    subscriptions = sorted(groups.of_topic(topic_id), key=lambda s: s.first_open, reverse=True)
    for subscription in subscriptions:
        group = groups.get(subscription.group_id)
        if group is not None and group.waiting.used:
            found |= group.waiting.waits(ids, wheel.cursor)
        found |= subscription.retries_open(ids)
    if subscriptions:
        ticks = due_ms // subscriptions[0].ready.slot_ms
        for tick in np.unique(ticks[~found]).tolist():
            rows = np.flatnonzero((ticks == tick) & ~found)
            found[rows] = _open_in_tick(subscriptions, ids[rows], int(due_ms[rows[0]]))
    return found[back]


def _open_in_tick(subscriptions: list[Subscription], ids: Ids, due_ms: int) -> NDArray[np.bool_]:
    """Which messages of one tick a subscription has open. These are of one topic, by falling `first_open`: what one of
    them reads is read for those behind it too."""
    ready = subscriptions[0].ready
    start, end = ready.position_of_due(due_ms), ready.end_of_due(due_ms)
    found = np.zeros(len(ids), np.bool_)
    left = np.arange(len(ids))
    for number, subscription in enumerate(subscriptions):
        first = max(start, subscription.first_open)
        if first >= end:
            continue
        positions, rows = ready.search(first, end, ids[left])
        for other in subscriptions[number:]:
            found[left[rows[~other.is_settled(positions.astype(np.uint64))]]] = True
        left, end = np.delete(left, rows), first
        if not len(left):
            break
    return found
