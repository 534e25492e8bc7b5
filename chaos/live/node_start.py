"""`python -m tickwheel.chaos.live.node_start --config FILE --knobs FILE`: a node whose clock and disk can be spoilt.

The node's own process, with two of its ports replaced before it begins: the clock (offset and rate come from the
knobs) and the system calls of the disk port  below. The node itself has no switch for any of this: it is
this module that a normal start does not know. The process ends with its supervisor, however that ends.

The disk without room: what has room already can still be written, as on a real full disk. An fdatasync that fails takes
with it what it would have covered: Linux marks such pages clean, and a later read may find what was there before, so
here they become zeros at once. Whether a second fdatasync would succeed is nothing that anybody may try.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tickwheel.chaos.live.knobs import Effects, Knobs, modified_ns, read_knobs, write_effects
from tickwheel.chaos.live.namespaces import enter
from tickwheel.node.config import ConfigError, read_config
from tickwheel.node.server.process import run_node
from tickwheel.storage import local

LOOK_NS = 20_000_000
REPORT_NS = 200_000_000
PR_SET_PDEATHSIG = 1
MILLION = 1_000_000
RANGES_MAX = 4_096
"""Most ranges remembered of a file between two syncs. On overflow the earlier ones are forgotten and never lost."""


class Panel:
    """The knobs as they stand, looked at a few times a second, and the answers to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_look_ns = 0
        self._next_report_ns = 0
        self._modified_ns = -1
        self.knobs = Knobs()
        self._readings = 0
        self._refusals = self._slow_syncs = self._failed_syncs = 0
        self._reporting = threading.Lock()

    def look(self, now_ns: int) -> Knobs:
        """The knobs; `now_ns` is true CLOCK_BOOTTIME."""
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            modified = modified_ns(self._path)
            if modified != self._modified_ns:
                self._modified_ns = modified
                self.knobs = read_knobs(self._path)
                self._readings = 0
                self._next_report_ns = 0
        self._readings += 1
        if now_ns >= self._next_report_ns:
            self._next_report_ns = now_ns + REPORT_NS
            self._report()
        return self.knobs

    def _report(self) -> None:
        with self._reporting:
            effects = Effects(
                self.knobs.turn, self._readings, self._refusals, self._slow_syncs, self._failed_syncs, os.getpid()
            )
            if effects.turn or self._refusals or self._slow_syncs or self._failed_syncs:
                write_effects(self._path, effects)

    def refused(self) -> None:
        """The disk has said no."""
        self._refusals += 1

    def slowed(self) -> None:
        """An fdatasync took longer. On any thread."""
        self._slow_syncs += 1

    def sync_failed(self) -> None:
        """An fdatasync failed: told at once, the process has not long to live. On any thread."""
        self._failed_syncs += 1
        self._report()


class SpoiltClock:
    """A machine's two clocks under a wrong oscillator and a wrong setting. The monotonic one never goes back."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._rate_ppm = 0
        self._true_ns = self._monotonic_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def monotonic_ns(self) -> int:
        true_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        rate_ppm = self._panel.look(true_ns).rate_ppm
        passed_ns = true_ns - self._true_ns
        reading_ns = self._monotonic_ns + passed_ns + passed_ns * self._rate_ppm // MILLION
        if rate_ppm != self._rate_ppm:
            self._true_ns, self._monotonic_ns, self._rate_ppm = true_ns, reading_ns, rate_ppm
        return reading_ns

    def wall_ms(self) -> int:
        ahead_ns = self.monotonic_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return (time.time_ns() + ahead_ns) // MILLION + self._panel.knobs.offset_ms


class _NoRoom:
    """statvfs of a file system without room."""

    def __init__(self, real: os.statvfs_result) -> None:
        self.f_bavail = self.f_bfree = 0
        self.f_blocks = real.f_blocks
        self.f_frsize = real.f_frsize


class SpoiltSystem:
    """`os`, but for what the knobs say."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._not_fsynced: dict[int, list[tuple[int, int]]] = {}
        """By descriptor: (offset, bytes) of each write that no fdatasync has covered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # -- room

    def _refuse(self) -> OSError:
        self._panel.refused()
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, descriptor: int, parts: Sequence[bytes], offset: int) -> int:
        """While the disk is full, only writes within the present size of the file succeed; others raise ENOSPC."""
        if self._panel.knobs.disk_full and offset + sum(map(len, parts)) > os.fstat(descriptor).st_size:
            raise self._refuse()
        written = os.pwritev(descriptor, parts, offset)
        ranges = self._not_fsynced.setdefault(descriptor, [])
        if len(ranges) >= RANGES_MAX:
            ranges.clear()
        ranges.append((offset, written))
        return written

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        """Refused while the disk is full."""
        if self._panel.knobs.disk_full:
            raise self._refuse()
        os.posix_fallocate(descriptor, offset, size)

    def statvfs(self, path: str | Path | int) -> os.statvfs_result | _NoRoom:
        """No room while the disk is full."""
        state = os.statvfs(path)
        return _NoRoom(state) if self._panel.knobs.disk_full else state

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
        knobs = self._panel.knobs
        if knobs.sync_ms:
            time.sleep(knobs.sync_ms / 1_000)
            self._panel.slowed()
        if knobs.sync_fails:
            end = os.fstat(descriptor).st_size  # the file may have been cut since
            for offset, size in self._not_fsynced.pop(descriptor, []):
                os.pwrite(descriptor, bytes(max(0, min(size, end - offset))), offset)
            self._panel.sync_failed()
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def end_with_parent() -> None:
    """The kernel kills this process when the one that started it has ended (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            raise SystemExit(1)


def main() -> int:
    """Run the node; its exit code."""
    parser = argparse.ArgumentParser(description="A node under wrong clocks and bad disks; for chaos runs only.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--knobs", type=Path, required=True)
    parser.add_argument("--namespace", help="A file that stands for the network namespace to live in.")
    options = parser.parse_args()
    end_with_parent()
    if options.namespace:
        enter(options.namespace)
    try:
        config = read_config(options.config, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    panel = Panel(options.knobs)
    vars(local)["os"] = SpoiltSystem(panel)
    return run_node(config, SpoiltClock(panel))


if __name__ == "__main__":
    raise SystemExit(main())
