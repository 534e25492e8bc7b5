"""Rates by name: a bucket of tokens for each name, one second deep, refilled by the cluster's time.

A request passes while its bucket holds anything, and may leave it in debt. So a batch larger than a second's worth
passes too, and its sender waits longer afterwards. Bounded: the least recently used bucket is forgotten, and starts
full if its name comes again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BUCKETS_MAX = 10_000
WAIT_MS_MAX = 60_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_ms: int


class Buckets:
    """Buckets of one kind of name. Soft: a new master starts with full ones."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_ms(self, name: str, rate: int, now_ms: int) -> int:
        """0: a request may pass now; else after how many milliseconds to ask again. `rate`: messages or bytes a
        second."""
        bucket = self._refilled(name, rate, now_ms)
        if bucket.tokens > 0:
            return 0
        return min(WAIT_MS_MAX, int(-bucket.tokens * 1_000 / rate) + 1)

    def take(self, name: str, rate: int, count: int, now_ms: int) -> None:
        """Take `count` tokens for a request that passed."""
        self._refilled(name, rate, now_ms).tokens -= count

    def _refilled(self, name: str, rate: int, now_ms: int) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(float(rate), now_ms)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        passed_ms = max(0, now_ms - bucket.at_ms)
        bucket.tokens = min(float(rate), bucket.tokens + passed_ms * rate / 1_000)
        bucket.at_ms = now_ms
        return bucket

    def clear(self) -> None:
        self._buckets.clear()
