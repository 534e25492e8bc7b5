"""`python -m tickwheel.chaos.live.node_start --config FILE --knobs FILE --parent PID`: a node whose clock and disk can
be spoilt.

The node's own process, with two of its ports replaced before it begins: the clock (offset and rate come from the
knobs) and the system calls of the disk port. The node itself has no switch for any of this: it is this module that a
normal start does not know. The process ends with its supervisor, however that ends.

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
from types import SimpleNamespace
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
        self.effects = Effects(pid=os.getpid())
        self._reporting = threading.Lock()

    def look(self, now_ns: int) -> Knobs:
        """The knobs; `now_ns` is true CLOCK_BOOTTIME."""
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            modified = modified_ns(self._path)
            if modified != self._modified_ns:
                self._modified_ns = modified
                self.knobs = read_knobs(self._path)
                self.effects.turn, self.effects.readings = self.knobs.turn, 0
                self._next_report_ns = 0
        self.effects.readings += 1
        if now_ns >= self._next_report_ns:
            self._next_report_ns = now_ns + REPORT_NS
            self.report()
        return self.knobs

    def report(self) -> None:
        """Write the effects down, if anybody has turned a knob. On any thread."""
        with self._reporting:
            if self.effects.turn:
                write_effects(self._path, self.effects)


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
        self._panel.effects.refusals += 1
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

    def statvfs(self, path: str | Path | int) -> os.statvfs_result | SimpleNamespace:
        """No room while the disk is full."""
        state = os.statvfs(path)
        if not self._panel.knobs.disk_full:
            return state
        return SimpleNamespace(f_bavail=0, f_bfree=0, f_blocks=state.f_blocks, f_frsize=state.f_frsize)

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
        """Close. Writes without an fsync are forgotten here: a later failed sync does not lose them."""
        self._not_fsynced.pop(descriptor, None)
        os.close(descriptor)

    def _spoil_sync(self, descriptor: int) -> None:
        knobs = self._panel.knobs
        if knobs.sync_ms:
            time.sleep(knobs.sync_ms / 1_000)
            self._panel.effects.slow_syncs += 1
        if knobs.sync_fails:
            end = os.fstat(descriptor).st_size  # the file may have been cut since
            for offset, size in self._not_fsynced.pop(descriptor, []):
                os.pwrite(descriptor, bytes(max(0, min(size, end - offset))), offset)
            self._panel.effects.failed_syncs += 1
            self._panel.report()  # now: the process has not long to live
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when the one that started it has ended (Linux). `parent`: that one's id, by its own
    word: it may have ended while this process still imported."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(1)


def main() -> int:
    """Run the node; its exit code."""
    parser = argparse.ArgumentParser(description="A node under wrong clocks and bad disks; for chaos runs only.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--knobs", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="The process without which the node ends.")
    parser.add_argument("--namespace", help="A file that stands for the network namespace to live in.")
    options = parser.parse_args()
    end_with_parent(options.parent)
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
