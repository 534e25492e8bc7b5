"""Streams to peers that come and go: what the node is told of them comes in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from tests.node.server.test_unforeseen import network, peer_service, serving
from tickwheel.proto.peer_pb2 import Hello, PeerFrame
from tickwheel.replication import grpc_network
from tickwheel.replication.log import NO_INTRODUCTION
from tickwheel.transport.client import CallError, ClientConnection


class Told:
    """A node that remembers what it was told of its peers."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        return False

    def peer_connected(self, peer_id: str) -> None:
        self.events.put_nowait(f"{peer_id} is there")

    def peer_disconnected(self, peer_id: str) -> None:
        self.events.put_nowait(f"{peer_id} is gone")


class Lingering:
    """A connection that takes its time to close."""

    def __init__(self, connection: ClientConnection, until: asyncio.Event) -> None:
        self.connection = connection
        self.until = until

    async def __aenter__(self) -> ClientConnection:
        return self.connection

    async def __aexit__(self, *error: object) -> None:
        await self.until.wait()
        self.connection.close()


@pytest.mark.parametrize("between", [False, True], ids=["another address", "removed and added"])
async def test_a_link_that_was_replaced_does_not_end_the_one_after_it(
    between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: it ended after the next was up and told the node that the peer is gone; nobody told it anything else, so it
    sent that peer nothing more."""
    ours, told, may_close = network(), Told(), asyncio.Event()
    dial = ours._connect

    async def lingering(peer_id: str, address: str) -> Lingering:
        return Lingering(await dial(peer_id, address), may_close)

    monkeypatch.setattr(ours, "_connect", lingering)
    ours.attach(told, lambda: None, lambda: NO_INTRODUCTION)
    async with serving(peer_service(Told())) as address, asyncio.timeout(5):
        ours.set_peers({"a": address})
        assert await told.events.get() == "a is there"
        [first] = [link.task for link in ours._links.values()]
        assert first is not None
        if between:
            ours.set_peers({})
        # The same peer, spelled otherwise.
        ours.set_peers({"a": address.replace("127.0.0.1", "localhost")})
        heard = [await told.events.get()]
        while heard[-1] != "a is there":
            heard.append(await told.events.get())
        may_close.set()
        await asyncio.wait([first])
        sent = ours.send("a", PeerFrame())
        await ours.stop()
    assert told.events.empty() and sent
    assert heard == ["a is gone", "a is there"]


class Breaking:
    """A stream that opens, and breaks with the first frame; `broken` is called when that is seen."""

    def __init__(self, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._frames = [PeerFrame(hello=Hello())]
        self._opened = False

    async def read(self) -> PeerFrame:
        if not self._frames:
            await asyncio.Event().wait()
        return self._frames.pop()

    async def write(self, frame: PeerFrame) -> None:
        if self._opened:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "broken")
        self._opened = True

    def cancel(self) -> None:
        self._broken()


async def test_a_link_that_is_dropped_while_it_breaks_is_not_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cancellation was lost in the tidying up: it was dialled for ever, beside the one that came in its place."""
    ours, told, dials = network(), Told(), asyncio.Queue[Breaking]()
    monkeypatch.setattr(grpc_network, "REDIAL_S", 0.0)

    class Dialled:
        async def __aenter__(self) -> Dialled:
            return self

        async def __aexit__(self, *error: object) -> None: ...

        def call(self, *_: object) -> Breaking:
            call = Breaking(lambda: ours.set_peers({}))
            dials.put_nowait(call)
            return call

    async def dialled(peer_id: str, address: str) -> Dialled:
        return Dialled()

    monkeypatch.setattr(ours, "_connect", dialled)
    ours.attach(told, lambda: None, lambda: NO_INTRODUCTION)
    async with asyncio.timeout(5):
        ours.set_peers({"a": "127.0.0.1:1"})
        [link] = [link.task for link in ours._links.values()]
        assert link is not None
        assert await told.events.get() == "a is there"
        ours.send("a", PeerFrame())
        await dials.get()
        again = asyncio.ensure_future(dials.get())
        await asyncio.wait([link, again], return_when=asyncio.FIRST_COMPLETED)
        assert link.done() and not again.done()
        again.cancel()
        await ours.stop()
    assert told.events.get_nowait() == "a is gone"
