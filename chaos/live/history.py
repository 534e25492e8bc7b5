"""The events of a run as workload and supervisor wrote them down, one JSON object a line.

Owns the form of the records and the true time in them: the machine's wall clock when the run began, advanced by
CLOCK_BOOTTIME, the same in every process that is told the anchor, and touched by no fault. Every record has `t` (ms)
and `k` (its kind); `verdict.py` says what it needs of each. This module and the verdict know nothing of the node.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]

FLUSH_S = 0.25


def anchor_now() -> float:
    """The anchor of a run that begins now: wall clock minus CLOCK_BOOTTIME, ms."""
    return (time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e6


class TrueTime:
    """Milliseconds since the epoch."""

    def __init__(self, anchor_ms: float) -> None:
        self.anchor_ms = anchor_ms

    def now_ms(self) -> float:
        return self.anchor_ms + time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1e6


class HistoryWriter:
    """Appends records to one file; what is written is there after `close`, or FLUSH_S later if it is killed."""

    def __init__(self, path: Path, time_of_run: TrueTime) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._time = time_of_run
        self._flushed_ms = 0.0

    def write(self, kind: str, /, **fields: object) -> None:
        """Write a record, of now."""
        now = self._time.now_ms()
        self._file.write(json.dumps({"t": round(now, 3), "k": kind, **fields}, separators=(",", ":")) + "\n")
        if now - self._flushed_ms > FLUSH_S * 1_000:
            self._file.flush()
            self._flushed_ms = now

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # the last one of a killed writer may be torn
                yield json.loads(line)


def read_history(paths: Iterable[Path]) -> Iterator[Record]:
    """All records of several writers, by time: each of them wrote in that order."""
    return heapq.merge(*(_lines(path) for path in paths if path.exists()), key=lambda record: record["t"])
