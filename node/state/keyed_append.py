"""Appends messages of which some have unique keys: each key's conflict is decided here, when the command is applied.

Messages are decided in the order of their requests, and appended together: also those that a later one of the same
command replaces, which are cancelled then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.key_holders import Holder, KeyHolders
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
        self._found: dict[KeyOf, Holder] = {}
        """Holders that were looked up."""
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
        newest: dict[KeyOf, int] = {}
        replaced: list[int] = []
        held_by: list[tuple[int, int]] = []
        keys = [(unit, KeyOf(*parts)) for unit, *parts in zip(*(column.tolist() for column in columns), strict=True)]
        with self._holders.looking_up({key for _, key in keys}):
            for unit, key in keys:
                other = newest.get(key)
                if other is None:
                    together[unit] = self._decide(unit, key)
                elif self._rule(unit) == KEY_CONFLICT_REPLACE:
                    self.outcomes[unit] = KEY_REPLACED
                    replaced.append(other)
                else:
                    together[unit] = False
                    self.outcomes[unit] = self._kept_out(unit)
                    held_by.append((unit, other))
                if together[unit]:
                    newest[key] = unit
        self._append(together)
        for unit, other in held_by:
            self.ids[unit], self.due_ms[unit] = self.ids[other], self.due_ms[other]
        for unit in replaced:
            self._cancel(int(self.ids[unit]), int(self.due_ms[unit]))
        until_settled = self._keys.rules & UNTIL_SETTLED != 0
        self._holders.take(
            {
                key: Held(int(self.ids[unit]), int(self.due_ms[unit]), bool(until_settled[unit]))
                for key, unit in newest.items()
            }
        )

    def _append(self, taken: NDArray[np.bool_]) -> None:
        """Append the units that are taken."""
        if not taken.any():
            return
        units, records = self._units, self._records
        if not taken.all():
            units, records = picked(units, taken), cut_records(records, units["size"], taken)
        self.ids[taken] = self._wheel.append(units, records)
        self.due_ms[taken] = units["due_ms"]

    def _decide(self, unit: int, key: KeyOf) -> bool:
        """Whether the first unit of a command with a key is to be appended; a message that it replaces is cancelled."""
        holder = self._found.get(key) or self._holders.holder(key)
        if holder is None:
            return True
        self._found[key] = holder
        if self._rule(unit) == KEY_CONFLICT_REPLACE and not holder.dispatched:
            self._cancel(holder.id, holder.due_ms)
            self.outcomes[unit] = KEY_REPLACED
            return True
        self.ids[unit], self.due_ms[unit], self.outcomes[unit] = holder.id, holder.due_ms, self._kept_out(unit)
        return False

    def _rule(self, unit: int) -> int:
        return int(self._keys.rules[unit]) & ~UNTIL_SETTLED

    def _kept_out(self, unit: int) -> int:
        """The outcome of a unit that is not appended."""
        return KEY_USED_EXISTING if self._rule(unit) == KEY_CONFLICT_USE_EXISTING else KEY_REFUSED

    def _cancel(self, id: int, due_ms: int) -> None:
        self._wheel.cancel(id, due_ms)
        self.replaced.append(id)


assert KEY_FREE == 0, "outcomes begin as free"
