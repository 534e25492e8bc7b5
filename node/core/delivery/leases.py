"""Leases of deliveries: the master's table, and what the slaves have heard of it.

The master's table is soft state. A new master rebuilds it from what the 50 ms sync told it. A lease names
positions of a topic's ready queue. Only the replicated state knows which positions are settled, so a
settlement does not touch this table; when a lease expires, the state says which of its positions are still open.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.subscription import Subscription
from tickwheel.proto.peer_pb2 import LeaseRange
from tickwheel.wheel.units import Ids

Positions = NDArray[np.uint64]
Attempts = NDArray[np.uint32]
ChannelKey = tuple[int, int]
"""(group id, topic id)"""
FloorOf = Callable[[ChannelKey], int]
"""Returns a channel's floor: all lower positions are settled. 0 if the group does not have the topic (any more)."""

EVENTS_MAX = 20_000
"""Lease ranges kept for slaves that have not acknowledged them. A slave further behind gets the whole table."""
RANGES_PER_SYNC_MAX = 2_000
RANGE_MESSAGES_MAX = 1_000_000
"""Messages that one range may name. A range becomes arrays of that length, so its count must be bounded."""
MERGED_MESSAGES_MAX = 1_000_000
"""Messages of several channels that are merged together. Ranges are a peer's word: all at once could fill the
memory."""
POSITION_MAX = 1 << 62
UNANSWERED_MAX = 64
"""Unanswered syncs remembered for each slave: 3 s at 50 ms. Answers to older ones are ignored."""
_FIRST = np.ones(1, "<u4").tobytes()
NOTHING = -1
"""Number of an event before all others."""


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

    def only(self, rows: NDArray[np.bool_]) -> Lease:
        """A copy of the lease with only these positions. The copy is in no table."""
        ids = None if self.ids is None else self.ids[rows]
        return replace(self, positions=self.positions[rows], attempts=self.attempts[rows], ids=ids)


@dataclass(slots=True)
class LeaseTable:
    """The master's leases, ordered by their end."""

    _heap: list[tuple[int, int, Lease]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _sessions: dict[int, deque[Lease]] = field(default_factory=dict)
    _extended: dict[tuple[ChannelKey, int], int] = field(default_factory=dict)
    """(channel, position) of each extended message -> new end of its lease."""
    _channels: dict[ChannelKey, list[Lease]] = field(default_factory=dict)
    """All open leases by channel, and those closed since the last `forget_settled`."""

    def give(self, lease: Lease) -> None:
        """Add the lease of a delivery."""
        heapq.heappush(self._heap, (lease.until_ms, next(self._order), lease))
        self._sessions.setdefault(lease.session_id, deque()).append(lease)
        self._channels.setdefault(lease.channel, []).append(lease)

    def extend(
        self, channel: ChannelKey, positions: Positions, attempts: Attempts, until_ms: int, session_id: int, epoch: int
    ) -> None:
        """Hold these positions until `until_ms`; their older leases no longer count."""
        for position in positions.tolist():
            self._extended[channel, position] = until_ms
        self.give(Lease(channel, positions, attempts, until_ms, session_id, epoch=epoch))

    def drop(self, channel: ChannelKey) -> None:
        """Close all leases of a channel: its group was reset, or the topic or group deleted."""
        for lease in self.of_channel(channel):
            lease.closed = True
            lease.positions = lease.positions[:0]
        for key in [key for key in self._extended if key[0] == channel]:
            del self._extended[key]

    def next_end_ms(self) -> int | None:
        """When the next open lease ends; None: none is open."""
        while self._heap and self._heap[0][2].closed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expire(self, now_ms: int) -> Iterator[Lease]:
        """Close and yield the leases that are over, without positions whose extension still runs."""
        while (end_ms := self.next_end_ms()) is not None and end_ms <= now_ms:
            _, _, lease = heapq.heappop(self._heap)
            lease.closed = True
            trimmed = self._without_extended(lease, now_ms)
            if len(trimmed.positions):
                yield trimmed

    def _without_extended(self, lease: Lease, now_ms: int) -> Lease:
        if not self._extended:
            return lease
        keep = np.ones(len(lease.positions), bool)
        for place, position in enumerate(lease.positions.tolist()):
            key = (lease.channel, position)
            until_ms = self._extended.get(key)
            if until_ms is None:
                continue
            if until_ms > now_ms:
                keep[place] = False
            else:
                del self._extended[key]
        return lease.only(keep)

    def close_session(self, session_id: int) -> list[Lease]:
        """Close and return a consumer's open leases, each position only in the lease that counts for it. Its extensions
        end too."""
        leases = [lease for lease in self._sessions.pop(session_id, ()) if not lease.closed]
        for lease in leases:
            lease.closed = True
        if not self._extended:
            return leases
        ended = [lease.only(self._counting(lease)) for lease in leases]
        for lease in leases:
            for position in lease.positions.tolist():
                self._extended.pop((lease.channel, position), None)
        return [lease for lease in ended if len(lease.positions)]

    def _counting(self, lease: Lease) -> NDArray[np.bool_]:
        """True for each position that no other lease has extended."""
        extended, channel, until_ms = self._extended, lease.channel, lease.until_ms
        places = lease.positions.tolist()
        return np.fromiter((extended.get((channel, p), until_ms) == until_ms for p in places), bool, len(places))

    def out(self) -> int:
        """Messages under open leases, each counted once however often its lease was extended."""
        return self.out_by_group().total()

    def out_by_group(self) -> Counter[int]:
        """Group id -> messages under open leases, for groups that have some."""
        counts: Counter[int] = Counter()
        for lease in self.open_leases():
            count = int(np.count_nonzero(self._counting(lease))) if self._extended else len(lease.positions)
            counts[lease.channel[0]] += count
        return counts

    def forget_settled(self, floor_of: FloorOf) -> None:
        """Drop leases whose positions all lie below their channel's floor: all their messages are settled."""
        for session_id in list(self._sessions):
            leases = self._sessions[session_id]
            while leases:
                lease = leases[0]
                if not lease.closed:
                    if int(lease.positions[-1]) >= floor_of(lease.channel):
                        break
                    lease.closed = True
                    lease.positions = lease.positions[:0]
                leases.popleft()
            if not leases:
                del self._sessions[session_id]
        if len(self._heap) > 64:
            closed = sum(1 for item in self._heap if item[2].closed)
            if closed * 2 > len(self._heap):
                self._heap = [item for item in self._heap if not item[2].closed]
                heapq.heapify(self._heap)
        if self._extended:
            for key in [k for k in self._extended if k[1] < floor_of(k[0])]:
                del self._extended[key]
        self._channels.clear()
        for lease in self.open_leases():
            self._channels.setdefault(lease.channel, []).append(lease)

    def open_leases(self) -> Iterator[Lease]:
        """All open leases, roughly by rising end."""
        return (item[2] for item in self._heap if not item[2].closed)

    def of_channel(self, channel: ChannelKey) -> Iterator[Lease]:
        """The open leases of one channel. Cost depends on that channel's leases."""
        return (lease for lease in self._channels.get(channel, ()) if not lease.closed)

    def clear(self) -> None:
        """Forget all leases: this node leads no more."""
        self._heap.clear()
        self._sessions.clear()
        self._channels.clear()
        self._extended.clear()


def ranges_of(lease: Lease) -> list[LeaseRange]:
    """A lease as ranges of consecutive positions."""
    positions = lease.positions
    if not len(positions):
        return []
    # Over many topics most leases have one message: arrays would cost ten times as much.
    inner = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist() if len(positions) > 1 else []
    ranges = []
    for first, last in zip([0, *inner], [*inner, len(positions)], strict=True):
        attempts = lease.attempts[first:last]
        ranges.append(
            LeaseRange(
                group_id=lease.channel[0],
                topic_id=lease.channel[1],
                first_position=int(positions[first]),
                count=last - first,
                attempts=b"" if _all_first(attempts) else attempts.astype("<u4").tobytes(),
                until_ms=lease.until_ms,
                ids=b"" if lease.ids is None else lease.ids[first:last].astype("<u8").tobytes(),
                epoch=lease.epoch,
            )
        )
    return ranges


def _all_first(attempts: Attempts) -> bool:
    return int(attempts[0]) == 1 if len(attempts) == 1 else bool((attempts == 1).all())


@dataclass(slots=True)
class _Told:
    """What one slave was told on its present connection. Events are numbered from the first one on."""

    heard: int = NOTHING
    """It has acknowledged all events below; NOTHING: not even the whole table."""
    sent: int = NOTHING
    """The next sync begins here; NOTHING: with the whole table."""
    unanswered: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=UNANSWERED_MAX))
    """Its syncs since the last rewind: (sync number, first event, end of its events)."""

    def rewind(self) -> None:
        """Something did not arrive: begin again after what was acknowledged. Answers to earlier syncs say no more."""
        self.sent = self.heard
        self.unanswered.clear()


class LeaseFeed:
    """The master's side of the sync: tracks which slave has heard of which lease.

    A sync goes on where the one before it ended, whether that has been answered or not. Frames of a connection arrive
    in order or not at all. So an answer to a sync that does not begin in what the slave has acknowledged tells of a
    loss, and the slave is told again from there on.
    """

    def __init__(self) -> None:
        self._events: deque[LeaseRange] = deque()
        self._first = 0
        """Number of the oldest event kept."""
        self._told: dict[str, _Told] = {}

    @property
    def _end(self) -> int:
        return self._first + len(self._events)

    def add(self, lease: Lease) -> None:
        """A lease was given out or extended."""
        self._events.extend(ranges_of(lease))
        while len(self._events) > EVENTS_MAX:
            self._events.popleft()
            self._first += 1

    def for_peer(self, peer_id: str, number: int, held: Callable[[], Iterable[Lease]]) -> tuple[list[LeaseRange], bool]:
        """Ranges for sync `number` to a slave, and whether they are the whole table, which `held` returns."""
        told = self._told.setdefault(peer_id, _Told())
        whole = told.sent < self._first
        if whole:
            ranges = [r for lease in held() for r in ranges_of(lease)]
            start, stop = NOTHING, self._end
        else:
            start, stop = told.sent, min(self._end, told.sent + RANGES_PER_SYNC_MAX)
            ranges = list(itertools.islice(self._events, start - self._first, stop - self._first))
        told.sent = stop
        told.unanswered.append((number, start, stop))
        return ranges, whole

    def acknowledged(self, peer_id: str, number: int) -> None:
        """A slave answered sync `number`."""
        told = self._told.get(peer_id)
        while told and told.unanswered and told.unanswered[0][0] <= number:
            answered, start, stop = told.unanswered.popleft()
            if answered < number:
                continue
            if start > told.heard:
                told.rewind()
            else:
                told.heard = max(told.heard, stop)
                self._trim()

    def unsent(self, peer_id: str) -> None:
        """The newest sync to a slave could not be sent."""
        told = self._told.get(peer_id)
        if told and told.unanswered:
            _, told.sent, _ = told.unanswered.pop()

    def all_heard(self, peer_id: str) -> bool:
        """Whether a slave has acknowledged every lease given out so far."""
        told = self._told.get(peer_id)
        return told is not None and told.heard == self._end

    def _trim(self) -> None:
        # A slave that has not acknowledged the whole table needs what was given out since, or the whole table again.
        keep_from = min(told.sent if told.heard == NOTHING else told.heard for told in self._told.values())
        while self._first < keep_from and self._events:
            self._events.popleft()
            self._first += 1

    def forget_peer(self, peer_id: str) -> None:
        """Forget what a slave has heard: its connection broke, so it may have restarted without it."""
        self._told.pop(peer_id, None)

    def clear(self) -> None:
        """Forget all: this node leads no more."""
        self._events.clear()
        self._told.clear()


class HeardLeases:
    """Leases that this node knows of while it does not lead: told by its masters, left from its own earlier
    masterships, or found on its disk. A new master starts with them.

    A lease of an earlier term stays until it ends, even if later masters have not heard of it. That is safe: the
    replicated state shows which messages were settled or came back meanwhile, so an old lease never holds those.
    """

    def __init__(self) -> None:
        self._ranges: dict[ChannelKey, list[LeaseRange]] = {}

    def hear(self, ranges: Iterable[LeaseRange], complete: bool) -> None:
        """Learn of leases. `complete`: these are all leases of the source. Many are known already, so overlapping
        ranges are joined."""
        for r in ranges:
            if _well_formed(r):
                self._ranges.setdefault((r.group_id, r.topic_id), []).append(r)
        if complete:
            self._join()

    def _join(self) -> None:
        """Join overlapping ranges, so that repeated reports take no more room. Of a channel only the newest epoch is
        kept."""
        several = {key: ranges for key, ranges in self._ranges.items() if len(ranges) > 1}
        placed: list[LeaseRange] = []
        for key, ranges in several.items():
            epoch = max(r.epoch for r in ranges)
            by_ids: dict[bytes, LeaseRange] = {}
            for r in ranges:
                if r.epoch != epoch:
                    continue
                if not r.ids:
                    placed.append(r)
                elif r.ids not in by_ids or by_ids[r.ids].until_ms < r.until_ms:
                    by_ids[r.ids] = r
            self._ranges[key] = list(by_ids.values())
        for channel, leases in _merged(placed).items():
            self._ranges[channel] = [r for lease in leases for r in ranges_of(lease)] + self._ranges[channel]

    def prune(self, now_ms: int, floor_of: FloorOf) -> None:
        """Forget ranges that have ended or lie below the floor."""
        for key in list(self._ranges):
            floor = floor_of(key)
            kept = [r for r in self._ranges[key] if r.until_ms > now_ms and r.first_position + r.count > floor]
            if kept:
                self._ranges[key] = kept
            else:
                del self._ranges[key]

    def size(self) -> int:
        """Number of ranges kept."""
        return sum(len(ranges) for ranges in self._ranges.values())

    def ranges(self) -> Iterator[LeaseRange]:
        """All ranges kept."""
        return itertools.chain.from_iterable(self._ranges.values())

    def held(self, now_ms: int, epoch_of: Callable[[ChannelKey], int | None]) -> list[Lease]:
        """The leases that still run, as leases of an earlier master. Leases from before a reset of the group are void.
        Where leases overlap, the highest attempt wins, then the latest end."""
        running = {
            key: [r for r in ranges if r.until_ms > now_ms and r.epoch == (epoch_of(key) or 0)]
            for key, ranges in self._ranges.items()
        }
        merged = _merged([r for ranges in running.values() for r in ranges if not r.ids])
        leases: list[Lease] = []
        for key, ranges in running.items():
            leases += merged.get(key, ())
            for r in ranges:
                if r.ids:
                    positions = np.arange(r.first_position, r.first_position + r.count, dtype=np.uint64)
                    ids = np.frombuffer(r.ids, "<u8")
                    attempts = np.ones(r.count, np.uint32)
                    leases.append(Lease(key, positions, attempts, r.until_ms, 0, ids=ids, epoch=r.epoch))
        return leases

    def clear(self) -> None:
        """Forget all ranges: the leases are in a LeaseTable now."""
        self._ranges.clear()


def _well_formed(r: LeaseRange) -> bool:
    """Whether a range from a peer or a file can be used; malformed ranges are ignored."""
    return (
        0 < r.count <= RANGE_MESSAGES_MAX
        and r.first_position < POSITION_MAX
        and len(r.attempts) in (0, 4 * r.count)
        and len(r.ids) in (0, 8 * r.count)
    )


def _merged(ranges: Iterable[LeaseRange]) -> dict[ChannelKey, list[Lease]]:
    """Ranges without ids, channel by channel and those of a channel of one epoch, as leases that do not overlap: for
    each channel, by rising end. Many channels in one pass: a new master would lose its mastership over a thousand."""
    merged: dict[ChannelKey, list[Lease]] = {}
    together: list[LeaseRange] = []
    messages = 0
    for _, channel in itertools.groupby(ranges, key=lambda r: (r.group_id, r.topic_id)):
        some = list(channel)
        count = sum(r.count for r in some)
        if together and messages + count > MERGED_MESSAGES_MAX:
            merged |= _merged_together(together)
            together, messages = [], 0
        together += some
        messages += count
    return merged | _merged_together(together) if together else merged


def _merged_together(ranges: Sequence[LeaseRange]) -> dict[ChannelKey, list[Lease]]:
    """As `_merged`, in one pass."""
    numbers: dict[ChannelKey, int] = {}
    number_of = [numbers.setdefault((r.group_id, r.topic_id), len(numbers)) for r in ranges]
    keys, epochs = list(numbers), {number: r.epoch for number, r in zip(number_of, ranges, strict=True)}
    counts = np.array([r.count for r in ranges])
    channels = np.repeat(np.array(number_of), counts)
    until = np.repeat(np.array([r.until_ms for r in ranges], np.int64), counts)
    firsts = np.array([r.first_position for r in ranges], np.uint64)
    inside = np.arange(len(channels)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(firsts, counts) + inside.astype(np.uint64)
    attempts = np.frombuffer(b"".join(r.attempts or _FIRST * r.count for r in ranges), "<u4")
    order = np.lexsort((until, attempts, positions, channels))
    here, there = positions[order], channels[order]
    last = np.append((here[1:] != here[:-1]) | (there[1:] != there[:-1]), True)
    order = order[last]
    order = order[np.lexsort((positions[order], until[order], channels[order]))]
    positions, attempts, until, channels = positions[order], attempts[order], until[order], channels[order]
    cuts = (np.flatnonzero((np.diff(until) != 0) | (np.diff(channels) != 0)) + 1).tolist()
    merged: dict[ChannelKey, list[Lease]] = {key: [] for key in keys}
    for start, end in itertools.pairwise([0, *cuts, len(order)]):
        number = int(channels[start])
        lease = Lease(keys[number], positions[start:end], attempts[start:end], int(until[start]), 0)
        lease.epoch = epochs[number]
        merged[lease.channel].append(lease)
    return merged


def current(subscription: Subscription, lease: Lease) -> NDArray[np.bool_]:
    """True for each position of a lease that is still out: neither settled nor returned since."""
    is_current: NDArray[np.bool_] = ~subscription.is_settled(lease.positions)
    is_current &= subscription.attempts_of(lease.positions) == lease.attempts
    return is_current
