"""Reads the messages that channels have claimed: units if they are not in memory, then records, by a worker if needed.

Messages removed with their hour are left out. Messages that the disk cannot read are withheld by their channel and
announced (salvage.py looks after them). Any other failure is a bug and stops the node. Answers of an earlier reign are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tickwheel.node.core.announcements import Unreadable
from tickwheel.node.core.delivery.channel import Channel, Staged
from tickwheel.node.core.delivery.sift import Sift, Sifted
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.work import RemovedError
from tickwheel.storage.disk import DiskError
from tickwheel.wheel.units import Units


class Fetching:
    def __init__(
        self,
        core: Kernel,
        news: Callable[[], None],
    ) -> None:
        """`news` is called when a read has ended, so messages may be ready to hand out."""
        self._state = core.state
        self._background = core.background
        self._announce = core.announcements.announce
        self._fatal = core.fatal
        self._news = news
        self._reign = 0

    def next_reign(self) -> None:
        """A reign begins or ends: drop the answers to earlier reads."""
        self._reign += 1

    def fetch(self, channel: Channel, staged: Staged) -> None:
        """Implements `channel.Fetch`."""
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
            self._news()

        def records_read(records: list[bytes] | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if isinstance(error, RemovedError):
                staged.kept = staged.ids >> np.uint64(32) >= np.uint64(self._state.hour_min_kept)
                channel.fetched(staged)
                return
            if isinstance(error, DiskError):
                Sift(self._background, staged.ids, staged.units, sifted, broken).go()
                return
            if error is not None:
                broken(error)
                return
            staged.records = records
            channel.fetched(staged)
            self._news()

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
