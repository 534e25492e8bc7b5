"""Spans of a gateway, as the SDK exports them: one trace from a caller of the REST API to the target of a post."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.gateway.gateways import LISTEN, api, running
from tests.gateway.test_real_gateway import receiving, target
from tickwheel.client import AsyncClient, ExponentialBackoff, RetryPolicy
from tickwheel.client.tracing import SENT_HEADER
from tickwheel.gateway.config import GatewayConfigError, read_config
from tickwheel.gateway.models import TRACE_HEADERS
from tickwheel.node.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACE, CALLER, OTHER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
TRACES = "traces = true\n"


class Exported(InMemorySpanExporter):
    """The spans that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, span and parent, as headers have them."""
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


async def test_one_trace_from_the_caller_to_the_target(cluster: LocalCluster, tmp_path: Path) -> None:
    """Schedule, wait, delivery, each post with its answer, and settlements; the target is a child of its post."""
    answers = iter((503, 204))

    async def respond(request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=next(answers))

    spans, quick = (
        Exported(),
        ExponentialBackoff(initial=timedelta(milliseconds=10), maximum=timedelta(milliseconds=10)),
    )
    async with AsyncClient(cluster.addresses) as client:
        await client.admin.create_topic("traced")
        await client.admin.create_group("traced", ["traced"], retry=RetryPolicy(backoff=quick, attempts_max=3))
    async with receiving(respond) as receiver:
        text = TRACES + LISTEN + target("traced", receiver.url)
        async with api(cluster, tmp_path / "g.toml", text, spans.provider) as call:
            parent = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
            status, made, _ = await call("POST", "/v1/topics/traced/messages", {"text": "x", "delay": "10ms"}, **parent)
            assert status == 201
            await receiver.until(lambda: len(receiver.posts) == 2)
    [send] = spans.named("send traced")
    waits, processed, posts = (spans.named(name) for name in ("wait traced", "process traced", "POST"))
    settled = [*spans.named("nack traced"), *spans.named("ack traced")]
    assert {ids(span)[0] for span in spans.get_finished_spans()} == {TRACE}
    assert ids(send)[2] == CALLER and send.attributes and send.attributes["messaging.message.id"] == made["id"]
    assert {ids(span)[2] for span in (*waits, *processed)} == {ids(send)[1]} and len(waits) == 2
    assert (
        [ids(span)[2] for span in posts] == [ids(span)[2] for span in settled] == [ids(span)[1] for span in processed]
    )
    assert [span.kind for span in posts] == [SpanKind.CLIENT] * 2
    assert [(span.attributes or {})["http.response.status_code"] for span in posts] == [503, 204]
    assert [span.status.status_code for span in posts] == [StatusCode.ERROR, StatusCode.UNSET]
    for post, (headers, _) in zip(posts, receiver.posts, strict=True):
        assert headers["traceparent"] == f"00-{TRACE}-{ids(post)[1]}-01" and headers["tracestate"] == "vendor=1"


async def test_moves_and_cancels_continue_the_callers_trace(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each call that of its own caller; nonsense begins a trace, and harms nothing."""
    spans = Exported()
    async with api(cluster, tmp_path / "g.toml", TRACES + LISTEN, spans.provider) as call:
        _, made, _ = await call("POST", "/v1/topics/moved/messages", {"text": "x", "delay": "1h"}, traceparent="00-1-2")
        path = f"/v1/messages/{made['id']}"
        assert (await call("PATCH", path, {"delay": "2h"}, traceparent=f"00-{TRACE}-{CALLER}-01"))[0] == 200
        assert (await call("DELETE", path, traceparent=f"00-{TRACE}-{OTHER}-01"))[0] == 200
    [send], [move], [cancel] = (spans.named(name) for name in ("send moved", "reschedule", "cancel"))
    assert (ids(move)[0], ids(move)[2], ids(cancel)[2]) == (TRACE, CALLER, OTHER)
    assert send.parent is None and ids(send)[0] != TRACE


async def test_a_repeat_of_another_caller_is_the_same_message(cluster: LocalCluster, tmp_path: Path) -> None:
    """By a gateway with traces or without: the headers that one adds make no other message. Those of the caller do."""
    spans, key = Exported(), {"Idempotency-Key": "once"}
    body = {"text": "x", "delay": "1h", "headers": {"a": "b"}}
    async with (
        api(cluster, tmp_path / "g.toml", TRACES + LISTEN, spans.provider) as traced,
        api(cluster, tmp_path / "h.toml", TRACES + LISTEN, spans.provider) as other,
        api(cluster, tmp_path / "p.toml") as plain,
    ):
        path = "/v1/topics/traced-once/messages"
        status, made, _ = await traced("POST", path, body, traceparent=f"00-{TRACE}-{CALLER}-01", **key)
        assert status == 201
        for again in (other, plain):
            assert (await again("POST", path, body, traceparent=f"00-{TRACE}-{OTHER}-01", **key))[:2] == (201, made)
        own = body | {"headers": {"a": "b", "traceparent": "mine"}}
        async with api(cluster, tmp_path / "q.toml") as call:
            assert (await call("POST", path, own, **key))[0] == 409
    assert SENT_HEADER in TRACE_HEADERS


async def test_without_a_provider_traces_are_passed_on(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says that there are no spans. Without `traces` a post has what the message has."""

    async def respond(request: web.Request, body: bytes) -> web.Response:
        return web.Response()

    parent = f"00-{TRACE}-{CALLER}-01"
    async with receiving(respond) as receiver, AsyncClient(cluster.addresses) as client:
        text = TRACES + LISTEN + target("passed", receiver.url)
        with caplog.at_level(logging.WARNING, "tickwheel.gateway"):
            async with api(cluster, tmp_path / "g.toml", text) as call:
                assert "no tracer provider" in caplog.text
                await call("POST", "/v1/topics/passed/messages", {"text": "x", "delay": "10ms"}, traceparent=parent)
                await receiver.until(lambda: len(receiver.posts) == 1)
        async with running(cluster, tmp_path / "h.toml", target("plain", receiver.url)):
            await client.schedule("plain", b"x", delay_ms=0, headers={"traceparent": parent, "tracestate": "v=1"})
            await receiver.until(lambda: len(receiver.posts) == 2)
    assert [headers["traceparent"] for headers, _ in receiver.posts] == [parent, parent]
    assert receiver.posts[1][0]["tracestate"] == "v=1"


async def test_traces_need_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed, the file is refused with what to install."""
    path = tmp_path / "gateway.toml"
    await asyncio.to_thread(path.write_text, TRACES + LISTEN)
    assert read_config(path).traces
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(GatewayConfigError, match=r"traces.*pip install 'tickwheel\[otel\]'"):
        read_config(path)
