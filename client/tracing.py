"""OpenTelemetry: a message carries the trace of the program that schedules it to the program that handles it.

Needs the extra `otel`. Spans, named and described by OpenTelemetry's conventions for messaging
(https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans):

    send TOPIC          from the call to the receipt; its context goes with the message, in headers
    wait TOPIC          from the scheduling to the delivery; later attempts: from their due time
    process TOPIC       a handler's work, in a Worker, in `Consumer.run`, or in `with tracing.processing(delivery)`
    ack, nack, dead     a settlement, until its receipt
    cancel, reschedule  the call

No I/O and no state: spans go to the tracer provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tickwheel.client.delivery import Delivery
from tickwheel.client.errors import TickwheelError
from tickwheel.client.messages import MessageOptions, Receipt

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError("traces need OpenTelemetry: pip install 'tickwheel[otel]'") from error

SCOPE = "tickwheel"
SENT_HEADER = "tickwheel-sent-ms"
"""When a message was scheduled: milliseconds since the Unix epoch, by the sender's clock."""
NS_PER_MS = 1_000_000


class Tracing:
    """Makes spans of what a client does with messages: `AsyncClient(addresses, tracing=Tracing())`."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        propagator: TextMapPropagator | None = None,
        link_only: bool = False,
    ) -> None:
        """By default the program's tracer provider and propagator.

        `link_only`: each delivery begins a trace of its own, linked to the sender's. It suits messages that wait
        longer than the trace backend keeps a trace open.
        """
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        self._propagator = propagator
        self._link_only = link_only

    def sending(self, topic: str, options: MessageOptions) -> Sending:
        """Begin the span of a schedule."""
        span = self._tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=_of("send", "send", topic))
        headers = dict(options.get("headers") or {})
        # The caller's own choice stands: it may pass on a trace that this program is not a part of.
        own = {SENT_HEADER: str(time.time_ns() // NS_PER_MS)}
        (self._propagator or propagate).inject(own, trace.set_span_in_context(span))
        return Sending(span, {**options, "headers": {**own, **headers}})

    @contextlib.contextmanager
    def calling(self, name: str, message_id: str = "", topic: str = "") -> Iterator[None]:
        """The span of one call about a message that is scheduled: its id, or the topic of its unique key."""
        attributes = {"messaging.system": SCOPE, "messaging.operation.name": name}
        if message_id:
            attributes["messaging.message.id"] = message_id
        if topic:
            attributes["messaging.destination.name"] = topic
        with self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes=attributes) as span:
            try:
                yield
            except TickwheelError as error:
                span.set_attribute("error.type", error.reason)
                raise

    def handling(self, delivery: Delivery, group: str) -> Handling:
        """Begin the span of a handler, after that of the wait."""
        headers = delivery.headers
        sender = (self._propagator or propagate).extract(headers, Context())
        of_sender = trace.get_current_span(sender).get_span_context()
        attributes = _of("process", "process", delivery.topic) | {
            "messaging.consumer.group.name": group,
            "messaging.message.id": delivery.id,
            "messaging.message.body.size": len(delivery.payload),
            "tickwheel.attempt": delivery.attempt,
        }
        if of_sender.is_valid:
            self._wait(delivery, sender, headers.get(SENT_HEADER, ""))
        links = [Link(of_sender)] if of_sender.is_valid else []
        span = self._tracer.start_span(
            f"process {delivery.topic}",
            context=Context() if self._link_only else sender,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links if self._link_only else [],
        )
        return Handling(span)

    @contextlib.contextmanager
    def processing(self, delivery: Delivery, group: str) -> Iterator[Span]:
        """The span of what a program does with a delivery that it took from a consumer."""
        handling = self.handling(delivery, group)
        try:
            with handling.current():
                yield handling.span
        except BaseException as error:
            handling.failed(error)
            raise
        finally:
            handling.end()

    def settling(self, name: str, topic: str, count: int, message_id: str, receipt: asyncio.Future[Any]) -> None:
        """The span of a settlement of `count` deliveries, until its receipt. The current span is its parent."""
        attributes: dict[str, str | int] = {**_of(name, "settle", topic)}
        if count == 1:
            attributes["messaging.message.id"] = message_id
        else:
            attributes["messaging.batch.message_count"] = count
        span = self._tracer.start_span(f"{name} {topic}", kind=SpanKind.CLIENT, attributes=attributes)
        receipt.add_done_callback(_ending(span))

    def _wait(self, delivery: Delivery, sender: Context, sent_ms: str) -> None:
        """The span of a message's time in the cluster."""
        now_ns = time.time_ns()
        first = delivery.attempt == 1 and sent_ms.isascii() and sent_ms.isdecimal() and len(sent_ms) < 16
        began_ns = (int(sent_ms) if first else delivery.due_ms) * NS_PER_MS
        span = self._tracer.start_span(
            f"wait {delivery.topic}",
            context=sender,
            attributes={
                "messaging.message.id": delivery.id,
                "tickwheel.due_ms": delivery.due_ms,
                "tickwheel.late_ms": now_ns // NS_PER_MS - delivery.due_ms,
            },
            start_time=min(began_ns, now_ns),  # the sender's clock may be ahead
        )
        span.end(now_ns)


class Sending:
    """The span of one schedule, and the options to schedule with."""

    def __init__(self, span: Span, options: MessageOptions) -> None:
        self.options = options
        self._span = span

    def received(self, receipt: Receipt) -> None:
        """The message is scheduled."""
        if self._span.is_recording():
            self._span.set_attributes({"messaging.message.id": receipt.id, "tickwheel.due_ms": receipt.due_ms})
        self._span.end()

    def failed(self, error: BaseException) -> None:
        """There is no receipt."""
        _fail(self._span, error)
        self._span.end()

    def watch(self, receipt: asyncio.Future[Receipt]) -> None:
        """End with this future."""

        def ended(future: asyncio.Future[Receipt]) -> None:
            if future.cancelled():
                self.failed(asyncio.CancelledError())
            elif (error := future.exception()) is not None:
                self.failed(error)
            else:
                self.received(future.result())

        receipt.add_done_callback(ended)


class Handling:
    """The span of one handler."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._failed = False

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Spans begun inside, also in coroutines and threads that inherit the context, are children of this one."""
        token = contexts.attach(trace.set_span_in_context(self.span))
        try:
            yield
        finally:
            contexts.detach(token)

    def failed(self, error: BaseException) -> None:
        """Note the error; only the first one counts."""
        if not self._failed:
            self._failed = True
            _fail(self.span, error)

    def end(self) -> None:
        """The handler runs no more. Idempotent."""
        if self.span.is_recording():
            self.span.end()


def _of(name: str, kind: str, topic: str) -> dict[str, str | int]:
    return {
        "messaging.system": SCOPE,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }


def _fail(span: Span, error: BaseException) -> None:
    if span.is_recording():
        reason = error.reason if isinstance(error, TickwheelError) else type(error).__qualname__
        span.set_attribute("error.type", reason)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))


def _ending(span: Span) -> Callable[[asyncio.Future[Any]], None]:
    def ended(future: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            _fail(span, error)
        span.end()

    return ended
