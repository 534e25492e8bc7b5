"""Appends messages of which some have unique keys: each key's conflict is decided here, when the command is applied.

Messages are decided in the order of their requests. Those that meet no conflict are appended together; only a message
whose key is held, or wanted twice in one command, is handled by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.key_holders import KeyHolders
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.unique_keys import Held, KeyOf
from tickwheel.proto.common_pb2 import (
    KEY_CONFLICT_REPLACE,
    KEY_CONFLICT_USE_EXISTING,
    KEY_FREE,
    KEY_REFUSED,
    KEY_REPLACED,
    KEY_USED_EXISTING,
)
from tickwheel.wheel.sweep import cut_records
from tickwheel.wheel.units import Units, picked

UNTIL_SETTLED = 4
"""In a rule, beside the KeyConflict: the key is held until the message is settled."""


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
        keyed = np.flatnonzero((digests["high"] != 0) | (digests["low"] != 0))
        if rows is not None:
            keyed = keyed[np.argsort(rows[keyed], kind="stable")]
        columns = (keyed, self._units["topic_id"][keyed], digests["high"][keyed], digests["low"][keyed])
        together = np.ones(len(self._units), np.bool_)
        first: dict[KeyOf, int] = {}
        alone: list[tuple[int, KeyOf]] = []
        for unit, *parts in zip(*(column.tolist() for column in columns), strict=True):
            key = KeyOf(*parts)
            if key in first or self._holders.holder(key) is not None:
                together[unit] = False
                alone.append((unit, key))
            else:
                first[key] = unit
        self._append(together)
        for key, unit in first.items():
            self._take(key, unit)
        for unit, key in alone:
            self._decide(unit, key)

    def _append(self, taken: NDArray[np.bool_]) -> None:
        """Append the units that are taken, together."""
        if not taken.any():
            return
        units, records = self._units, self._records
        if not taken.all():
            units, records = picked(units, taken), cut_records(records, units["size"], taken)
        self.ids[taken] = self._wheel.append(units, records)
        self.due_ms[taken] = units["due_ms"]

    def _take(self, key: KeyOf, unit: int) -> None:
        until_settled = bool(self._keys.rules[unit] & UNTIL_SETTLED)
        self._holders.take(key, Held(int(self.ids[unit]), int(self.due_ms[unit]), until_settled))

    def _decide(self, unit: int, key: KeyOf) -> None:
        """Append one unit, or not, by its rule."""
        holder = self._holders.holder(key)
        taken = np.zeros(len(self._units), np.bool_)
        taken[unit] = True
        if holder is None:
            self._append(taken)
            self._take(key, unit)
            return
        rule = int(self._keys.rules[unit]) & ~UNTIL_SETTLED
        if rule == KEY_CONFLICT_REPLACE and not holder.dispatched:
            self._wheel.cancel(holder.id, holder.due_ms)
            self._append(taken)
            self._take(key, unit)
            self.outcomes[unit] = KEY_REPLACED
            self.replaced.append(holder.id)
            return
        outcome = KEY_USED_EXISTING if rule == KEY_CONFLICT_USE_EXISTING else KEY_REFUSED
        self.ids[unit], self.due_ms[unit], self.outcomes[unit] = holder.id, holder.due_ms, outcome


assert KEY_FREE == 0, "outcomes begin as free"
