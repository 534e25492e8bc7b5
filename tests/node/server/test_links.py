"""Streams to peers that come and go: what the node is told of them comes in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.node.server.test_unforeseen import SOON_S, network, peer_service, serving
from tickwheel.proto.peer_pb2 import Hello, PeerFrame
from tickwheel.replication import grpc_network
from tickwheel.replication.frames import FORMAT_VERSION, Refusal
from tickwheel.replication.grpc_network import PeerService
from tickwheel.replication.log import NO_INTRODUCTION
from tickwheel.transport.client import CallError, ClientConnection


class Told:
    """A node that remembers what it was told of its peers."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.frames: asyncio.Queue[int] = asyncio.Queue()
        """The terms of the frames that came."""

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        self.frames.put_nowait(frame.term)
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
    async with serving(peer_service(Told())) as address, asyncio.timeout(SOON_S):
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
        self._breaks = asyncio.Event()
        self._frames = [PeerFrame(hello=Hello())]

    async def read(self) -> PeerFrame:
        if not self._frames:
            await self._breaks.wait()
            raise CallError(grpc.StatusCode.UNAVAILABLE, "broken")
        return self._frames.pop()

    async def write(self, frame: PeerFrame) -> None: ...

    def write_now(self, frame: PeerFrame) -> bool:
        self._breaks.set()
        return True

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
    async with asyncio.timeout(SOON_S):
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


class Twins:
    """Two processes with one identity, and what they are told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.warned: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[Refusal] = asyncio.Queue()

    def start(self) -> tuple[grpc_network.GrpcNetwork, Told]:
        """One more process."""
        told = Told()
        made = network(warn=lambda peer, text: self.warned.put_nowait(text), refused=self.ended.put_nowait)
        made.attach(told, lambda: None, lambda: NO_INTRODUCTION)
        made.set_peers({"a": self.address})
        return made, told


async def test_a_process_with_a_copy_of_a_members_data_is_refused_while_the_member_is_heard() -> None:
    """The later of the two took the member's place without a word, and the member was heard by nobody any more."""
    called = Told()
    async with serving(peer_service(called)) as address, asyncio.timeout(SOON_S):
        twins = Twins(address)
        first, told = twins.start()
        assert await told.events.get() == "a is there"
        assert first.send("a", PeerFrame()) and await called.frames.get() == 0
        second, told_too = twins.start()
        assert "another process runs as b, with a copy of this node's data directory" in await twins.warned.get()
        assert told.events.empty() and first.send("a", PeerFrame()) and twins.ended.empty()
        await first.stop()
        assert await told_too.events.get() == "a is there", "once the stream of the other is gone"
        await second.stop()


async def test_of_two_processes_that_take_turns_the_first_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silent when the other one came; its frames would be dropped as those of an earlier start."""
    monkeypatch.setattr(grpc_network, "HEARD_S", 0.0)
    called = Told()
    async with serving(peer_service(called)) as address, asyncio.timeout(SOON_S):
        twins = Twins(address)
        first, told = twins.start()
        assert await told.events.get() == "a is there"
        assert first.send("a", PeerFrame()) and await called.frames.get() == 0
        second, told_too = twins.start()
        assert await told_too.events.get() == "a is there"
        assert second.send("a", PeerFrame()) and await called.frames.get() == 0
        first.send("a", PeerFrame())
        assert await told.events.get() == "a is gone"
        ended = await twins.ended.get()
        assert ended.final and "stop the one that does not belong here, then start the other one again" in ended.reason
        assert second.send("a", PeerFrame())
        await first.stop()
        await second.stop()


class Process:
    """One that calls a node as b; its stream is written by hand."""

    def __init__(self, service: PeerService, boot_id: int) -> None:
        self.answers: list[str] = []
        """What came: the bodies of frames; "end" after them."""
        self.boot_id = boot_id
        context: Any = self
        self._opened = service.Exchange(context)
        hello = PeerFrame(cluster_id="c", sender_id="b", receiver_id="a", boot_id=boot_id, hello=Hello())
        hello.format_version = FORMAT_VERSION
        self._opened.take(hello)

    def post(self, data: bytes) -> bool:
        """Called by the service: an answer."""
        self.answers.append(PeerFrame.FromString(data).WhichOneof("body") or "")
        return True

    def finish(self) -> None:
        """Called by the service: the end of the stream."""
        self.answers.append("end")
        self._opened.ended()

    def send(self) -> None:
        """A frame; its term says from which process."""
        self._opened.take(PeerFrame(term=self.boot_id))

    def end(self) -> None:
        """Its connection is gone."""
        self._opened.ended()


async def test_a_hello_that_is_read_after_its_process_has_ended_replaces_nobody() -> None:
    """A kernel or a proxy held it back: the process that runs now was ended by the word of one that does not."""
    called = Told()
    service = peer_service(called)
    runs = Process(service, 3)
    runs.send()
    assert runs.answers == ["hello"] and called.frames.get_nowait() == 3
    runs.end()
    ended = Process(service, 2)
    assert ended.answers == ["hello"]
    ended.end()
    again = Process(service, 3)
    again.send()
    assert again.answers == ["hello"] and called.frames.get_nowait() == 3


async def test_what_came_while_this_node_stood_still_counts_as_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, a paused machine: the copy, which calls all the time, took the place of the member."""
    called = Told()
    service = peer_service(called)
    member = Process(service, 1)
    member.send()
    assert member.answers == ["hello"] and called.frames.get_nowait() == 1
    with monkeypatch.context() as stood_still:
        stood_still.setattr(grpc_network, "HEARD_S", 0.0)
        copy = Process(service, 2)
        assert copy.answers == ["hello"]
    member.send()
    assert called.frames.get_nowait() == 1
    copy.send()
    assert copy.answers == ["hello", "end"] and called.frames.empty()
    assert Process(service, 2).answers == ["refused", "end"]
    member.send()
    assert called.frames.get_nowait() == 1
