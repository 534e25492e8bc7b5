"""The asyncio client: one object for a cluster, which finds the master itself.

Concurrent schedules, cancels and reschedules of one client travel together. Every call has a deadline (`timeout_s`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Unpack

import grpc

from tickwheel.client.access import AccessClient
from tickwheel.client.admin import AdminClient
from tickwheel.client.bulk import BulkClient
from tickwheel.client.cluster import Cluster, TlsFiles
from tickwheel.client.cold import ColdClient
from tickwheel.client.consumer import CREDITS, HOLD_S_MAX, UNAVAILABLE_S_MAX, Consumer, open_request
from tickwheel.client.dead import DeadClient
from tickwheel.client.ids import parse_id, text_of
from tickwheel.client.lanes import Doubt, Lane
from tickwheel.client.messages import KIND_DELAY, KIND_DUE, MessageOptions, Receipt, refused, row_of, when_of
from tickwheel.client.numbered import Invoke, Numbered
from tickwheel.client.producer import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BUFFER_BYTES_MAX,
    IN_FLIGHT_MAX,
    LINGER_MS,
    Producer,
)
from tickwheel.client.pulling import PullClient
from tickwheel.client.row_calls import CancelCalls, RescheduleCalls
from tickwheel.client.scheduling import Scheduling
from tickwheel.client.snapshot import SnapshotClient
from tickwheel.client.staging import StagingClient
from tickwheel.client.sweeps import SweepClient
from tickwheel.proto import consumer_pb2, scheduler_pb2
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

TIMEOUT_S = 15.0
STARTS = ("earliest", "latest", "time")


@dataclass(frozen=True, slots=True)
class Message:
    """A message in the state that a node reports."""

    id: str
    topic: str
    due_ms: int
    due_requested_ms: int
    payload_bytes: int
    state: str
    """PENDING, DISPATCHED, CANCELLED or REMOVED."""
    payload: bytes | None = None
    key: str = ""
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] | None = None
    message_group: str = ""
    scheduled_ms: int = 0
    """When it was scheduled, moved, or returned for a retry; milliseconds since the Unix epoch."""
    attempts: int = 0
    """Deliveries that failed so far."""
    group: str = ""
    """The group that a retry goes to; empty if it is no retry."""
    retries: Mapping[str, int] | None = None
    """Groups for which it waits for its next attempt, and the due time of each in milliseconds; None for no group."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The number of pending messages in a span of time."""

    start_ms: int
    count: int


@dataclass(frozen=True, slots=True)
class PendingCount:
    """The number of pending messages, in total and by bucket."""

    total: int
    buckets: tuple[Bucket, ...]


def _message(pending: scheduler_pb2.PendingMessage, state: str, content: bool) -> Message:
    meta: MessageMeta = pending.meta
    return Message(
        id=text_of(pending.id),
        topic=pending.topic,
        due_ms=pending.due_ms,
        due_requested_ms=pending.due_requested_ms,
        payload_bytes=pending.payload_bytes,
        state=state,
        payload=pending.payload if content else None,
        key=meta.key,
        tags=tuple(meta.tags),
        headers=dict(meta.headers),
        message_group=meta.message_group,
        scheduled_ms=pending.scheduled_ms,
        attempts=pending.attempts,
        group=pending.group,
    )


class AsyncClient:
    """Knows some nodes of a cluster and finds the master from any. Use it as an async context manager."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        token: str = "",
    ) -> None:
        """`name`: the client's name for quotas, unless a user or a certificate names it.

        `token`: sent with every call, for a cluster with rights; without TLS it crosses the network unencrypted.
        """
        if isinstance(addresses, str):
            addresses = [part.strip() for part in addresses.split(",") if part.strip()]
        self.cluster = Cluster(addresses, tls, token)
        self.timeout_s = timeout_s
        self.admin = AdminClient(self.cluster, timeout_s)
        self.access = AccessClient(self.cluster, timeout_s)
        self.dead = DeadClient(self.cluster, timeout_s)
        self.staging = StagingClient(self.cluster, timeout_s)
        self.snapshot = SnapshotClient(self.cluster, timeout_s)
        self.pulling = PullClient(self.cluster, timeout_s)
        self.bulk = BulkClient(self.cluster, timeout_s)
        self.cold = ColdClient(self.cluster, timeout_s)
        self.sweeps = SweepClient(self.cluster, timeout_s)
        self._numbered = Numbered(self.cluster)
        self._client_name = name
        self._scheduling = Scheduling(self.cluster, self._numbered, name)
        self._cancels = CancelCalls(self.cluster)
        self._reschedules = RescheduleCalls(self.cluster)
        self._producers: set[Producer] = set()
        self._consumers: set[Consumer] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End consumers and producers and close the connections. Unanswered messages end with OutcomeUnknown."""
        for consumer in list(self._consumers):
            await consumer.close()
        for producer in list(self._producers):
            await producer.abandon()
        self._scheduling.close()
        await self.cluster.close()

    # -- producing

    async def schedule(
        self,
        topic: str,
        payload: bytes | str,
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> Receipt:
        """Schedule one message. Returns once it is on stable storage of a majority; repeats itself safely until then.

        Concurrent calls of one client travel together; each has an answer of its own.
        `options`: exactly one of due_ms, delay_ms, delay and level; key, tags, headers, message_group, jitter.
        Raises OutcomeUnknown if no answer came in time: the message may be scheduled.
        """
        return await self._scheduling.schedule(row_of(topic, payload, **options), timeout_s or self.timeout_s)

    def producer(
        self,
        *,
        producer_id: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        linger_ms: float = LINGER_MS,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
        timeout_s: float = 60.0,
    ) -> Producer:
        """A producer, for many messages a second."""
        self.cluster.check_open()
        producer = Producer(
            self.cluster,
            producer_id=producer_id,
            batch_messages_max=batch_messages_max,
            batch_bytes_max=batch_bytes_max,
            linger_ms=linger_ms,
            buffer_bytes_max=buffer_bytes_max,
            in_flight_max=in_flight_max,
            timeout_s=timeout_s,
            closed=self._producers.discard,
            client_name=self._client_name,
            owner="" if producer_id else self._numbered.owner,
        )
        self._producers.add(producer)
        return producer

    # -- one message

    async def cancel(self, message_id: str) -> str:
        """Cancel a message. Returns CANCELLED, ALREADY_DISPATCHED or NOT_FOUND; the answer is final."""
        request = scheduler_pb2.CancelRequest(id=parse_id(message_id))

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.CancelResponse:
            return await self._cancels.call(channel, request, try_s)

        response = await self.cluster.call(invoke, self.timeout_s)
        return scheduler_pb2.CancelOutcome.Name(response.outcome)

    async def reschedule(
        self,
        message_id: str,
        *,
        due_ms: int | None = None,
        delay_ms: int | None = None,
        delay: timedelta | None = None,
        level: int | None = None,
    ) -> tuple[str, Receipt | None]:
        """Move a message: RESCHEDULED with the receipt, or ALREADY_DISPATCHED, NOT_FOUND or CANCELLED with None.

        The message keeps its first id. Repeats itself safely. Raises OutcomeUnknown if no answer came in time: the
        message may be moved.
        """
        kind, when = when_of(due_ms, delay_ms, delay, level)
        request = scheduler_pb2.RescheduleRequest(id=parse_id(message_id))
        if kind == KIND_DUE:
            request.due_ms = when
        elif kind == KIND_DELAY:
            request.delay_ms = when
        else:
            request.delay_level = when

        def tries(lane: Lane, doubt: Doubt) -> Invoke[scheduler_pb2.RescheduleResponse]:
            stated = scheduler_pb2.RescheduleRequest(
                producer_id=lane.producer_id, sequence=lane.sequence, producer_owner=self._numbered.owner
            )
            stated.MergeFrom(request)
            return lambda channel, try_s: self._reschedules.call(channel, stated, try_s)

        response = await self._numbered.call(tries, self.timeout_s, counts=lambda answer: answer.remembered)
        name = scheduler_pb2.RescheduleOutcome.Name(response.outcome).removeprefix("RESCHEDULE_")
        if response.outcome != scheduler_pb2.RESCHEDULED:
            return name, None
        return name, Receipt(text_of(response.id), response.due_ms)

    async def get(self, message_id: str, *, content: bool = False) -> Message:
        """The state of a message, and with `content` its payload and meta. Raises NotFound."""
        request = scheduler_pb2.GetRequest(id=parse_id(message_id), content=content)

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.GetResponse:
            return await self.cluster.stub(SchedulerStub, channel).Get(request, timeout=try_s)

        response = await self.cluster.call(invoke, self.timeout_s)
        state = scheduler_pb2.MessageState.Name(response.state).removeprefix("MESSAGE_")
        message = _message(response.message, state, content)
        waiting = {retry.group: retry.due_ms for retry in response.retries}
        return replace(message, retries=waiting) if waiting else message

    # -- what is pending

    async def list_pending(
        self,
        topic: str = "",
        *,
        tag: str = "",
        key: str = "",
        key_prefix: str = "",
        due_ms_min: int = 0,
        due_ms_max: int = 0,
        content: bool = False,
        meta: bool = False,
        page_size: int = 0,
    ) -> AsyncIterator[Message]:
        """The pending messages that meet all given conditions, in delivery order, fetched in pages.

        `meta`: with key, tags and headers. `content`: with the payload too.
        """
        request = scheduler_pb2.ListPendingRequest(
            topic=topic,
            tag=tag,
            key=key,
            key_prefix=key_prefix,
            due_ms_min=due_ms_min,
            due_ms_max=due_ms_max,
            content=content,
            meta=meta,
            page_size=page_size,
        )

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.ListPendingResponse:
            return await self.cluster.stub(SchedulerStub, channel).ListPending(request, timeout=try_s)

        while True:
            page = await self.cluster.call(invoke, self.timeout_s, try_timeout_s=self.timeout_s)
            for pending in page.messages:
                yield _message(pending, "PENDING", content)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def count_pending(
        self,
        topic: str = "",
        *,
        tag: str = "",
        key: str = "",
        key_prefix: str = "",
        due_ms_min: int = 0,
        due_ms_max: int = 0,
        bucket_ms: int = 0,
    ) -> PendingCount:
        """The number of pending messages that meet all given conditions, by buckets of 1,000, 60,000 or 3,600,000 ms.

        Counts in pieces, each within `timeout_s`, however many messages there are.
        """
        request = scheduler_pb2.CountPendingRequest(
            topic=topic,
            tag=tag,
            key=key,
            key_prefix=key_prefix,
            due_ms_min=due_ms_min,
            due_ms_max=due_ms_max,
            bucket_ms=bucket_ms,
            partial=True,
        )

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.CountPendingResponse:
            return await self.cluster.stub(SchedulerStub, channel).CountPending(request, timeout=try_s)

        counts: dict[int, int] = {}
        while True:
            response = await self.cluster.call(invoke, self.timeout_s, try_timeout_s=self.timeout_s)
            for bucket in response.buckets:
                counts[bucket.start_ms] = counts.get(bucket.start_ms, 0) + bucket.count
            if not response.next_page_token:
                break
            request.page_token = response.next_page_token
        buckets = tuple(Bucket(start_ms, counts[start_ms]) for start_ms in sorted(counts))
        return PendingCount(sum(counts.values()), buckets)

    # -- consuming

    def consumer(
        self,
        group: str,
        topics: str | Sequence[str] = (),
        *,
        start_from: str = "earliest",
        start_ms: int = 0,
        credits: int = CREDITS,
        lease: timedelta | None = None,
        name: str = "",
        batch_messages_max: int = 0,
        messages_max: int = 0,
        unavailable_s_max: float = UNAVAILABLE_S_MAX,
        filter: str = "",
        hold_max: timedelta = timedelta(seconds=HOLD_S_MAX),
    ) -> Consumer:
        """A consumer of a group, which holds at most `credits` messages.

        A new group starts at `start_from`: earliest, latest, or time with `start_ms`. It takes the tags of `filter`:
        `a || b` or `*`. If the group exists with another filter, the consumer gets FilterDiffers; without a filter it
        takes what the group takes. With `messages_max` it takes exactly this many at most, and its iteration then ends.

        The leases of held messages are renewed until they are settled or were held for `hold_max`; 0: never
        renewed.
        """
        self.cluster.check_open()
        if start_from not in STARTS:
            raise refused("start_from", start_from, ", ".join(STARTS))
        if messages_max < 0:
            raise refused("messages_max", messages_max, "0 (any number) or more")
        if hold_max < timedelta(0):
            raise refused("hold_max", hold_max, "not negative")
        consumer = Consumer(
            self.cluster,
            open_request(
                group,
                [topics] if isinstance(topics, str) else list(topics),
                start_from=consumer_pb2.StartFrom.Value(start_from.upper()),
                start_ms=start_ms,
                credits=credits,
                lease_ms=round(lease / timedelta(milliseconds=1)) if lease else 0,
                name=name,
                batch_messages_max=batch_messages_max,
                filter=filter,
            ),
            messages_max=messages_max,
            unavailable_s_max=unavailable_s_max,
            hold_s_max=hold_max.total_seconds(),
            closed=self._consumers.discard,
        )
        self._consumers.add(consumer)
        return consumer
