"""Spans of a gateway, beside those that its clients and workers make (client/tracing.py). Needs the extra `otel`.

A schedule, cancel or reschedule over REST continues the trace of its caller. A post is a span of its own, and carries
its context to the target. Contexts travel as W3C defines them, whatever other formats the process has been given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tickwheel.client.tracing import Tracing


class GatewayTracing(Tracing):
    """The tracing of a gateway's clients, and of what only a gateway does."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """By default the process's tracer provider."""
        self._contexts = TraceContextTextMapPropagator()
        super().__init__(tracer_provider, propagator=self._contexts)

    @contextlib.contextmanager
    def of_request(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Spans begun inside are children of the caller's span, or of the current one if there is one already."""
        if trace.get_current_span().get_span_context().is_valid:
            yield
            return
        token = contexts.attach(self._contexts.extract(headers))
        try:
            yield
        finally:
            contexts.detach(token)

    @contextlib.contextmanager
    def posting(self, url: str, headers: dict[str, str]) -> Iterator[Post]:
        """The span of one post; its context is put into the post's headers. `url`: as it may be shown."""
        attributes: dict[str, str | int] = {"http.request.method": "POST", "url.full": url}
        parts = urlsplit(url)
        if parts.hostname:
            attributes["server.address"] = parts.hostname
        with self._tracer.start_as_current_span("POST", kind=SpanKind.CLIENT, attributes=attributes) as span:
            own: dict[str, str] = {}
            self._contexts.inject(own)
            if own:
                headers.pop("tracestate", None)  # it belongs to the context of the message, which is replaced
                headers.update(own)
            try:
                yield Post(span)
            except Exception as error:
                span.set_attribute("error.type", type(error).__qualname__)
                raise


class Post:
    """The span of a post."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, status: int) -> None:
        """The target has answered."""
        self._span.set_attribute("http.response.status_code", status)
        if not 200 <= status < 300:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))


def is_provided() -> bool:
    """Whether the process has a tracer provider that makes spans."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)
