"""The proxy between nodes: what each way of spoiling a connection does to it, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from tickwheel.chaos.live.network import CLIENTS, Spoiling, Way
from tickwheel.chaos.live.proxy import Proxies
from tickwheel.node.local_cluster import free_ports


class Line:
    """Node a has dialled node b through the proxy; the test holds both ends."""

    def __init__(self, proxies: Proxies, near: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.proxies = proxies
        self.near_in, self.near_out = near
        self.far: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    @property
    def forth(self) -> Way:
        return self.proxies.ways["a", "b"]

    @property
    def back(self) -> Way:
        return self.proxies.ways["b", "a"]


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    """A connection from a to b."""
    proxy_port, far_port = free_ports(2)
    proxies = Proxies(["a", "b", "c"], lambda port, remote: "a", 1)
    made: list[Line] = []
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not accepted.done():
            accepted.set_result((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", far_port)
    await proxies.listen("b", f"127.0.0.1:{proxy_port}", f"127.0.0.1:{far_port}")
    made.append(Line(proxies, await asyncio.open_connection("127.0.0.1", proxy_port)))
    made[0].far = accepted
    made[0].near_out.write(b"x")
    far_in, _ = await accepted
    assert await far_in.readexactly(1) == b"x"
    try:
        yield made[0]
    finally:
        made[0].near_out.transport.abort()
        (await accepted)[1].transport.abort()
        await proxies.stop()
        server.close()


async def _comes(reader: asyncio.StreamReader, within_s: float = 0.15) -> bytes:
    """What can be read within that time."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(reader.read(1 << 16), within_s)
    return b""


async def test_bytes_pass_both_ways(line: Line) -> None:
    """Without a fault the proxy changes nothing."""
    far_in, far_out = await line.far
    line.near_out.write(b"question")
    assert await far_in.readexactly(8) == b"question"
    far_out.write(b"answer")
    assert await line.near_in.readexactly(6) == b"answer"


async def test_a_stalled_way_holds_bytes_without_a_reset(line: Line) -> None:
    """One direction alone stops; its bytes come, in order, when it is healed; the held bytes are the evidence."""
    far_in, far_out = await line.far
    stall = Spoiling(stalled=True)
    line.proxies.spoil([line.forth], stall)
    line.near_out.write(b"one")
    far_out.write(b"back")
    assert await line.near_in.readexactly(4) == b"back"
    assert await _comes(far_in) == b""
    line.near_out.write(b"two")
    line.proxies.heal([line.forth], stall)
    assert await far_in.readexactly(6) == b"onetwo"
    assert line.forth.counts.held_bytes >= 3
    assert not line.forth.counts.reset


async def test_a_cut_way_resets_and_refuses(line: Line) -> None:
    """Both ends see the connection break, and a new one is refused until the way is healed."""
    far_in, _ = await line.far
    port = line.near_out.get_extra_info("peername")[1]
    cut = Spoiling(cut=True)
    line.proxies.spoil([line.back], cut)
    with contextlib.suppress(ConnectionError):
        assert await line.near_in.read(1) == b""
    with contextlib.suppress(ConnectionError):
        assert await far_in.read(1) == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read(1) == b""
    writer.transport.abort()
    assert line.forth.counts.reset == 2
    line.proxies.heal([line.back], cut)
    assert line.forth.passes
    assert line.back.passes


async def test_delay_and_throttle_make_bytes_late(line: Line) -> None:
    """Bytes arrive after the delay and no sooner, and are counted as late."""
    far_in, _ = await line.far
    loop = asyncio.get_running_loop()
    line.proxies.spoil([line.forth], Spoiling(delay_ms=120))
    began_s = loop.time()
    line.near_out.write(b"late")
    assert await far_in.readexactly(4) == b"late"
    assert loop.time() - began_s >= 0.115
    assert line.forth.counts.late_bytes == 4
    line.proxies.heal_all()
    line.proxies.spoil([line.forth], Spoiling(bytes_per_s=100_000))
    began_s = loop.time()
    line.near_out.write(bytes(20_000))
    await far_in.readexactly(20_000)
    assert loop.time() - began_s >= 0.15


async def test_faults_on_one_way_add_up_and_end_alone() -> None:
    """Ending a delay does not end a stall that began meanwhile, nor the other way round."""
    way = Way("a", "b")
    stall, slow = Spoiling(stalled=True), Spoiling(delay_ms=50)
    way.spoil(stall)
    way.spoil(slow)
    way.heal(slow)
    assert not way.passes
    way.spoil(slow)
    way.heal(stall)
    assert way.passes
    assert way.due_s(10.0, 1, random.Random(1)) == pytest.approx(10.05)
    way.heal(stall)
    way.heal_all()
    assert way.due_s(10.0, 1, random.Random(1)) == 10.0


def test_clients_are_an_end_of_their_own() -> None:
    """A partition between nodes leaves clients alone, unless they are meant too."""
    proxies = Proxies(["a", "b", "c"], lambda port, remote: None, 1)
    assert {way.name for way in proxies.ways_of("a")} == {"a>b", "a>c", "b>a", "c>a"}
    assert f"a>{CLIENTS}" in {way.name for way in proxies.ways_of("a", clients=True)}
    assert {way.name for way in proxies.between(["a"], ["b", "c"])} == {"a>b", "a>c"}
