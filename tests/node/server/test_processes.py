"""Real node processes: a newcomer, a wiped disk, a port in use, another cluster's data, all killed at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import grpc

from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub


async def digest(node: LocalNode) -> admin_pb2.StateDigest:
    """The node's digest, as it says itself."""
    async with grpc.aio.insecure_channel(node.client_address) as channel:
        answer: admin_pb2.StateDigest = await AdminStub(channel).GetDigest(admin_pb2.GetDigestRequest(), timeout=5)
        return answer


async def until_equal(nodes: list[LocalNode]) -> None:
    """Wait until all nodes have applied the same and agree on it."""
    async with asyncio.timeout(20):
        while True:
            digests = [await digest(node) for node in nodes]
            if len({(d.applied_index, d.digest) for d in digests}) == 1:
                return
            await asyncio.sleep(0.1)


def due_later(count: int) -> list[tuple[int, bytes]]:
    """Messages due in a minute."""
    now_ms = time.time_ns() // 1_000_000
    return [(now_ms + 60_000 + i, b"m%d" % i) for i in range(count)]


async def test_newcomer_is_added_and_ends_equal(tmp_path: Path) -> None:
    """A fourth node that waits is added by an operator, gets the log and has the same state."""
    async with LocalCluster(tmp_path, 3) as cluster, cluster.client() as client:
        async with client.producer() as producer:
            await producer.schedule_many("t", due_later(2_000))
        newcomer = cluster.add_node("n4")
        cluster.start_node(newcomer)
        member = admin_pb2.Member(
            node_id="n4", peer_address=newcomer.peer_address, client_address=newcomer.client_address
        )
        async with asyncio.timeout(20):
            while True:
                try:
                    await digest(newcomer)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        members = await client.admin.add_member(member)
        assert [m.node_id for m in members] == ["n1", "n2", "n3", "n4"]
        await until_equal(cluster.nodes)


async def test_all_nodes_killed_at_once_keep_everything(tmp_path: Path) -> None:
    """SIGKILL of all three: what was acknowledged is pending again after the start, on all of them alike."""
    async with LocalCluster(tmp_path, 3) as cluster:
        async with cluster.client() as client, client.producer() as producer:
            await producer.schedule_many("t", due_later(3_000))
        for node in cluster.nodes:
            await cluster.kill_node(node)
        for node in cluster.nodes:
            cluster.start_node(node)
        await cluster.wait_ready()
        async with cluster.client() as client:
            counted = await client.count_pending("t")
        assert counted.total == 3_000
        await until_equal(cluster.nodes)


def start(*settings: str) -> subprocess.CompletedProcess[str]:
    """Start a node that is expected to refuse; its exit code and what it says."""
    flags = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "tickwheel.node.cli", "node", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


async def test_refusals_at_start_say_what_to_do(tmp_path: Path) -> None:
    """A used port, a data directory in use, another cluster's data: an exit code and a sentence, no traceback."""
    async with LocalCluster(tmp_path, 1) as cluster:
        node = cluster.nodes[0]
        client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
        own_data = f"node.data_dir={node.directory / 'data'}"
        here = (f"listen.client_bind={client}", f"listen.peer_bind={peer}", "listen.metrics_bind=")
        taken = (f"listen.client_bind={node.client_address}", *here[1:])
        used = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'x'}", *taken)
        assert used.returncode == 2 and node.client_address in used.stderr, used.stderr
        locked = start("cluster.id=c", "node.id=x", own_data, *here)
        assert locked.returncode == 3 and "node.data_dir" in locked.stderr, locked.stderr
        await cluster.kill_node(node)
        foreign = start("cluster.id=other", f"node.id={node.node_id}", own_data, *here)
        assert foreign.returncode == 3 and "cluster" in foreign.stderr, foreign.stderr
        for refused in (used, locked, foreign):
            assert "Traceback" not in refused.stderr
