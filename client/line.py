"""The order in which waiting calls leave: what waits while batches are under way makes the next one.

Owns the calls that are not under way. Pure: it holds no clock and sends nothing. At most `under_way_max` batches are
under way, so batches grow with the number of callers. Calls that have to travel apart (a part of a batch that was
refused) leave before the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

C = TypeVar("C")


class Line(Generic[C]):
    """The waiting calls of one client."""

    def __init__(
        self, size: Callable[[C], int], gone: Callable[[C], bool], *, under_way_max: int, calls_max: int, bytes_max: int
    ) -> None:
        """`size` returns the bytes of a call. `gone`: its caller waits no more, so it is left out."""
        self._size = size
        self._gone = gone
        self._under_way_max = under_way_max
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._waiting: deque[C] = deque()
        self._apart: deque[list[C]] = deque()
        self._under_way = 0

    def add(self, call: C) -> None:
        """A call waits for the next batch."""
        self._waiting.append(call)

    def add_apart(self, calls: Sequence[C]) -> None:
        """These calls, and no others, wait for a batch."""
        self._apart.append(list(calls))

    def take(self) -> list[C]:
        """The calls of the next batch, which is under way from now until `ended`; empty: none can go now."""
        if self._under_way >= self._under_way_max:
            return []
        batch = self._next_apart() or self._next_batch()
        self._under_way += bool(batch)
        return batch

    def ended(self) -> None:
        """A batch is not under way any more."""
        self._under_way -= 1

    def _next_apart(self) -> list[C]:
        while self._apart:
            batch = [call for call in self._apart.popleft() if not self._gone(call)]
            if batch:
                return batch
        return []

    def _next_batch(self) -> list[C]:
        batch: list[C] = []
        total = 0
        while self._waiting and len(batch) < self._calls_max:
            size = self._size(self._waiting[0])
            if batch and total + size > self._bytes_max:
                break
            call = self._waiting.popleft()
            if not self._gone(call):
                batch.append(call)
                total += size
        return batch
