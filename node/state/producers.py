"""Idempotence: the last batches of each producer, so that a repeat gets the answer of the first time.

Invariants:
- A producer's remembered batches are those of the sequences [first, last] without a gap.
- What is forgotten follows from the log, its stamps included, and the replicated settings alone: first a producer's
  oldest batch beyond its window, then batches beyond the sum of ids, and producers beyond their number.
- Beyond the sum or the number it is the owner with the largest share that loses its oldest batch, or its least recently
  used producer (`producer_shares.py`). This rule holds from the first accepted request that states it. Before that, in
  logs of versions without it, the oldest batch and the least recently used producer of all are forgotten.
- The newest batch of all is kept even if it alone is beyond the sum. By shares it does not count for the sum at all, so
  that it displaces nobody.
- An id belongs to the owner who was stated first; a remembered sequence is repeated only by the same content.
  What states neither (versions before these) is judged by the number of messages alone.

Called by `publishing.py` and for checkpoint and digest.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.state.producer_shares import Shares, share_of
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.state_pb2 import ProducerShares
from tickwheel.wheel.units import Ids

SEQUENCES = 1 << 64
"""Sequences are below this."""
DIGEST_TURN = 2_000
"""Producers or batches in one turn of a digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The answer to a batch: ids and due times in row order, and a CRC32C of all columns for the digest. `checksum`: of
    the request's content; None: not stated. `keys` as in RequestOutcome."""

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


@dataclass(frozen=True, slots=True)
class Sender:
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
    ids, due_ms, keys = ids.copy(), due_ms.copy(), None if keys is None else keys.copy()
    crc: int = google_crc32c.extend(google_crc32c.value(ids.tobytes()), due_ms.tobytes())
    if keys is not None:
        crc = google_crc32c.extend(crc, keys.tobytes())
    return Batch(ids, due_ms, crc, checksum, keys)


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
            facts = {"field": "sequence", "value": str(sequence), "expected": str(span.last + 1)}
            raise RequestError(Failure(pb.SEQUENCE_FORGOTTEN, text, facts))
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
        self._batches[producer_id, sequence] = batch
        self.ids_kept += len(batch.ids)
        if self._shares is not None:
            self._shares.use(share_of(span.owner), producer_id, at_ms)
            self._shares.add(share_of(span.owner), (producer_id, sequence), len(batch.ids))
        while span.last - span.first >= settings.producer_window_batches:
            self._forget_oldest(producer_id, span)
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
