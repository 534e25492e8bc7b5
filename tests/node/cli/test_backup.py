"""The command `backup` against nodes that break, refuse, or are older: when it asks again, and whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import google_crc32c
import grpc
import pytest
from rich.progress import Progress

from tickwheel.client import ClusterUnavailable, TickwheelError
from tickwheel.client.async_client import AsyncClient
from tickwheel.node.backup_files import LIST_NAME, BackupWriter
from tickwheel.node.cli import backup as command
from tickwheel.node.failure import Failure, invalid
from tickwheel.node.server.door import read_request
from tickwheel.node.server.errors import abort
from tickwheel.proto import admin_pb2, admin_pb2_grpc, common_pb2

Answer = Callable[[admin_pb2.BackupRequest, Any], AsyncIterator[admin_pb2.BackupChunk]]
CONTENT = b"0123456789"


class Node(admin_pb2_grpc.AdminServicer):
    """Answers one request for a backup after the other, as it was told; the last answer stays."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[admin_pb2.BackupRequest] = []
        self.address = ""

    async def Backup(self, request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        async for chunk in answer(request, context):
            yield chunk


def node_with(*answers: Answer) -> Node:
    """One."""
    return Node(*answers)  # type: ignore[abstract]  # it is asked for nothing else


@contextlib.asynccontextmanager
async def serving(*nodes: Node) -> AsyncIterator[None]:
    """These nodes, each with its address."""
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            server = grpc.aio.server()
            admin_pb2_grpc.add_AdminServicer_to_server(node, server)
            node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield


def chunk(offset: int, end: int, **other: Any) -> admin_pb2.BackupChunk:
    """A part of the only file."""
    data = CONTENT[offset:end]
    return admin_pb2.BackupChunk(
        path="manifest", offset=offset, data=data, crc32c=google_crc32c.value(data), file_bytes=len(CONTENT), **other
    )


def half_then(ended: Callable[[Any], Awaitable[None]]) -> Answer:
    """Half of the file, then this."""

    async def answer(request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
        yield chunk(0, 5, origin=admin_pb2.BackupOrigin(cluster_id="c"))
        await ended(context)

    return answer


async def rest(request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
    """What the caller does not hold."""
    (held,) = request.held
    assert held.crc32c == google_crc32c.value(CONTENT[: held.bytes])
    yield admin_pb2.BackupChunk(path="manifest", comparing=True, origin=admin_pb2.BackupOrigin(cluster_id="c"))
    yield chunk(held.bytes, len(CONTENT), last=True)


async def everything(request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
    """All of it, whatever the caller holds."""
    yield chunk(0, 5)
    yield chunk(5, len(CONTENT), last=True)


def refusal(failure: Failure) -> Answer:
    """A refusal."""

    async def answer(request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
        await abort(context, failure)
        yield chunk(0, 0)

    return answer


async def breaks(context: Any) -> None:
    """The node stops."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the node stops")


async def ends(context: Any) -> None:
    """As if there were no more."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    monkeypatch.setattr(command, "PAUSE_S_FIRST", 0.001)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[BackupWriter]:
    """Of an empty directory."""
    made = BackupWriter(tmp_path / "copy")
    yield made
    made.close()


async def copied(writer: BackupWriter, *nodes: Node, patience_s: float = 60.0) -> None:
    """One run of the command, without its output."""
    progress = Progress(disable=True)
    addresses = [node.address for node in nodes]
    await command._Copy(addresses, writer, False, patience_s, progress, progress.add_task("")).run()
    writer.finish()


@pytest.mark.parametrize("ended", [breaks, ends])
async def test_a_copy_that_breaks_goes_on_with_the_same_node(
    ended: Callable[[Any], Awaitable[None]], writer: BackupWriter, tmp_path: Path
) -> None:
    """Though another is known; also when the node only said that it was done. A node that recovers meanwhile, or hears
    no master yet, is asked again."""
    recovers = refusal(Failure(common_pb2.WRONG_STATE, "a backup of this node may be old: it recovers"))
    node, other = node_with(half_then(ended), recovers, recovers, rest), node_with(everything)
    async with serving(node, other):
        await copied(writer, node, other)
    assert len(node.requests) == 4 and not other.requests
    listed = json.loads((tmp_path / "copy" / LIST_NAME).read_text())
    assert listed["files"]["manifest"] == {"bytes": 10, "crc32c": google_crc32c.value(CONTENT)}
    assert (tmp_path / "copy" / "manifest").read_bytes() == CONTENT


async def test_a_node_that_stays_away_is_replaced_by_another(
    writer: BackupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while; what has arrived is named to it, and used as far as it has the same."""
    monkeypatch.setattr(command, "SAME_NODE_S", 0.02)
    gone = node_with(half_then(breaks), refusal(Failure(common_pb2.WRONG_STATE, "it recovers")))
    other = node_with(rest)
    async with serving(gone, other):
        await copied(writer, gone, other)
    (request,) = other.requests
    assert [(held.path, held.bytes) for held in request.held] == [("manifest", 5)]


async def test_the_first_answer_counts(writer: BackupWriter) -> None:
    """A refusal before anything came is told at once: a wrong node, a missing right, a node that is stale."""
    node = node_with(refusal(Failure(common_pb2.WRONG_STATE, "it may be old")))
    async with serving(node):
        with pytest.raises(TickwheelError, match=f"{node.address}: .*may be old"):
            await copied(writer, node)
    assert len(node.requests) == 1


async def test_what_will_not_pass_ends_the_command(writer: BackupWriter) -> None:
    """A right that was taken away on the way."""
    node = node_with(half_then(breaks), refusal(Failure(common_pb2.RIGHT_REQUIRED, "not yours any more")))
    async with serving(node):
        with pytest.raises(TickwheelError, match="not yours"):
            await copied(writer, node)
    assert len(node.requests) == 2 and writer.held_bytes == 5


async def test_patience_ends(writer: BackupWriter) -> None:
    """With the node's own words, when nothing has come for so long."""
    node = node_with(half_then(breaks), refusal(Failure(common_pb2.RECOVERING, "still recovering")))
    async with serving(node):
        with pytest.raises(TickwheelError, match="still recovering"):
            await copied(writer, node, patience_s=0.1)
    assert len(node.requests) > 2


async def test_a_node_of_an_earlier_version_sends_everything(writer: BackupWriter, tmp_path: Path) -> None:
    """It refuses the field that it does not know, in the words of the door; the copy begins anew and becomes whole."""
    unknown = admin_pb2.BackupRequest().SerializeToString() + bytes([15 << 3, 1])
    failure = cast(Any, read_request(admin_pb2.BackupRequest, unknown)).failure
    assert failure.metadata["field"] == "15", "the number of the field that is not known"
    failure = invalid("2", failure.metadata["value"], failure.metadata["limit"]).failure

    async def older(request: admin_pb2.BackupRequest, context: Any) -> AsyncIterator[admin_pb2.BackupChunk]:
        if request.held:
            await abort(context, failure)
        async for sent in everything(request, context):
            yield sent

    node = node_with(half_then(breaks), older)
    async with serving(node):
        await copied(writer, node)
    assert [len(request.held) for request in node.requests] == [0, 1, 0]
    assert (tmp_path / "copy" / "manifest").read_bytes() == CONTENT


async def test_a_node_that_falls_silent_is_given_up() -> None:
    """It holds the connection and sends nothing: a process that is stopped, a checkpoint that is never written."""

    async def waits(context: Any) -> None:
        await asyncio.Event().wait()

    node = node_with(half_then(waits))
    async with serving(node), AsyncClient([node.address]) as client:
        with pytest.raises(TickwheelError, match="nothing for 0 s"):
            async for _ in client.admin.backup(node.address, silence_s=0.05):
                pass


async def test_a_node_that_answers_nothing_is_not_waited_for(
    writer: BackupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first chunk may take minutes. So the node is asked first for what comes at once."""

    class Silent(Node):
        async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.NodeStatus:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(command, "open_client", lambda addresses: AsyncClient(addresses, timeout_s=0.3))
    node = Silent(everything)  # type: ignore[abstract]
    async with serving(node):
        with pytest.raises(ClusterUnavailable, match=f"{node.address}: does not answer"):
            await copied(writer, node)
    assert not node.requests


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """130, a sentence, what has arrived, and no lock."""
    asked = asyncio.Event()

    async def waits(context: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    node = node_with(half_then(waits))
    copy = tmp_path / "copy"
    async with serving(node):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tickwheel.node.cli.main", "backup", str(copy), "--address", node.address),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                await asked.wait()
                while not (copy / "manifest").exists() or not (copy / "manifest").stat().st_size:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGINT)
                _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 130, said
    words = " ".join(said.decode().split())
    assert f"interrupted. What has arrived stays in {copy}" in words and "Traceback" not in words
    writer = BackupWriter(copy)
    assert writer.held_bytes == 5
    writer.close()
