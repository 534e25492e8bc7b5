"""Messages that a channel has claimed, from the claim until they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.subscription import Attempts, Positions
from tickwheel.wheel.units import Ids, Units, join_units


@dataclass(slots=True, eq=False)
class Prefetched:
    """Messages on their way to a consumer: claimed at first, then with their units, then read, with their records. All
    arrays and lists have one element for each message."""

    positions: Positions
    ids: Ids
    attempts: Attempts
    units: Units | None = None
    records: list[bytes] | None = None
    """None until they are read."""
    due_ms: NDArray[np.int64] = field(init=False)
    """As `ends`, set by `measure` before the records are read."""
    ends: NDArray[np.int64] = field(init=False)
    """Running sum of the records' sizes in bytes, which begins at `before`."""
    before: int = 0
    taken: int = 0
    """How many messages, from the first on, have left."""
    failed: str = ""
    """Why these messages do not leave from here; empty if they do."""
    parked: bool = False
    """The units are known, and there was no room for the records yet."""
    bytes_held: int = 0
    """Of the records that were read or are being read and have not left."""

    @property
    def count(self) -> int:
        """Messages not yet taken."""
        return len(self.positions) - self.taken

    @property
    def has_no_room(self) -> bool:
        """Whether its records are still to be read, and have no room yet."""
        return self.records is None and not self.bytes_held and not self.failed

    def bytes_of(self, first: int, last: int) -> int:
        """Bytes of the records of the rows [first, last), at least one."""
        return int(self.ends[last - 1]) - (int(self.ends[first - 1]) if first else self.before)

    def keep(self, rows: slice | list[int] | NDArray[np.bool_]) -> None:
        """Drop all but these messages. None of them has been read."""
        self.positions, self.ids, self.attempts = self.positions[rows], self.ids[rows], self.attempts[rows]
        if self.units is not None:
            self.units = self.units[rows]

    def split(self, at: int) -> Prefetched:
        """Part with the messages from row `at` on, and return them. None of them has been read."""
        assert self.units is not None
        behind = Prefetched(self.positions[at:], self.ids[at:], self.attempts[at:], self.units[at:])
        self.keep(slice(at))
        measure([self])
        return behind

    def join(self, behind: Prefetched) -> None:
        """Add what has not left of `behind`; both have been read. Messages that have left are dropped."""
        assert self.records is not None and self.units is not None
        assert behind.records is not None and behind.units is not None
        here, there = slice(self.taken, None), slice(behind.taken, None)
        self.positions = np.concatenate((self.positions[here], behind.positions[there]))
        self.ids = np.concatenate((self.ids[here], behind.ids[there]))
        self.attempts = np.concatenate((self.attempts[here], behind.attempts[there]))
        self.units = join_units((self.units[here], behind.units[there]))
        self.records = self.records[here] + behind.records[there]
        measure([self])
        self.taken = 0
        self.bytes_held += behind.bytes_held


def measure(some: Sequence[Prefetched]) -> Units:
    """Note due times and sizes of messages whose units are known, all together. Returns these units in one array."""
    units = join_units([prefetched.units for prefetched in some if prefetched.units is not None])
    due_ms, ends = units["due_ms"].astype(np.int64), units["size"].cumsum(dtype=np.int64)
    first = before = 0
    for prefetched in some:
        last = first + len(prefetched.positions)
        prefetched.due_ms, prefetched.ends, prefetched.before = due_ms[first:last], ends[first:last], before
        first, before = last, int(ends[last - 1])
    return units
