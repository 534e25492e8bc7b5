"""Reads the messages that channels have claimed: units if they are not in memory, then records, by a worker if needed.

All claims of a pass are read together, whatever their channels and topics. If that fails, each channel's part is read
by itself. Messages removed with their hour are left out. Messages that the disk cannot read are withheld by their
channel and passed to record_repair.py. Any other failure is a bug and stops the node. Answers of an
earlier mastership are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.partial_read import PartialRead, ReadRows
from tickwheel.node.core.delivery.prefetched import Prefetched, measure
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.work import RemovedError
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import Units, hours_of, join_units

READ_MESSAGES_MAX = 8_192
"""Messages read together. Small enough that one read holds the others up for some milliseconds only."""

_Claim = tuple[Channel, Prefetched]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The disk cannot read this message; its channel withholds it. `unit` is None if it could not be read either."""

    channel: Channel
    position: int
    id: int
    unit: Units | None
    error: str


class Fetching:
    def __init__(
        self,
        core: Kernel,
        news: Callable[[Iterable[int]], None],
        unreadable: Callable[[Unreadable], None],
    ) -> None:
        """`news` is called with the ids of groups when a read has ended, so messages may be ready to hand out."""
        self._state = core.state
        self._background = core.background
        self._unreadable = unreadable
        self._fatal = core.fatal
        self._news = news
        self._mastership = 0
        self._claims: list[_Claim] = []

    def next_mastership(self) -> None:
        """A mastership begins or ends: drop the answers to earlier reads."""
        self._mastership += 1
        self._claims.clear()

    def fetch(self, channel: Channel, prefetched: Prefetched) -> None:
        """Implements `channel.Fetch`: the read begins with the next `flush`."""
        self._claims.append((channel, prefetched))

    def flush(self) -> None:
        """Begin to read what was claimed."""
        if not self._claims:
            return
        claims, self._claims = self._claims, []
        with_units: list[_Claim] = []
        without: list[_Claim] = []
        for claim in claims:
            (without if claim[1].units is None else with_units).append(claim)
        self._admit(with_units)
        for together in _in_pieces(without):
            self._read(together)

    def _admit(self, claims: Sequence[_Claim]) -> None:
        """Read those for which the channels have room; all have units."""
        if not claims:
            return
        units = measure([prefetched for _, prefetched in claims])
        admitted = [(channel, prefetched) for channel, prefetched in claims if channel.admit(prefetched)]
        if sum([len(prefetched.positions) for _, prefetched in admitted]) == len(units) <= READ_MESSAGES_MAX:
            self._read_records(claims, units)
            return
        for together in _in_pieces(admitted):
            self._read(together)

    def _read(self, claims: Sequence[_Claim]) -> None:
        """Read the claims together; all have units or none has."""
        known = [prefetched.units for _, prefetched in claims if prefetched.units is not None]
        if known:
            self._read_records(claims, join_units(known))
        else:
            ids = np.concatenate([prefetched.ids for _, prefetched in claims])
            self._background.read_units(ids, partial(self._units_found, self._mastership, claims))

    def _read_records(self, claims: Sequence[_Claim], units: Units) -> None:
        """`units`: those of all claims."""
        self._background.read_records(units, partial(self._records_read, self._mastership, claims))

    def _units_found(
        self, mastership: int, claims: Sequence[_Claim], units: Units | None, error: BaseException | None
    ) -> None:
        """Read the records for which the channels have room."""
        if mastership != self._mastership:
            return
        if units is None:
            self._failed(claims, error)
            return
        at = 0
        for _, prefetched in claims:
            count = len(prefetched.positions)
            prefetched.units = units[at : at + count]
            at += count
        self._admit(claims)

    def _records_read(
        self, mastership: int, claims: Sequence[_Claim], records: list[bytes] | None, error: BaseException | None
    ) -> None:
        if mastership != self._mastership:
            return
        if records is None:
            self._failed(claims, error)
            return
        at = 0
        for channel, prefetched in claims:
            count = len(prefetched.positions)
            channel.fetched(prefetched, records[at : at + count])
            at += count
        self._news({channel.key[0] for channel, _ in claims})

    def _failed(self, claims: Sequence[_Claim], error: BaseException | None) -> None:
        """Units or records could not be read."""
        assert error is not None
        if len(claims) > 1:
            # One part of them is removed or damaged: each by itself says which.
            for claim in claims:
                self._read([claim])
            return
        ((channel, prefetched),) = claims
        if isinstance(error, RemovedError):
            channel.fetch_again(prefetched, hours_of(prefetched.ids) >= self._state.hour_min_kept)
            self.flush()
        elif isinstance(error, DiskError):
            PartialRead(
                self._background,
                prefetched.ids,
                prefetched.units,
                partial(self._read_in_part, self._mastership, channel, prefetched),
                partial(self._broken, channel, prefetched),
            ).go()
        else:
            self._broken(channel, prefetched, error)

    def _read_in_part(self, mastership: int, channel: Channel, prefetched: Prefetched, found: ReadRows) -> None:
        if mastership != self._mastership:
            return
        positions, ids = prefetched.positions, prefetched.ids
        channel.withhold(prefetched, found)
        for row, error in found.failed.items():
            unit = found.units[row : row + 1] if found.known[row] else None
            self._unreadable(Unreadable(channel, int(positions[row]), int(ids[row]), unit, str(error)))
        self._news((channel.key[0],))

    def _broken(self, channel: Channel, prefetched: Prefetched, error: BaseException) -> None:
        channel.give_up(prefetched, str(error))
        self._fatal(f"messages that are due cannot be looked for: {error}", error)


def _in_pieces(claims: Iterable[_Claim]) -> Iterable[list[_Claim]]:
    """The claims in lists of about READ_MESSAGES_MAX messages."""
    piece: list[_Claim] = []
    count = 0
    for claim in claims:
        if piece and count + len(claim[1].positions) > READ_MESSAGES_MAX:
            yield piece
            piece, count = [], 0
        piece.append(claim)
        count += len(claim[1].positions)
    if piece:
        yield piece
