"""Which message holds a unique key, by the wheel and the groups; and when rows of the table go.

A message holds its key while it is pending; with `until_settled` also until every group of its topic has settled it. So
nothing has to be done to free a key: not at a dispatch, a cancel, a settlement or the deletion of a topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from tickwheel.node.state.groups import Groups
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.unique_keys import UNIQUE_KEYS_MAX, Held, KeyOf, Rows, UniqueKeys
from tickwheel.node.state.unsettled import DISPATCHED, owed_many
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


class Dispatched(NamedTuple):
    """A dispatched message: its topic, and id and due time of its own unit."""

    topic_id: int
    id: int
    due_ms: int


class KeyHolders:
    def __init__(self, keys: UniqueKeys, groups: Groups, wheel: WheelPort) -> None:
        self._keys = keys
        self._groups = groups
        self._wheel = wheel
        self._looked_up: dict[KeyOf, Holder | None] = {}
        """What was found out for keys of dispatched messages, while `looking_up`."""
        self._rows: dict[KeyOf, Held | None] = {}
        """What the table has for all keys that are looked up."""

    def holder(self, key: KeyOf) -> Holder | None:
        """The message that holds a key now; None: none does."""
        if key in self._looked_up:
            return self._looked_up[key]
        held = self._rows[key] if key in self._rows else self._keys.get(key)
        if held is None:
            return None
        id, due_ms, outcome = self._wheel.standing(held.id, held.due_ms)
        if outcome is None:
            return Holder(id, due_ms, dispatched=False)
        if not held.until_settled or outcome.name not in DISPATCHED:
            return None
        found = self._owed_of([Dispatched(key.topic_id, id, due_ms)])
        return Holder(id, due_ms, dispatched=True) if found else None

    @contextmanager
    def looking_up(self, keys: Iterable[KeyOf]) -> Iterator[None]:
        """Until the end of the block `holder` knows which dispatched messages of these keys are settled: found out for
        all of them together, so each tick is read once. Nothing may be dispatched, settled or taken in the block."""
        messages: dict[KeyOf, Dispatched] = {}
        self._rows = {key: self._keys.get(key) for key in keys}
        for key, held in self._rows.items():
            if held is not None and held.until_settled:
                id, due_ms, outcome = self._wheel.standing(held.id, held.due_ms)
                if outcome is not None and outcome.name in DISPATCHED:
                    messages[key] = Dispatched(key.topic_id, id, due_ms)
        owed = self._owed_of(messages.values())
        self._looked_up = {
            key: Holder(message.id, message.due_ms, dispatched=True) if message in owed else None
            for key, message in messages.items()
        }
        try:
            yield
        finally:
            self._looked_up, self._rows = {}, {}

    def _owed_of(self, messages: Iterable[Dispatched]) -> set[Dispatched]:
        """Those that a group has not settled."""
        by_topic: dict[int, list[Dispatched]] = {}
        for message in messages:
            by_topic.setdefault(message.topic_id, []).append(message)
        found: set[Dispatched] = set()
        for topic_id, those in by_topic.items():
            ids = np.array([message.id for message in those], np.uint64)
            due_ms = np.array([message.due_ms for message in those], np.int64)
            owed = owed_many(self._groups, self._wheel, topic_id, ids, due_ms)
            found.update(those[place] for place in np.flatnonzero(owed).tolist())
        return found

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
            messages = {row: self._dispatched(rows, row) for row in waiting.tolist()}
            owed = self._owed_of(messages.values())
            for row, message in messages.items():
                kept[row] = message in owed
            keys.keep(kept)

    def _dispatched(self, rows: Rows, row: int) -> Dispatched:
        id, due_ms, _ = self._wheel.standing(int(rows.ids[row]), int(rows.due_ms[row]))
        return Dispatched(int(rows.rest["topic_id"][row]), id, due_ms)
