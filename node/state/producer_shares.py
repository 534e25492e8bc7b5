"""Whose producers are forgotten first when there are too many: the share of each owner in what is remembered.

Invariants:
- An owner that holds no more than its equal part of a limit (the limit divided by the owners that hold anything) loses
  nothing to others while it sends something at least every IDLE_MS.
- Whose turn it is follows from the shares, their order of use and their times of use alone. It does not depend on when
  or how this object was filled.

All who were not identified have one share, under the empty name: a secret of one's own choice costs nothing, so shares
for them would protect nobody, and programs that run once would displace those that run for long.

Pure. Used by `producers.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

IDENTIFIED = "cn/"
"""Owners with a certificate or a user begin with this."""
IDLE_MS = 86_400_000
"""An owner that was not heard of for so long gives way to all others, so that names used for a short time (a job, a
container) do not keep their shares for ever. No client repeats a request for so long."""
SPARE_ENTRIES = 64
"""Outdated entries of a heap that are not worth building it again, beside one for each share."""

Key = tuple[str, int]
"""A batch: producer id and sequence."""


def share_of(owner: str) -> str:
    """Name of the share of a producer id's owner."""
    return owner if owner.startswith(IDENTIFIED) else ""


@dataclass(slots=True, eq=False)
class _Share:
    """`used` numbers the uses of all shares; `used_ms` is the time of the last one, as stamped in the log. Producers:
    least recently used first. `batches`: oldest first, with their numbers of ids."""

    used: int
    used_ms: int
    producers: OrderedDict[str, None] = field(default_factory=OrderedDict)
    batches: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    ids: int = 0


class _First:
    """Finds the share with the lowest rank, in O(log n) steps for each change on average. Each share with a rank has an
    entry that counts, which is not above its rank and is corrected when it comes to the top."""

    def __init__(self, shares: dict[str, _Share], rank: Callable[[_Share], tuple[int, int] | None]) -> None:
        """`rank` of a share; None: it is not looked for."""
        self._shares = shares
        self._rank = rank
        self._entries: list[tuple[tuple[int, int], str]] = []
        self._counts: dict[str, tuple[int, int]] = {}
        """The rank in the entry that counts."""

    def lowered(self, name: str) -> None:
        """The rank of a share may have become lower, or is no longer None."""
        rank = self._rank(self._shares[name])
        counts = self._counts.get(name)
        if rank is None or (counts is not None and counts <= rank):
            return
        self._counts[name] = rank
        heapq.heappush(self._entries, (rank, name))
        if len(self._entries) > 2 * len(self._shares) + SPARE_ENTRIES:
            ranks = ((name, self._rank(share)) for name, share in self._shares.items())
            self._counts = {name: rank for name, rank in ranks if rank is not None}
            self._entries = [(rank, name) for name, rank in self._counts.items()]
            heapq.heapify(self._entries)

    def find(self) -> str:
        """Name of the share with the lowest rank; there must be one."""
        while True:
            noted, name = self._entries[0]
            if self._counts.get(name) != noted:
                heapq.heappop(self._entries)
                continue
            share = self._shares.get(name)
            rank = None if share is None else self._rank(share)
            if rank == noted:
                return name
            if rank is None:
                heapq.heappop(self._entries)
                del self._counts[name]
            else:
                heapq.heapreplace(self._entries, (rank, name))
                self._counts[name] = rank


class Shares:
    """`now_ms` and `at_ms` are stamps of the log."""

    def __init__(self, rows: Iterable[tuple[str, int]]) -> None:
        """Restore shares from what `rows` returned; `enter` and `add` fill them."""
        self._shares: dict[str, _Share] = {}
        self._uses = itertools.count()
        for name, used_ms in rows:
            self._shares[name] = _Share(next(self._uses), used_ms)
        self._most_producers = _First(self._shares, lambda share: (-len(share.producers), share.used))
        self._longest_idle = _First(self._shares, lambda share: (share.used, 0))
        self._most_ids = _First(self._shares, lambda share: (-share.ids, share.used) if share.ids else None)
        self._longest_idle_with_ids = _First(self._shares, lambda share: (share.used, 0) if share.ids else None)

    def rows(self) -> Iterator[tuple[str, int]]:
        """(name, time of the last use) of each share, least recently used first."""
        ordered = sorted(self._shares.items(), key=lambda item: item[1].used)
        return ((name, share.used_ms) for name, share in ordered)

    def use(self, name: str, producer_id: str, at_ms: int) -> None:
        """Note the use of a producer, which may be new."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share(0, at_ms)
        share.used, share.used_ms = next(self._uses), at_ms
        self.enter(name, producer_id)
        share.producers.move_to_end(producer_id)

    def enter(self, name: str, producer_id: str) -> None:
        """A producer belongs to a share that exists; it is the last one used if it is new there."""
        share = self._shares[name]
        if producer_id not in share.producers:
            share.producers[producer_id] = None
            self._most_producers.lowered(name)
            if len(share.producers) == 1:
                self._longest_idle.lowered(name)

    def leave(self, name: str, producer_id: str) -> None:
        """A producer without batches leaves its share."""
        share = self._shares[name]
        del share.producers[producer_id]
        if not share.producers:
            del self._shares[name]

    def add(self, name: str, key: Key, ids: int) -> None:
        """Count a batch, the newest one of its share."""
        share = self._shares[name]
        before = share.ids
        share.batches[key] = ids
        share.ids += ids
        if ids:
            self._most_ids.lowered(name)
            if not before:
                self._longest_idle_with_ids.lowered(name)

    def remove(self, name: str, key: Key) -> None:
        """Count a batch no longer."""
        share = self._shares[name]
        share.ids -= share.batches.pop(key)

    def next_producer(self, now_ms: int) -> str:
        """The producer to be forgotten first; there must be one."""
        return next(iter(self._turn(self._longest_idle, self._most_producers, now_ms).producers))

    def next_batch(self, now_ms: int) -> Key:
        """The batch to be forgotten first; one with ids must be counted."""
        return next(iter(self._turn(self._longest_idle_with_ids, self._most_ids, now_ms).batches))

    def _turn(self, longest_idle: _First, most: _First, now_ms: int) -> _Share:
        share = self._shares[longest_idle.find()]
        return share if now_ms - share.used_ms >= IDLE_MS else self._shares[most.find()]
