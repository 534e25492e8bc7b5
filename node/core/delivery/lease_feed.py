"""The master's side of the sync: which slave has been told of which lease, and has answered that it was."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tickwheel.node.core.delivery.leases import AnyLease, FloorOf, Lease, ranges_of
from tickwheel.proto.peer_pb2 import LeaseRange

EVENTS_MAX = 100_000
"""Lease ranges kept for slaves that have not acknowledged them. A slave further behind gets the whole table."""
GIVEN_MAX = 10_000
"""Leases kept until the next sync makes events of them; many more would hold it up."""
RANGES_PER_SYNC_MAX = 2_000
TABLE_RANGES_PER_SYNC_MAX = 800
"""Of the whole table, beside events: its ranges are made for the sync, each in some ten microseconds."""
SYNC_BYTES_MAX = 1 << 20
"""Bytes of ranges in one sync; the last event and the last range of the table may go beyond it."""
UNANSWERED_MAX = 64
"""Unanswered syncs remembered for each slave: 3 s at 50 ms. Answers to older ones are ignored."""
PIECES_UNANSWERED_MAX = 8
"""Pieces of the whole table under way to one slave: they are kept until it has answered."""


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

    def __init__(self, held: Callable[[], Iterable[AnyLease]], floor_of: FloorOf = lambda _: 0) -> None:
        """`held` returns the whole table."""
        self._held = held
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

    def for_peer(self, peer_id: str, number: int) -> tuple[list[LeaseRange], bool]:
        """Ranges for sync `number` to a slave, and whether with them it has been told the whole table and all
        events."""
        self._note_given()
        told = self._told.get(peer_id)
        if told is None:
            told = self._told[peer_id] = _Told(self._end, self._end, _ranges(self._held()))
        elif told.sent < self._first:
            told.heard = told.sent = self._end
            told.again = True
        if told.again and told.table is None:
            told.table, told.again = _ranges(self._held()), False
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
