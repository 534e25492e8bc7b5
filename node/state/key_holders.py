"""Which message holds a unique key, by the wheel and the groups; and when rows of the table go.

A message holds its key while it is pending; with `until_settled` also until every group of its topic has settled it. So
nothing has to be done to free a key: not at a dispatch, a cancel, a settlement or the deletion of a topic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.groups import DISPATCHED, Groups, owed, owed_many
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.unique_keys import UNIQUE_KEYS_MAX, HeldColumns, KeyColumns, KeyOf, UniqueKeys
from tickwheel.wheel import sweep
from tickwheel.wheel.units import Ids

PRUNED_MANY = 4
"""Shards that a dispatch looks through while the table is more than half full; otherwise it is one."""
PRUNED_DISPATCHED_MAX = 4
"""Dispatched messages of one shard that are looked up in the ready queues, which may read a file."""


class Holder(NamedTuple):
    """The message that holds a key. `id` and `due_ms`: its newest. `dispatched`: it only waits to be settled."""

    id: int
    due_ms: int
    dispatched: bool


class Holders(NamedTuple):
    """Who holds keys: whether anybody does, and `Holder` in columns. Ids and due times of the others mean nothing."""

    held: NDArray[np.bool_]
    ids: Ids
    due_ms: NDArray[np.int64]
    dispatched: NDArray[np.bool_]


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
        waits = held.until_settled and outcome.name in DISPATCHED
        if not waits or not owed(self._groups, self._wheel, key.topic_id, id, due_ms):
            return None
        return Holder(id, due_ms, dispatched=True)

    def holders(self, keys: KeyColumns) -> Holders:
        """`holder` for many keys. Each tick whose messages may not be settled is read once."""
        held, taken = self._keys.get_many(keys)
        if not held.any():
            return Holders(held, taken.ids, taken.due_ms, held)
        ids, due_ms, outcomes = self._wheel.standing_many(taken.ids, taken.due_ms)
        rows = np.flatnonzero(held & taken.until_settled & _dispatched(outcomes))
        dispatched = np.zeros(len(held), np.bool_)
        dispatched[rows] = self._owed(keys.topic_ids[rows], ids[rows], due_ms[rows])
        return Holders(held & ((outcomes == sweep.DONE) | dispatched), ids, due_ms, dispatched)

    def _owed(self, topic_ids: NDArray[np.uint32], ids: Ids, due_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which dispatched messages a group has not settled. Ids and due times: of their own units."""
        found = np.zeros(len(ids), np.bool_)
        for topic_id in np.unique(topic_ids).tolist():
            rows = np.flatnonzero(topic_ids == topic_id)
            found[rows] = owed_many(self._groups, self._wheel, topic_id, ids[rows], due_ms[rows])
        return found

    def take(self, keys: KeyColumns, held: HeldColumns) -> None:
        """Let messages hold keys. Nobody may hold them, unless a message takes the holder's place."""
        self._keys.put_many(keys, held)

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
            held = rows.held
            ids, due_ms, outcomes = self._wheel.standing_many(held.ids, held.due_ms)
            kept = outcomes == sweep.DONE
            waiting = np.flatnonzero(_dispatched(outcomes) & held.until_settled)
            kept[waiting] = True
            if len(waiting) > PRUNED_DISPATCHED_MAX:  # others another time
                waiting = np.roll(waiting, self._wheel.cursor.due_ms % len(waiting))[:PRUNED_DISPATCHED_MAX]
            kept[waiting] = self._owed(rows.topic_ids[waiting], ids[waiting], due_ms[waiting])
            keys.keep(kept)


def _dispatched(outcomes: sweep.Outcomes) -> NDArray[np.bool_]:
    """Which were dispatched: with their hours, and without."""
    found: NDArray[np.bool_] = (outcomes == sweep.DISPATCHED) | (outcomes == sweep.UNKNOWN)
    return found
