"""Realistic schedules of any size to try a cluster and a pipeline with. Equal seeds give equal schedules.

Uses only numpy. Due times follow a daily rhythm: few at night, most around noon and in the evening. They have bursts at
full hours, which people and crons prefer, and a long tail: most are within days, some up to two years ahead.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tickwheel.storage.plain_file import unfinished

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
ROWS_A_BATCH = 250_000
ROWS_MAX = 10**16 - 1
"""Each payload begins with the number of its row, in 16 digits."""
START_MS_MAX = 253_402_300_799_999
"""The end of the year 9999."""
HOUR_WEIGHTS = np.array([2, 1, 1, 1, 1, 2, 4, 7, 9, 9, 8, 8, 10, 9, 8, 8, 8, 9, 10, 10, 8, 6, 4, 3], dtype=np.float64)
"""Relative frequency of each hour of the day."""

SCHEMA = pa.schema([("topic", pa.string()), ("due_ms", pa.int64()), ("payload", pa.binary()), ("key", pa.string())])


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """The shape of a schedule."""

    rows: int = 1_000_000
    start_ms: int = 0
    """No due time is before this."""
    seed: int = 0
    topics: tuple[str, ...] = ("reminders", "invoices", "retries")
    """Topics; each is half as frequent as its predecessor."""
    payload_bytes: int = 100
    keys: bool = False
    """Whether messages have a key of their own."""
    span_days: float = 730.0
    """No due time is further ahead."""
    median_days: float = 3.0
    """Half of the messages are due within this."""
    burst_share: float = 0.2
    """Share of messages due within two seconds of a full hour."""

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("rows", 0 <= self.rows <= ROWS_MAX, f"0 to {ROWS_MAX}"),
            ("start_ms", 0 <= self.start_ms <= START_MS_MAX, f"0 to {START_MS_MAX}"),
            ("seed", self.seed >= 0, "0 or more"),
            ("topics", bool(self.topics), "at least one"),
            ("topics", all(map(_is_text, self.topics)), "texts of UTF-8"),
            ("payload_bytes", 16 <= self.payload_bytes <= 4 << 20, "16 to 4194304"),
            ("span_days", 0 < self.span_days <= 36_500, "above 0, up to 36500"),
            ("median_days", 0 < self.median_days <= self.span_days, "above 0, up to span_days"),
            ("burst_share", 0 <= self.burst_share <= 1, "0 to 1"),
        ):
            if not good:
                raise ValueError(f"{name}: {getattr(self, name)!r}: {allowed}")


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def due_times(config: ScheduleConfig, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Due times of some messages, in milliseconds since 1970."""
    span_ms = int(config.span_days * DAY_MS)
    # A log-normal has the long tail; values beyond the span are spread evenly over it.
    ahead = np.exp(rng.normal(np.log(config.median_days), 1.6, count)) * DAY_MS
    days = np.where(ahead < span_ms, ahead, rng.uniform(0, span_ms, count)) // DAY_MS
    hours = rng.choice(24, count, p=HOUR_WEIGHTS / HOUR_WEIGHTS.sum())
    within = rng.integers(0, HOUR_MS, count)
    burst = rng.random(count) < config.burst_share
    within[burst] = rng.exponential(400, int(burst.sum())).astype(np.int64) % 2_000
    midnight = config.start_ms // DAY_MS * DAY_MS
    due = midnight + days.astype(np.int64) * DAY_MS + hours * HOUR_MS + within
    due[due < config.start_ms] += DAY_MS
    last = config.start_ms + span_ms
    late = due > last
    due[late] = config.start_ms + (due[late] - config.start_ms) % max(1, span_ms)
    return due


def schedule(config: ScheduleConfig) -> Iterator[pa.RecordBatch]:
    """Record batches of SCHEMA. Each payload contains the number of its row, so all messages differ."""
    rng = np.random.default_rng(config.seed)
    weights = 0.5 ** np.arange(len(config.topics))
    names = pa.array(config.topics, pa.string())
    for first in range(0, config.rows, ROWS_A_BATCH):
        count = min(ROWS_A_BATCH, config.rows - first)
        due = due_times(config, rng, count)
        topics = rng.choice(len(config.topics), count, p=weights / weights.sum())
        filling = rng.integers(32, 127, (count, config.payload_bytes), dtype=np.uint8)
        rows = np.arange(first, first + count)
        filling[:, :16] = np.char.zfill(rows.astype("S16"), 16).view(np.uint8).reshape(count, 16)
        ends = np.arange(count + 1, dtype=np.int32) * config.payload_bytes
        payload = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(filling)])
        key = pa.array(np.char.add("k", rows.astype("U")) if config.keys else [None] * count, pa.string())
        yield pa.RecordBatch.from_arrays([names.take(pa.array(topics)), pa.array(due), payload, key], schema=SCHEMA)


def write_schedule(config: ScheduleConfig, path: Path) -> int:
    """Write a schedule as a Parquet file, which is there only once it is whole. Returns the number of rows. Raises
    OSError."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "no regular file", str(path))
    rows = 0
    aside = path.with_name(f"{path.name}.new")
    with unfinished(aside):
        with aside.open("wb") as file, pq.ParquetWriter(file, SCHEMA, compression="snappy") as writer:
            for batch in schedule(config):
                writer.write_batch(batch)
                rows += batch.num_rows
        aside.replace(path)
    return rows
