"""`python -m tickwheel.chaos.live.node_start --config FILE --knobs FILE`: a node whose clock and disk can be spoilt.

The node's own process, with two of its ports replaced before it begins: the clock (offset and rate come from the
knobs) and the system calls of the disk port (spoilt_disk.py). The node itself has no switch for any of this: it is
this module that a normal start does not know. The process ends with its supervisor, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tickwheel.chaos.live.knobs import Effects, Knobs, modified_ns, read_knobs, write_effects
from tickwheel.chaos.live.namespaces import enter
from tickwheel.chaos.live.spoilt_disk import SpoiltSystem
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
