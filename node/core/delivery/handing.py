"""What one pass hands to a consumer: rows of one topic or of several, which leave as one batch with their leases.

A consumer that takes mixed batches gets the rows of all topics of a pass together. Any other gets a batch for each
topic at once. Soft state of one pass: nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.delivery.channel import Share
from tickwheel.node.core.delivery.leases import ChannelKey
from tickwheel.node.core.delivery.sessions import Session
from tickwheel.node.state.targets import origins_of
from tickwheel.proto.consumer_pb2 import DeliverBatch
from tickwheel.wheel.units import join_units

BATCH_TOPICS_MAX = 512
"""Topics in one batch: what is delivered together can be settled together (`SETTLE_TOPICS_MAX`)."""


def batch_of(shares: Sequence[Share], term: int, lease_until_ms: int, filter: str) -> DeliverBatch:
    """One batch of these rows; of a single topic in the form that every client reads."""
    if len(shares) == 1:
        share = shares[0]
        positions, ids, attempts, due_ms = share.positions, share.ids, share.attempts, share.due_ms
        units, records = share.units, share.records
    else:
        positions = np.concatenate([share.positions for share in shares])
        ids = np.concatenate([share.ids for share in shares])
        attempts = np.concatenate([share.attempts for share in shares])
        due_ms = np.concatenate([share.due_ms for share in shares])
        units = join_units([share.units for share in shares])
        records = [record for share in shares for record in share.records]
    origins = origins_of(units)
    if origins.any():
        # To consumers a retry keeps the id under which the message was first scheduled, and its attempts add up.
        ids, attempts = np.where(origins != 0, origins, ids), attempts + units["attempts"]
    batch = DeliverBatch(
        group=shares[0].channel.group,
        term=term,
        ids=ids.tobytes(),
        attempts=attempts.astype("<u4").tobytes(),
        positions=positions.tobytes(),
        due_ms=due_ms.tobytes(),
        meta_sizes=units["meta_size"].astype("<u4").tobytes(),
        sizes=units["size"].tobytes(),
        records=b"".join(records),
        lease_until_ms=lease_until_ms,
        filter=filter,
    )
    if len(shares) == 1:
        batch.topic, batch.epoch = shares[0].channel.topic, shares[0].channel.mark
    else:
        batch.topics.extend([share.channel.topic for share in shares])
        batch.topic_counts = np.array([len(share.records) for share in shares], "<u4").tobytes()
        batch.epochs = np.array([share.channel.mark for share in shares], "<u4").tobytes()
    return batch


@dataclass(slots=True, eq=False)
class _Gathered:
    shares: list[Share] = field(default_factory=list)
    count: int = 0
    bytes: int = 0


class Handing:
    """Gathers the shares of a pass for each consumer. `send` lets one batch of them leave."""

    def __init__(self, batch_bytes_max: int, send: Callable[[Session, list[Share]], None]) -> None:
        self._batch_bytes_max = batch_bytes_max
        self._send = send
        self._full: list[tuple[Session, _Gathered]] = []
        """Batches that take no more."""
        self._gathered: dict[Session, _Gathered] = {}

    def put(self, session: Session, share: Share, *, mixes: bool) -> None:
        """Hand a share to a consumer. Takes its credits now. `mixes`: it may leave together with those of other topics,
        with `flush`; else it leaves at once."""
        count = len(share.records)
        session.credits -= count
        session.delivered += count
        if not mixes:
            self._send(session, [share])
            return
        size, gathered = sum(map(len, share.records)), self._gathered.get(session)
        if gathered is not None and (
            len(gathered.shares) >= BATCH_TOPICS_MAX
            or gathered.count + count > session.batch_messages_max
            or gathered.bytes + size > self._batch_bytes_max
        ):
            self._full.append((session, gathered))
            gathered = None
        if gathered is None:
            gathered = self._gathered[session] = _Gathered()
        gathered.shares.append(share)
        gathered.count += count
        gathered.bytes += size

    def _take(self) -> list[tuple[Session, _Gathered]]:
        """What was gathered, in the order in which it is to leave."""
        full, gathered = self._full, self._gathered
        self._full, self._gathered = [], {}
        return [*full, *gathered.items()]

    def flush(self) -> None:
        """The pass ends: let everything leave."""
        for session, waiting in self._take():
            self._send(session, waiting.shares)

    def drop(self) -> list[ChannelKey]:
        """Let nothing of what was gathered leave, and give its credits back. Returns the channels that it was taken
        from: it has no lease, and must be read again."""
        dropped = self._take()
        for session, waiting in dropped:
            session.credits += waiting.count
            session.delivered -= waiting.count
        return [share.channel.key for _, waiting in dropped for share in waiting.shares]
