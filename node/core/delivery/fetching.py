"""Reads the messages that channels have claimed: units if they are not in memory, then records, by a worker if needed.

What the channels of a pass have claimed is read together, whatever the topics. If that fails, each channel's part is
read by itself. Messages removed with their hour are left out. Messages that the disk cannot read are withheld by their
channel and announced (salvage.py looks after them). Any other failure is a bug and stops the node. Answers of an
earlier reign are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tickwheel.node.core.announcements import Unreadable
from tickwheel.node.core.delivery.channel import Channel, Staged
from tickwheel.node.core.delivery.sift import Sift, Sifted
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.work import RemovedError
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import Units, join_units

READ_MESSAGES_MAX = 8_192
"""Messages read together. Small enough that one read holds the others up for some milliseconds only."""

_Claim = tuple[Channel, Staged]


class Fetching:
    def __init__(
        self,
        core: Kernel,
        news: Callable[[Iterable[int]], None],
    ) -> None:
        """`news` is called with the ids of groups when a read has ended, so messages may be ready to hand out."""
        self._state = core.state
        self._background = core.background
        self._announce = core.announcements.announce
        self._fatal = core.fatal
        self._news = news
        self._reign = 0
        self._claims: list[_Claim] = []

    def next_reign(self) -> None:
        """A reign begins or ends: drop the answers to earlier reads."""
        self._reign += 1
        self._claims.clear()

    def fetch(self, channel: Channel, staged: Staged) -> None:
        """Implements `channel.Fetch`: the read begins with the next `flush`."""
        self._claims.append((channel, staged))

    def flush(self) -> None:
        """Begin to read what was claimed."""
        if not self._claims:
            return
        claims, self._claims = self._claims, []
        with_units = [claim for claim in claims if claim[1].units is not None]
        without = [claim for claim in claims if claim[1].units is None]
        for some in (with_units, without):
            for together in _in_pieces(some):
                self._read(together)

    def _read(self, claims: Sequence[_Claim]) -> None:
        """Read the claims together; all have units or none has."""
        if len(claims) == 1:
            self._read_one(*claims[0])
            return
        reign = self._reign

        def records_read(records: list[bytes] | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if error is not None or records is None:
                # One part of them is removed or damaged: each by itself says which.
                for channel, staged in claims:
                    self._read_one(channel, staged)
                return
            at = 0
            for channel, staged in claims:
                count = len(staged.positions)
                staged.records = records[at : at + count]
                at += count
                channel.fetched(staged)
            self._news({channel.key[0] for channel, _ in claims})

        def units_found(units: Units | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if error is not None or units is None:
                records_read(None, error)
                return
            at = 0
            for _, staged in claims:
                count = len(staged.positions)
                staged.units = units[at : at + count]
                at += count
            self._background.read_records(units, records_read)

        known = [staged.units for _, staged in claims if staged.units is not None]
        if known:
            self._background.read_records(join_units(known), records_read)
        else:
            self._background.read_units(np.concatenate([staged.ids for _, staged in claims]), units_found)

    def _read_one(self, channel: Channel, staged: Staged) -> None:
        reign = self._reign

        def broken(error: BaseException) -> None:
            staged.failed = str(error)
            channel.fetched(staged)
            self._fatal(f"messages that are due cannot be looked for: {error}")

        def sifted(found: Sifted) -> None:
            if reign != self._reign:
                return
            positions, ids = staged.positions, staged.ids
            channel.withhold(staged, found)
            for row, error in found.failed.items():
                unit = found.units[row : row + 1] if found.known[row] else None
                self._announce(Unreadable(channel, int(positions[row]), int(ids[row]), unit, str(error)))
            self._news((channel.key[0],))

        def records_read(records: list[bytes] | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if isinstance(error, RemovedError):
                staged.kept = staged.ids >> np.uint64(32) >= np.uint64(self._state.hour_min_kept)
                channel.fetched(staged)
                self.flush()
                return
            if isinstance(error, DiskError):
                Sift(self._background, staged.ids, staged.units, sifted, broken).go()
                return
            if error is not None:
                broken(error)
                return
            staged.records = records
            channel.fetched(staged)
            self._news((channel.key[0],))

        def units_found(units: Units | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if error is not None or units is None:
                records_read(None, error)
                return
            staged.units = units
            self._background.read_records(units, records_read)

        if staged.units is not None:
            self._background.read_records(staged.units, records_read)
        else:
            self._background.read_units(staged.ids, units_found)


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
