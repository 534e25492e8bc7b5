"""The port of metrics and probes: what it answers, and that no caller hurts the node or keeps others out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from tickwheel.node.metrics import MetricValue, registry_of
from tickwheel.node.server import metrics_server
from tickwheel.node.server.metrics_server import CONNECTIONS_MAX, MetricsServer
from tickwheel.node.server.probes import Answer


async def ask_port(port: int, request: bytes) -> bytes:
    """All that comes back until the end of the connection; nothing if it breaks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str, *headers: str) -> bytes:
    """A request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode()


class Served:
    """A server with one number, a probe that is well and one that is not."""

    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.read: Callable[[], Mapping[str, MetricValue]] = lambda: {"term": 7.0}
        probes = {"/livez": lambda: Answer(True, "alive\n"), "/readyz": lambda: Answer(False, "not ready\nwhy\n")}
        self.server = MetricsServer(registry_of(lambda: self.read()), probes, self.failed.append)
        self.port = 0

    async def ask(self, request: bytes) -> bytes:
        """The answer to one request."""
        return await ask_port(self.port, request)


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    """Serves until the end of the block; a test that hangs fails."""
    served = Served()
    served.port = await served.server.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(20):
            yield served
    finally:
        await served.server.stop()


async def test_each_path_and_method_has_its_answer() -> None:
    """Codes are what Kubernetes and load balancers look at; the text is for people."""
    async with serving() as served:
        metrics = await served.ask(get("/metrics"))
        assert metrics.startswith(b"HTTP/1.1 200 ") and b"\ntickwheel_term 7.0\n" in metrics
        assert (await served.ask(get("/livez?verbose"))).startswith(b"HTTP/1.1 200 ")
        unready = await served.ask(get("/readyz"))
        assert unready.startswith(b"HTTP/1.1 503 ") and unready.endswith(b"\r\n\r\nnot ready\nwhy\n")
        head = await served.ask(get("/readyz").replace(b"GET", b"HEAD"))
        assert head.startswith(b"HTTP/1.1 503 ") and head.endswith(b"\r\n\r\n")
        nowhere = await served.ask(get("/"))
        assert b"/metrics, /livez, /readyz" in nowhere
        assert (await served.ask(get("/etc/passwd"))).startswith(b"HTTP/1.1 404 ")
        assert (await served.ask(get("/livez").replace(b"GET", b"POST"))).startswith(b"HTTP/1.1 405 ")
        old = await served.ask(b"GET /livez HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.1 200 ") and old.endswith(b"alive\n"), "some load balancers probe like this"
        assert not served.failed


async def test_a_mistake_in_an_answer_ends_its_connection_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise ValueError("a mistake")

    async with serving() as served:
        with monkeypatch.context() as patched:
            patched.setattr(metrics_server, "_page", broken)
            assert await served.ask(get("/livez")) == b""
        assert [str(error) for error in served.failed] == ["a mistake"]
        assert b"alive" in await served.ask(get("/livez"))


@pytest.mark.parametrize("version", ["abc", "1.x.0", "1..0", "", "9" * 4_000])
async def test_any_accept_header_gets_a_page(version: str) -> None:
    """The library raises at versions that it cannot read."""
    async with serving() as served:
        for kind in ("application/openmetrics-text", "text/plain"):
            page = await served.ask(get("/metrics", f"Accept: {kind};version={version}"))
            assert page.startswith(b"HTTP/1.1 200 ") and b"tickwheel_term" in page
        assert not served.failed


async def test_a_request_that_is_none_is_ended_and_the_next_is_served() -> None:
    """Too long, cut off, not HTTP."""
    async with serving() as served:
        for request in (b"GET /" + b"a" * (64 << 10), b"\x16\x03\x01" + bytes(40) + b"\r\n\r\n", b"\r\n\r\n"):
            assert b" 200 " not in await served.ask(request)
        _, gone = await asyncio.open_connection("127.0.0.1", served.port)
        gone.write(b"GET /met")
        gone.close()
        assert b"alive" in await served.ask(get("/livez"))
        assert not served.failed


async def test_callers_that_say_nothing_do_not_keep_a_probe_out() -> None:
    """The oldest of too many connections is ended: otherwise whoever holds them makes a supervisor kill the node."""
    async with serving() as served:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(CONNECTIONS_MAX)]
        assert b"alive" in await served.ask(get("/livez"))
        oldest, _ = silent[0]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await oldest.readexactly(1)
        for _, writer in silent:
            writer.close()


async def test_an_answer_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that asks and does not read holds neither the page nor the connection."""
    serve, ended = MetricsServer._serve, asyncio.Event()

    async def observed(self: MetricsServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(self, reader, writer)
        assert writer.transport.is_closing() and not writer.transport.get_write_buffer_size()
        ended.set()

    monkeypatch.setattr(MetricsServer, "_serve", observed)
    async with serving() as served:
        names: Mapping[tuple[str, ...], float] = {(f"n{number:08}" + "x" * 200,): 1.0 for number in range(60_000)}
        served.read = lambda: {"peer_connected": names}
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as hasty, socket.socket() as caller:
            hasty.setattr(metrics_server, "REQUEST_SECONDS_MAX", 0.2)
            caller.setblocking(False)
            await loop.sock_connect(caller, ("127.0.0.1", served.port))
            await loop.sock_sendall(caller, get("/metrics"))
            await ended.wait()
            got = 0
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(caller, 1 << 20):
                    got += len(part)
        assert got < 60_000 * 200
        ended.clear()
        assert b"alive" in await served.ask(get("/livez"))


async def test_pages_take_a_tenth_of_the_loop_and_probes_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many who ask for metrics at once wait for each other. Time is told, not measured."""
    now_s, slept_s = 100.0, []
    at_rest, go_on = asyncio.Event(), asyncio.Event()

    async def rest(wait_s: float) -> None:
        nonlocal now_s
        slept_s.append(wait_s)
        at_rest.set()
        await go_on.wait()
        now_s += wait_s

    def read() -> Mapping[str, MetricValue]:
        nonlocal now_s
        now_s += 0.01
        return {"term": 7.0}

    async with serving() as served:
        served.read = read
        monkeypatch.setattr(metrics_server, "monotonic", lambda: now_s)
        monkeypatch.setattr(metrics_server, "sleep", rest)
        pages = [asyncio.create_task(served.ask(get("/metrics"))) for _ in range(4)]
        await at_rest.wait()
        assert b"alive" in await served.ask(get("/livez"))
        assert not all(page.done() for page in pages)
        go_on.set()
        for page in pages:
            assert b"tickwheel_term 7.0" in await page
    assert slept_s == pytest.approx([0.09] * 3)


async def test_a_mistake_of_the_node_is_told_to_caller_and_log() -> None:
    """500 for this caller, the error for the log; the next is served."""
    async with serving() as served:

        def broken() -> Mapping[str, MetricValue]:
            raise ZeroDivisionError

        good, served.read = served.read, broken
        assert (await served.ask(get("/metrics"))).startswith(b"HTTP/1.1 500 ")
        assert [type(error) for error in served.failed] == [ZeroDivisionError]
        served.read = good
        assert (await served.ask(get("/metrics"))).startswith(b"HTTP/1.1 200 ")


async def test_stop_ends_open_connections() -> None:
    """It waits for nobody."""
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await served.ask(get("/livez"))
        await served.server.stop()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
