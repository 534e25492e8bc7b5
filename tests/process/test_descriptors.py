"""A node with few file descriptors, and more connections than it has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from tickwheel.client import AsyncClient, ClusterUnavailable, OutcomeUnknown
from tickwheel.node.local_cluster import LocalCluster, LocalNode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
MIB = 1 << 20


class Few(LocalCluster):
    """Nodes under a small limit of open files."""

    limit = 256

    def command(self, node: LocalNode) -> list[str]:
        """See LocalCluster."""
        return ["/bin/sh", "-c", f'ulimit -n {self.limit} && exec "$@"', "sh", *super().command(node)]


async def test_connections_beyond_the_limit_end_no_node(tmp_path: Path) -> None:
    """400 of them, on both ports: meanwhile the journal begins new files, clients come in and are served, and the
    node says what to do."""
    config = {"storage": {"journal_segment_bytes": MIB, "checkpoint_log_bytes": MIB}}
    async with Few(tmp_path, 1, config=config) as cluster:
        node = await cluster.master()
        idle: list[socket.socket] = []
        for address in (node.client_address, node.peer_address):
            host, _, port = address.rpartition(":")
            for _ in range(200):
                connection = socket.create_connection((host, int(port)), timeout=5)
                connection.sendall(PREFACE)
                idle.append(connection)
        before = sorted((node.config_file.parent / "data" / "journal").iterdir())
        async with asyncio.timeout(60):
            # gRPC accepts again once a second: whoever calls during the burst waits behind those that came before.
            number = 0
            while number < 8:
                with contextlib.suppress(ClusterUnavailable, OutcomeUnknown):
                    async with AsyncClient(node.client_address) as client:
                        while number < 8:
                            await client.schedule("t", bytes([number]) * MIB, delay_ms=60_000)
                            number += 1
        after = sorted((node.config_file.parent / "data" / "journal").iterdir())
        assert after != before, "the journal went on in other files"
        for connection in idle:
            connection.close()
        assert node.running
    log = node.log_file.read_text(encoding="utf-8")
    assert "Traceback" not in log and '"fatal"' not in log
    assert "too many connections" in log and "LimitNOFILE" in log


@pytest.mark.parametrize("limit", [32, 64, 191])
async def test_a_limit_that_is_too_low_is_refused_with_what_to_do(tmp_path: Path, limit: int) -> None:
    """By the message and code 2, however low it is: a supervisor need not try again."""
    cluster = Few(tmp_path, 1)
    cluster.limit = limit
    (node,) = cluster.nodes
    cluster.start_node(node)
    assert node.process is not None
    assert await asyncio.to_thread(node.process.wait, 20) == 2, node.log_tail()
    assert f"the limit of open files is {limit}: at least 192" in node.log_tail()
    assert "Traceback" not in node.log_file.read_text(encoding="utf-8")
