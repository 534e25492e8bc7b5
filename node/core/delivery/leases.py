"""The master's leases of deliveries, and the ranges in which others are told of them.

The table is soft state. A new master rebuilds it from what the 50 ms sync told it. A lease names positions of a topic's
ready queue. Only the replicated state knows which positions are settled, so a settlement does not touch the table; when
a lease expires, the state says which of its positions are still open.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.subscription import Attempts, Positions, Subscription
from tickwheel.proto.peer_pb2 import LeaseRange
from tickwheel.wheel.units import Ids

K = TypeVar("K")
ChannelKey = tuple[int, int]
"""(group id, topic id)"""
FloorOf = Callable[[ChannelKey], int]
"""Returns a channel's floor, as `StateView.floor`."""

TURN_CHANNELS = 500
"""Channels looked at in one turn of an upkeep. One takes a few microseconds."""
TURN_FRESH = 5_000
"""Fresh leases looked at in one turn of an upkeep. One takes a microsecond."""
TURN_LEASES = 200
"""Leases taken over, written as ranges or given back in one turn. One takes 20 to 50 microseconds."""
TURN_DROPPED = 2_000
"""Dropped leases closed in one turn of an upkeep. One takes about a microsecond."""
LEASE_MESSAGES = 64
"""A lease that is given back counts as one more for each of so many messages that it names: they take as long."""
TOLD_MESSAGES_MAX = 65_536
"""Messages that a range names which this node tells of: less than a megabyte, with attempts and ids."""
NEVER_MS = 1 << 62
_NO_POSITIONS = np.zeros(0, np.uint64)
_NO_ATTEMPTS = np.zeros(0, np.uint32)


@dataclass(slots=True, eq=False)
class Lease:
    """Positions given out together, in rising order, and the attempt of each."""

    channel: ChannelKey
    positions: Positions
    attempts: Attempts
    until_ms: int
    session_id: int
    """0: an earlier master gave them out."""
    closed: bool = False
    ids: Ids | None = None
    """Set for messages delivered ahead of their dispatch: their positions are valid only once that is applied."""
    epoch: int = 0
    """How often the group had been reset when the messages were given out."""
    given_back: bool = False
    """The consumer left and the return failed; it is tried again at the lease's end. The lease did not run out."""
    counting: int = 0
    """Positions that no newer lease of the table names; kept by the table."""

    def only(self, rows: NDArray[np.bool_]) -> Lease:
        """A copy of the lease with only these positions. The copy is in no table."""
        ids = None if self.ids is None else self.ids[rows]
        return replace(self, positions=self.positions[rows], attempts=self.attempts[rows], ids=ids)


@dataclass(slots=True)
class LeaseTable:
    """The master's leases, ordered by their end.

    A newer lease replaces older ones for the positions that it names, as soon as a lease of the channel was extended:
    a lease that no longer counts for any position is closed, and one that counts for less than half of them loses the
    others. So open leases name at most twice as many positions as there are messages out.

    `inherit` is called before a channel's leases are looked at: its owner may have some to add first.
    """

    inherit: Callable[[ChannelKey], None] = lambda _: None
    _fresh: deque[Lease] = field(default_factory=deque)
    """Leases given since the last look, in none of the lists below yet: most are settled before anybody looks."""
    _fresh_channels: set[ChannelKey] = field(default_factory=set)
    """Their channels, and perhaps some more."""
    _fresh_end_ms: int = NEVER_MS
    """None of the fresh leases ends before. Says nothing while there are none."""
    _heap: list[tuple[int, int, Lease]] = field(default_factory=list)
    _closed: int = 0
    """Closed leases that are still in the heap."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _sessions: dict[int, dict[Lease, None]] = field(default_factory=dict)
    """Session -> its open leases that are not fresh, in the order in which they were given."""
    _channels: dict[ChannelKey, dict[Lease, None]] = field(default_factory=dict)
    """The same by channel, without dropped ones."""
    _dropped: list[dict[Lease, None]] = field(default_factory=list)
    """By channel, leases that were dropped: `close_dropped` closes them, unless they end before."""
    _groups: dict[int, dict[Lease, None]] = field(default_factory=dict)
    """The same by group."""
    _counting: dict[ChannelKey, dict[int, Lease]] = field(default_factory=dict)
    """Position -> the lease that counts for it. For channels in which leases were extended, while something is out."""
    _out: Counter[int] = field(default_factory=Counter)
    """Group id -> messages under open leases; groups without any are left out."""
    _out_total: int = 0

    def give(self, lease: Lease) -> None:
        """Add the lease of a delivery."""
        lease.counting = count = len(lease.positions)
        self._out[lease.channel[0]] += count
        self._out_total += count
        self._fresh.append(lease)
        self._fresh_channels.add(lease.channel)
        if lease.until_ms < self._fresh_end_ms:
            self._fresh_end_ms = lease.until_ms
        if self._counting:
            self._list_fresh()

    def _list_fresh(self) -> None:
        fresh, self._fresh, self._fresh_end_ms = self._fresh, deque(), NEVER_MS
        self._fresh_channels.clear()
        for lease in fresh:
            self._list(lease)

    def _list(self, lease: Lease) -> None:
        heapq.heappush(self._heap, (lease.until_ms, next(self._order), lease))
        self._sessions.setdefault(lease.session_id, {})[lease] = None
        self._channels.setdefault(lease.channel, {})[lease] = None
        self._groups.setdefault(lease.channel[0], {})[lease] = None
        counting = self._counting.get(lease.channel)
        if counting is not None:
            self._replace(counting, lease)

    def extend(self, lease: Lease) -> None:
        """Add a lease; older ones no longer count for the positions that it names."""
        self._counting_of(lease.channel)
        self.give(lease)

    def holds(self, channel: ChannelKey, positions: Positions) -> NDArray[np.bool_]:
        """True for each position that an open lease names."""
        counting = self._counting_of(channel)
        return np.fromiter((position in counting for position in positions.tolist()), bool, len(positions))

    def _counting_of(self, channel: ChannelKey) -> dict[int, Lease]:
        """`_counting` of a channel; made when it is first asked for, at a cost that depends on what is out there."""
        counting = self._counting.get(channel)
        if counting is None:
            counting = {}
            for lease in self.of_channel(channel):
                self._replace(counting, lease)
            if counting:
                self._counting[channel] = counting
        return counting

    def _replace(self, counting: dict[int, Lease], lease: Lease) -> None:
        """Let a lease count for all its positions."""
        for position in lease.positions.tolist():
            older = counting.get(position)
            counting[position] = lease
            if older is not None:
                self._less(older, 1)
                if not older.counting:
                    self._close(older)
                    _empty(older)
                elif 2 * older.counting < len(older.positions):
                    rows = (counting.get(p) is older for p in older.positions.tolist())
                    _keep(older, np.fromiter(rows, bool, len(older.positions)))

    def _less(self, lease: Lease, count: int) -> None:
        """The lease counts for so many positions less."""
        lease.counting -= count
        group_id = lease.channel[0]
        self._out[group_id] -= count
        self._out_total -= count
        if not self._out[group_id]:
            del self._out[group_id]

    def _close(self, lease: Lease) -> None:
        lease.closed = True
        self._less(lease, lease.counting)
        _remove(self._sessions, lease.session_id, lease)
        _remove(self._groups, lease.channel[0], lease)
        if not self._was_dropped(lease):
            _remove(self._channels, lease.channel, lease)
        self._closed += 1
        if self._closed > 64 and 2 * self._closed > len(self._heap):
            self._heap = [item for item in self._heap if not item[2].closed]
            heapq.heapify(self._heap)
            self._closed = 0

    def _was_dropped(self, lease: Lease) -> bool:
        return lease not in self._channels.get(lease.channel, ())

    def _end(self, lease: Lease) -> Lease:
        """Close a lease; returns it with the positions for which it counted, none if it was dropped."""
        if self._was_dropped(lease):
            self._close(lease)
            _empty(lease)
            return lease
        counting = self._counting.get(lease.channel)
        if counting is not None:
            if lease.counting < len(lease.positions):
                rows = (counting.get(p) is lease for p in lease.positions.tolist())
                _keep(lease, np.fromiter(rows, bool, len(lease.positions)))
            for position in lease.positions.tolist():
                del counting[position]
            if not counting:
                del self._counting[lease.channel]
        self._close(lease)
        return lease

    def drop(self, channel: ChannelKey) -> None:
        """End all leases of a channel: its group was reset, or the topic or group deleted. There may be very many, so
        they are closed, and no longer counted in `out`, in the turns of the next upkeep."""
        self.inherit(channel)
        self._list_fresh()
        self._counting.pop(channel, None)
        if (leases := self._channels.pop(channel, None)) is not None:
            self._dropped.append(leases)

    def close_dropped(self) -> Iterator[None]:
        """Close what was dropped. In turns of TURN_DROPPED."""
        done = 0
        while self._dropped:
            leases = self._dropped[-1]
            lease, _ = leases.popitem()
            if not leases:
                self._dropped.pop()
            if not lease.closed:
                self._close(lease)
                _empty(lease)
            done += 1
            if not done % TURN_DROPPED:
                yield

    def next_end_ms(self) -> int | None:
        """When the next open lease ends, at the earliest; None: none is open."""
        while self._heap and self._heap[0][2].closed:
            heapq.heappop(self._heap)
            self._closed -= 1
        end_ms = self._heap[0][0] if self._heap else NEVER_MS
        if self._fresh and self._fresh_end_ms < end_ms:
            end_ms = self._fresh_end_ms
        return None if end_ms == NEVER_MS else end_ms

    def expire(self, now_ms: int) -> Iterator[Lease]:
        """Close and yield the leases that are over, each with the positions for which it counted."""
        while (end_ms := self.next_end_ms()) is not None and end_ms <= now_ms:
            if self._fresh:
                self._list_fresh()
            else:
                yield self._end(self._heap[0][2])

    def close_session(self, session_id: int, leases_max: int | None = None) -> Iterator[Lease]:
        """Close and yield the open leases that a consumer has now, at most the first `leases_max`, each position only
        in the lease that counts for it."""
        self._list_fresh()
        for lease in list(itertools.islice(self._sessions.get(session_id, ()), leases_max)):
            yield self._end(lease)

    def out(self) -> int:
        """Messages under open leases, each counted once however often its lease was extended."""
        return self._out_total

    def out_of_group(self, group_id: int) -> int:
        """As `out`, of one group."""
        return self._out.get(group_id, 0)

    def out_by_group(self) -> Counter[int]:
        """Group id -> messages under open leases, for groups that have some."""
        return self._out.copy()

    def forget_settled(self, floor_of: FloorOf) -> Iterator[None]:
        """Drop leases whose positions all lie below their channel's floor: all their messages are settled. Looks at all
        fresh leases, in turns of TURN_FRESH, then at each channel's leases up to the first that stays, in turns of
        TURN_CHANNELS."""
        for number in range(1, len(self._fresh) + 1):
            if not self._fresh:
                break
            lease = self._fresh.popleft()
            if int(lease.positions[-1]) < floor_of(lease.channel):
                lease.closed = True
                self._less(lease, lease.counting)
                _empty(lease)
            else:
                self._list(lease)
            if not number % TURN_FRESH:
                yield
        self._fresh_channels = {lease.channel for lease in self._fresh}
        if not self._fresh:
            self._fresh_end_ms = NEVER_MS
        for number, channel in enumerate(list(self._channels), 1):
            floor = floor_of(channel)
            settled = []
            for lease in self.of_channel(channel):
                if int(lease.positions[-1]) >= floor:
                    break
                settled.append(lease)
            for lease in settled:
                _empty(self._end(lease))
            if not number % TURN_CHANNELS:
                yield

    def channels(self) -> list[ChannelKey]:
        """Channels with open leases."""
        self._list_fresh()
        return list(self._channels)

    def epochs(self) -> dict[ChannelKey, int]:
        """The epoch of each channel's open leases: `drop` comes with each new one, so they have the same."""
        self._list_fresh()
        return {channel: next(iter(leases)).epoch for channel, leases in self._channels.items()}

    def open_leases(self) -> Iterator[Lease]:
        """All open leases, channel by channel, each as it is when the iteration comes to it."""
        return itertools.chain.from_iterable(map(self.of_channel, self.channels()))

    def of_channel(self, channel: ChannelKey) -> list[Lease]:
        """The open leases of one channel, in the order in which they were given. Cost depends on that channel's
        leases."""
        self.inherit(channel)
        if channel in self._fresh_channels:
            self._list_fresh()
        return list(self._channels.get(channel, ()))

    def groups(self) -> dict[int, int]:
        """Group id -> its open leases, for groups that have some."""
        self._list_fresh()
        return {group_id: len(leases) for group_id, leases in self._groups.items()}

    def newest(self, group_id: int, leases_max: int) -> list[Lease]:
        """The open leases of a group that were given last, at most so many, the newest first."""
        self._list_fresh()
        return list(itertools.islice(reversed(self._groups.get(group_id, {})), leases_max))

    def clear(self) -> None:
        """Forget all leases: this node leads no more."""
        self._fresh.clear()
        self._fresh_channels.clear()
        self._fresh_end_ms = NEVER_MS
        self._heap.clear()
        self._closed = 0
        self._sessions.clear()
        self._channels.clear()
        self._dropped.clear()
        self._groups.clear()
        self._counting.clear()
        self._out.clear()
        self._out_total = 0


def in_turn(leases: Iterator[Lease], room: int) -> Iterator[tuple[Lease, int]]:
    """Leases to give back in a turn that has room for `room`, each with the room that it leaves: the last may take
    more than there was."""
    while room > 0 and (lease := next(leases, None)) is not None:
        room -= 1 + len(lease.positions) // LEASE_MESSAGES
        yield lease, room


def _remove(leases: dict[K, dict[Lease, None]], key: K, lease: Lease) -> None:
    some = leases[key]
    del some[lease]
    if not some:
        del leases[key]


def _keep(lease: Lease, rows: NDArray[np.bool_]) -> None:
    """Take the other positions from a lease. New arrays: whoever holds the old ones has them unchanged."""
    lease.positions, lease.attempts = lease.positions[rows], lease.attempts[rows]
    lease.ids = None if lease.ids is None else lease.ids[rows]


def _empty(lease: Lease) -> None:
    lease.positions, lease.attempts, lease.ids = _NO_POSITIONS, _NO_ATTEMPTS, None


class LeaseCopy(NamedTuple):
    """What the others must know of a lease, as it is now: the arrays never change."""

    channel: ChannelKey
    positions: Positions
    attempts: Attempts
    ids: Ids | None
    until_ms: int
    epoch: int


def copy_of(lease: Lease) -> LeaseCopy:
    """What the others must know of a lease."""
    return LeaseCopy(lease.channel, lease.positions, lease.attempts, lease.ids, lease.until_ms, lease.epoch)


AnyLease = Lease | LeaseCopy | LeaseRange
"""A lease that is out, or what is known of one."""


def ranges_of(lease: AnyLease) -> Iterator[LeaseRange]:
    """A lease as ranges of consecutive positions."""
    if isinstance(lease, LeaseRange):
        yield lease
        return
    positions, attempts, ids, until_ms, epoch = lease.positions, lease.attempts, lease.ids, lease.until_ms, lease.epoch
    if not len(positions):
        return
    group_id, topic_id = lease.channel
    count, lowest = len(positions), positions.item(0)
    together = positions.item(-1) - lowest == count - 1
    plain = ids is None and _all_first(attempts)
    if together and plain and count <= TOLD_MESSAGES_MAX:  # nearly always, and over many topics for each message
        yield LeaseRange(
            group_id=group_id, topic_id=topic_id, first_position=lowest, count=count, until_ms=until_ms, epoch=epoch
        )
        return
    inner = [] if together else (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    for start, end in itertools.pairwise([0, *inner, len(positions)]):
        for first in range(start, end, TOLD_MESSAGES_MAX):
            last = min(end, first + TOLD_MESSAGES_MAX)
            told = LeaseRange(
                group_id=group_id,
                topic_id=topic_id,
                first_position=int(positions[first]),
                count=last - first,
                until_ms=until_ms,
                epoch=epoch,
            )
            if not plain:
                if not _all_first(attempts[first:last]):
                    told.attempts = attempts[first:last].astype("<u4").tobytes()
                if ids is not None:
                    told.ids = ids[first:last].astype("<u8").tobytes()
            yield told


def _all_first(attempts: Attempts) -> bool:
    return attempts.item(0) == 1 if len(attempts) == 1 else bool((attempts == 1).all())


def current(subscription: Subscription, lease: Lease) -> NDArray[np.bool_]:
    """True for each position of a lease that is still out: neither settled nor returned since."""
    is_current: NDArray[np.bool_] = ~subscription.is_settled(lease.positions)
    is_current &= subscription.attempts_of(lease.positions) == lease.attempts
    return is_current
