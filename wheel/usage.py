"""How much of the hour files each topic takes: a job that reads indexes, never payloads.

The job is bounded: it ends after UNITS_MAX units, at the end of an hour, and says which hour comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tickwheel.wheel.jobs import HourChunks
from tickwheel.wheel.units import UNIT_BYTES

UNITS_MAX = 1_000_000
"""Units that one job reads, about 100 MB of index; its last hour may exceed it."""
TICKS_OF_AN_HOUR = 36_000
"""Ticks of an hour at the narrowest slot."""


class UsageJob:
    """After `run`: `topics` (topic id -> messages, bytes of their records and units), and `next_hour` (where the next
    job continues; None: nothing is left)."""

    kind = "usage"

    def __init__(self, hours: Sequence[HourChunks]) -> None:
        self._hours = hours
        self.topics: dict[int, tuple[int, int]] = {}
        self.next_hour: int | None = None
        self.done = False

    def run(self) -> None:
        """Read hour by hour, a chunk at a time."""
        read = 0
        try:
            for hour in self._hours:
                if read >= UNITS_MAX:
                    self.next_hour = hour.hour
                    break
                for block in hour.blocks(0, TICKS_OF_AN_HOUR):
                    read += len(block.units)
                    self._add(block.units["topic_id"], block.units["size"])
        finally:
            for hour in self._hours:
                hour.close()
        self.done = True

    def _add(self, topic_ids: np.ndarray, sizes: np.ndarray) -> None:
        ids, places = np.unique(topic_ids, return_inverse=True)
        counts = np.bincount(places)
        weights = np.bincount(places, weights=sizes.astype(np.float64))
        for topic_id, count, weight in zip(ids.tolist(), counts.tolist(), weights.tolist(), strict=True):
            messages, size = self.topics.get(topic_id, (0, 0))
            self.topics[topic_id] = messages + count, size + int(weight) + count * UNIT_BYTES
