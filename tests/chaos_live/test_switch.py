"""The switch between network namespaces: what each way of spoiling does to real connections of real kernels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tickwheel.chaos.live import namespaces
from tickwheel.chaos.live.namespaces import Namespace, NamespacesRefused
from tickwheel.chaos.live.network import CLIENTS, Spoiling, Way
from tickwheel.chaos.live.switch import Switch

PORT = 7_000
SOON_S = 20.0


class Line:
    """A connection from end a to end b, both held by the test, and the listener of b."""

    def __init__(self, switch: Switch, listener: socket.socket) -> None:
        self.switch = switch
        self._listener = listener

    async def dial(self) -> socket.socket:
        """One more connection from a."""
        near = self.switch.namespaces["a"].socket()
        near.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(near, (self.switch.namespaces["b"].address, PORT))
        except BaseException:
            near.close()
            raise
        return near

    async def pair(self) -> tuple[socket.socket, socket.socket]:
        """A new connection's two ends."""
        near = await self.dial()
        far, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return near, far

    @property
    def forth(self) -> Way:
        return self.switch.ways["a", "b"]

    @property
    def back(self) -> Way:
        return self.switch.ways["b", "a"]


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    """Two namespaces and one for clients, and the switch between them."""
    try:
        switch = Switch(["a", "b"], 1)
    except NamespacesRefused as error:
        pytest.skip(str(error))
    switch.start()
    with switch.namespaces["b"].socket() as listener:
        listener.bind((switch.namespaces["b"].address, PORT))
        listener.listen()
        listener.setblocking(False)
        try:
            yield Line(switch, listener)
        finally:
            await switch.stop()


async def _comes(end: socket.socket) -> bytes:
    """What can be read next."""
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, 1 << 16), SOON_S)


async def _nothing_comes(end: socket.socket) -> bool:
    """For a while."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, 1 << 16), 0.15)
        return False
    return True


async def _send(end: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(end, data)


async def test_connections_pass_between_namespaces(line: Line) -> None:
    """Without a fault everything comes through, both ways, and from clients too."""
    near, far = await line.pair()
    with near, far:
        assert far.getpeername()[0] == line.switch.namespaces["a"].address
        await _send(near, b"question")
        assert await _comes(far) == b"question"
        await _send(far, b"answer")
        assert await _comes(near) == b"answer"
    client = line.switch.namespaces[CLIENTS].socket()
    client.setblocking(False)
    with client:
        await asyncio.get_running_loop().sock_connect(client, (line.switch.namespaces["b"].address, PORT))
    assert line.switch.ways[CLIENTS, "b"].counts.bytes


async def test_a_stalled_way_loses_packets_one_way_alone(line: Line) -> None:
    """What is said that way is lost and said again by the kernel after the end; the other way goes on, nothing is
    reset. Acknowledgements go the other way, so what arrives is known to have arrived only afterwards."""
    near, far = await line.pair()
    with near, far:
        stall = Spoiling(stalled=True)
        line.switch.spoil([line.forth], stall)
        await _send(near, b"one")
        await _send(far, b"back")
        assert await _comes(near) == b"back"
        assert await _nothing_comes(far)
        assert not line.forth.passes
        assert line.back.passes
        line.switch.heal([line.forth], stall)
        assert await _comes(far) == b"one"
        assert line.forth.counts.dropped
        assert not line.back.counts.dropped
        assert not line.forth.counts.reset


async def test_a_stalled_way_swallows_attempts_to_connect(line: Line) -> None:
    """Who dials hears nothing, as from a machine that is gone; a proxy would accept."""
    line.switch.spoil([line.back], Spoiling(stalled=True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(line.dial(), 0.2)
    line.switch.heal_all()
    (await line.dial()).close()


async def test_a_cut_way_resets_and_refuses(line: Line) -> None:
    """Whoever says something over it is reset, whoever dials is refused, from both ends; until it is healed."""
    near, far = await line.pair()
    with near, far:
        cut = Spoiling(cut=True)
        line.switch.spoil([line.back], cut)
        await _send(near, b"x")
        with pytest.raises(ConnectionResetError):
            await _comes(near)
        with pytest.raises(ConnectionRefusedError):
            await line.dial()
        await _send(far, b"x")
        with pytest.raises(ConnectionResetError):
            await _comes(far)
        assert line.forth.counts.reset >= 2
        assert line.back.counts.reset >= 1
        line.switch.heal([line.back], cut)
        (await line.dial()).close()


async def test_delay_and_throttle_make_packets_late(line: Line) -> None:
    """Packets arrive after the delay and no sooner, at the rate and no faster, and are counted as late."""
    loop = asyncio.get_running_loop()
    near, far = await line.pair()
    with near, far:
        line.switch.spoil([line.forth], Spoiling(delay_ms=120))
        began_s = loop.time()
        await _send(near, b"late")
        assert await _comes(far) == b"late"
        assert loop.time() - began_s >= 0.115
        assert line.forth.counts.late_bytes
        line.switch.heal_all()
        line.switch.spoil([line.forth], Spoiling(bytes_per_s=100_000))
        began_s = loop.time()
        await _send(near, bytes(20_000))
        got = 0
        while got < 20_000:
            got += len(await _comes(far))
        assert loop.time() - began_s >= 0.15


async def test_lost_packets_cost_time_and_no_bytes(line: Line) -> None:
    """Every third packet is lost, and the bytes come all the same, in order: TCP repeats them."""
    near, far = await line.pair()
    with near, far:
        line.switch.spoil([line.forth], Spoiling(lost_share=0.3))
        sent = os.urandom(300_000)
        sending = asyncio.ensure_future(_send(near, sent))
        got = b""
        while len(got) < len(sent):
            got += await _comes(far)
        await sending
        assert got == sent
        assert line.forth.counts.dropped >= 3


def test_nothing_is_left_of_a_namespace_that_is_closed() -> None:
    """No name, no process, no interface: the kernel forgets it with its last descriptor."""
    try:
        namespace = Namespace(9)
    except NamespacesRefused as error:
        pytest.skip(str(error))
    with namespace.socket() as within:
        inode = os.stat(namespace.path).st_ino  # noqa: PTH116  # a link that only stat follows
        assert inode != os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116
        within.bind((namespace.address, 0))
    before = len(list(Path("/proc/self/fd").iterdir()))
    namespace.close()
    namespace.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    assert "wheel0" not in {name for _, name in socket.if_nameindex()}


def test_a_machine_that_refuses_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No device or no right: one exact sentence, and the number of descriptors stays."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(namespaces, "TUN_DEVICE", tmp_path / "none")
    with pytest.raises(NamespacesRefused, match=r"(there is no .*none|unshare: ).*--map-root-user"):
        Switch(["a"], 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
