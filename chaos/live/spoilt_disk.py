"""`os` as the disk port of a node under chaos sees it: without room, slow, or with an fdatasync that fails.

Without room what has room already can still be written, as on a real full disk. An fdatasync that fails takes with it
what it would have covered: Linux marks such pages clean, and a later read may find what was there before,
so here they become zeros at once. Whether a second fdatasync would succeed is nothing that anybody may try.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tickwheel.chaos.live.knobs import Knobs

RANGES_MAX = 4_096
"""Most ranges remembered of a file between two syncs. On overflow the earlier ones are forgotten and never lost."""


class Board(Protocol):
    """The current knobs, and the counters of their effects."""

    @property
    def knobs(self) -> Knobs: ...

    def refused(self) -> None: ...

    def slowed(self) -> None: ...

    def sync_failed(self) -> None: ...


class _NoRoom:
    """statvfs of a file system without room."""

    def __init__(self, real: os.statvfs_result) -> None:
        self.f_bavail = self.f_bfree = 0
        self.f_blocks = real.f_blocks
        self.f_frsize = real.f_frsize


class SpoiltSystem:
    """`os`, but for what the knobs say."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._not_fsynced: dict[int, list[tuple[int, int]]] = {}
        """By descriptor: (offset, bytes) of each write that no fdatasync has covered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # -- room

    def _refuse(self) -> OSError:
        self._board.refused()
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, descriptor: int, parts: Sequence[bytes], offset: int) -> int:
        """While the disk is full, only writes within the present size of the file succeed; others raise ENOSPC."""
        if self._board.knobs.disk_full and offset + sum(map(len, parts)) > os.fstat(descriptor).st_size:
            raise self._refuse()
        written = os.pwritev(descriptor, parts, offset)
        ranges = self._not_fsynced.setdefault(descriptor, [])
        if len(ranges) >= RANGES_MAX:
            ranges.clear()
        ranges.append((offset, written))
        return written

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        """Refused while the disk is full."""
        if self._board.knobs.disk_full:
            raise self._refuse()
        os.posix_fallocate(descriptor, offset, size)

    def statvfs(self, path: str | Path | int) -> os.statvfs_result | _NoRoom:
        """No room while the disk is full."""
        state = os.statvfs(path)
        return _NoRoom(state) if self._board.knobs.disk_full else state

    # -- syncs

    def fdatasync(self, descriptor: int) -> None:
        """Fsync a file. Slow, or failing with EIO and loss of writes that no fsync covered, as the knobs say."""
        self._spoil_sync(descriptor)
        covered = self._not_fsynced.pop(descriptor, None)
        try:
            os.fdatasync(descriptor)
        except OSError:
            if covered:
                self._not_fsynced.setdefault(descriptor, []).extend(covered)
            raise

    def fsync(self, descriptor: int) -> None:
        """Sync a directory. Slow or failing with EIO, as the knobs say."""
        self._spoil_sync(descriptor)
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close. not fsynced writes are forgotten here: a later failed sync does not lose them."""
        self._not_fsynced.pop(descriptor, None)
        os.close(descriptor)

    def _spoil_sync(self, descriptor: int) -> None:
        knobs = self._board.knobs
        if knobs.sync_ms:
            time.sleep(knobs.sync_ms / 1_000)
            self._board.slowed()
        if knobs.sync_fails:
            end = os.fstat(descriptor).st_size  # the file may have been cut since
            for offset, size in self._not_fsynced.pop(descriptor, []):
                os.pwrite(descriptor, bytes(max(0, min(size, end - offset))), offset)
            self._board.sync_failed()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
