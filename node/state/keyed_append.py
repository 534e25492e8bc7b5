"""Appends messages of which some have unique keys: each key's conflict is decided here, when the command is applied.

Messages are decided in the order of their requests, and appended together: also those that a later one of the same
command replaces, which are cancelled then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.key_holders import KeyHolders
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.unique_keys import HeldColumns, KeyColumns, keys_of
from tickwheel.proto.common_pb2 import (
    KEY_CONFLICT_REPLACE,
    KEY_CONFLICT_USE_EXISTING,
    KEY_FREE,
    KEY_REFUSED,
    KEY_REPLACED,
    KEY_USED_EXISTING,
)
from tickwheel.wheel.sweep import cut_records
from tickwheel.wheel.units import Ids, Units, picked

UNTIL_SETTLED = 4
"""In a rule, beside the KeyConflict: the key is held until the message is settled."""


Places = NDArray[np.intp]


class Keys(NamedTuple):
    """Key columns of n units. `digests`: DIGEST of unique_keys.py, zeros: no key; `rules`: KeyConflict and
    UNTIL_SETTLED."""

    digests: NDArray[np.void]
    rules: NDArray[np.uint8]


class KeyedAppend:
    """One use. The results are in the order of the units."""

    def __init__(self, wheel: WheelPort, holders: KeyHolders, units: Units, records: bytes, keys: Keys) -> None:
        self._wheel = wheel
        self._holders = holders
        self._units = units
        self._records = records
        self._keys = keys
        self.ids = np.zeros(len(units), np.uint64)
        self.due_ms = np.zeros(len(units), np.int64)
        self.outcomes = np.zeros(len(units), np.uint8)
        self.replaced: list[int] = []
        """Ids of cancelled messages."""

    def append(self, rows: NDArray[np.uint32] | None) -> None:
        """Append what may be. `rows`: place of each unit in its requests; None: the units are in that order."""
        digests = self._keys.digests
        units = np.flatnonzero((digests["high"] != 0) | (digests["low"] != 0))
        if rows is not None:
            units = units[np.argsort(rows[units], kind="stable")]
        if not len(units):
            self._append(np.ones(len(self._units), np.bool_))
            return
        keys = keys_of(self._units["topic_id"][units], digests[units])
        turns = np.lexsort((keys.low, keys.topic_ids, keys.mixed))
        self._append_keyed(units[turns], keys.take(turns), turns)

    def _append_keyed(self, units: Places, keys: KeyColumns, turns: Places) -> None:
        """Append what may be, and let it take its keys. These columns are by key, and for one key by turn."""
        places = np.arange(len(units))
        first = places == 0
        for column in keys:
            first[1:] |= column[1:] != column[:-1]
        starts, group = np.flatnonzero(first), np.cumsum(first) - 1
        holders = self._holders.holders(keys.take(starts))
        held, dispatched = holders.held[group], holders.dispatched[group]
        conflict = self._keys.rules[units] & ~np.uint8(UNTIL_SETTLED)
        takes = ~dispatched & ((conflict == KEY_CONFLICT_REPLACE) | (first & ~held))
        newest = np.maximum.accumulate(np.where(takes, places, -1))
        before = np.concatenate(([-1], newest[:-1]))
        own = before >= starts[group]
        """The key is another unit's of this command, the one at `before`; otherwise the holder's, if there is one."""
        kept_out = np.where(conflict == KEY_CONFLICT_USE_EXISTING, KEY_USED_EXISTING, KEY_REFUSED)
        self.outcomes[units] = np.where(takes, np.where(held | own, KEY_REPLACED, KEY_FREE), kept_out)

        replaced = group[takes & held & ~own]
        self._cancel(holders.ids[replaced], holders.due_ms[replaced])
        together = np.ones(len(self._units), np.bool_)
        together[units[~takes]] = False
        self._append(together)
        if not together.all():
            for rows, ids, due_ms, source in (
                (~takes & ~own, holders.ids, holders.due_ms, group),
                (~takes & own, self.ids, self.due_ms, units[before]),
            ):
                self.ids[units[rows]], self.due_ms[units[rows]] = ids[source[rows]], due_ms[source[rows]]
        replaced = units[before[takes & own]]
        self._cancel(self.ids[replaced], self.due_ms[replaced])

        taken = np.flatnonzero(takes)
        if not len(taken):
            return
        groups, firsts = np.unique(group[taken], return_index=True)
        groups = groups[np.argsort(turns[taken[firsts]])]
        last = units[newest[np.append(starts[1:], len(units))[groups] - 1]]
        until_settled = self._keys.rules[last] & UNTIL_SETTLED != 0
        held_now = HeldColumns(self.ids[last], self.due_ms[last], until_settled)
        self._holders.take(keys.take(starts[groups]), held_now)

    def _append(self, taken: NDArray[np.bool_]) -> None:
        """Append the units that are taken."""
        if not taken.any():
            return
        units, records = self._units, self._records
        if not taken.all():
            units, records = picked(units, taken), cut_records(records, units["size"], taken)
        self.ids[taken] = self._wheel.append(units, records)
        self.due_ms[taken] = units["due_ms"]

    def _cancel(self, ids: Ids, due_ms: NDArray[np.int64]) -> None:
        if len(ids):
            self._wheel.cancel_many(ids, due_ms)
            self.replaced += ids.tolist()


assert KEY_FREE == 0, "outcomes begin as free"
