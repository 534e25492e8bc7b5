"""File descriptors of a process: some are reserved for its files, however many its connections take.

The kernel gives a process no descriptor numbered at or above the soft limit (RLIMIT_NOFILE). This module owns that
limit and keeps it below the hard one. Work on a file that finds no descriptor left raises the limit for a moment.
Libraries that accept or open sockets do not raise it, so the difference is reserved for the journal, checkpoints and
all other files. May be used from any thread.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_MAX = 1 << 20
"""Limit used if the hard limit is larger or infinite: the kernel's table is as long as the largest number in use."""


def limit_max() -> int:
    """The highest limit of open files that this process may give itself, at most LIMIT_MAX unless it is higher now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, max(soft, LIMIT_MAX))


class DescriptorReserve:
    """Use one object in a process. `take` begins the reserve; before that, work runs without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[int, int, int] | None = None
        self._last = -1
        """A spare descriptor. It is closed to make room for work that closes what it opens. -1: there is none."""
        self.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        """Descriptors available to connections and files together."""
        self.uses = 0
        """How often the reserve was needed."""

    def take(self, reserved: int) -> None:
        """Raise the soft limit as far as possible, less `reserved` descriptors."""
        most, hard = limit_max(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._kept = (most - reserved, most, hard)
        self.limit = most - reserved
        self._open_spare()
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.limit, hard))

    def give_back(self) -> None:
        """End the reserve: raise the soft limit as far as possible. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            _, most, hard = kept
            self._close_spare()
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def run(self, work: Callable[[], T]) -> T:
        """Run work that needs a descriptor, with one from the reserve if no other is left. Returns and raises what the
        work does."""
        try:
            return work()
        except OSError as error:
            if error.errno != errno.EMFILE or self._kept is None:
                raise
        limit, most, hard = self._kept
        with self._lock:
            self.uses += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            try:
                return work()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def run_briefly(self, work: Callable[[], T]) -> T:
        """`run` for work that closes what it opens: it gets the spare descriptor even when the reserve is used up."""
        try:
            done = self.run(work)
        except OSError as error:
            if error.errno != errno.EMFILE or self._kept is None:
                raise
        else:
            if self._last < 0 and self._kept is not None:
                with self._lock:
                    self._open_spare()
            return done
        with self._lock:
            self._close_spare()
            try:
                return work()
            finally:
                self._open_spare()

    def _close_spare(self) -> None:
        """It is another's as soon as it is closed: it must not be closed again."""
        spare, self._last = self._last, -1
        if spare >= 0:
            os.close(spare)

    def _open_spare(self) -> None:
        if self._last >= 0:
            return
        try:
            self._last = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:  # another thread has taken it meanwhile; the next work of this kind may get one again
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
