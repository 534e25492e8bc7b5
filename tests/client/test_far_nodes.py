"""Nodes so far away that a connection takes longer than one of its steps may, and a client that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from tests.client.fake_node import FakeNode
from tests.transport.served import serving
from tests.transport.test_calls import LIMITS
from tickwheel.client import cluster as cluster_module
from tickwheel.client.backoff import Deadline
from tickwheel.client.cluster import Cluster, TlsFiles
from tickwheel.node.certs import make_certificates
from tickwheel.node.tls import PortFiles, server_context
from tickwheel.proto import admin_pb2
from tickwheel.transport import channel as channel_module
from tickwheel.transport.server import Server

STEP_S = 0.6
ONE_WAY_S = 0.2
"""Two of them take TLS, two more the settings."""


class _Node(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Says that it is the master."""

    def __init__(self) -> None:
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        return grpc.unary_unary_rpc_method_handler(self._status)

    async def _status(self, _: bytes, context: object) -> bytes:
        return admin_pb2.NodeStatus(role=admin_pb2.MASTER, term=1, master_address=self.address).SerializeToString()


@asynccontextmanager
async def _far(address: str) -> AsyncIterator[str]:
    """The way to this server; each piece takes ONE_WAY_S."""
    tasks: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65_536):
            loop.call_later(ONE_WAY_S, writer.write, piece)
        loop.call_later(ONE_WAY_S, writer.close)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writers.update((back, writer))
        tasks.update((asyncio.ensure_future(carry(reader, back)), asyncio.ensure_future(carry(there, writer))))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_far_node_is_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the attempt is given up, nor is the node said to be out of reach, while its host answers."""
    monkeypatch.setattr(channel_module, "STEP_S", STEP_S)
    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", STEP_S)
    monkeypatch.setattr(cluster_module, "CONNECT_S", STEP_S + 0.1)
    make_certificates(tmp_path, {"n1": ["127.0.0.1"]}, [], [], 1)
    files = PortFiles(*((tmp_path / one).read_bytes() for one in ("n1.key", "n1.crt", "ca.crt")))
    node, server = _Node(), Server(LIMITS)
    server.add_generic_rpc_handlers([node])
    async with serving(server, server_context(files, required=False)) as near, _far(near) as node.address:
        cluster = Cluster([node.address], TlsFiles(tmp_path / "ca.crt"))
        assert await cluster.master(Deadline(20.0)) == node.address
        await cluster.close()


async def test_a_process_without_processor_does_not_blame_the_nodes(
    nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its time-outs are over before it has read an answer. Nobody is out of reach for that."""
    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster_module, "CONNECT_S", 0.3)
    monkeypatch.setattr(cluster_module, "CONNECT_PART_S", 0.01)
    loop = asyncio.get_running_loop()
    standing = True

    def stand_still() -> None:
        if standing:
            time.sleep(0.05)  # each pass of the loop
            loop.call_soon(stand_still)

    stand_still()
    cluster = Cluster([node.address for node in nodes])
    try:
        assert await cluster.master(Deadline(20.0)) == nodes[0].address
    finally:
        standing = False
        await cluster.close()
