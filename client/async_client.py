"""The asyncio client: one object for a cluster, which finds the master itself.

Concurrent schedules, cancels and reschedules of one client travel together. Every call has a deadline (`timeout_s`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack

import grpc

from tickwheel.client.access import AccessClient
from tickwheel.client.admin import AdminClient
from tickwheel.client.answers import reader
from tickwheel.client.bulk import BulkClient
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.cluster import Cluster, TlsFiles
from tickwheel.client.cold import ColdClient
from tickwheel.client.consumer import CREDITS, HOLD_S_MAX, UNAVAILABLE_S_MAX, Consumer
from tickwheel.client.dead import DeadClient
from tickwheel.client.errors import refused
from tickwheel.client.ids import parse_id, text_of
from tickwheel.client.lanes import Doubt, Lane
from tickwheel.client.messages import KIND_DELAY, KIND_DUE, MessageOptions, Receipt, When, row_of, when_of
from tickwheel.client.moments import moment_of, span_ms_of
from tickwheel.client.numbered import Invoke, Numbered
from tickwheel.client.payloads import Carrier, Payload
from tickwheel.client.producer import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BUFFER_BYTES_MAX,
    IN_FLIGHT_MAX,
    LINGER_MS,
    Producer,
)
from tickwheel.client.pulling import PullClient
from tickwheel.client.requests import checked_count, checked_timeout, request_of
from tickwheel.client.row_calls import cancel_calls, reschedule_calls
from tickwheel.client.schedules import ScheduleClient
from tickwheel.client.scheduling import Scheduling
from tickwheel.client.snapshot import SnapshotClient
from tickwheel.client.staging import StagingClient
from tickwheel.client.states import CancelOutcome, MessageState, RescheduleOutcome, StartFrom, start_of
from tickwheel.client.sweeps import Selection, SweepClient
from tickwheel.client.unique_keys import topic_key
from tickwheel.proto import consumer_pb2, scheduler_pb2
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

if TYPE_CHECKING:
    from tickwheel.client.tracing import Tracing

T = TypeVar("T")
C = TypeVar("C", scheduler_pb2.CancelRequest, scheduler_pb2.RescheduleRequest)

TIMEOUT_S = 15.0


class Conditions(TypedDict, total=False):
    """What pending messages have to meet, beside their topic; as in Selection."""

    tag: str
    key: str
    key_prefix: str
    due_from: datetime | None
    """From this time on; with a time zone."""
    due_before: datetime | None
    """Below this time."""
    due_ms_min: int
    """The same in milliseconds since the Unix epoch; 0: no limit."""
    due_ms_max: int


class CancelResult(NamedTuple):
    """What became of a cancel by unique key."""

    outcome: CancelOutcome
    id: str
    """The message that held the key; empty if none did."""


class RescheduleResult(NamedTuple):
    """What became of a reschedule."""

    outcome: RescheduleOutcome
    receipt: Receipt | None
    """Of the moved message; None if it was not moved."""


@dataclass(frozen=True, slots=True)
class Message(Carrier):
    """A message in the state that a node reports."""

    id: str
    topic: str
    due_ms: int
    due_requested_ms: int
    payload_bytes: int
    state: MessageState
    payload: bytes | None = None
    key: str = ""
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] | None = None
    message_group: str = ""
    unique_key: str = ""
    scheduled_ms: int = 0
    """When it was scheduled, moved, or returned for a retry; milliseconds since the Unix epoch."""
    attempts: int = 0
    """Deliveries that failed so far."""
    group: str = ""
    """The group that a retry goes to; empty if it is no retry."""
    retries: Mapping[str, int] | None = None
    """Groups for which it waits for its next attempt, and the due time of each in milliseconds; None for no group."""

    @property
    def due(self) -> datetime:
        """Its due time in UTC."""
        return moment_of(self.due_ms)

    @property
    def due_requested(self) -> datetime:
        """The due time that was asked for, in UTC."""
        return moment_of(self.due_requested_ms)

    @property
    def scheduled_at(self) -> datetime:
        """When it was scheduled, moved, or returned for a retry, in UTC."""
        return moment_of(self.scheduled_ms)


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Some pending messages, in delivery order. It may hold none and still have a next one."""

    messages: tuple[Message, ...]
    next: str
    """Names the next page; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The number of pending messages in a span of time."""

    start_ms: int
    count: int

    @property
    def start(self) -> datetime:
        """Its beginning, in UTC."""
        return moment_of(self.start_ms)


@dataclass(frozen=True, slots=True)
class PendingCount:
    """The number of pending messages, in total and by bucket."""

    total: int
    buckets: tuple[Bucket, ...]


_message_of = reader(
    Message,
    scheduler_pb2.PendingMessage,
    "meta",
    headers=lambda wire: dict(wire.meta.headers),
    state=lambda wire: MessageState.PENDING,
    retries=lambda wire: None,
)


def _message(pending: scheduler_pb2.PendingMessage, content: bool, **known: Any) -> Message:
    return _message_of(pending, payload=pending.payload if content else None, **known)


def _moving(request: scheduler_pb2.RescheduleRequest, when: When) -> scheduler_pb2.RescheduleRequest:
    """The request, with the new time. Raises RequestRefused unless exactly one is given."""
    kind, value = when_of(**when)
    if kind == KIND_DUE:
        request.due_ms = value
    elif kind == KIND_DELAY:
        request.delay_ms = value
    else:
        request.delay_level = value
    return request


class AsyncClient(ServiceCalls[SchedulerStub]):
    """Knows some nodes of a cluster and finds the master from any. Use it as an async context manager."""

    _service = SchedulerStub

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "",
        token: str = "",
        tracing: Tracing | None = None,
    ) -> None:
        """`timeout_s`: deadline of a call, above 0; math.inf: none.

        `name`: the client's name for quotas, unless a user or a certificate names it.

        `token`: sent with every call, for a cluster with rights; without TLS it crosses the network unencrypted.
        `tracing`: makes spans of OpenTelemetry, and sends the trace along with messages.
        """
        if isinstance(addresses, str):
            addresses = [part.strip() for part in addresses.split(",") if part.strip()]
        elif not isinstance(addresses, Sequence):
            raise refused("addresses", repr(addresses), "host:port, several with commas between them, or a list")
        timeout_s = checked_timeout("timeout_s", timeout_s)
        self.cluster = Cluster(addresses, tls, token)
        super().__init__(self.cluster, timeout_s)
        self.timeout_s = timeout_s
        self.tracing = tracing
        self.admin = AdminClient(self.cluster, timeout_s)
        """`AdminClient`: topics, groups, members, settings, status."""
        self.access = AccessClient(self.cluster, timeout_s)
        """`AccessClient`: users, roles, tokens, the audit log."""
        self.dead = DeadClient(self.cluster, timeout_s)
        """`DeadClient`: dead letters."""
        self.staging = StagingClient(self.cluster, timeout_s)
        """`StagingClient`: rows that are committed together or not at all."""
        self.snapshot = SnapshotClient(self.cluster, timeout_s)
        """`SnapshotClient`: what is pending, or settled, at one moment."""
        self.pulling = PullClient(self.cluster, timeout_s)
        """`PullClient`: batches by single calls, without a stream."""
        self.bulk = BulkClient(self.cluster, timeout_s)
        """`BulkClient`: finished bundles of messages."""
        self.cold = ColdClient(self.cluster, timeout_s)
        """`ColdClient`: parts that wait outside the cluster."""
        self.sweeps = SweepClient(self.cluster, timeout_s)
        """`SweepClient`: cancelling and moving many."""
        self.schedules = ScheduleClient(self.cluster, timeout_s)
        """`ScheduleClient`: recurring schedules."""
        self._numbered = Numbered(self.cluster)
        self._client_name = name
        self._scheduling = Scheduling(self.cluster, self._numbered, name)
        self._cancels = cancel_calls(self.cluster)
        self._reschedules = reschedule_calls(self.cluster)
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
        self, topic: str, payload: Payload, *, timeout_s: float | None = None, **options: Unpack[MessageOptions]
    ) -> Receipt:
        """Schedule one message. Returns once it is on stable storage of a majority; repeats itself safely until then.

        Concurrent calls of one client travel together; each has an answer of its own. Text becomes UTF-8. A dict, a
        list, a pydantic model, a msgspec Struct and a dataclass become JSON, with the content type in a header.
        `options`: exactly one of at, delay, due_ms, delay_ms and level; key, tags, headers, message_group, jitter;
        unique_key, and with it on_key_conflict and key_until_settled.
        Raises KeyTaken if another message holds the unique key, unless on_key_conflict says what to do then.
        Raises OutcomeUnknown if no answer came in time: the message may be scheduled.
        """
        timeout_s = timeout_s or self.timeout_s
        if self.tracing is None:
            return await self._scheduling.schedule(row_of(topic, payload, **options), timeout_s)
        span = self.tracing.sending(topic, options)
        try:
            receipt = await self._scheduling.schedule(row_of(topic, payload, **span.options), timeout_s)
        except BaseException as error:
            span.failed(error)
            raise
        span.received(receipt)
        return receipt

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
            tracing=self.tracing,
        )
        self._producers.add(producer)
        return producer

    # -- one message

    async def cancel(self, message_id: str) -> CancelOutcome:
        """Cancel a message. The answer is final."""
        request = scheduler_pb2.CancelRequest(id=parse_id(message_id))

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.CancelResponse:
            return await self._cancels.call(channel, request, try_s)

        with self._span("cancel", message_id):
            response = await self.cluster.call(invoke, self.timeout_s)
        return CancelOutcome(scheduler_pb2.CancelOutcome.Name(response.outcome))

    async def reschedule(self, message_id: str, **when: Unpack[When]) -> RescheduleResult:
        """Move a message to exactly one of at, delay, due_ms, delay_ms and level.

        Returns the outcome, which is final, and the receipt if it was moved. The message keeps its first id. Repeats
        itself safely. Raises OutcomeUnknown if no answer came in time: the message may be moved.
        """
        request = _moving(scheduler_pb2.RescheduleRequest(id=parse_id(message_id)), when)
        with self._span("reschedule", message_id):
            return await self._reschedule(request)

    async def _reschedule(self, request: scheduler_pb2.RescheduleRequest) -> RescheduleResult:
        def tries(lane: Lane, doubt: Doubt) -> Invoke[scheduler_pb2.RescheduleResponse]:
            stated = self._stated(request, lane)
            return lambda channel, try_s: self._reschedules.call(channel, stated, try_s)

        response = await self._numbered.call(tries, self.timeout_s, counts=lambda answer: answer.remembered)
        outcome = RescheduleOutcome(scheduler_pb2.RescheduleOutcome.Name(response.outcome).removeprefix("RESCHEDULE_"))
        if outcome is not RescheduleOutcome.RESCHEDULED:
            return RescheduleResult(outcome, None)
        return RescheduleResult(outcome, Receipt(text_of(response.id), response.due_ms))

    def _stated(self, request: C, lane: Lane) -> C:
        """The request under the sequence of a lane."""
        stated = deepcopy(request)
        stated.producer_id, stated.sequence = lane.producer_id, lane.sequence
        stated.producer_owner = self._numbered.owner
        return stated

    def _span(self, name: str, message_id: str = "", topic: str = "") -> AbstractContextManager[None]:
        return self.tracing.calling(name, message_id, topic) if self.tracing is not None else nullcontext()

    async def get(self, message_id: str, *, content: bool = False) -> Message:
        """The state of a message, and with `content` its payload and meta. Raises NotFound."""
        return await self._get(request_of(scheduler_pb2.GetRequest, id=parse_id(message_id), content=content))

    async def _get(self, request: scheduler_pb2.GetRequest) -> Message:
        response = await self._ask(lambda stub: stub.Get, request)
        state = MessageState(scheduler_pb2.MessageState.Name(response.state).removeprefix("MESSAGE_"))
        retries = {retry.group: retry.due_ms for retry in response.retries}
        return _message(response.message, request.content, state=state, retries=retries or None)

    # -- the message that holds a unique key

    async def cancel_by_key(self, topic: str, unique_key: str) -> CancelResult:
        """Cancel the message that holds this key now. Returns the outcome, which is final, and the message's id.

        NOT_FOUND: no message holds the key. Repeats itself safely: a repeat never meets the key's next message. Raises
        OutcomeUnknown if no answer came in time: the message may be cancelled.
        """
        request = scheduler_pb2.CancelRequest(key=topic_key(topic, unique_key))

        def tries(lane: Lane, doubt: Doubt) -> Invoke[scheduler_pb2.CancelResponse]:
            stated = self._stated(request, lane)

            async def invoke(channel: grpc.aio.Channel, try_s: float) -> scheduler_pb2.CancelResponse:
                return await self.cluster.stub(SchedulerStub, channel).Cancel(stated, timeout=try_s)

            return invoke

        with self._span("cancel", topic=topic):
            response = await self._numbered.call(tries, self.timeout_s, counts=lambda answer: answer.remembered)
        outcome = CancelOutcome(scheduler_pb2.CancelOutcome.Name(response.outcome))
        return CancelResult(outcome, text_of(response.id) if response.HasField("id") else "")

    async def reschedule_by_key(self, topic: str, unique_key: str, **when: Unpack[When]) -> RescheduleResult:
        """Move the message that holds this key now; it keeps the key. As `reschedule`. NOT_FOUND: none holds it."""
        request = _moving(scheduler_pb2.RescheduleRequest(key=topic_key(topic, unique_key)), when)
        with self._span("reschedule", topic=topic):
            return await self._reschedule(request)

    async def get_by_key(self, topic: str, unique_key: str, *, content: bool = False) -> Message:
        """The message that holds this key now, as `get`. Raises NotFound if none does."""
        request = request_of(scheduler_pb2.GetRequest, key=topic_key(topic, unique_key), content=content)
        # Nodes read a message's meta only with its content; which key it is found by is known.
        return replace(await self._get(request), unique_key=unique_key)

    # -- what is pending

    async def list_pending(
        self,
        topic: str = "",
        *,
        content: bool = False,
        meta: bool = False,
        page_size: int = 0,
        **conditions: Unpack[Conditions],
    ) -> AsyncIterator[Message]:
        """The pending messages that meet all given conditions, in delivery order, fetched in pages.

        `meta`: with key, tags and headers. `content`: with the payload too. `conditions`: tag, key, key_prefix,
        due_from and due_before, or due_ms_min and due_ms_max.
        """
        after = ""
        while True:
            page = await self.pending_page(
                topic, content=content, meta=meta, page_size=page_size, after=after, **conditions
            )
            for message in page.messages:
                yield message
            after = page.next
            if not after:
                return

    async def pending_page(
        self,
        topic: str = "",
        *,
        content: bool = False,
        meta: bool = False,
        page_size: int = 0,
        after: str = "",
        **conditions: Unpack[Conditions],
    ) -> PendingPage:
        """One page of `list_pending`. `after`: `next` of the page before, with the same conditions."""
        request = request_of(
            scheduler_pb2.ListPendingRequest,
            **asdict(Selection(topic, **conditions)),
            content=content,
            meta=meta,
            page_size=page_size,
            page_token=after,
        )
        page = await self._ask(lambda stub: stub.ListPending, request, try_timeout_s=self.timeout_s)
        messages = tuple(_message(pending, content) for pending in page.messages)
        return PendingPage(messages, page.next_page_token)

    async def count_pending(
        self, topic: str = "", *, bucket: timedelta | None = None, bucket_ms: int = 0, **conditions: Unpack[Conditions]
    ) -> PendingCount:
        """The number of pending messages that meet all given conditions, as in `list_pending`.

        `bucket`: also by buckets of a second, a minute or an hour. `bucket_ms` says the same in milliseconds.
        Counts in pieces, each within `timeout_s`, however many messages there are.
        """
        if bucket is not None and bucket_ms:
            raise refused("bucket", bucket, "not together with bucket_ms")
        request = request_of(
            scheduler_pb2.CountPendingRequest,
            **asdict(Selection(topic, **conditions)),
            bucket_ms=span_ms_of("bucket", bucket) if bucket is not None else bucket_ms,
            partial=True,
        )

        counts: dict[int, int] = {}
        while True:
            response = await self._ask(lambda stub: stub.CountPending, request, try_timeout_s=self.timeout_s)
            for found in response.buckets:
                counts[found.start_ms] = counts.get(found.start_ms, 0) + found.count
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
        start_from: StartFrom | str | datetime = StartFrom.EARLIEST,
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

        A new group starts at `start_from`: a StartFrom, or an aware datetime. It takes the tags of `filter`: `a || b`
        or `*`. If the group exists with another filter, the consumer gets FilterDiffers; without a filter it
        takes what the group takes. With `messages_max` it takes exactly this many at most, and its iteration then ends.

        The leases of held messages are renewed until they are settled or were held for `hold_max`; 0: never
        renewed.
        """
        self.cluster.check_open()
        checked_count("credits", credits, 1)
        checked_count("messages_max", messages_max, 0, "0 (any number) or more")
        lease_ms = span_ms_of("lease", lease) if lease is not None else 0
        if lease_ms < 0:
            raise refused("lease", lease, "not negative")
        if span_ms_of("hold_max", hold_max) < 0:
            raise refused("hold_max", hold_max, "not negative")
        place, start_ms = start_of(start_from, start_ms)
        opening = request_of(
            consumer_pb2.OpenConsumer,
            group=group,
            topics=[topics] if isinstance(topics, str) else list(topics),
            start_from=place,
            start_ms=start_ms,
            credits=credits,
            lease_ms=lease_ms,
            consumer_name=name,
            batch_messages_max=batch_messages_max,
            filter=filter,
        )
        consumer = Consumer(
            self.cluster,
            opening,
            messages_max=messages_max,
            unavailable_s_max=unavailable_s_max,
            hold_s_max=hold_max.total_seconds(),
            closed=self._consumers.discard,
            tracing=self.tracing,
        )
        self._consumers.add(consumer)
        return consumer
