"""Spans of OpenTelemetry, as the SDK exports them: one trace from the schedule to the settlement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from tests.client.fake_node import FakeNode
from tests.client.test_worker import SOON_S, acked, until
from tickwheel.client import (
    AsyncClient,
    Client,
    Dead,
    Delivery,
    KeyTaken,
    RequestRefused,
    SyncDelivery,
    SyncWorker,
    Worker,
)
from tickwheel.client.tracing import SENT_HEADER, Tracing


class Spans:
    """A tracer provider, and the spans that ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.ended if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def ids(span: ReadableSpan) -> tuple[int, int, int]:
    """Trace, span, and parent (0: none)."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id, span.parent.span_id if span.parent is not None else 0


async def worked(nodes: list[FakeNode], worker: Worker, count: int) -> None:
    """Run a worker until `count` messages are acknowledged."""
    running = asyncio.ensure_future(worker.run())
    await until(nodes, lambda: acked(nodes) >= count)
    worker.stop()
    await asyncio.wait_for(running, SOON_S)


async def test_one_trace_from_schedule_to_settlement(nodes: list[FakeNode], spans: Spans) -> None:
    """The sender's span is a child of what the program was doing; wait and process are its children, and what the
    handler does and the acknowledgement are children of the process."""
    tracer = spans.provider.get_tracer("program")

    async def handler(delivery: Delivery) -> None:
        with tracer.start_as_current_span("inside"):
            await asyncio.sleep(0)

    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        with tracer.start_as_current_span("request"):
            receipt = await client.schedule("orders", b"abc", delay_ms=0, headers={"a": "b"}, key="k")
        await worked(nodes, Worker(client, "g", {"orders": handler}), 1)
    request, send, wait, process, inside, ack = map(
        spans.one, ("request", "send orders", "wait orders", "process orders", "inside", "ack orders")
    )
    trace_id, request_id, _ = ids(request)
    assert {ids(span)[0] for span in spans.ended} == {trace_id}
    assert [ids(span)[2] for span in (send, wait, process, inside, ack)] == [
        request_id, ids(send)[1], ids(send)[1], ids(process)[1], ids(process)[1],
    ]  # fmt: skip
    assert (send.kind, process.kind, ack.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT)
    assert send.attributes is not None and process.attributes is not None
    assert send.attributes["messaging.message.id"] == receipt.id == process.attributes["messaging.message.id"]
    assert process.attributes["messaging.consumer.group.name"] == "g" and process.attributes["tickwheel.attempt"] == 1
    assert process.attributes["messaging.message.body.size"] == 3
    (message, _), *_ = nodes[0].state.messages.values()
    assert wait.start_time is not None and wait.end_time is not None and send.start_time is not None
    assert wait.start_time == int(message.meta.headers[SENT_HEADER]) * 10**6 > send.start_time - 10**6
    assert wait.start_time <= wait.end_time
    assert message.meta.key == "k" and set(message.meta.headers) == {"a", "traceparent", SENT_HEADER}


async def test_failures_are_errors_of_their_spans(nodes: list[FakeNode], spans: Spans) -> None:
    """A refused schedule, a handler that raises, and what follows: each attempt has its spans in the same trace."""
    seen: list[int] = []

    def handler(delivery: Delivery) -> None:
        seen.append(delivery.attempt)
        if delivery.payload == b"poison":
            raise KeyError("bad")
        if delivery.attempt == 1:
            raise ValueError("not yet")

    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        with pytest.raises(RequestRefused):
            await client.schedule(".hidden", b"x", delay_ms=0)
        with pytest.raises(RequestRefused):
            await client.schedule("t", b"x")
        await client.schedule("t", b"poison", delay_ms=0)
        await client.schedule("t", b"x", delay_ms=0)
        await worked(nodes, Worker(client, "g", {"t": handler}, on_error={KeyError: Dead("no use")}), 1)
    hidden, wrong = spans.one("send .hidden"), spans.named("send t")[0]
    for span, error in ((hidden, "INVALID_FIELD"), (wrong, "INVALID_FIELD")):
        assert span.status.status_code is StatusCode.ERROR and span.attributes is not None
        assert span.attributes["error.type"] == error
    processed = spans.named("process t")
    done = [span for span in processed if span.status.status_code is StatusCode.UNSET]
    assert len(done) == 1 and all(span.status.status_code is StatusCode.ERROR for span in processed if span not in done)
    assert {event.attributes["exception.type"] for span in processed for event in span.events if event.attributes} == {
        "KeyError", "ValueError",
    }  # fmt: skip
    assert [len(spans.named(f"{name} t")) for name in ("ack", "nack", "wait")] == [1, 1, len(processed)]
    assert spans.named("dead t")
    retried = [span for span in processed if ids(span)[0] == ids(spans.one("ack t"))[0]]
    assert len(retried) == 2 and ids(spans.one("nack t"))[0] == ids(retried[0])[0]


async def test_producers_batches_moves_and_cancels(nodes: list[FakeNode], spans: Spans) -> None:
    """A producer's messages have a span each, ended by the receipt; a batch is settled in one span."""
    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        async with client.producer() as producer:
            receipts = [await producer.send("t", b"x", delay_ms=0) for _ in range(3)]
            later = await (await producer.send("t", b"x", delay=timedelta(hours=1)))
        assert len({ids(span)[0] for span in spans.named("send t")}) == 4
        assert {span.attributes["messaging.message.id"] for span in spans.named("send t") if span.attributes} == {
            later.id, *[receipt.result().id for receipt in receipts],
        }  # fmt: skip
        await client.cancel(later.id)
        consumer = client.consumer("g", "t", messages_max=3)
        total = 0
        async for batch in consumer.batches():
            await batch.ack()
            total += len(batch)
        assert total == 3 and 1 <= len(spans.named("ack t")) <= 3
    assert spans.one("cancel").status.status_code is StatusCode.UNSET


async def test_unique_keys_in_spans(nodes: list[FakeNode], spans: Spans) -> None:
    """A key that is taken ends the span of its sender as an error; a call by key names the topic."""
    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        await client.schedule("t", b"x", delay=timedelta(hours=1), unique_key="k")
        with pytest.raises(KeyTaken):
            await client.schedule("t", b"y", delay=timedelta(hours=1), unique_key="k")
        await client.cancel_by_key("t", "k")
    held, refused = spans.named("send t")
    assert held.status.status_code is StatusCode.UNSET
    assert refused.attributes is not None and refused.attributes["error.type"] == "KEY_TAKEN"
    cancel = spans.one("cancel").attributes
    assert cancel is not None and cancel["messaging.destination.name"] == "t" and "messaging.message.id" not in cancel


async def test_a_trace_of_its_own_linked_to_the_sender(nodes: list[FakeNode], spans: Spans) -> None:
    """`link_only`: the handler's trace begins with it. `processing` is for programs that take deliveries themselves."""
    tracing = Tracing(spans.provider, link_only=True)
    async with AsyncClient(nodes[0].address, tracing=tracing) as client:
        await client.schedule("t", b"x", delay_ms=0)
        async for delivery in client.consumer("g", "t", messages_max=1):
            with pytest.raises(ZeroDivisionError), tracing.processing(delivery, "g"):
                raise ZeroDivisionError
            await delivery.ack()
    send, process = spans.one("send t"), spans.one("process t")
    assert ids(process)[0] != ids(send)[0] and ids(process)[2] == 0
    assert [link.context.span_id for link in process.links] == [ids(send)[1]]
    assert process.status.status_code is StatusCode.ERROR


async def test_senders_that_do_not_trace_or_send_nonsense(nodes: list[FakeNode], spans: Spans) -> None:
    """A message without a context, or with a broken one, begins a trace when it is handled. A time of sending in the
    future or beyond all bounds is no error."""
    headers = [
        {},
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 31}7-{'0' * 15}8-01", SENT_HEADER: "9" * 15},
        {"traceparent": f"00-{'0' * 31}7-{'0' * 15}8-01", SENT_HEADER: "9" * 4_000},
    ]
    async with AsyncClient(nodes[0].address) as client:
        for some in headers:
            await client.schedule("t", b"x", delay_ms=0, headers=some)

    async def handler(delivery: Delivery) -> None: ...

    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        await worked(nodes, Worker(client, "g", {"t": handler}), 4)
    assert sorted(ids(span)[2] for span in spans.named("process t")) == [0, 0, 8, 8]
    for wait in spans.named("wait t"):
        assert wait.start_time is not None and wait.end_time is not None and wait.start_time <= wait.end_time


async def test_a_trace_that_is_not_sampled_stays_so(nodes: list[FakeNode], spans: Spans) -> None:
    """The decision travels with the message."""
    off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)

    async def handler(delivery: Delivery) -> None: ...

    async with AsyncClient(nodes[0].address, tracing=Tracing(off)) as client:
        await client.schedule("t", b"x", delay_ms=0)
    async with AsyncClient(nodes[0].address, tracing=Tracing(spans.provider)) as client:
        await worked(nodes, Worker(client, "g", {"t": handler}), 1)
    assert not spans.ended


async def test_the_blocking_client(nodes: list[FakeNode], spans: Spans) -> None:
    """The caller's span is the parent though the call runs in another thread, and handlers have theirs."""
    tracer = spans.provider.get_tracer("program")
    current: list[int] = []

    def blocking() -> None:
        def handler(delivery: SyncDelivery) -> None:
            current.append(trace.get_current_span().get_span_context().span_id)
            worker.stop()

        with Client(nodes[0].address, tracing=Tracing(spans.provider)) as client:
            with tracer.start_as_current_span("request"):
                client.schedule("t", b"x", delay_ms=0)
            worker = SyncWorker(client, "g", {"t": handler}, signals=())
            worker.run()

    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, blocking)
    assert ids(spans.one("send t"))[2] == ids(spans.one("request"))[1]
    assert ids(spans.one("process t"))[2] == ids(spans.one("send t"))[1]
    assert current == [ids(spans.one("process t"))[1]] and ids(spans.one("ack t"))[2] == current[0]
