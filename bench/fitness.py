"""Is this machine fit to run nodes? Its disk, clock and timers, and the rates and lateness of three nodes on it.

Each figure is judged by two bounds: up to the first it is good, up to the second it will do. The bounds follow from
what nodes do: an acknowledgement waits for an fdatasync, and heartbeats and deliveries wait for the loop.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from tickwheel.bench.cases import disk_rate
from tickwheel.bench.load import Consumed, consuming, schedule_columns, spread
from tickwheel.bench.served import DRAIN_S, cluster

SYNC_BYTES = 4_096
SYNCS_MAX = 500
RATE = 5_000.0
"""Messages a second at which lateness is measured."""
RATE_BATCH, FULL_BATCH = 250, 4_096
_STATUS_OFFSET, _MAXERROR_OFFSET, _TIMEX_BYTES = 40, 24, 256
"""Of struct timex on 64-bit Linux; the buffer is larger than it."""
_UNSYNCHRONIZED = 5


class Verdict(StrEnum):
    """What a figure means."""

    GOOD = "good"
    SLOW = "will do"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class Checked:
    """One figure with its bounds. `worst`: beyond it the machine is not fit. `good` below `worst`: less is better."""

    name: str
    value: float
    unit: str
    good: float
    worst: float
    why: str

    @property
    def verdict(self) -> Verdict:
        """A value that could not be measured (nan) is unfit."""
        sign = 1 if self.good <= self.worst else -1
        if sign * self.value <= sign * self.good:
            return Verdict.GOOD
        return Verdict.SLOW if sign * self.value <= sign * self.worst else Verdict.UNFIT


def verdict_of(checked: list[Checked]) -> Verdict:
    """The verdict of the worst figure."""
    found = {one.verdict for one in checked}
    return next((one for one in (Verdict.UNFIT, Verdict.SLOW) if one in found), Verdict.GOOD)


def sync_ms(directory: Path, seconds: float) -> np.ndarray:
    """How long each append of 4 KiB took with its fdatasync, in ms. Stops after `seconds` or SYNCS_MAX appends. Raises
    OSError."""
    path = directory / f"tickwheel-sync-{os.getpid()}"
    took: list[float] = []
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        end_s = time.perf_counter() + seconds
        while len(took) < SYNCS_MAX and (not took or time.perf_counter() < end_s):
            began_s = time.perf_counter()
            os.write(descriptor, bytes(SYNC_BYTES))
            os.fdatasync(descriptor)
            took.append((time.perf_counter() - began_s) * 1_000)
    finally:
        os.close(descriptor)
        path.unlink()
    return np.array(took)


def timer_late_ms(seconds: float) -> np.ndarray:
    """How late each sleep of 1 ms ended, in ms."""
    late: list[float] = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        time.sleep(0.001)
        late.append((time.perf_counter() - began_s) * 1_000 - 1)
    return np.array(late)


def clock_error_ms() -> float:
    """How far the wall clock may be off, in ms, by what its time service tells the kernel; infinite without one."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: only asks
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    if state < 0 or state == _UNSYNCHRONIZED:
        return float("inf")
    return ctypes.c_long.from_buffer(timex, _MAXERROR_OFFSET).value / 1_000


def machine(directory: Path, seconds: float) -> Iterator[Checked]:
    """Disk, timers and clock, without nodes."""
    syncs = sync_ms(directory, seconds)
    disk = "an acknowledgement waits for the disks of a majority"
    yield Checked("fdatasync p50", float(np.percentile(syncs, 50)), "ms", 5, 50, disk)
    yield Checked("fdatasync p99", float(np.percentile(syncs, 99)), "ms", 20, 200, disk)
    rate = disk_rate(directory, seconds) / 1e6
    yield Checked("synced writes", rate, "MB/s", 100, 10, "the log takes all that is scheduled, payloads included")
    late = timer_late_ms(seconds)
    yield Checked(
        "timers late p99", float(np.percentile(late, 99)), "ms", 5, 50, "deliveries and heartbeats wait for them"
    )
    error = clock_error_ms()
    yield Checked(
        "clock error", error, "ms", 100, float("inf"), "a time service (chrony) keeps this host's clock right"
    )


async def served(directory: Path, seconds: float, told: Callable[[str], None]) -> list[Checked]:
    """Three nodes on this machine: how fast they take messages, and how late these come at a moderate rate."""
    told("three nodes: scheduling as fast as they take it")
    async with cluster(directory) as (_, client):
        fast = await schedule_columns(client, seconds, FULL_BATCH, spread(3_600_000, 3_600_000), topic="bench-later")
        told(f"three nodes: {RATE:,.0f} messages a second, scheduled, delivered and settled")
        consumed = Consumed()
        async with consuming(client, consumed):
            sent = await schedule_columns(client, seconds, RATE_BATCH, spread(1_000, 2_000), RATE)
            await consumed.drained(sent.messages, DRAIN_S)
    late = consumed.lateness()
    p50, p99 = np.percentile(late, (50, 99)) if len(late) else (float("nan"), float("nan"))
    why = "a failover takes about a second: without one, messages must come much sooner"
    return [
        Checked("scheduled", fast.rate, "msg/s", 50_000, 5_000, "one client, batches of columns, 256 bytes each"),
        Checked("sent at", sent.rate, "msg/s", 0.95 * RATE, 0.5 * RATE, f"of the {RATE:,.0f} that were wanted"),
        Checked("late p50", float(p50), "ms", 25, 250, why),
        Checked("late p99", float(p99), "ms", 250, 1_000, why),
        Checked("early", float((late < 0).sum()), "msg", 0, 0, "never, whatever the machine"),
        Checked("lost", float(consumed.lost(sent)), "msg", 0, 0, "never, whatever the machine"),
        Checked("repeats", float(consumed.repeats()), "msg", 0, 1_000, "an election under load repeats some"),
    ]
