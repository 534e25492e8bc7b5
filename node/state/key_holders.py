"""Which message holds a unique key, by the wheel and the groups; and when rows of the table go.

A message holds its key while it is pending; with `until_settled` also until every group of its topic has settled it. So
nothing has to be done to free a key: not at a dispatch, a cancel, a settlement or the deletion of a topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tickwheel.node.state.groups import Groups
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.unique_keys import UNIQUE_KEYS_MAX, Held, KeyOf, UniqueKeys
from tickwheel.node.state.unsettled import DISPATCHED, owed
from tickwheel.wheel import sweep

PRUNED_MANY = 4
"""Shards that a dispatch looks through while the table is more than half full; otherwise it is one."""
PRUNED_DISPATCHED_MAX = 4
"""Dispatched messages of one shard that are looked up in the ready queues, which may read a file."""


class Holder(NamedTuple):
    """The message that holds a key. `id` and `due_ms`: its newest. `dispatched`: it only waits to be settled."""

    id: int
    due_ms: int
    dispatched: bool


class KeyHolders:
    def __init__(self, keys: UniqueKeys, groups: Groups, wheel: WheelPort) -> None:
        self._keys = keys
        self._groups = groups
        self._wheel = wheel

    def holder(self, key: KeyOf) -> Holder | None:
        """The message that holds a key now; None: none does."""
        held = self._keys.get(key)
        if held is None:
            return None
        id, due_ms, outcome = self._wheel.standing(held.id, held.due_ms)
        if outcome is None:
            return Holder(id, due_ms, dispatched=False)
        if not held.until_settled or outcome.name not in DISPATCHED:
            return None
        found = owed(self._groups, self._wheel, key.topic_id, id, due_ms)
        return Holder(id, due_ms, dispatched=True) if found else None

    def take(self, taken: Mapping[KeyOf, Held]) -> None:
        """Let messages hold keys. Nobody may hold them, unless a message takes the holder's place."""
        self._keys.put_all(taken)

    def prune(self) -> None:
        """Drop the rows of messages that hold their keys no longer, in the next shards. Called by each dispatch, once
        its messages are in the ready queues."""
        keys = self._keys
        if not keys.count:
            return
        for _ in range(PRUNED_MANY if keys.count > UNIQUE_KEYS_MAX // 2 else 1):
            rows = keys.next_rows()
            if not len(rows.high):
                keys.keep(np.zeros(0, np.bool_))
                continue
            outcomes = self._wheel.standing_many(rows.ids, rows.due_ms)
            kept = outcomes == sweep.DONE
            dispatched = (outcomes == sweep.DISPATCHED) | (outcomes == sweep.UNKNOWN)
            waiting = np.flatnonzero(dispatched & rows.until_settled)
            kept[waiting] = True
            if len(waiting) > PRUNED_DISPATCHED_MAX:  # others another time
                waiting = np.roll(waiting, self._wheel.cursor.due_ms % len(waiting))[:PRUNED_DISPATCHED_MAX]
            for row in waiting.tolist():
                id, due_ms, _ = self._wheel.standing(int(rows.ids[row]), int(rows.due_ms[row]))
                kept[row] = owed(self._groups, self._wheel, int(rows.rest["topic_id"][row]), id, due_ms)
            keys.keep(kept)
