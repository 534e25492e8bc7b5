"""Consuming without a stream: each call pulls one batch, and a later call settles it, from any process with its handle.

For programs that consume in steps decided elsewhere, such as a stream of Spark. If the answer to a pull is lost, its
messages stay leased until the lease ends. A settlement can be repeated safely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tickwheel.client.answers import reader
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.delivery import columns_of
from tickwheel.client.errors import refused
from tickwheel.client.filtering import mismatches
from tickwheel.client.moments import span_ms_of
from tickwheel.client.requests import request_of
from tickwheel.client.states import Settlement, StartFrom, start_of
from tickwheel.proto import consumer_pb2
from tickwheel.proto.consumer_pb2_grpc import ConsumerStub

TRY_TIMEOUT_S = 30.0
_OUTCOMES = {
    Settlement.ACK: consumer_pb2.ACK,
    Settlement.RETRY: consumer_pb2.RETRY,
    Settlement.DEAD: consumer_pb2.DEAD,
    Settlement.SKIP: consumer_pb2.SKIP,
}


@dataclass(frozen=True, slots=True)
class PulledBatch:
    """Deliveries of one topic under one lease, as columns of n elements; views of the received bytes."""

    group: str
    topic: str
    term: int
    """Of the master that delivered."""
    lease_until: datetime
    """When the lease ends, by the cluster's clock, in UTC."""
    ids: NDArray[np.uint64]
    attempts: NDArray[np.uint32]
    """1 for the first delivery."""
    due_ms: NDArray[np.int64]
    sizes: NDArray[np.uint32]
    """Bytes of meta and payload together."""
    meta_sizes: NDArray[np.uint32]
    """Bytes of the meta alone."""
    records: bytes
    """Meta and payload of each, one behind the other."""
    handle: bytes
    """Names the deliveries in `settle`, in any process and as long as it is kept."""

    def __len__(self) -> int:
        return len(self.ids)


def handle_of(batch: consumer_pb2.DeliverBatch) -> consumer_pb2.SettleBatch:
    """What names the deliveries of a batch in a settlement. It omits positions, to be short."""
    return consumer_pb2.SettleBatch(
        group=batch.group, topic=batch.topic, ids=batch.ids, attempts=batch.attempts, epoch=batch.epoch
    )


pulled_of = reader(
    PulledBatch,
    consumer_pb2.DeliverBatch,
    meta_sizes=lambda wire: np.frombuffer(wire.meta_sizes or bytes(4 * (len(wire.ids) // 8)), "<u4"),
    handle=lambda wire: handle_of(wire).SerializeToString(),
)


class PullClient(ServiceCalls[ConsumerStub]):
    """The consumer's unary calls."""

    _service = ConsumerStub

    async def pull(
        self,
        group: str,
        topics: Sequence[str] = (),
        *,
        topic: str = "",
        messages_max: int = 1_024,
        wait: timedelta = timedelta(0),
        lease: timedelta | None = None,
        start_from: StartFrom | str | datetime = StartFrom.EARLIEST,
        filter: str = "",
    ) -> PulledBatch:
        """Pull one batch, empty if nothing came within `wait`, at most 20 s. Settles messages that the group's filter
        does not want.

        `topic`: only of this topic of the group. `topics`, `start_from`, `filter`: as in `AsyncClient.consumer`.
        `lease`: None for the cluster's own.
        """
        place, start_ms = start_of(start_from, 0)
        request = request_of(
            consumer_pb2.PullRequest,
            group=group,
            topic=topic,
            topics=topics,
            messages_max=messages_max,
            wait_ms=_span_ms("wait", wait),
            lease_ms=_span_ms("lease", lease) if lease is not None else 0,
            start_from=place,
            start_ms=start_ms,
            filter=filter,
        )
        batch = await self._ask(lambda stub: stub.Pull, request, try_timeout_s=TRY_TIMEOUT_S)
        (columns,) = columns_of(batch)
        foreign = mismatches(batch.filter, columns)
        if len(foreign):
            handle = handle_of(batch)
            handle.ids, handle.attempts = columns.ids[foreign].tobytes(), columns.attempts[foreign].tobytes()
            await self._settle(handle, consumer_pb2.SKIP, 0)
            rest = columns.without(foreign)
            for name in ("ids", "attempts", "due_ms", "meta_sizes", "sizes"):
                setattr(batch, name, getattr(rest, name).tobytes())
            batch.records = rest.records
        return pulled_of(batch)

    async def settle(
        self, handles: Sequence[bytes], outcome: Settlement = Settlement.ACK, *, delay: timedelta | None = None
    ) -> int:
        """Settle deliveries. Returns how many were settled; those delivered again meanwhile do not count.

        `delay`: for `RETRY`; None: at the group's pace.
        """
        self._cluster.check_open()
        number = _OUTCOMES.get(outcome)
        if number is None:
            raise refused("outcome", outcome, ", ".join(_OUTCOMES))
        delay_ms = _span_ms("delay", delay) if delay is not None else 0
        return sum([await self._settle(_parsed(handle), number, delay_ms) for handle in handles])

    async def _settle(
        self, request: consumer_pb2.SettleBatch, outcome: consumer_pb2.Outcome.ValueType, delay_ms: int
    ) -> int:
        request.outcome, request.delay_ms = outcome, delay_ms

        return (await self._ask(lambda stub: stub.Settle, request)).settled


def _parsed(handle: bytes) -> consumer_pb2.SettleBatch:
    try:
        return consumer_pb2.SettleBatch.FromString(handle)
    except (DecodeError, TypeError):
        raise refused("handle", handle, "the handle of a pulled batch") from None


def _span_ms(field: str, span: timedelta) -> int:
    span_ms = span_ms_of(field, span)
    if not 0 <= span_ms < 1 << 32:
        raise refused(field, span, "0 to 49 days")
    return span_ms
