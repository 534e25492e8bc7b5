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
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.subscription import Subscription
from tickwheel.proto.peer_pb2 import LeaseRange
from tickwheel.wheel.units import Ids

K = TypeVar("K")
Positions = NDArray[np.uint64]
Attempts = NDArray[np.uint32]
ChannelKey = tuple[int, int]
"""(group id, topic id)"""
FloorOf = Callable[[ChannelKey], int]
EpochOf = Callable[[ChannelKey], int | None]
"""Returns a channel's floor: all lower positions are settled. 0 if the group does not have the topic (any more)."""

EVENTS_MAX = 100_000
"""Lease ranges kept for slaves that have not acknowledged them. A slave further behind gets the whole table."""
GIVEN_MAX = 10_000
"""Leases kept until the next sync makes events of them; many more would hold it up."""
TURN_CHANNELS = 500
"""Channels looked at in one turn of an upkeep. One takes a few microseconds."""
TURN_RANGES = 5_000
"""Ranges looked at in one turn of an upkeep."""
TURN_LEASES = 200
"""Leases taken over, written as ranges or given back in one turn. One takes 20 to 50 microseconds."""
LEASE_MESSAGES = 64
"""A lease that is given back counts as one more for each of so many messages that it names: they take as long."""
RANGES_PER_SYNC_MAX = 2_000
TABLE_RANGES_PER_SYNC_MAX = 800
"""Of the whole table, beside events: its ranges are made for the sync, each in some ten microseconds."""
SYNC_BYTES_MAX = 1 << 20
"""Bytes of ranges in one sync; the last event and the last range of the table may go beyond it."""
TOLD_MESSAGES_MAX = 65_536
"""Messages that a range names which this node tells of: less than a megabyte, with attempts and ids."""
RANGE_MESSAGES_MAX = 1_000_000
"""Messages that one range may name. A range becomes arrays of that length, so its count must be bounded."""
MERGED_MESSAGES_MAX = 1_000_000
"""Messages of several channels that are merged together. Ranges are a peer's word: all at once could fill the
memory."""
ENDS_MAX, ENDS_STEP_MS = 64, 1_000
"""Where a new master knows more leases of a channel than that, they end at the next full second: a lease takes as long
to take over with one message as with thousands."""
POSITION_MAX = 1 << 62
_FIRST = np.ones(1, "<u4").tobytes()
UNANSWERED_MAX = 64
"""Unanswered syncs remembered for each slave: 3 s at 50 ms. Answers to older ones are ignored."""
PIECES_UNANSWERED_MAX = 8
"""Pieces of the whole table under way to one slave: they are kept until it has answered."""
JOIN_MESSAGES_MIN = 1_000
"""What a node has heard of a channel is joined when it names this many messages more than twice the positions from the
lowest to the highest, and than twice what it named when it was joined last. Leases that do not overlap never are."""
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
    _heap: list[tuple[int, int, Lease]] = field(default_factory=list)
    _closed: int = 0
    """Closed leases that are still in the heap."""
    _order: Iterator[int] = field(default_factory=itertools.count)
    _sessions: dict[int, dict[Lease, None]] = field(default_factory=dict)
    """Session -> its open leases, in the order in which they were given."""
    _channels: dict[ChannelKey, dict[Lease, None]] = field(default_factory=dict)
    """All open leases by channel, in the same order."""
    _groups: dict[int, dict[Lease, None]] = field(default_factory=dict)
    """All open leases by group, in the same order."""
    _counting: dict[ChannelKey, dict[int, Lease]] = field(default_factory=dict)
    """Position -> the lease that counts for it. For channels in which leases were extended, while something is out."""
    _out: Counter[int] = field(default_factory=Counter)
    """Group id -> messages under open leases; groups without any are left out."""
    _out_total: int = 0

    def give(self, lease: Lease) -> None:
        """Add the lease of a delivery."""
        lease.counting = len(lease.positions)
        heapq.heappush(self._heap, (lease.until_ms, next(self._order), lease))
        self._sessions.setdefault(lease.session_id, {})[lease] = None
        self._channels.setdefault(lease.channel, {})[lease] = None
        self._groups.setdefault(lease.channel[0], {})[lease] = None
        self._out[lease.channel[0]] += lease.counting
        self._out_total += lease.counting
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
        _remove(self._channels, lease.channel, lease)
        _remove(self._groups, lease.channel[0], lease)
        self._closed += 1
        if self._closed > 64 and 2 * self._closed > len(self._heap):
            self._heap = [item for item in self._heap if not item[2].closed]
            heapq.heapify(self._heap)
            self._closed = 0

    def _end(self, lease: Lease) -> Lease:
        """Close a lease; returns it with the positions for which it counted."""
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
        """Close all leases of a channel: its group was reset, or the topic or group deleted."""
        self._counting.pop(channel, None)
        for lease in self.of_channel(channel):
            self._close(lease)
            _empty(lease)

    def next_end_ms(self) -> int | None:
        """When the next open lease ends; None: none is open."""
        while self._heap and self._heap[0][2].closed:
            heapq.heappop(self._heap)
            self._closed -= 1
        return self._heap[0][0] if self._heap else None

    def expire(self, now_ms: int) -> Iterator[Lease]:
        """Close and yield the leases that are over, each with the positions for which it counted."""
        while (end_ms := self.next_end_ms()) is not None and end_ms <= now_ms:
            yield self._end(self._heap[0][2])

    def close_session(self, session_id: int, leases_max: int | None = None) -> Iterator[Lease]:
        """Close and yield the open leases that a consumer has now, at most the first `leases_max`, each position only
        in the lease that counts for it."""
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
        """Drop leases whose positions all lie below their channel's floor: all their messages are settled. Looks at a
        channel's leases up to the first that stays. In turns of TURN_CHANNELS."""
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
        return list(self._channels)

    def open_leases(self) -> Iterator[Lease]:
        """All open leases, channel by channel, each as it is when the iteration comes to it."""
        return itertools.chain.from_iterable(map(self.of_channel, self.channels()))

    def of_channel(self, channel: ChannelKey) -> list[Lease]:
        """The open leases of one channel, in the order in which they were given. Cost depends on that channel's
        leases."""
        self.inherit(channel)
        return list(self._channels.get(channel, ()))

    def groups(self) -> dict[int, int]:
        """Group id -> its open leases, for groups that have some."""
        return {group_id: len(leases) for group_id, leases in self._groups.items()}

    def newest(self, group_id: int, leases_max: int) -> list[Lease]:
        """The open leases of a group that were given last, at most so many, the newest first."""
        return list(itertools.islice(reversed(self._groups.get(group_id, {})), leases_max))

    def clear(self) -> None:
        """Forget all leases: this node leads no more."""
        self._heap.clear()
        self._closed = 0
        self._sessions.clear()
        self._channels.clear()
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
    # Over many topics most leases are one range: arrays would cost ten times as much.
    together = int(positions[-1]) - int(positions[0]) == len(positions) - 1
    inner = [] if together else (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    plain = ids is None and _all_first(attempts)
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
    return int(attempts[0]) == 1 if len(attempts) == 1 else bool((attempts == 1).all())


def _up_to(ranges: Iterable[LeaseRange], ranges_max: int, bytes_max: int) -> tuple[list[LeaseRange], bool]:
    """The first ranges, as many as fit, and whether there are no more. The last one may go beyond `bytes_max`."""
    some: list[LeaseRange] = []
    size = 0
    for r in ranges:
        some.append(r)
        size += r.ByteSize()
        if len(some) >= ranges_max or size >= bytes_max:
            return some, False
    return some, True


class _Sent(NamedTuple):
    """What a sync to a slave told: events and pieces of the table from a number to below another."""

    number: int
    event: int
    event_end: int
    piece: int
    piece_end: int


@dataclass(slots=True)
class _Told:
    """What one slave was told on its present connection: events, and beside them the whole table in pieces. Events tell
    of what changes while the table is told, so no lease waits behind it."""

    heard: int
    """It has acknowledged all events from the beginning of the table to below this one."""
    sent: int
    """The next sync begins with this event."""
    table: Iterator[LeaseRange] | None
    """What is left of the whole table; each piece is gathered when it is sent."""
    again: bool = False
    """Events were dropped before they were sent: once the table has ended, it is sent again. It never restarts before
    its end, or under a load that drops events meanwhile it would never end."""
    pieces: deque[list[LeaseRange]] = field(default_factory=deque)
    """Pieces that it has not acknowledged."""
    heard_pieces: int = 0
    sent_pieces: int = 0
    """Number of the piece that the next sync tells."""
    unanswered: deque[_Sent] = field(default_factory=lambda: deque(maxlen=UNANSWERED_MAX))
    """Its syncs since the last rewind."""

    def next_piece(self) -> list[LeaseRange]:
        """The ranges of the next piece; none if the table has ended, or too many pieces wait for their answers."""
        place = self.sent_pieces - self.heard_pieces
        if place == len(self.pieces):
            if self.table is None or place >= PIECES_UNANSWERED_MAX:
                return []
            ranges, ended = _up_to(self.table, TABLE_RANGES_PER_SYNC_MAX, SYNC_BYTES_MAX // 2)
            self.pieces.append(ranges)
            if ended:
                self.table = None
        self.sent_pieces += 1
        return self.pieces[place]

    @property
    def tells_table(self) -> bool:
        """Whether a part of the table is still to be sent."""
        return self.table is not None or self.again or self.sent_pieces < self.heard_pieces + len(self.pieces)

    def hear(self, sent: _Sent) -> None:
        """It has acknowledged a sync, and all before it."""
        self.heard = max(self.heard, sent.event_end)
        while self.heard_pieces < sent.piece_end:
            self.pieces.popleft()
            self.heard_pieces += 1

    def rewind(self) -> None:
        """Something did not arrive: begin again after what was acknowledged. Answers to earlier syncs say no more."""
        self.sent, self.sent_pieces = self.heard, self.heard_pieces
        self.unanswered.clear()


class LeaseFeed:
    """The master's side of the sync: tracks which slave has heard of which lease.

    A sync goes on where the one before it ended, whether that has been answered or not. Frames of a connection arrive
    in order or not at all. So an answer to a sync that does not begin in what the slave has acknowledged tells of a
    loss, and the slave is told again from there on. No sync has more than RANGES_PER_SYNC_MAX ranges.

    A slave that connects, or is EVENTS_MAX behind, is told the whole table.

    No slave is told of a lease whose messages are all settled by the time of the next sync, as most are where consumers
    keep up: a new master has applied the settlements before it looks at leases.
    """

    def __init__(self, floor_of: FloorOf = lambda _: 0) -> None:
        self._floor_of = floor_of
        self._given: list[Lease] = []
        """Leases of which no event tells yet, at most GIVEN_MAX."""
        self._events: deque[LeaseRange] = deque()
        self._first = 0
        """Number of the oldest event kept."""
        self._told: dict[str, _Told] = {}

    @property
    def _end(self) -> int:
        return self._first + len(self._events)

    def add(self, lease: Lease) -> None:
        """A lease was given out or extended."""
        self._given.append(lease)
        if len(self._given) >= GIVEN_MAX:
            self._note_given()

    def _note_given(self) -> None:
        """Make events of the leases that were given out, as far as their messages are not settled."""
        given, self._given = self._given, []
        for lease in given:
            if len(lease.positions) and int(lease.positions[-1]) >= self._floor_of(lease.channel):
                self._events.extend(ranges_of(lease))
        while len(self._events) > EVENTS_MAX:
            self._events.popleft()
            self._first += 1

    def for_peer(
        self, peer_id: str, number: int, held: Callable[[], Iterable[AnyLease]]
    ) -> tuple[list[LeaseRange], bool]:
        """Ranges for sync `number` to a slave, and whether with them it has been told the whole table, which `held`
        returns, and all events."""
        self._note_given()
        told = self._told.get(peer_id)
        if told is None:
            told = self._told[peer_id] = _Told(self._end, self._end, _ranges(held()))
        elif told.sent < self._first:
            told.heard = told.sent = self._end
            told.again = True
        if told.again and told.table is None:
            told.table, told.again = _ranges(held()), False
        start, first_piece = told.sent, told.sent_pieces
        piece = told.next_piece()
        aside = TABLE_RANGES_PER_SYNC_MAX if piece else 0
        room = SYNC_BYTES_MAX // 2 if piece else SYNC_BYTES_MAX
        events = itertools.islice(self._events, start - self._first, None)
        ranges, ended = _up_to(events, RANGES_PER_SYNC_MAX - aside, room)
        told.sent += len(ranges)
        told.unanswered.append(_Sent(number, start, told.sent, first_piece, told.sent_pieces))
        return ranges + piece, ended and not told.tells_table

    def acknowledged(self, peer_id: str, number: int) -> None:
        """A slave answered sync `number`."""
        told = self._told.get(peer_id)
        while told and told.unanswered and told.unanswered[0].number <= number:
            sent = told.unanswered.popleft()
            if sent.number < number:
                continue
            if sent.event > told.heard or sent.piece > told.heard_pieces:
                told.rewind()
            else:
                told.hear(sent)
                self._trim()

    def unsent(self, peer_id: str) -> None:
        """The newest sync to a slave could not be sent."""
        told = self._told.get(peer_id)
        if told and told.unanswered:
            sent = told.unanswered.pop()
            told.sent, told.sent_pieces = sent.event, sent.piece

    def all_heard(self, peer_id: str) -> bool:
        """Whether a slave has acknowledged every lease given out so far."""
        told = self._told.get(peer_id)
        if told is None or self._given:
            return False
        return told.heard == self._end and not told.pieces and not told.tells_table

    def _trim(self) -> None:
        keep_from = min(told.heard for told in self._told.values())
        while self._first < keep_from and self._events:
            self._events.popleft()
            self._first += 1

    def forget_peer(self, peer_id: str) -> None:
        """Forget what a slave has heard: its connection broke, so it may have restarted without it."""
        self._told.pop(peer_id, None)

    def clear(self) -> None:
        """Forget all: this node leads no more."""
        self._given.clear()
        self._events.clear()
        self._told.clear()


def _ranges(held: Iterable[AnyLease]) -> Iterator[LeaseRange]:
    return (r for some in held for r in ranges_of(some))


RangeKey = tuple[int, int, bytes, bytes, int]
"""A range without its end."""


@dataclass(slots=True)
class _Heard:
    """What was heard of one channel. Of ranges that differ in their end alone, the latest end is kept."""

    ranges: dict[RangeKey, LeaseRange] = field(default_factory=dict)
    messages: int = 0
    """Messages that the ranges name, those named twice counted twice."""
    first: int = POSITION_MAX
    end: int = 0
    joined_messages: int = 0
    """`messages` when the ranges were joined."""

    def add(self, r: LeaseRange) -> None:
        key = (r.first_position, r.count, r.attempts, r.ids, r.epoch)
        known = self.ranges.get(key)
        if known is None:
            self.messages += r.count
            self.first, self.end = min(self.first, r.first_position), max(self.end, r.first_position + r.count)
        elif known.until_ms >= r.until_ms:
            return
        self.ranges[key] = r

    @property
    def overlaps(self) -> bool:
        """Whether many messages are named more than once."""
        return self.messages > 2 * max(self.end - self.first, self.joined_messages) + JOIN_MESSAGES_MIN

    def joined(self) -> _Heard:
        """The same, with each message once; only the newest epoch, since a reset ended the leases from before it.
        Messages known by their ids stay as they are, but of the same ids the latest end counts."""
        epoch = max(r.epoch for r in self.ranges.values())
        by_ids: dict[bytes, LeaseRange] = {}
        placed: list[LeaseRange] = []
        for r in self.ranges.values():
            if r.epoch != epoch:
                continue
            if not r.ids:
                placed.append(r)
            elif r.ids not in by_ids or by_ids[r.ids].until_ms < r.until_ms:
                by_ids[r.ids] = r
        merged = (r for leases in _merged(placed).values() for lease in leases for r in ranges_of(lease))
        heard = _heard_of(itertools.chain(merged, by_ids.values()))
        heard.joined_messages = heard.messages
        return heard


def _heard_of(ranges: Iterable[LeaseRange]) -> _Heard:
    heard = _Heard()
    for r in ranges:
        heard.add(r)
    return heard


class HeardLeases:
    """Leases that this node knows of while it does not lead: told by its masters, left from its own earlier
    masterships, or found on its disk. A new master starts with them.

    A lease of an earlier term stays until it ends, even if later masters have not heard of it. That is safe: the
    replicated state shows which messages were settled or came back meanwhile, so an old lease never holds those.
    """

    def __init__(self) -> None:
        self._channels: dict[ChannelKey, _Heard] = {}
        self._given: dict[ChannelKey, list[Lease]] = {}
        """Leases from this node's own mastership, not yet written as ranges: of many that takes seconds."""

    def keep(self, leases: Iterable[Lease]) -> None:
        """Keep leases of this node's own mastership, which nobody changes any more."""
        for lease in leases:
            self._given.setdefault(lease.channel, []).append(lease)

    def take_in(self, other: HeardLeases) -> None:
        """Move all leases of `other` here."""
        for key in other.channels():
            heard, given = other._channels.pop(key, None), other._given.pop(key, ())
            if heard is not None:
                known = self._channels.setdefault(key, heard)
                if known is not heard:
                    self.hear(heard.ranges.values())
            if given:
                self._given.setdefault(key, []).extend(given)

    def __contains__(self, key: ChannelKey) -> bool:
        """Whether leases of a channel are known."""
        return key in self._channels or key in self._given

    def __len__(self) -> int:
        """Number of channels."""
        return len(self._channels.keys() | self._given.keys()) if self._given else len(self._channels)

    def messages_by_channel(self) -> Counter[ChannelKey]:
        """Messages that the leases of each channel name; those named twice count twice."""
        found = Counter({key: heard.messages for key, heard in self._channels.items()})
        for key, leases in self._given.items():
            found[key] += sum(len(lease.positions) for lease in leases)
        return found

    def take(self, key: ChannelKey) -> HeardLeases | None:
        """Take out the leases of one channel; None: there are none."""
        heard, given = self._channels.pop(key, None), self._given.pop(key, None)
        if heard is None and given is None:
            return None
        taken = HeardLeases()
        if heard is not None:
            taken._channels[key] = heard
        if given is not None:
            taken._given[key] = given
        return taken

    def take_some(self, leases_max: int) -> HeardLeases:
        """Take out the leases of some channels, with about `leases_max` leases or more."""
        taken, count = HeardLeases(), 0
        while count < leases_max and (key := next(iter(self._channels or self._given), None)) is not None:
            if (heard := self._channels.pop(key, None)) is not None:
                taken._channels[key] = heard
                count += len(heard.ranges)
            if (given := self._given.pop(key, None)) is not None:
                taken._given[key] = given
                count += len(given)
        return taken

    def channels(self) -> list[ChannelKey]:
        """Channels of which leases are known."""
        return list(dict.fromkeys([*self._channels, *self._given]))

    def _write(self, key: ChannelKey) -> Iterator[int]:
        """Write the leases of a channel that are not yet ranges. Yields how many were written, TURN_LEASES at most."""
        while given := self._given.get(key):
            some = given[-TURN_LEASES:]
            del given[-TURN_LEASES:]
            for lease in some:
                self.hear(ranges_of(lease))
            if not given:
                del self._given[key]
            yield len(some)

    def hear(self, ranges: Iterable[LeaseRange]) -> None:
        """Learn of leases. Many may be known already: what names the same messages is joined, at once where only the
        end differs, else when it has grown."""
        for r in ranges:
            if _well_formed(r):
                key = (r.group_id, r.topic_id)
                heard = self._channels.get(key)
                if heard is None:
                    heard = self._channels[key] = _Heard()
                heard.add(r)
                if heard.overlaps:
                    self._channels[key] = heard.joined()

    def prune(self, now_ms: int, floor_of: FloorOf, epoch_of: EpochOf) -> Iterator[None]:
        """Forget ranges that have ended or lie below the floor. In turns of TURN_CHANNELS and TURN_RANGES, or of
        TURN_LEASES that this node gave out. Ranges of a later epoch stay: here the reset is not applied yet, and the
        floor is that of before it."""
        done = 0.0
        for key in self.channels():
            for written in self._write(key):
                done += written / TURN_LEASES
                if done >= 1:
                    yield
                    done = 0
            done += 1 / TURN_CHANNELS
            heard = self._channels.get(key)
            if heard is None:
                continue
            done += len(heard.ranges) / TURN_RANGES
            floor, epoch = floor_of(key), epoch_of(key) or 0
            running = [r for r in heard.ranges.values() if r.until_ms > now_ms]
            kept = [r for r in running if r.epoch > epoch or r.first_position + r.count > floor]
            if not kept:
                del self._channels[key]
            elif len(kept) < len(heard.ranges):
                self._channels[key] = _heard_of(kept)
            if done >= 1:
                yield
                done = 0

    def size(self) -> int:
        """Number of ranges kept, and leases not yet written as ranges."""
        return sum(len(heard.ranges) for heard in self._channels.values()) + sum(map(len, self._given.values()))

    def by_group(self) -> dict[int, list[AnyLease]]:
        """All leases by group. None of them changes any more."""
        found: dict[int, list[AnyLease]] = {}
        for (group_id, _), heard in self._channels.items():
            found.setdefault(group_id, []).extend(heard.ranges.values())
        for (group_id, _), given in self._given.items():
            found.setdefault(group_id, []).extend(given)
        return found

    def held(self, now_ms: int, epoch_of: EpochOf) -> list[Lease]:
        """The leases that still run, as leases of an earlier master. Leases from before a reset of the group are void.
        Where leases overlap, the highest attempt wins, then the latest end."""
        running: dict[ChannelKey, list[LeaseRange | LeaseCopy]] = {}
        for key in self.channels():
            epoch, heard = epoch_of(key) or 0, self._channels.get(key)
            known: list[LeaseRange | LeaseCopy] = [*heard.ranges.values()] if heard is not None else []
            known += map(copy_of, self._given.get(key, ()))
            running[key] = [some for some in known if some.until_ms > now_ms and some.epoch == epoch]
        merged = _merged([some for known in running.values() for some in known if not _has_ids(some)], coarse=True)
        leases: list[Lease] = []
        for key, known in running.items():
            leases += merged.get(key, ())
            leases += _by_ids([_lease_by_ids(some) for some in known if _has_ids(some)])
        return leases

    def of_channel(self, key: ChannelKey) -> list[AnyLease]:
        """The leases of one channel as they are now."""
        heard = self._channels.get(key)
        return [*(heard.ranges.values() if heard is not None else ()), *self._given.get(key, ())]


def _well_formed(r: LeaseRange) -> bool:
    """Whether a range from a peer or a file can be used; malformed ranges are ignored."""
    return (
        0 < r.count <= RANGE_MESSAGES_MAX
        and r.first_position < POSITION_MAX
        and len(r.attempts) in (0, 4 * r.count)
        and len(r.ids) in (0, 8 * r.count)
    )


def _has_ids(some: LeaseRange | LeaseCopy) -> bool:
    return bool(some.ids) if isinstance(some, LeaseRange) else some.ids is not None


def _channel_of(some: LeaseRange | LeaseCopy) -> ChannelKey:
    return (some.group_id, some.topic_id) if isinstance(some, LeaseRange) else some.channel


def _messages_of(some: LeaseRange | LeaseCopy) -> int:
    return some.count if isinstance(some, LeaseRange) else len(some.positions)


def _lease_by_ids(some: LeaseRange | LeaseCopy) -> Lease:
    """A lease of messages that are known by their ids, as one of an earlier master."""
    key, until_ms, epoch = _channel_of(some), some.until_ms, some.epoch
    if isinstance(some, LeaseCopy):
        return Lease(key, some.positions, some.attempts, until_ms, 0, ids=some.ids, epoch=epoch)
    positions = np.arange(some.first_position, some.first_position + some.count, dtype=np.uint64)
    attempts = np.ones(some.count, np.uint32)
    return Lease(key, positions, attempts, until_ms, 0, ids=np.frombuffer(some.ids, "<u8"), epoch=epoch)


def _by_ids(leases: list[Lease]) -> list[Lease]:
    """Leases by ids of one channel and epoch: where it has more than ENDS_MAX of them, few whose ends are rounded up to
    ENDS_STEP_MS, with each message once, under the latest end."""
    if len(leases) <= ENDS_MAX:
        return leases
    counts = [len(lease.positions) for lease in leases]
    ends = np.minimum(np.array([lease.until_ms for lease in leases], np.int64), POSITION_MAX)
    until = np.repeat(-(-ends // ENDS_STEP_MS) * ENDS_STEP_MS, counts)
    positions = np.concatenate([lease.positions for lease in leases])
    ids = np.concatenate([lease.ids for lease in leases if lease.ids is not None])
    order = np.lexsort((positions, until, ids))
    order = order[np.append(ids[order][1:] != ids[order][:-1], True)]
    order = order[np.lexsort((positions[order], until[order]))]
    positions, ids, until = positions[order], ids[order], until[order]
    cuts = (np.flatnonzero(np.diff(until)) + 1).tolist()
    return [
        replace(
            leases[0],
            positions=positions[start:end],
            attempts=np.ones(end - start, np.uint32),
            until_ms=int(until[start]),
            ids=ids[start:end],
        )
        for start, end in itertools.pairwise([0, *cuts, len(order)])
    ]


def _merged(known: Iterable[LeaseRange | LeaseCopy], *, coarse: bool = False) -> dict[ChannelKey, list[Lease]]:
    """Leases without ids, channel by channel and those of a channel of one epoch, as leases that do not overlap: for
    each channel, by rising end. Many channels in one pass: a new master would lose its mastership over a thousand.
    `coarse`: where a channel has more than ENDS_MAX of them, their ends are rounded up to ENDS_STEP_MS."""
    merged: dict[ChannelKey, list[Lease]] = {}
    together: list[LeaseRange | LeaseCopy] = []
    messages = 0
    for _, channel in itertools.groupby(known, key=_channel_of):
        some = list(channel)
        count = sum(map(_messages_of, some))
        if together and messages + count > MERGED_MESSAGES_MAX:
            merged |= _merged_together(together, coarse=coarse)
            together, messages = [], 0
        together += some
        messages += count
    return merged | _merged_together(together, coarse=coarse) if together else merged


def _merged_together(known: Sequence[LeaseRange | LeaseCopy], *, coarse: bool) -> dict[ChannelKey, list[Lease]]:
    """As `_merged`, in one pass."""
    ranges = [some for some in known if isinstance(some, LeaseRange)]
    copies = [some for some in known if isinstance(some, LeaseCopy)]
    known = [*ranges, *copies]
    numbers: dict[ChannelKey, int] = {}
    numbers_of = np.array([numbers.setdefault(_channel_of(some), len(numbers)) for some in known])
    keys, epochs = list(numbers), {number: some.epoch for number, some in zip(numbers_of.tolist(), known, strict=True)}
    ends = np.array([some.until_ms for some in known], np.int64)
    if coarse:
        many = np.bincount(numbers_of)[numbers_of] > ENDS_MAX
        # A peer may name any end; the largest would wrap around.
        ends[many] = -(-np.minimum(ends[many], POSITION_MAX) // ENDS_STEP_MS) * ENDS_STEP_MS
    counts = np.array([_messages_of(some) for some in known], np.int64)
    channels, until = np.repeat(numbers_of, counts), np.repeat(ends, counts)
    in_ranges = counts[: len(ranges)]
    inside = np.arange(in_ranges.sum()) - np.repeat(np.cumsum(in_ranges) - in_ranges, in_ranges)
    firsts = np.repeat(np.array([r.first_position for r in ranges], np.uint64), in_ranges)
    positions = np.concatenate([firsts + inside.astype(np.uint64), *(copy.positions for copy in copies)])
    told = np.frombuffer(b"".join(r.attempts or _FIRST * r.count for r in ranges), "<u4")
    attempts = np.concatenate([told, *(copy.attempts for copy in copies)])
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
