"""Idempotence: the last batches of each producer, so that a repeat gets the answer of the first time.

Invariants:
- A producer's remembered batches are those of the sequences [first, last] without a gap.
- What is forgotten follows from the log, its stamps included, and the replicated settings alone: first a producer's
  oldest batch beyond its window, then batches beyond the sum of ids, and producers beyond their number.
- Beyond the sum or the number it is the owner with the largest share that loses its oldest batch, or its least recently
  used producer (`Shares`). This rule holds from the first accepted request that states it. Before that, in
  logs of versions without it, the oldest batch and the least recently used producer of all are forgotten.
- The newest batch of all is kept even if it alone is beyond the sum. By shares it does not count for the sum at all, so
  that it displaces nobody.
- An id belongs to the owner who was stated first; a remembered sequence is repeated only by the same content.
  What states neither (versions before these) is judged by the number of messages alone.

Called by `publishing.py` and for checkpoint and digest.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid, refused
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.state_pb2 import ProducerShares
from tickwheel.wheel.units import Ids

SEQUENCES = 1 << 64
"""Sequences are below this."""
DIGEST_TURN = 2_000
"""Producers or batches in one turn of a digest."""


@dataclass(slots=True, eq=False)
class Batch:
    """The answer to a batch: ids and due times in row order, and a CRC32C of all columns for the digest. `checksum`: of
    the request's content; None: not stated. `keys` as in RequestOutcome.

    Never changed. It is not frozen, since a frozen one takes three times as long to make."""

    ids: Ids
    due_ms: NDArray[np.int64]
    crc: int
    checksum: int | None = None
    keys: NDArray[np.uint8] | None = None


@dataclass(slots=True)
class Span:
    """A producer's remembered sequences, `first` to `last`; first == last + 1: none is remembered any more. `owner`:
    owner of the id; empty: nobody."""

    first: int
    last: int
    owner: str = ""


class Sender(NamedTuple):
    """The producer's part of a request. `checksum`: of its content; None: not stated. `owner`: empty if not stated.
    `by_owner`: producers are forgotten by the shares of their owners from this request on."""

    producer_id: str
    sequence: int
    checksum: int | None = None
    owner: str = ""
    by_owner: bool = False


NOBODY = Sender("", 0)
"""The sender of a request without a producer id: a repeat of it takes effect again."""


def make_batch(
    ids: Ids, due_ms: NDArray[np.int64], checksum: int | None = None, keys: NDArray[np.uint8] | None = None
) -> Batch:
    """A batch with its own arrays (a slice would keep a whole entry's columns alive)."""
    crc: int = google_crc32c.value(ids.tobytes() + due_ms.tobytes())
    if keys is not None:
        keys = keys.copy()
        crc = google_crc32c.extend(crc, keys.tobytes())
    return Batch(ids.copy(), due_ms.copy(), crc, checksum, keys)


def owner_differs(sender: Sender) -> Failure:
    """The refusal because the producer id has another owner. It does not name the owner."""
    return Failure(
        pb.SEQUENCE_TAKEN,
        f"producer id {sender.producer_id} is in use by another client: choose another id",
        {"field": "producer_id", "value": sender.producer_id},
    )


def content_differs(sender: Sender) -> Failure:
    """The refusal because the sequence was accepted with other content."""
    return Failure(
        pb.SEQUENCE_TAKEN,
        f"sequence {sender.sequence} of producer {sender.producer_id} was accepted with other content: "
        "another program uses the same id, or a sequence was used twice",
        {"field": "sequence", "value": str(sender.sequence)},
    )


class Producers:
    def __init__(self) -> None:
        self._spans: OrderedDict[str, Span] = OrderedDict()
        self._batches: OrderedDict[tuple[str, int], Batch] = OrderedDict()
        self.ids_kept = 0
        self.stated = False
        """A remembered batch has a checksum: so the log has some, and every reader of the log understands them. No part
        of the state."""
        self._shares: Shares | None = None
        """None: no request has stated yet that producers are forgotten by owner."""
        self._forgot = False
        """A producer was forgotten since they are forgotten by owner, or may have been before."""

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, producer_id: str) -> Span | None:
        """A producer's remembered sequences; None: it is not known (any more)."""
        return self._spans.get(producer_id)

    def repeated(self, sender: Sender, count: int) -> Batch | None:
        """The remembered batch that a request of `count` messages repeats; None: its sequence was never accepted, as
        far as is known. Raises RequestError: it must be refused although its sequence may be the next."""
        span = self._spans.get(sender.producer_id)
        if span is None:
            return None
        if sender.owner and span.owner and sender.owner != span.owner:
            raise RequestError(owner_differs(sender))
        sequence = sender.sequence
        if sequence > span.last:
            return None
        if sequence < span.first:
            text = f"sequence {sequence} of producer {sender.producer_id} was accepted, its ids are no longer kept"
            raise refused(pb.SEQUENCE_FORGOTTEN, text, field="sequence", value=sequence, expected=span.last + 1)
        batch = self._batches[sender.producer_id, sequence]
        if sender.checksum is not None and batch.checksum is not None and sender.checksum != batch.checksum:
            raise RequestError(content_differs(sender))
        if len(batch.ids) != count:
            raise RequestError(other_count(sender, count, len(batch.ids)))
        return batch

    def touch(self, producer_id: str, at_ms: int) -> None:
        """Note a use of a producer at a stamp of the log: it becomes the last one of its owner to be forgotten."""
        span = self._spans.get(producer_id)
        if span is not None:
            self._spans.move_to_end(producer_id)
            if self._shares is not None:
                self._shares.use(share_of(span.owner), producer_id, at_ms)

    def accept(self, sender: Sender, batch: Batch, settings: Settings, at_ms: int) -> None:
        """Remember a batch that was accepted at a stamp of the log, and forget what exceeds the limits. An id without
        an owner gets the sender's."""
        producer_id, sequence = sender.producer_id, sender.sequence
        if sender.by_owner and self._shares is None:
            self._divide(at_ms)
            self._forgot = len(self._spans) >= settings.producers_max
        span = self._spans.get(producer_id)
        if span is None:
            self._spans[producer_id] = span = Span(sequence, sequence - 1, sys.intern(sender.owner))
        else:
            self._spans.move_to_end(producer_id)
            if not span.owner and sender.owner:
                self._claim(producer_id, span, sender.owner, at_ms)
        span.last = sequence
        self.stated = self.stated or batch.checksum is not None
        key, ids = (producer_id, sequence), len(batch.ids)
        self._batches[key] = batch
        self.ids_kept += ids
        if self._shares is not None:
            owner = share_of(span.owner)
            self._shares.use(owner, producer_id, at_ms)
            self._shares.add(owner, key, ids)
        while sequence - span.first >= settings.producer_window_batches:
            self._forget_oldest(producer_id, span)
        if self.ids_kept > settings.producer_window_ids or len(self._spans) > settings.producers_max:
            self.trim(settings, at_ms)

    def trim(self, settings: Settings, now_ms: int) -> None:
        """Forget what exceeds the limits of all producers together. `now_ms`: a stamp of the log."""
        if self._shares is None:
            self._trim_oldest(settings)
        else:
            self._trim_by_owner(self._shares, settings, now_ms)

    def may_have_forgotten(self, settings: Settings) -> bool:
        """Whether a producer that is unknown may have been known before."""
        return self._forgot or len(self._spans) >= settings.producers_max

    @property
    def by_owner(self) -> bool:
        """Whether producers are forgotten by the shares of their owners."""
        return self._shares is not None

    def _trim_oldest(self, settings: Settings) -> None:
        while self.ids_kept > settings.producer_window_ids and len(self._batches) > 1:
            producer_id, _ = next(iter(self._batches))
            self._forget_oldest(producer_id, self._spans[producer_id])
        while len(self._spans) > settings.producers_max:
            self._forget(next(iter(self._spans)))

    def _trim_by_owner(self, shares: Shares, settings: Settings, now_ms: int) -> None:
        if self._batches:
            newest, batch = next(reversed(self._batches.items()))
            ids_max = settings.producer_window_ids + len(batch.ids)
            if self.ids_kept > ids_max:
                owner = share_of(self._spans[newest[0]].owner)
                shares.remove(owner, newest)
                while self.ids_kept > ids_max:
                    producer_id, _ = shares.next_batch(now_ms)
                    self._forget_oldest(producer_id, self._spans[producer_id])
                shares.add(owner, newest, len(batch.ids))
        while len(self._spans) > settings.producers_max:
            producer_id = shares.next_producer(now_ms)
            owner = share_of(self._spans[producer_id].owner)
            self._forget(producer_id)
            shares.leave(owner, producer_id)
            self._forgot = True

    def _forget(self, producer_id: str) -> None:
        span = self._spans[producer_id]
        while span.first <= span.last:
            self._forget_oldest(producer_id, span)
        del self._spans[producer_id]

    def _forget_oldest(self, producer_id: str, span: Span) -> None:
        key = (producer_id, span.first)
        self.ids_kept -= len(self._batches.pop(key).ids)
        if self._shares is not None:
            self._shares.remove(share_of(span.owner), key)
        span.first += 1

    def _claim(self, producer_id: str, span: Span, owner: str, at_ms: int) -> None:
        """An id without an owner gets one. Its batches become the newest of that owner's share, and of all: a share has
        the order of all batches."""
        before = share_of(span.owner)
        span.owner = sys.intern(owner)
        after = share_of(span.owner)
        if self._shares is None or after == before:
            return
        self._shares.use(after, producer_id, at_ms)
        for sequence in range(span.first, span.last + 1):
            key = (producer_id, sequence)
            self._batches.move_to_end(key)
            self._shares.remove(before, key)
            self._shares.add(after, key, len(self._batches[key].ids))
        self._shares.leave(before, producer_id)

    def _divide(self, at_ms: int) -> None:
        """Forget by owner from now on. How and when an owner used its producers before is not known on every node."""
        names = sorted({share_of(span.owner) for span in self._spans.values()})
        self._fill((name, at_ms) for name in names)

    def _fill(self, rows: Iterable[tuple[str, int]]) -> None:
        self._shares = Shares(rows)
        for producer_id, span in self._spans.items():
            self._shares.enter(share_of(span.owner), producer_id)
        for key, batch in self._batches.items():
            self._shares.add(share_of(self._spans[key[0]].owner), key, len(batch.ids))

    def spans(self) -> Iterator[tuple[str, Span]]:
        """(producer id, copy of its span), least recently used first.

        `first` is 0 behind the last sequence of 64 bits, which earlier versions accepted.
        """
        return ((name, replace(span, first=span.first % SEQUENCES)) for name, span in self._spans.items())

    def batches(self) -> Iterator[tuple[str, int, Batch]]:
        """(producer id, sequence, batch), oldest first. Batches never change."""
        return ((name, sequence, batch) for (name, sequence), batch in self._batches.items())

    def shares(self) -> ProducerShares | None:
        """Times and order of use of the owners' shares; None: producers are not forgotten by owner yet."""
        if self._shares is None:
            return None
        rows = list(self._shares.rows())
        used_ms = np.array([used_ms for _, used_ms in rows], "<i8").tobytes()
        return ProducerShares(owners=[name for name, _ in rows], used_ms=used_ms, forgot=self._forgot)

    def restore(
        self,
        spans: Iterable[tuple[str, Span]],
        batches: Iterable[tuple[str, int, Batch]],
        shares: ProducerShares | None = None,
    ) -> None:
        """Restore what `spans`, `batches` and `shares` returned."""
        self._spans = OrderedDict((name, replace(span, first=span.first or SEQUENCES)) for name, span in spans)
        self._batches = OrderedDict(((name, sequence), batch) for name, sequence, batch in batches)
        self.stated = any(batch.checksum is not None for batch in self._batches.values())
        self.ids_kept = sum(len(batch.ids) for batch in self._batches.values())
        self._shares, self._forgot = None, False
        if shares is not None:
            used_ms = np.frombuffer(shares.used_ms, "<i8").tolist()
            self._fill(zip(map(sys.intern, shares.owners), used_ms, strict=True))
            self._forgot = shares.forgot

    def digest_in_turns(self) -> Generator[None, None, bytes]:
        """SHA-256 of all of it, in order of use and of acceptance, in turns of a few milliseconds."""
        sha = hashlib.sha256()
        for number, (name, span) in enumerate(self._spans.items(), 1):
            if number % DIGEST_TURN == 0:
                yield
            sha.update(
                name.encode() + b"\0" + struct.pack("<QQ", span.first % SEQUENCES, span.last) + span.owner.encode()
            )
        for number, ((name, sequence), batch) in enumerate(self._batches.items(), 1):
            if number % DIGEST_TURN == 0:
                yield
            sha.update(name.encode() + b"\0" + struct.pack("<QQI", sequence, len(batch.ids), batch.crc))
            if batch.checksum is not None:
                sha.update(struct.pack("<I", batch.checksum))
        shares = self.shares()
        if shares is not None:
            sha.update(shares.SerializeToString(deterministic=True))
        return sha.digest()


def other_count(sender: Sender, count: int, first_count: int) -> Failure:
    """The refusal of a repeat with another number of messages than the first request."""
    return invalid("messages", count, f"{first_count}, as when sequence {sender.sequence} was first accepted").failure


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
    entry that counts, which is not above its rank and is corrected when it comes to the top. Entries of shares whose
    rank became lower are made when one is looked for: with nearly every batch a rank becomes lower, and the first is
    hardly ever asked for."""

    def __init__(self, shares: dict[str, _Share], rank: Callable[[_Share], tuple[int, int] | None]) -> None:
        """`rank` of a share; None: it is not looked for."""
        self._shares = shares
        self._rank = rank
        self._entries: list[tuple[tuple[int, int], str]] = []
        self._counts: dict[str, tuple[int, int]] = {}
        """The rank in the entry that counts."""
        self._lowered: set[str] = set()
        """Shares whose entries may be above their ranks; some may be gone."""

    def lowered(self, name: str) -> None:
        """The rank of a share may have become lower, or is no longer None."""
        self._lowered.add(name)
        if len(self._lowered) > len(self._shares) + SPARE_ENTRIES:
            self._rebuild()

    def _note_lowered(self) -> None:
        for name in self._lowered:
            share = self._shares.get(name)
            rank = None if share is None else self._rank(share)
            counts = self._counts.get(name)
            if rank is not None and (counts is None or rank < counts):
                self._counts[name] = rank
                heapq.heappush(self._entries, (rank, name))
        self._lowered.clear()
        if len(self._entries) > 2 * len(self._shares) + SPARE_ENTRIES:
            self._rebuild()

    def _rebuild(self) -> None:
        ranks = ((name, self._rank(share)) for name, share in self._shares.items())
        self._counts = {name: rank for name, rank in ranks if rank is not None}
        self._entries = [(rank, name) for name, rank in self._counts.items()]
        heapq.heapify(self._entries)
        self._lowered.clear()

    def find(self) -> str:
        """Name of the share with the lowest rank; there must be one."""
        self._note_lowered()
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
    """Whose producers are forgotten first when there are too many: the share of each owner in what is remembered.

    Invariants:
    - An owner that holds no more than its equal part of a limit (the limit divided by the owners that hold anything)
      loses nothing to others while it sends something at least every IDLE_MS.
    - Whose turn it is follows from the shares, their order of use and their times of use alone. It does not depend on
      when or how this object was filled.

    All callers without an identity have one share, under the empty name. Anybody can choose new secrets, so shares by
    secret would protect nobody, and programs that run once would displace those that run for long.

    Pure. `now_ms` and `at_ms` are stamps of the log.
    """

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
        if producer_id in share.producers:
            share.producers.move_to_end(producer_id)
        else:
            self.enter(name, producer_id)

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
