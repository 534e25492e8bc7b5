"""`python -m tickwheel.chaos.live.node_start --config FILE --knobs FILE`: a node whose clock and disk can be spoilt.

The node's own process, with two of its ports replaced before it begins: the clock (offset and rate come from the
knobs) and, for a full disk, the calls by which the disk port asks the system for room. What has room already can
still be written, as on a real full disk. The node itself has no switch for any of this: it is this module that a
normal start does not know. The process ends with its supervisor, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import signal
import sys
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


class Panel:
    """The knobs as they stand, looked at a few times a second, and the answers to them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_look_ns = 0
        self._next_report_ns = 0
        self._modified_ns = -1
        self.knobs = Knobs()
        self._readings = 0
        self._refusals = 0
        self._reported = Effects()

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
            effects = Effects(self.knobs.turn, self._readings, self._refusals)
            if (effects.turn, effects.refusals) != (self._reported.turn, self._reported.refusals) or effects.turn:
                write_effects(self._path, effects)
                self._reported = effects
        return self.knobs

    def refused(self) -> None:
        """The disk has said no."""
        self._refusals += 1


class SpoiltClock:
    """A machine's two clocks under a wrong oscillator and a wrong setting. The monotonic one never goes back."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._rate_ppm = 0
        self._true_ns = self._monotonic_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def monotonic_ns(self) -> int:
        """See replication.ports.Clock."""
        true_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        rate_ppm = self._panel.look(true_ns).rate_ppm
        passed_ns = true_ns - self._true_ns
        reading_ns = self._monotonic_ns + passed_ns + passed_ns * self._rate_ppm // MILLION
        if rate_ppm != self._rate_ppm:
            self._true_ns, self._monotonic_ns, self._rate_ppm = true_ns, reading_ns, rate_ppm
        return reading_ns

    def wall_ms(self) -> int:
        """See replication.ports.Clock."""
        ahead_ns = self.monotonic_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return (time.time_ns() + ahead_ns) // MILLION + self._panel.knobs.offset_ms


class _NoRoom:
    """statvfs of a file system without room."""

    def __init__(self, real: os.statvfs_result) -> None:
        self.f_bavail = self.f_bfree = 0
        self.f_blocks = real.f_blocks
        self.f_frsize = real.f_frsize


class LimitedSystem:
    """`os` as the disk port sees it: while the disk is full nothing new gets room."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _full(self) -> bool:
        return self._panel.knobs.disk_full

    def _refuse(self) -> OSError:
        self._panel.refused()
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, descriptor: int, parts: Sequence[bytes], offset: int) -> int:
        """Writes within what the file has already; beyond it there is no room."""
        if self._full() and offset + sum(map(len, parts)) > os.fstat(descriptor).st_size:
            raise self._refuse()
        return os.pwritev(descriptor, parts, offset)

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        """Refused while the disk is full."""
        if self._full():
            raise self._refuse()
        os.posix_fallocate(descriptor, offset, size)

    def statvfs(self, path: str | Path | int) -> os.statvfs_result | _NoRoom:
        """No room while the disk is full."""
        state = os.statvfs(path)
        return _NoRoom(state) if self._full() else state


def end_with_parent() -> None:
    """The kernel kills this process when the one that started it has ended (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            raise SystemExit(1)


def main() -> int:
    """Run the node; its exit code."""
    parser = argparse.ArgumentParser(description="A node under wrong clocks and full disks; for chaos runs only.")
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
    vars(local)["os"] = LimitedSystem(panel)
    return run_node(config, SpoiltClock(panel))


if __name__ == "__main__":
    raise SystemExit(main())
