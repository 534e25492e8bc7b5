"""Numbers of the process itself, under the names that every Prometheus client uses (`process_*`).

Reads only /proc/self, which the service's unit leaves visible (ProcSubset=pid); the library's own collector needs
/proc/stat for the start, and lists all descriptors on each request.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from tickwheel.node.metrics import MetricValue

_START_FIELD = 19
"""Of /proc/self/stat behind the name, which is in brackets and may hold anything: clock ticks from the boot on."""


def _started_s() -> float:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    after_boot_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot_s


class ProcessMetrics:
    """Reads them on request. `values` costs some 0.1 ms, however many descriptors are open."""

    def __init__(self) -> None:
        self._started_s = _started_s()
        """Read once: what the wall clock does later does not change when the process started."""
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def values(self, descriptors_open: int) -> Mapping[str, MetricValue]:
        """Name -> value (names of node/metrics.py)."""
        virtual, resident, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return {
            "process_cpu_seconds": time.process_time(),
            "process_start_time_seconds": self._started_s,
            "process_resident_memory_bytes": float(int(resident) * self._page_bytes),
            "process_virtual_memory_bytes": float(int(virtual) * self._page_bytes),
            "process_open_fds": float(descriptors_open),
            "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        }
