"""An error that nobody foresaw ends the node with its reason: it may have left the state half changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import grpc
import pytest

from tests.transport.served import started
from tickwheel.node.server.door import Door
from tickwheel.node.server.fault_log import LoopFaults
from tickwheel.node.server.ports import ThreadExecutor
from tickwheel.proto import peer_pb2_grpc
from tickwheel.proto.peer_pb2 import CheckpointChunk, FetchCheckpointRequest, FrameBundle, Hello, PeerFrame
from tickwheel.replication.frames import FORMAT_VERSION, Refusal
from tickwheel.replication.grpc_network import GrpcNetwork, Inbox, PeerService
from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.plausible import ImplausibleFrameError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.transport.client import Call
from tickwheel.transport.server import Server

SOON_S = 30.0


class Faulty:
    """A node with a bug in one of its methods."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _at(self, where: str) -> None:
        if where == self._where:
            raise KeyError(where)

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        self._at("receive")
        return True

    def peer_connected(self, peer_id: str) -> None:
        self._at("peer_connected")

    def peer_disconnected(self, peer_id: str) -> None:
        self._at("peer_disconnected")


class Giving(peer_pb2_grpc.PeerServicer):
    """A peer that gives one chunk."""

    async def FetchCheckpoint(self, request: FetchCheckpointRequest, context: object) -> AsyncIterator[CheckpointChunk]:
        yield CheckpointChunk(path="manifest", last=True)


def peer_service(
    inbox: Inbox,
    refusal: Callable[..., None] = lambda *asked: None,
    dropped: Callable[[str, str], None] = lambda peer, text: pytest.fail(text),
    wake: Callable[[], None] = lambda: None,
    failed: Callable[[BaseException], None] = lambda error: pytest.fail(repr(error)),
) -> PeerService:
    """What a node named a, of cluster c, offers to its peers."""
    return PeerService(
        ("a", "c"),
        inbox,
        wake,
        disk=SimulatedDisk(Random(1)),
        refusal=refusal,
        removed=lambda peer_id: False,
        greeted=lambda peer_id, address: None,
        checkpoint=pytest.fail,
        progressed=lambda files: True,
        copied=lambda files: None,
        dropped=dropped,
        failed=failed,
    )


def network(
    failed: Callable[[BaseException], None] = lambda error: pytest.fail(repr(error)),
    unforeseen: Callable[[str, BaseException], None] = lambda peer_id, error: pytest.fail(repr(error)),
    warn: Callable[[str, str], None] = lambda peer_id, text: None,
    refused: Callable[[Refusal], None] = lambda why: pytest.fail(why.reason),
) -> GrpcNetwork:
    """Of a node named b."""
    return GrpcNetwork(
        "b",
        "c",
        "disk",
        "",
        secured=lambda: None,
        warn=warn,
        unforeseen=unforeseen,
        refused=refused,
        failed=failed,
    )


@asynccontextmanager
async def serving(service: object) -> AsyncIterator[str]:
    """Peers reach the service at the address."""
    server = Server()
    Door(server, Counter(), exact=False).serve(peer_pb2_grpc.add_PeerServicer_to_server, service)
    port = await started(server)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def test_an_error_in_what_a_work_brought_ends_the_node() -> None:
    """Only logged by asyncio it would leave a merge or a sync half taken in, and the node up."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    executor = ThreadExecutor("test", 1, asyncio.get_running_loop(), failed.set_result)

    def done(result: int | None, error: BaseException | None) -> None:
        raise KeyError(result)

    executor.submit(lambda: 7, done)
    async with asyncio.timeout(SOON_S):
        error = await failed
    executor.stop()
    assert isinstance(error, KeyError) and error.args == (7,)


@pytest.mark.parametrize("bundled", [False, True])
async def test_an_error_in_a_peers_frame_ends_the_node(bundled: bool) -> None:
    """Ending the stream only, the peer dials again and the node goes on with what was half done."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    service = peer_service(Faulty("receive"), failed=failed.set_result)
    async with serving(service) as address, grpc.aio.insecure_channel(address) as channel, asyncio.timeout(SOON_S):
        call = peer_pb2_grpc.PeerStub(channel).Exchange()  # type: ignore[call-arg]  # written to
        hello = PeerFrame(cluster_id="c", sender_id="b", receiver_id="a", format_version=FORMAT_VERSION, hello=Hello())
        await call.write(hello)
        await call.read()
        frame = PeerFrame(cluster_id="c", sender_id="b")
        await call.write(PeerFrame(bundle=FrameBundle(frames=[frame])) if bundled else frame)
        error = await failed
        call.cancel()
    assert isinstance(error, KeyError) and error.args == ("receive",)


@pytest.mark.parametrize("where", ["peer_connected", "peer_disconnected"])
async def test_an_error_over_a_connection_ends_the_node(where: str) -> None:
    """The task that dials would end with it, and that peer never be called again."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    ours = network(failed.set_result)
    connected = asyncio.Event()
    ours.attach(Faulty(where), connected.set, lambda: NO_INTRODUCTION)
    async with asyncio.timeout(SOON_S):
        async with serving(peer_service(Faulty("nowhere"))) as address:
            ours.set_peers({"a": address})
            await connected.wait()
        error = await failed
        await ours.stop()
    assert isinstance(error, KeyError) and error.args == (where,)


class Disbelieving:
    """A node to which a peer says what cannot be true."""

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        if frame.term == 1:
            return True
        raise ImplausibleFrameError("term 2^64-1")

    def peer_connected(self, peer_id: str) -> None: ...

    def peer_disconnected(self, peer_id: str) -> None: ...


async def test_a_frame_that_cannot_be_true_drops_its_link_alone() -> None:
    """Loudly; the node goes on, with what came before it in the same bundle."""
    told: list[tuple[str, str]] = []
    woken: list[None] = []
    service = peer_service(
        Disbelieving(), dropped=lambda peer_id, text: told.append((peer_id, text)), wake=lambda: woken.append(None)
    )
    async with serving(service) as address, grpc.aio.insecure_channel(address) as channel, asyncio.timeout(SOON_S):
        call = peer_pb2_grpc.PeerStub(channel).Exchange()  # type: ignore[call-arg]  # written to
        hello = PeerFrame(cluster_id="c", sender_id="b", receiver_id="a", format_version=FORMAT_VERSION, hello=Hello())
        await call.write(hello)
        await call.read()
        frames = [PeerFrame(cluster_id="c", sender_id="b", term=term) for term in (1, (1 << 64) - 1)]
        await call.write(PeerFrame(bundle=FrameBundle(frames=frames)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(told) == 1 and told[0][0] == "b" and "term 2^64-1" in told[0][1]
    assert woken


class Reached:
    """A node that says when it can speak to a peer."""

    def __init__(self) -> None:
        self.by: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        return False

    def peer_connected(self, peer_id: str) -> None:
        self.by.set_result(peer_id)

    def peer_disconnected(self, peer_id: str) -> None: ...


async def test_an_error_that_ends_a_call_is_told_and_the_peer_called_again() -> None:
    """P10: the task would end with it, unheard, and this node never speak to that peer again."""
    shown: list[Introduction] = []

    def refusal(sender_id: str, disk_uuid: str, introduction: Introduction, context: object) -> None:
        shown.append(introduction)

    told: list[tuple[str, str]] = []
    ours = network(unforeseen=lambda peer_id, error: told.append((peer_id, repr(error))))
    known = Introduction(7, (Member("a", "x:1", "", "disk-a"), Member("b", "y:1", "")))
    calls = iter([KeyError("nobody thought of it"), None])

    def introduction() -> Introduction:
        error = next(calls)
        if error is not None:
            raise error
        return known

    reached = Reached()
    ours.attach(reached, lambda: None, introduction)
    async with serving(peer_service(Reached(), refusal)) as address, asyncio.timeout(SOON_S):
        ours.set_peers({"a": address})
        assert await reached.by == "a"
        await ours.stop()
    assert told == [("a", "KeyError('nobody thought of it')")]
    assert shown == [known], "the members that the caller knows come with its hello"


class Hearing:
    """A node that keeps the terms of frames, and says when it can speak to a peer."""

    def __init__(self) -> None:
        self.terms: asyncio.Queue[int] = asyncio.Queue()
        self.connections: asyncio.Queue[str] = asyncio.Queue()

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        self.terms.put_nowait(frame.term)
        return False

    def peer_connected(self, peer_id: str) -> None:
        self.connections.put_nowait(peer_id)

    def peer_disconnected(self, peer_id: str) -> None: ...


@pytest.mark.parametrize("waits_for_room", [False, True])
async def test_an_error_that_ends_the_writing_is_told_and_the_peer_called_again(
    waits_for_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream would stay open, pings would be answered, and nothing be written on it ever again."""
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    ours = network(unforeseen=lambda peer_id, error: told.put_nowait((peer_id, repr(error))))
    there, here = Hearing(), Hearing()
    ours.attach(here, lambda: None, lambda: NO_INTRODUCTION)
    async with serving(peer_service(there)) as address, asyncio.timeout(SOON_S):
        ours.set_peers({"a": address})
        await here.connections.get()

        def write_now(call: Call, message: PeerFrame) -> bool:
            if waits_for_room:
                return False
            raise KeyError("nobody thought of it")

        async def write(call: Call, message: PeerFrame) -> None:
            raise KeyError("nobody thought of it")

        with monkeypatch.context() as faulty:
            faulty.setattr(Call, "write_now", write_now)
            faulty.setattr(Call, "write", write)
            assert ours.send("a", PeerFrame(cluster_id="c", sender_id="b", term=1))
            assert await told.get() == ("a", "KeyError('nobody thought of it')")
        await here.connections.get()
        assert ours.send("a", PeerFrame(cluster_id="c", sender_id="b", term=2))
        assert await there.terms.get() == 2
        await ours.stop()
    assert told.empty()


@pytest.mark.parametrize("where", ["chunk", "done"])
async def test_an_error_over_a_copied_checkpoint_ends_the_node(where: str) -> None:
    """Nobody would hear that the copy ended: the node would never ask for another."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    ours = network(failed.set_result)

    def at(place: str) -> None:
        if place == where:
            raise KeyError(place)

    async with serving(Giving()) as address, asyncio.timeout(SOON_S):  # type: ignore[abstract]  # one method is enough
        ours.set_peers({"a": address})
        ours.fetch("a", (), lambda chunk: at("chunk"), lambda reason: at("done"))
        error = await failed
        await ours.stop()
    assert isinstance(error, KeyError) and error.args == (where,)


async def test_an_error_that_nothing_takes_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """In a callback of the loop. An error of the network is none of the node's."""
    loop, faults = asyncio.get_running_loop(), LoopFaults()
    loop.set_exception_handler(faults)

    def raising(error: Exception) -> None:
        raise error

    try:
        loop.call_soon(raising, KeyError("a mistake"))
        loop.call_soon(raising, TimeoutError("a network"))
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert faults.count == 1
