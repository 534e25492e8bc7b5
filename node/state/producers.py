"""Idempotence: the last batches of each producer, so that a repeat gets the answer of the first time.

Invariants:
- A producer's remembered batches are those of the sequences [first, last] without a gap.
- What is forgotten follows from the log and the replicated settings alone, never from memory or time:
  first a producer's oldest batch beyond its window, then the oldest batches of all beyond the sum of
  ids, and producers beyond their number, the least recently used (in log order) first.
- The newest batch of all is kept even if it alone is beyond the sum.

Called by `publishing.py` and for checkpoint and digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.settings import Settings
from tickwheel.wheel.units import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What was answered: ids and due times in row order, and a CRC32C of both for the digest."""

    ids: Ids
    due_ms: NDArray[np.int64]
    crc: int


@dataclass(slots=True)
class Span:
    """A producer's remembered sequences, `first` to `last`; first == last + 1: none is remembered any more."""

    first: int
    last: int


def make_batch(ids: Ids, due_ms: NDArray[np.int64]) -> Batch:
    """A batch with its own arrays (a slice would keep a whole entry's columns alive)."""
    ids, due_ms = ids.copy(), due_ms.copy()
    crc: int = google_crc32c.extend(google_crc32c.value(ids.tobytes()), due_ms.tobytes())
    return Batch(ids, due_ms, crc)


class Producers:
    """See the module."""

    def __init__(self) -> None:
        self._spans: OrderedDict[str, Span] = OrderedDict()
        self._batches: OrderedDict[tuple[str, int], Batch] = OrderedDict()
        self.ids_kept = 0

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, producer_id: str) -> Span | None:
        """Its remembered sequences; None: it is not known (any more)."""
        return self._spans.get(producer_id)

    def batch(self, producer_id: str, sequence: int) -> Batch:
        """A remembered batch."""
        return self._batches[producer_id, sequence]

    def touch(self, producer_id: str) -> None:
        """It was used: it is the last to be forgotten."""
        if producer_id in self._spans:
            self._spans.move_to_end(producer_id)

    def accept(self, producer_id: str, sequence: int, batch: Batch, settings: Settings) -> None:
        """Remember an accepted batch; forgets what is beyond the limits."""
        span = self._spans.get(producer_id)
        if span is None:
            self._spans[producer_id] = span = Span(sequence, sequence)
        else:
            span.last = sequence
            self._spans.move_to_end(producer_id)
        self._batches[producer_id, sequence] = batch
        self.ids_kept += len(batch.ids)
        while span.last - span.first >= settings.producer_window_batches:
            self._forget_oldest(producer_id, span)
        self.trim(settings)

    def trim(self, settings: Settings) -> None:
        """Forget what is beyond the limits of all producers together."""
        while self.ids_kept > settings.producer_window_ids and len(self._batches) > 1:
            producer_id, _ = next(iter(self._batches))
            self._forget_oldest(producer_id, self._spans[producer_id])
        while len(self._spans) > settings.producers_max:
            producer_id, span = next(iter(self._spans.items()))
            while span.first <= span.last:
                self._forget_oldest(producer_id, span)
            del self._spans[producer_id]

    def _forget_oldest(self, producer_id: str, span: Span) -> None:
        batch = self._batches.pop((producer_id, span.first))
        self.ids_kept -= len(batch.ids)
        span.first += 1

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(producer id, first, last), least recently used first."""
        return ((name, span.first, span.last) for name, span in self._spans.items())

    def batches(self) -> list[tuple[str, int, Batch]]:
        """(producer id, sequence, batch), oldest first. The list is the caller's; batches never change."""
        return [(name, sequence, batch) for (name, sequence), batch in self._batches.items()]

    def restore(self, spans: Iterable[tuple[str, int, int]], batches: Iterable[tuple[str, int, Batch]]) -> None:
        """Back to what `spans` and `batches` told."""
        self._spans = OrderedDict((name, Span(first, last)) for name, first, last in spans)
        self._batches = OrderedDict(((name, sequence), batch) for name, sequence, batch in batches)
        self.ids_kept = sum(len(batch.ids) for batch in self._batches.values())

    def digest(self) -> bytes:
        """SHA-256 of all of it, in order of use and of acceptance."""
        sha = hashlib.sha256()
        for name, first, last in self.spans():
            sha.update(name.encode() + b"\0" + struct.pack("<QQ", first, last))
        for (name, sequence), batch in self._batches.items():
            sha.update(name.encode() + b"\0" + struct.pack("<QQI", sequence, len(batch.ids), batch.crc))
        return sha.digest()
