"""Idle and slow callers of an HTTP port lose their places; others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tickwheel.console import limited_http
from tickwheel.console.limited_http import LimitedHttp

PLACES = 8
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
WAIT_S = 30

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"read {len(await request.body())}")


@asynccontextmanager
async def served() -> AsyncIterator[Connect]:
    """A port with this protocol."""
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    config = uvicorn.Config(
        app, http=LimitedHttp, port=0, lifespan="off", log_config=None, limit_concurrency=PLACES, timeout_keep_alive=60
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
    [b"", b"GET / HTT", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc"],
    ids=["nothing", "a part of a head", "a part of a body"],
)
async def test_a_connection_that_brings_no_whole_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a good request on it."""
    monkeypatch.setattr(limited_http, "RECEIVE_S", 0.2)
    LimitedHttp._told_s.clear()
    async with served() as connect:
        reader, writer = await connect()
        if sent:
            writer.write(GET)
            assert b"200" in await answer_of(reader)
            writer.write(sent)
        await asyncio.wait_for(reader.read(), WAIT_S)
        assert reader.at_eof()
    assert sum("no whole request" in line for line in caplog.messages) == 1


async def test_a_connection_between_two_requests_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the time-out of kept connections counts, which is longer."""
    monkeypatch.setattr(limited_http, "RECEIVE_S", 0.1)
    async with served() as connect:
        idle_reader, _ = await connect()
        reader, writer = await connect()
        writer.write(GET)
        assert b"200" in await answer_of(reader)
        await asyncio.wait_for(idle_reader.read(), WAIT_S)  # as long as the limit
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
