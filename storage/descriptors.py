"""File descriptors of a process: some are kept for its files, whatever its connections take.

The kernel gives out no descriptor with a number from the soft limit on (RLIMIT_NOFILE), to nobody in the process. Owns
that limit: it stands below the hard one, and whoever needs a file when none is left raises it for a moment. Sockets
that libraries accept or open do not, so the difference is kept for the journal, checkpoints and whatever else is read
or written. May be used from any thread.
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
"""Where the hard limit is none, or larger: the kernel keeps a table as long as the largest number in use."""


class DescriptorReserve:
    """One per process. `take` begins it; without it, work is run as it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[int, int, int] | None = None
        self._last = -1
        """One that is open for nothing, to be closed for what must be opened and is closed again."""
        self.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        """Descriptors that connections and files may share."""
        self.uses = 0
        """Times that the reserve was needed."""

    def take(self, reserved: int) -> None:
        """Raise the limit as far as it goes, and keep so many of the descriptors."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, max(soft, LIMIT_MAX))
        self._kept = (most - reserved, most, hard)
        self.limit = most - reserved
        self._last = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.limit, hard))

    def give_back(self) -> None:
        """The limit is as far up as it goes. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            _, most, hard = kept
            os.close(self._last)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def run(self, work: Callable[[], T]) -> T:
        """Do work that needs a descriptor, with one of the reserve if there is no other. Else like the work itself."""
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
        """`run` for work that closes what it opens: it gets the last descriptor when even the reserve is used up."""
        try:
            return self.run(work)
        except OSError as error:
            if error.errno != errno.EMFILE or self._kept is None:
                raise
        with self._lock:
            os.close(self._last)
            try:
                return work()
            finally:
                self._last = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
