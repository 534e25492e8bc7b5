"""Callers who copy a checkpoint and go away, and peers who do while they give theirs: the node goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import google_crc32c
import grpc
import pytest

from tests.node.core.trio import Client, World
from tests.node.server.test_unforeseen import SOON_S, Faulty, network, serving
from tickwheel.node.core import checkpoint
from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.host import NodeHost
from tickwheel.node.core.install import CheckpointCopy
from tickwheel.node.failure import RequestError
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.server import backup
from tickwheel.node.server.backup import Backups, files_to_copy
from tickwheel.proto import admin_pb2, peer_pb2_grpc
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import CheckpointChunk, FetchCheckpointRequest
from tickwheel.replication import grpc_network
from tickwheel.replication.copied_file import CHUNK_BYTES
from tickwheel.replication.grpc_network import PeerService
from tickwheel.storage.simulated import SimulatedDisk


def begun() -> tuple[World, Client, NodeHost, Callable[[], None]]:
    """Three nodes with something to checkpoint, the master's host, and what wakes it."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, checkpoint_period_ms=500))
    client = Client(world)
    master = world.elect()
    client.schedule([60_000] * 10)
    world.run(50)
    assert master.host is not None
    return world, client, master.host, master.wake


@pytest.mark.parametrize("late", [False, True], ids=["while it is written", "just when the files come"])
async def test_a_caller_who_goes_away_holds_no_checkpoint(late: bool) -> None:
    """P10: the journal would grow for ten minutes, each time that a slave gives a copy up."""
    world, client, host, wake = begun()
    checkpointer = host.core.checkpointer
    asked = asyncio.create_task(files_to_copy(checkpointer, wake))
    await asyncio.sleep(0)
    if late:
        world.run(200)
        asked.cancel()
    else:
        asked.cancel()
        await asyncio.sleep(0)
        world.run(200)
    with pytest.raises(asyncio.CancelledError):
        await asked
    written, covered = checkpointer.written, checkpointer.covered_index
    assert written, "nothing was written for the caller"
    client.schedule([60_000] * 10)
    world.run(1_500)
    assert checkpointer.written > written and checkpointer.covered_index > covered


async def test_two_callers_hold_until_both_are_done() -> None:
    """One that goes away must not give back what the other still copies."""
    world, client, host, wake = begun()
    checkpointer = host.core.checkpointer
    stays, goes = (asyncio.create_task(files_to_copy(checkpointer, wake)) for _ in range(2))
    await asyncio.sleep(0)
    goes.cancel()
    await asyncio.sleep(0)
    world.run(200)
    files = await stays
    assert isinstance(files, list)
    written = checkpointer.written
    client.schedule([60_000] * 10)
    world.run(1_500)
    assert checkpointer.written == written
    checkpointer.copied(files)
    world.run(1_500)
    assert checkpointer.written > written


async def test_a_checkpoint_is_held_as_long_as_a_copy_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: however large it is. One that stands still is given up, else the journal would grow; when it is heard of
    late, that neither ends nor prolongs the hold of a later copy."""
    stall_ms = 3_000
    monkeypatch.setattr(checkpoint, "COPY_STALL_MS", stall_ms)
    world, client, host, wake = begun()
    checkpointer = host.core.checkpointer

    async def copy_begun() -> list[BackupFile]:
        asked = asyncio.create_task(files_to_copy(checkpointer, wake))
        await asyncio.sleep(0)
        world.run(200)
        files = await asked
        assert isinstance(files, list)
        return files

    first = await copy_begun()
    written = checkpointer.written
    client.schedule([3_600_000] * 10)
    for _ in range(4):
        world.run(stall_ms * 2 // 3)
        assert checkpointer.progressed(first)
    assert checkpointer.written == written
    world.run(stall_ms + 2_000)
    assert checkpointer.written > written
    assert not checkpointer.progressed(first)
    second = await copy_begun()
    written = checkpointer.written
    checkpointer.copied(first)
    assert not checkpointer.progressed(first) and checkpointer.progressed(second)
    client.schedule([3_600_000] * 10)
    world.run(2_000)
    assert checkpointer.written == written
    checkpointer.copied(second)
    world.run(2_000)
    assert checkpointer.written > written


async def test_checkpoints_go_on_after_a_backup(tmp_path_factory: pytest.TempPathFactory) -> None:
    """P10: a second backup holds what came after the first."""
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 1) as cluster, cluster.client() as client:
        address = cluster.nodes[0].client_address
        sums = []
        for _ in range(2):
            await client.schedule("t", b"one", delay_ms=3_600_000)
            sums.append({chunk.path: chunk.crc32c async for chunk in client.admin.backup(address)}["manifest"])
        assert sums[0] != sums[1]


class AtOnce:
    """An executor without workers."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)


class Caller:
    """Takes a backup, or is gone when its first chunk comes."""

    def __init__(self, *, gone: bool = False) -> None:
        self._gone = gone
        self.chunks: list[admin_pb2.BackupChunk] = []

    async def write(self, chunk: admin_pb2.BackupChunk) -> None:
        if self._gone:
            raise ConnectionError
        self.chunks.append(chunk)


async def test_a_backup_that_broke_goes_on_with_the_same_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a link that breaks often would never carry the files that each checkpoint has anew. So does one whose end was
    sent and did not arrive. A caller that starts over gets what there is by then; and a while later nothing is held."""
    monkeypatch.setattr(checkpoint, "COPY_STALL_MS", 3_000)
    world, client, host, wake = begun()
    master = world.master()
    assert master is not None
    backups = Backups(cast(Any, SimpleNamespace(core=host.core, wake=wake)), master.disk, cast(Any, AtOnce()))

    async def index_of(*held: str, gone: bool = False) -> int:
        """Up to where a backup goes that the caller takes who holds these files, or did not take."""
        caller = Caller(gone=gone)
        request = admin_pb2.BackupRequest(stale=True, held=[HeldFile(path=path) for path in held])
        asked = asyncio.create_task(backups.serve(request, cast(Any, caller)))
        await asyncio.sleep(0)
        world.run(200)
        with contextlib.suppress(ConnectionError):
            await asked
        client.schedule([60_000])
        world.run(50)
        return caller.chunks[0].origin.applied_index if caller.chunks else host.core.checkpointer.covered_index

    broken = await index_of(gone=True)
    assert await index_of("manifest", gone=True) == broken
    assert await index_of("manifest") == broken
    assert await index_of("manifest") == broken
    anew = await index_of()
    assert anew > broken
    later = await index_of(gone=True)
    assert later > anew
    assert await index_of("manifest") == later
    world.run(checkpoint.COPY_STALL_MS)
    assert await index_of("manifest") > later


async def test_tries_without_end_do_not_hold_up_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: a caller that names some file and asks once a minute would otherwise let the journal grow for ever."""
    monkeypatch.setattr(backup, "KEPT_MS_MAX", 3_000)
    world, client, host, wake = begun()
    master = world.master()
    assert master is not None
    backups = Backups(cast(Any, SimpleNamespace(core=host.core, wake=wake)), master.disk, cast(Any, AtOnce()))
    written: list[int] = []
    for _ in range(30):
        request = admin_pb2.BackupRequest(stale=True, held=[HeldFile(path="manifest")])
        asked = asyncio.create_task(backups.serve(request, cast(Any, Caller(gone=True))))
        await asyncio.sleep(0)
        world.run(300)
        with contextlib.suppress(ConnectionError):
            await asked
        client.schedule([60_000])
        written.append(host.core.checkpointer.written)
    assert 2 <= written[-1] - written[0] <= 6


async def test_a_backup_from_a_disk_that_fails_names_the_file() -> None:
    """It was called a mistake of the node, by which the request may have been carried out."""
    world, _, host, wake = begun()
    master = world.master()
    assert master is not None and isinstance(master.disk, SimulatedDisk)
    backups = Backups(cast(Any, SimpleNamespace(core=host.core, wake=wake)), master.disk, cast(Any, AtOnce()))
    master.disk.read_error("manifest")
    asked = asyncio.create_task(backups.serve(admin_pb2.BackupRequest(stale=True), cast(Any, Caller())))
    await asyncio.sleep(0)
    world.run(200)
    with pytest.raises(
        RequestError, match=r"cannot read its own files: cannot read 'manifest': Input/output error\. Ask"
    ):
        await asked


class Stalling(peer_pb2_grpc.PeerServicer):
    """A peer that loses its power: after some chunks nothing comes any more, not even the end of the connection."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    async def FetchCheckpoint(self, request: FetchCheckpointRequest, context: object) -> AsyncIterator[CheckpointChunk]:
        for _ in range(self._chunks):
            yield CheckpointChunk(path="manifest")
        await asyncio.Event().wait()


@pytest.mark.parametrize("chunks", [0, 2])
async def test_a_peer_that_falls_silent_is_given_up(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: the node would wait for ever, and ask no other peer, however often it is told that it needs a checkpoint."""
    if not chunks:
        monkeypatch.setattr(grpc_network, "COPY_BEGIN_S", 0.2)
    ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    ours = network()
    got: list[CheckpointChunk] = []

    def take(chunk: CheckpointChunk) -> None:
        got.append(chunk)
        if len(got) == chunks - 1:  # each wait is as long as it was set to before the last chunk came
            monkeypatch.setattr(grpc_network, "COPY_SILENCE_S", 0.1)

    peer = Stalling(chunks)  # type: ignore[abstract]  # it is asked for nothing else
    async with serving(peer) as address, asyncio.timeout(SOON_S):
        ours.set_peers({"a": address})
        ours.fetch("a", (), take, ended.set_result)
        assert "nothing came" in str(await ended)
        await ours.stop()
    assert len(got) == chunks


async def test_a_sender_ends_a_copy_whose_files_are_not_held_any_more() -> None:
    """P6: a later checkpoint writes to them; and each chunk that goes tells that the copy gets on."""
    disk = SimulatedDisk(Random(1))
    disk.open("wheel/a", create=True).append(bytes(2 * CHUNK_BYTES))
    files = [BackupFile("wheel/a", 2 * CHUNK_BYTES)]
    told: list[object] = []
    given_back: list[object] = []

    def progressed(about: object) -> bool:
        told.append(about)
        return len(told) < 2

    async def checkpoint_files() -> list[BackupFile]:
        return files

    service = PeerService(
        ("a", "c"),
        Faulty(""),
        lambda: None,
        disk=disk,
        refusal=lambda *asked: None,
        removed=lambda peer_id: False,
        greeted=lambda peer_id, address: None,
        checkpoint=checkpoint_files,
        progressed=progressed,
        copied=given_back.append,
        dropped=lambda peer, text: None,
        failed=lambda error: pytest.fail(repr(error)),
    )
    ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    ours = network()
    got: list[CheckpointChunk] = []
    async with serving(service) as address, asyncio.timeout(SOON_S):
        ours.set_peers({"a": address})
        ours.fetch("a", (), got.append, ended.set_result)
        assert "stood still" in str(await ended)
        await ours.stop()
    assert [chunk.offset for chunk in got] == [0]
    assert told == [files, files] and given_back == [files]


class Sender:
    """A peer that gives some files over a real connection."""

    def __init__(self, **contents: bytes) -> None:
        self.disk = SimulatedDisk(Random(1))
        self.files: list[BackupFile] = []
        self.chunks_left = 1 << 30
        """Until its copies break."""
        for name, content in contents.items():
            self.disk.open(f"wheel/{name}", create=True).append(content)
            self.files.append(BackupFile(f"wheel/{name}", len(content)))
        self._service = PeerService(
            ("a", "c"),
            Faulty(""),
            lambda: None,
            disk=self.disk,
            refusal=lambda *asked: None,
            removed=lambda peer_id: False,
            greeted=lambda peer_id, address: None,
            checkpoint=self._checkpoint,
            progressed=self._progressed,
            copied=lambda files: None,
            dropped=lambda peer, text: None,
            failed=lambda error: pytest.fail(repr(error)),
        )

    async def _checkpoint(self) -> list[BackupFile]:
        return self.files

    def _progressed(self, files: object) -> bool:
        self.chunks_left -= 1
        return self.chunks_left >= 0

    async def give(self, held: list[HeldFile], wanted: int = 1 << 30) -> tuple[list[CheckpointChunk], str | None]:
        """What a receiver that holds these gets, and why it ended. `wanted`: chunks that it has room for."""
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        ours = network()
        got: list[CheckpointChunk] = []

        def take(chunk: CheckpointChunk) -> bool:
            got.append(chunk)
            return len(got) < wanted

        async with serving(self._service) as address, asyncio.timeout(20):
            ours.set_peers({"a": address})
            ours.fetch("a", held, take, ended.set_result)
            problem = await ended
            await ours.stop()
        return got, problem


async def test_a_receiver_without_room_gets_no_more() -> None:
    """The rest of the copy was sent all the same."""
    sender = Sender(a=bytes(3 * CHUNK_BYTES))
    got, problem = await sender.give([], wanted=2)
    assert len(got) == 2 and problem is not None


async def test_a_copy_that_broke_is_given_from_where_it_broke() -> None:
    """Bytes that the receiver holds already are compared, not sent; one that differs costs its file alone."""
    a, b = (Random(n).randbytes(3 * CHUNK_BYTES + 5) for n in range(2))
    sender = Sender(a=a, b=b)
    receiver = SimulatedDisk(Random(2))
    copy = CheckpointCopy(receiver)
    sender.chunks_left = 6  # all of a, two chunks of b
    got, problem = await sender.give(copy.begin())
    assert problem is not None and sum(len(chunk.data) for chunk in got) == len(a) + 2 * CHUNK_BYTES
    for chunk in got:
        copy.take(chunk)
    copy.pause()
    sender.chunks_left = 1 << 30
    got, problem = await sender.give(CheckpointCopy(receiver).begin())
    assert problem is None
    assert [(chunk.path, chunk.offset, len(chunk.data)) for chunk in got] == [
        ("wheel/a", len(a), 0),
        ("wheel/b", 2 * CHUNK_BYTES, CHUNK_BYTES),
        ("wheel/b", 3 * CHUNK_BYTES, 5),
    ]
    receiver.open("staging/wheel/a").write_at(CHUNK_BYTES, bytes([a[CHUNK_BYTES] ^ 1]))
    copy = CheckpointCopy(receiver)
    got, problem = await sender.give(copy.begin())
    assert problem is None and sum(len(chunk.data) for chunk in got) == len(a) + CHUNK_BYTES + 5
    for chunk in got:
        copy.take(chunk)
    copy.pause()
    for name, content in (("a", a), ("b", b)):
        assert receiver.open(f"staging/wheel/{name}").read_at(0, len(content) + 1) == content


async def test_a_receiver_that_holds_more_than_the_file_gets_all_of_it() -> None:
    """The sender's file was made anew in between."""
    sender = Sender(a=b"abc")
    got, problem = await sender.give([HeldFile(path="wheel/a", bytes=1 << 62, crc32c=0)])
    assert problem is None and [chunk.data for chunk in got] == [b"abc"]


async def test_a_receiver_may_not_name_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves out the last; a sender refuses who does not."""
    sender = Sender(a=b"abc", b=b"abc")
    held = [HeldFile(path=f"wheel/{name}", bytes=3, crc32c=google_crc32c.value(b"abc")) for name in "ab"]
    monkeypatch.setattr(grpc_network, "HELD_FILES_MAX", 1)
    got, problem = await sender.give(held)
    assert problem is None and [chunk.data for chunk in got] == [b"", b"abc"]
    async with serving(sender._service) as address, grpc.aio.insecure_channel(address) as channel:
        request = FetchCheckpointRequest(cluster_id="c", node_id="b", held=held)
        call = peer_pb2_grpc.PeerStub(channel).FetchCheckpoint(request)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "held names 2 files, 1 are allowed" in str(await call.details())
