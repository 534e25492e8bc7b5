"""The attempts in flight: of each message of a ready queue from the first unsettled one on, which attempt of it counts.

Invariants:
- Everything below `floor` is settled; the message at `floor` is not (or has not been dispatched yet).
- `_values[p - _base]` of a position in [floor, end): 0 settled, else the number of its attempt.
  From `end` on the attempt is 1 and nothing is settled but positions meant for another group.
- `returned_count` is how many values are above 1, `settled` how many positions are settled, those below the floor
  included.

Memory goes with [floor, end), not with the queue: a window that covers nothing holds no array. Every change of
`settled` is told to the backlog at once. Called by the subscription alone, which says what may be settled; this says
only what is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.backlog import Backlog
from tickwheel.node.state.ready import ReadyLog

Places = NDArray[np.int64]
Values = NDArray[np.uint16]

ATTEMPT_MAX = 65_535
CHUNK = 65_536
"""Positions examined together."""
CAPACITY_LEAST = 1_024
_NOTHING: Values = np.zeros(0, np.uint16)
_OPEN: Values = np.ones(1, np.uint16)
_CLOSED: Values = np.zeros(1, np.uint16)


class Window:
    """The window of one group in one topic's ready queue."""

    __slots__ = (
        "_backlog",
        "_base",
        "_group_id",
        "_ready",
        "_returned_from",
        "_topic_id",
        "_values",
        "end",
        "floor",
        "returned_count",
        "settled",
    )

    def __init__(self, group_id: int, topic_id: int, ready: ReadyLog, backlog: Backlog) -> None:
        self._group_id = group_id
        self._topic_id = topic_id
        self._ready = ready
        self._backlog = backlog
        self.floor = 0
        self.end = 0
        self.settled = 0
        """Settled positions, those below the floor included."""
        self.returned_count = 0
        """Unsettled messages with an attempt above 1."""
        self._values = _NOTHING
        self._base = 0
        """Position of `_values[0]`."""
        self._returned_from = 0
        """No position below is returned; only saves searching."""
        backlog.add(group_id, topic_id, ready.count)

    def forget(self) -> None:
        """The group or topic is gone: take its messages off the backlog."""
        self._hold(_NOTHING)
        self._backlog.add(self._group_id, self._topic_id, self.settled - self._ready.count)

    # -- settled positions

    def span(self, first: int, last: int) -> Values:
        """Values of [first, last), which lies above the floor. Do not write to them."""
        inside = max(0, min(last, self.end) - first)
        start = first - self._base
        if inside == last - first:
            return self._values[start : start + inside]
        values = np.ones(last - first, np.uint16)
        values[:inside] = self._values[start : start + inside]
        foreign = self._ready.foreign(self._group_id, first + inside, last)
        if len(foreign):
            values[foreign - first] = 0
        return values

    def at(self, places: Places) -> Values:
        """Values at any positions. Do not write to them."""
        if len(places) == 1 and int(places[0]) >= self.end:
            return _CLOSED if len(self._ready.foreign(self._group_id, int(places[0]), int(places[0]) + 1)) else _OPEN
        values = np.ones(len(places), np.uint16)
        if not len(places):
            return values
        least, most = int(places.min()), int(places.max())
        if least < self.end:
            if least >= self.floor and most < self.end:
                return self._values[places - self._base]
            values[places < self.floor] = 0
            inside = (places >= self.floor) & (places < self.end)
            values[inside] = self._values[places[inside] - self._base]
        if most >= self.end:
            beyond = np.flatnonzero(places >= self.end)
            hits, rows = self._ready.targets.of(places[beyond])
            values[beyond[hits[rows["group"] != self._group_id]]] = 0
        return values

    def returned(self, limit: int) -> Places:
        """Up to `limit` unsettled positions that came back, rising."""
        at = max(self._returned_from, self.floor)
        parts: list[Places] = []
        missing = min(limit, self.returned_count)
        while at < self.end and missing > 0:
            end = min(self.end, at + CHUNK)
            found = at + np.flatnonzero(self._values[at - self._base : end - self._base] > 1)
            if not parts and len(found):
                self._returned_from = int(found[0])
            parts.append(found[:missing])
            missing -= len(parts[-1])
            at = end
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def growth(self, last: int) -> int:
        """By how many values the array would grow if a position were settled or given back; 0: not at all."""
        end = last + 1
        if end - self._base <= len(self._values):
            return 0
        return max(CAPACITY_LEAST, 2 * (end - self.floor)) - len(self._values)

    # -- changes

    def begin_at(self, position: int) -> None:
        """Nothing from this position on is settled; everything below is."""
        self.floor = self._base = self.end = self._returned_from = position
        self.returned_count = 0
        self._note_settled(position - self.settled)
        self._advance()

    def settle(self, places: Places) -> None:
        """Settle positions, which are rising and unsettled."""
        end = int(places[-1]) + 1
        if self.floor == self.end == int(places[0]) and end - self.end == len(places):
            # All that is out at once: over many topics nearly every settlement, and no array is needed for it.
            self._note_settled(len(places))
            self.floor = self._base = self.end = end
            self._advance()
            return
        self._cover(int(places[-1]) + 1)
        at = places - self._base
        if self.returned_count:
            self.returned_count -= int(np.count_nonzero(self._values[at] > 1))
        self._values[at] = 0
        self._note_settled(len(places))
        self._advance()

    def give_back(self, places: Places) -> None:
        """End the attempts that are out for positions, which are rising and unsettled: the next attempt counts."""
        self._cover(int(places[-1]) + 1)
        at = places - self._base
        old = self._values[at]
        self._values[at] = np.minimum(old, ATTEMPT_MAX - 1) + 1
        self.returned_count += int(np.count_nonzero(old == 1))
        self._returned_from = min(self._returned_from, int(places[0]))

    def settle_unwanted(self, first: int, wanted: NDArray[np.bool_]) -> int:
        """Settle the unwanted ones of the positions from `first` on, which is not below the floor; returns how many."""
        end = first + len(wanted)
        self._cover(end)
        values = self._values[first - self._base : end - self._base]
        settled = ~wanted & (values != 0)
        count = int(np.count_nonzero(settled))
        if count:
            self.returned_count -= int(np.count_nonzero(values[settled] > 1))
            values[settled] = 0
            self._note_settled(count)
            self._advance()
        return count

    def skip_foreign(self) -> None:
        """Step the floor over positions for other groups, which may have been added."""
        if self.floor == self.end:
            self._advance()

    def raise_floor(self, position: int) -> int:
        """Settle all positions below one that lies above the floor; returns how many were unsettled."""
        if position >= self.end:
            # All that the window covers, and perhaps more: counted without a look at the values.
            unsettled, at = position - self.settled, self.end
            while at < position:
                end = min(position, at + CHUNK)
                unsettled -= len(self._ready.foreign(self._group_id, at, end))
                at = end
            self.begin_at(position)
            return unsettled
        unsettled, at = 0, self.floor
        while at < position:
            end = min(position, at + CHUNK)
            values = self.span(at, end)
            unsettled += int(np.count_nonzero(values))
            self.returned_count -= int(np.count_nonzero(values > 1))
            at = end
        self.floor = position
        self._note_settled(unsettled)
        self._advance()
        return unsettled

    def as_bytes(self) -> bytes:
        """uint16 for each position from the floor on."""
        return self._held().astype("<u2").tobytes() if self.end > self.floor else b""

    def restore(self, floor: int, data: bytes) -> None:
        """Restore what `as_bytes` returned."""
        values = np.frombuffer(data, "<u2")
        self._hold(np.array(values, np.uint16))
        self.floor = self._base = self._returned_from = floor
        self.end = floor + len(values)
        self.returned_count = int(np.count_nonzero(values > 1))
        self._note_settled(floor + int(np.count_nonzero(values == 0)) - self.settled)

    # -- inside

    def _hold(self, values: Values) -> None:
        self._backlog.window_values += len(values) - len(self._values)
        self._values = values

    def _note_settled(self, count: int) -> None:
        self.settled += count
        self._backlog.add(self._group_id, self._topic_id, -count)

    def _held(self) -> Values:
        return self._values[self.floor - self._base : self.end - self._base]

    def _cover(self, end: int) -> None:
        """Extend the array so that `end` is at least this."""
        if end <= self.end:
            return
        if end - self._base > len(self._values):
            used = self._held()
            capacity = max(CAPACITY_LEAST, 2 * (end - self.floor))
            values = np.ones(capacity, np.uint16)
            values[: len(used)] = used
            self._hold(values)
            self._base = self.floor
        start = self.end - self._base
        self._values[start : end - self._base] = 1
        foreign = self._ready.foreign(self._group_id, self.end, end)
        if len(foreign):
            self._values[foreign - self._base] = 0
            self._note_settled(len(foreign))
        self.end = end

    def _advance(self) -> None:
        """Move the floor over settled positions."""
        at, step = self.floor, 256
        while at < self.end:
            end = min(self.end, at + step)
            values = self._values[at - self._base : end - self._base]
            first_open = int(np.argmax(values != 0))
            if values[first_open]:
                self.floor = at + first_open
                return
            at, step = end, min(2 * step, CHUNK)
        while at < self._ready.count:
            foreign = self._ready.foreign(self._group_id, at, at + CHUNK)
            if not len(foreign):
                break
            run = np.flatnonzero(foreign != at + np.arange(len(foreign)))
            skipped = int(run[0]) if len(run) else len(foreign)
            at += skipped
            if skipped < CHUNK:
                break
        if at > self.end:
            self._note_settled(at - self.end)
        self.floor = self._base = self.end = at
        if len(self._values):
            self._hold(_NOTHING)
