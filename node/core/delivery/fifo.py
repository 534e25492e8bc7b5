"""One group's progress through a FIFO topic: of each message group at most one message is out, in order.

This channel reads ahead in the order of the ready queue and sorts the messages into lanes, one for each message group
(messages without one share a lane). Only the head of a lane may leave, and only when no message of the lane is out. A
head stays the head until it is settled. A nack raises its attempt in place, and it leaves again when its pause (in the
replicated state) is over; other lanes go on meanwhile.

An unreadable message may belong to any message group. It holds back the messages read together with it and all behind
them, until another member has sent its record or the message is set aside (record_repair.py).

Bounded: at most AHEAD_MAX messages and the channel's bytes are read ahead. If that many wait behind blocked heads,
message groups further back wait too. All of it is soft state; a new master begins at the floor.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.delivery.agenda import NEVER
from tickwheel.node.core.delivery.channel import FETCHES_MAX, Channel, Share
from tickwheel.node.core.delivery.partial_read import ReadRows
from tickwheel.node.core.delivery.prefetched import Prefetched
from tickwheel.node.core.metas import meta_of
from tickwheel.node.state.subscription import Positions
from tickwheel.wheel.units import Units, join_units

AHEAD_MAX = 4_096
"""Messages read ahead, including those that are out."""


@dataclass(slots=True)
class _Waiting:
    """A message in its lane."""

    position: int
    prefetched: Prefetched
    row: int
    size: int
    """Bytes of its record."""

    @property
    def unit(self) -> Units:
        """An array of one."""
        assert self.prefetched.units is not None
        return self.prefetched.units[self.row : self.row + 1]

    @property
    def record(self) -> bytes:
        assert self.prefetched.records is not None
        return self.prefetched.records[self.row]


@dataclass(slots=True)
class _Lane:
    """A message group's messages in order; the head stays until it is settled. `out`: attempt in which the head is out,
    0 if it is not out."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    out: int = 0


@dataclass(slots=True, eq=False)
class _Incomplete:
    """A Prefetched with unreadable messages; `missing`: rows that are still undecided."""

    prefetched: Prefetched
    units: Units
    records: list[bytes | None]
    missing: dict[int, int]


@dataclass(slots=True, eq=False)
class FifoChannel(Channel):
    """A lane is in one of `_free`, `_paused`, `_blocked` and `_out`."""

    _lanes: dict[str, _Lane] = field(default_factory=dict)
    _free: deque[str] = field(default_factory=deque)
    """Lanes whose heads may leave, if the heads are still unsettled."""
    _paused: list[tuple[int, str]] = field(default_factory=list)
    """Heap of (time, lane): lanes whose heads wait for their time."""
    _blocked: dict[str, int] = field(default_factory=dict)
    """Lane -> attempt of its head that is held: an earlier master's lease covers the head, its return is under way, or
    a changed filter has not checked it yet."""
    _out: dict[str, None] = field(default_factory=dict)
    _ahead: int = 0
    _stirred: bool = False
    """A message was settled or came back since the last look at the lanes that are out."""
    _incomplete: list[_Incomplete] = field(default_factory=list)

    @property
    def prefetched_count(self) -> int:
        """Messages read or being read, without those that are out."""
        return self._prefetched_count + self._ahead - len(self._out)

    def out(self) -> int:
        """As in Channel. Messages under an earlier master's lease are read ahead too, but count as out."""
        lanes = [self._lanes[name] for name in self._out]
        heads = [lane.waiting[0].position for lane in lanes]
        given = np.array([lane.out for lane in lanes], np.uint32)
        held = np.array([*self._held.difference(heads)], np.uint64)
        attempts = self.subscription.attempts_of(np.array(heads, np.uint64))
        return int(np.count_nonzero(attempts == given) + np.count_nonzero(~self.subscription.is_settled(held)))

    def claims(self, position: int, attempt: int) -> bool:
        """Always true for a returned message that is in its lane: the lane hands it out again."""
        return True

    def idle_at(self, ready_count: int) -> bool:
        return not self._lanes and Channel.idle_at(self, ready_count)

    def wants(self, ready_count: int) -> bool:
        """Always true: `advance` also sorts into lanes what was read."""
        return True

    def push(self, first_position: int, units: Units, credits: int) -> bool:
        """Always False: a message has no place in its lane before its dispatch."""
        return False

    def stir(self) -> None:
        """A message of this channel was settled or came back: look at the lanes in the next `advance`."""
        self._stirred = True

    def release_hold(self, positions: Positions) -> None:
        Channel.release_hold(self, positions)
        self._free.extend(self._blocked)
        self._blocked.clear()
        self._stirred = True

    def _end_attempt(self, position: int) -> None:
        for name in self._out:
            lane = self._lanes[name]
            if lane.waiting[0].position == position:
                lane.out = 0

    def advance(self, demand: int, ready_count: int) -> None:
        if demand <= 0:
            return
        self._sort()
        resumed = self._resume()
        while (
            self._fetching < FETCHES_MAX
            and not (resumed or self._parked)
            and self.next_position < ready_count
            and self._bytes < self.config.staged_bytes_max
            and (wanted := AHEAD_MAX - self._ahead - self._prefetched_count) > 0
        ):
            limit = min(wanted, self.config.batch_messages_max)
            positions, ids, attempts = self.subscription.deliverable(self.next_position, limit)
            if not len(positions):
                self.next_position = max(self.next_position, self.subscription.scanned_to(self.next_position))
                return
            self.next_position = int(positions[-1]) + 1
            self._start(self._prefetched, positions, ids, attempts)

    def _sort(self) -> None:
        """Sort the messages that were read into their lanes, in order."""
        while self._prefetched and (self._prefetched[0].failed or self._prefetched[0].records is not None):
            prefetched = self._drop_head(self._prefetched)
            if prefetched.failed or prefetched.records is None or prefetched.units is None:
                continue
            meta_sizes = prefetched.units["meta_size"].tolist()
            for row, (position, record) in enumerate(
                zip(prefetched.positions.tolist(), prefetched.records, strict=True)
            ):
                name = meta_of(record[: meta_sizes[row]]).message_group if meta_sizes[row] else ""
                lane = self._lanes.get(name)
                if lane is None:
                    lane = self._lanes[name] = _Lane()
                    self._free.append(name)
                lane.waiting.append(_Waiting(position, prefetched, row, len(record)))
                self._ahead += 1
                self._bytes += len(record)

    def withhold(self, prefetched: Prefetched, found: ReadRows) -> None:
        """As `Channel.withhold`, but here the whole Prefetched waits: an unreadable message may belong to any lane."""
        missing = {int(prefetched.positions[row]): row for row in found.failed}
        waiting = _Incomplete(prefetched, found.units, list(found.records), missing)
        self._incomplete.append(waiting)
        self._complete(waiting)

    def supply(self, position: int, id: int, unit: Units, record: bytes) -> None:
        for waiting in self._incomplete:
            row = waiting.missing.pop(position, None)
            if row is not None:
                waiting.units[row], waiting.records[row] = unit[0], record
                self._complete(waiting)
                return

    def forsake(self, position: int) -> None:
        for waiting in self._incomplete:
            if waiting.missing.pop(position, None) is not None:
                self._complete(waiting)
                return

    def _complete(self, waiting: _Incomplete) -> None:
        if not waiting.missing:
            self._incomplete.remove(waiting)
            self._fetched_in_part(waiting.prefetched, waiting.units, waiting.records)

    def forget_settled(self) -> None:
        """As in Channel. Also looks for messages settled in other ways (a filter, a removal), which nobody reports."""
        Channel.forget_settled(self)
        self._free.extend(self._blocked)
        self._blocked.clear()
        self._stirred = True

    def earliest_ms(self) -> int | None:
        """When the next head may leave. None: a settlement, a read or a lease's end will come first."""
        if self._free or self._stirred or (self._prefetched and self._prefetched[0].records is not None):
            return self.hold_until_ms
        return max(self._paused[0][0], self.hold_until_ms) if self._paused else None

    def rests_until_ms(self, ready_count: int, full: int) -> int | None:
        """NEVER if everything is settled, else None: a settlement or the end of a pause may free a lane at any time."""
        return None if self.subscription.backlog or not self.idle_at(ready_count) else NEVER

    def take(self, now_ms: int, limit: int) -> Share | None:
        """Take the due heads of up to `limit` lanes."""
        if now_ms < self.hold_until_ms or limit <= 0:
            return None
        self._sort()
        if self._stirred:
            self._stirred = False
            self._look_at_what_is_out()
            self._look_at_what_is_held()
        while self._paused and self._paused[0][0] <= now_ms:
            self._free.append(heapq.heappop(self._paused)[1])
        chosen: list[tuple[_Waiting, int]] = []
        size = 0
        while self._free and len(chosen) < limit and size < self.config.batch_bytes_max:
            name = self._free.popleft()
            lane = self._lanes[name]
            attempt = self._attempt_of_head(name, lane)
            if not attempt:
                continue
            head = lane.waiting[0]
            due_ms = max(int(head.prefetched.due_ms[head.row]), self.subscription.pauses.get(head.position, 0))
            if head.position in self._held or head.position >= self.subscription.unchecked:
                self._blocked[name] = attempt
            elif due_ms > now_ms:
                heapq.heappush(self._paused, (due_ms, name))
            else:
                lane.out = attempt
                self._out[name] = None
                chosen.append((head, attempt))
                size += head.size
        return self._together(chosen) if chosen else None

    def _look_at_what_is_out(self) -> None:
        """Free the lanes whose head was settled or came back."""
        names = list(self._out)
        positions = np.array([self._lanes[name].waiting[0].position for name in names], np.uint64)
        given = np.array([self._lanes[name].out for name in names], np.uint32)
        for place in np.flatnonzero(self.subscription.attempts_of(positions) != given).tolist():
            name = names[place]
            self._lanes[name].out = 0
            del self._out[name]
            self._free.append(name)

    def _look_at_what_is_held(self) -> None:
        """Free the lanes whose held head was settled: a consumer may answer for a lease of an earlier master."""
        names = list(self._blocked)
        positions = np.array([self._lanes[name].waiting[0].position for name in names], np.uint64)
        held = np.array([self._blocked[name] for name in names], np.uint32)
        for place in np.flatnonzero(self.subscription.attempts_of(positions) != held).tolist():
            name = names[place]
            self._held.discard(int(positions[place]))
            del self._blocked[name]
            self._free.append(name)

    def _attempt_of_head(self, name: str, lane: _Lane) -> int:
        """Attempt of the first unsettled message of a lane; 0: the lane is empty and was removed."""
        waiting = lane.waiting
        while waiting:
            attempt = int(self.subscription.attempts_of(np.array([waiting[0].position], np.uint64))[0])
            if attempt:
                return attempt
            settled = waiting.popleft()
            self._ahead -= 1
            self._bytes -= settled.size
            if settled.prefetched.records is not None:
                # Messages read together with it may wait for long, and would keep its record in memory.
                settled.prefetched.records[settled.row] = b""
        del self._lanes[name]
        return 0

    def _together(self, chosen: list[tuple[_Waiting, int]]) -> Share:
        chosen.sort(key=lambda item: item[0].position)
        heads = [head for head, _ in chosen]
        units = join_units([head.unit for head in heads])
        return Share(
            self,
            np.array([head.position for head in heads], np.uint64),
            np.array([head.prefetched.ids[head.row] for head in heads], np.uint64),
            np.array([attempt for _, attempt in chosen], np.uint32),
            units["due_ms"].astype(np.int64),
            units,
            [head.record for head in heads],
        )
