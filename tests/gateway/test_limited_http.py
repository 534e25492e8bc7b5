"""Idle, slow and broken callers of an HTTP port lose their places; others are served meanwhile."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tickwheel.console import limited_http
from tickwheel.console.limited_http import SELDOM, LimitedHttp, places, tell_faults

PLACES = 8
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = b"x" * (64 << 20)
"""More than the buffers between two processes hold."""
WAIT_S = 30

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def echo(request: Request) -> Response:
    try:
        return PlainTextResponse(f"read {len(await request.body())}")
    except ClientDisconnect:
        return PlainTextResponse("nobody reads this")


async def large(request: Request) -> Response:
    return Response(LARGE)


async def endless(request: Request) -> Response:
    """An answer that begins before its request is there."""

    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield LARGE[:65_536]
            await asyncio.sleep(0)

    return StreamingResponse(parts())


class Noted(LimitedHttp):
    """Says when a connection is gone."""

    gone = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()


@asynccontextmanager
async def served() -> AsyncIterator[Connect]:
    """A port with this protocol."""
    Noted.gone = asyncio.Event()
    SELDOM.forget()
    routes = [Route("/", echo, methods=["GET", "POST"]), Route("/large", large), Route("/endless", endless)]
    app = Starlette(routes=routes)
    config = uvicorn.Config(
        app,
        http=Noted,
        ws="none",
        port=0,
        lifespan="off",
        log_config=None,
        limit_concurrency=PLACES,
        timeout_keep_alive=60,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await server.shutdown()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The status line of the next answer, whose body has been read."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.splitlines()[0]


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTT", POST + b"Content-Length: 100\r\n\r\nabc", GET + GET[:9], GET + POST + CHUNKED],
    ids=["nothing", "a part of a head", "a part of a body", "a part of a second head", "a second without its body"],
)
async def test_a_connection_that_brings_no_whole_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a good request on it."""
    async with served() as connect:
        if sent:
            reader, writer = await connect()
            writer.write(GET)
            assert b"200" in await answer_of(reader)
        monkeypatch.setattr(limited_http, "RECEIVE_S", 0.2)
        if sent:
            writer.write(sent)
        else:
            reader, _ = await connect()
        if sent.startswith(GET):
            assert b"200" in await answer_of(reader)
        await asyncio.wait_for(reader.read(), WAIT_S)
        assert reader.at_eof()
    assert sum("no whole request" in line for line in caplog.messages) == 1


async def test_a_connection_between_two_requests_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the time-out of kept connections counts, which is longer."""
    async with served() as connect:
        reader, writer = await connect()
        writer.write(GET)
        assert b"200" in await answer_of(reader)
        with monkeypatch.context() as hasty:
            hasty.setattr(limited_http, "RECEIVE_S", 0.1)
            writer.write(GET)
            assert b"200" in await answer_of(reader)
            idle_reader, _ = await connect()
            await asyncio.wait_for(idle_reader.read(), WAIT_S)  # for longer than the limit
        writer.write(GET)
        assert b"200" in await answer_of(reader)


async def test_one_address_has_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the rest is there for others, and a place that is given up can be taken again."""
    async with served() as connect:
        held = [await connect() for _ in range(PLACES // 2)]
        reader, _ = await connect()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        held[0][1].write(GET)
        assert b"200" in await answer_of(held[0][0])
        held[1][1].close()
        for _ in range(1_000):
            reader, writer = await connect()
            writer.write(GET)
            if await asyncio.wait_for(reader.read(1), WAIT_S):
                break
        else:
            raise AssertionError("the place stays taken")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"illegal request line"),
        (GET[:-2] + b"Host: h\r\n\r\n", b"Found multiple Host"),
        (GET[:-2] + b"Cookie: " + b"a" * 65_536, b"Receive buffer too long"),
        (POST + b"Content-Length: -1\r\n\r\n", b"bad Content-Length"),
        (POST + CHUNKED + b"zz\r\n", b"illegal chunk header"),
        (GET + POST + CHUNKED + b"2\r\nabc\r\n", b""),
    ],
    ids=["TLS", "two hosts", "a cookie", "a length", "a chunk", "a chunk behind a good request"],
)
async def test_what_is_no_http_is_told_why(sent: bytes, why: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """However often it comes: the log has one line, and no traceback of an answer that found the connection closed."""
    async with served() as connect:
        for _ in range(3):
            reader, writer = await connect()
            writer.write(sent)
            said = await asyncio.wait_for(reader.read(), WAIT_S)
            assert b"400 Bad Request" in said and why in said
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "Invalid HTTP request received.")
    ]


async def test_a_request_that_breaks_within_its_answer_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """The answer is under way: nothing else can be said."""
    async with served() as connect:
        reader, writer = await connect()
        writer.write(GET.replace(b"/ ", b"/endless ")[:-2] + CHUNKED)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"zz\r\n")
        await asyncio.wait_for(reader.read(), WAIT_S)
        await asyncio.wait_for(Noted.gone.wait(), WAIT_S)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


async def test_nothing_is_read_behind_a_request_with_two_lengths() -> None:
    """A proxy that went by the other one would take the answer to what follows for that of somebody else."""
    async with served() as connect:
        reader, writer = await connect()
        writer.write(POST + b"Content-Length: 5\r\n" + CHUNKED + b"0\r\n\r\n" + GET)
        assert b"200" in await answer_of(reader)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""


@pytest.mark.parametrize("path", [b"/large ", b"/endless "])
async def test_a_caller_that_stops_reading_loses_its_place(
    path: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within an answer, and behind one that is written as a whole."""
    monkeypatch.setattr(limited_http, "SEND_S", 0.2)
    async with served() as connect:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET.replace(b"/ ", path)[:-2] + b"Connection: close\r\n\r\n")
        await asyncio.wait_for(Noted.gone.wait(), WAIT_S)
    assert sum("was read within" in line for line in caplog.messages) == 1


def test_places_fit_into_the_descriptors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised; where the hard one is low, half of it or a thousand is for the nodes and for files."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    for limits, found, raised in (
        ((1_024, 1_048_576), 2_000, (16_384, 1_048_576)),
        ((1_024, -1), 2_000, (16_384, -1)),
        ((1_024, 1_024), 512, None),
        ((1_024, 1_500), 750, (1_500, 1_500)),
        ((-1, -1), 2_000, None),
        ((65_536, 65_536), 2_000, None),
    ):
        given.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        assert places(2_000) == found
        assert given == ([raised] if raised else [])


async def test_a_want_of_descriptors_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells it for each connection that waits. Other faults are told as ever."""
    SELDOM.forget()
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(3):
            tell_faults(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many"), "socket": listener})
    tell_faults(loop, {"message": "other fault"})
    assert caplog.messages == ["no connection can be accepted now: Too many", "other fault"]
