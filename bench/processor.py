"""How much processor time processes take, by the kernel's counts: user and system seconds, and thread switches.

All counts are totals up to now: read twice and subtract. A process that is gone counts as 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CHILDREN_STIME = 11, 12, 14
"""Places in /proc/PID/stat after the name, which may contain blanks and brackets."""


def spent_s(stat: str) -> float:
    """Seconds that a process and the children it has waited for have taken, by its /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[_UTIME : _CHILDREN_STIME + 1])) / TICKS_PER_S


def busy_s(stat: str) -> float:
    """Seconds that all processors of the machine have been busy, by /proc/stat. Guests count as user time already."""
    user, nice, system, _idle, _waiting, *rest = map(int, stat.splitlines()[0].split()[1:9])
    return (user + nice + system + sum(rest)) / TICKS_PER_S


def switches(status: str) -> int:
    """Number of times that a thread was switched, wanted or not, by its /proc/PID/task/TID/status."""
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


def children_of(pid: int) -> list[int]:
    """Ids of a process's children, and of their children."""
    direct = [int(word) for file in PROC.glob(f"{pid}/task/*/children") for word in _text(file).split()]
    return direct + [other for child in direct for other in children_of(child)]


def processor_s(pids: Iterable[int]) -> float:
    """Seconds that these processes and their children have taken."""
    stats = (_text(PROC / str(one) / "stat") for pid in pids for one in (pid, *children_of(pid)))
    return sum(spent_s(stat) for stat in stats if stat)


def machine_s() -> float:
    """Seconds that all processors have been busy since the machine started."""
    return busy_s(_text(PROC / "stat"))


def switched(pids: Iterable[int]) -> int:
    """Thread switches of these processes, in the threads that they have now."""
    return sum(switches(_text(file)) for pid in pids for file in PROC.glob(f"{pid}/task/*/status"))


def _text(path: Path) -> str:
    """Content of a file; empty if it has gone with its process."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
