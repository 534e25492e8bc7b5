"""Node processes that must not start: a port in use, data in use, another cluster's data."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports
from tickwheel.node.metrics import METRICS
from tickwheel.node.server import process
from tickwheel.proto import admin_pb2
from tickwheel.proto.peer_pb2 import Hello, PeerFrame
from tickwheel.replication.frames import FORMAT_VERSION
from tickwheel.storage.disk import DiskError, DiskFullError, FsyncFailedError


def start(*settings: str) -> subprocess.CompletedProcess[str]:
    """Start a node that is expected to refuse; its exit code and what it says."""
    flags = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "tickwheel.node.cli.main", "node", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


async def page(node: LocalNode) -> str:
    """The node's metrics, as Prometheus reads them."""
    reader, writer = await asyncio.open_connection(*node.metrics_address.rsplit(":", 1))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def test_a_running_node_serves_every_metric_and_refusals_at_start_say_what_to_do(tmp_path: Path) -> None:
    """A master's page has every entry of the table: what docs/METRICS.md names can be watched. Beside that node, a used
    port, a data directory in use, another cluster's data: an exit code and a sentence, no traceback."""
    async with LocalCluster(tmp_path, 1) as cluster:
        node = cluster.nodes[0]
        # The pending messages of topics are served only while they have a limit.
        await cluster.client().admin.update_settings(admin_pb2.Settings(topic_pending_max="*=1000"))
        served = await page(node)
        names = [spec.exposed_name + ("_info" if spec.kind == "info" else "") for spec in METRICS]
        assert not [name for name in names if f"\n# TYPE {name} " not in served]
        assert int(served.split("\ntickwheel_fdatasync_duration_seconds_count ")[1].split(".")[0]) > 0
        client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
        own_data = f"node.data_dir={node.directory / 'data'}"
        here = (f"listen.client_bind={client}", f"listen.peer_bind={peer}", "listen.metrics_bind=")
        metrics = f"listen.metrics_bind={node.metrics_address}"
        taken = (f"listen.client_bind={node.client_address}", *here[1:])
        used = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'x'}", *taken)
        assert used.returncode == 2 and node.client_address in used.stderr, used.stderr
        watched = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'y'}", *here[:2], metrics)
        assert watched.returncode == 2 and "listen.metrics_bind" in watched.stderr, watched.stderr
        locked = start("cluster.id=c", "node.id=x", own_data, *here)
        assert locked.returncode == 3 and "node.data_dir" in locked.stderr, locked.stderr
        await cluster.kill_node(node)
        foreign = start("cluster.id=other", f"node.id={node.node_id}", own_data, *here)
        assert foreign.returncode == 3 and "cluster" in foreign.stderr, foreign.stderr
        for refused in (used, watched, locked, foreign):
            assert "Traceback" not in refused.stderr


async def test_links_that_were_dropped_are_counted_and_logged(tmp_path: Path) -> None:
    """An operator learns that somebody sends a node what is no frame, or cannot be true; the node goes on."""

    async with LocalCluster(tmp_path, 2) as cluster, asyncio.timeout(30):
        node, peer = cluster.nodes
        hello = PeerFrame(
            cluster_id=cluster.cluster_id,
            sender_id=peer.node_id,
            receiver_id=node.node_id,
            format_version=FORMAT_VERSION,
            hello=Hello(),
        )
        async with grpc.aio.insecure_channel(node.peer_address) as channel:
            for hostile in (b"\xff" * 100, PeerFrame(term=(1 << 64) - 1).SerializeToString()):
                # Without serializers: bytes as they are.
                call: Any = channel.stream_stream("/tickwheel.v1.Peer/Exchange")()  # type: ignore[call-arg]
                await call.write(hello.SerializeToString())
                assert PeerFrame.FromString(await call.read()).HasField("hello")
                await call.write(hostile)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        counted = await page(node)
        assert '\ntickwheel_refused_calls_total{kind="undecodable"} 1.0\n' in counted
        assert "\ntickwheel_peer_links_dropped_total 1.0\n" in counted
        assert node.running and "the link of a peer is dropped" in node.log_file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskError("manifest is damaged"), process.EXIT_DATA),
        (FsyncFailedError("journal"), process.EXIT_DATA),
        (DiskFullError("journal"), process.EXIT_FAILED),
        (RuntimeError("ours"), process.EXIT_FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_damage_met_while_serving_ends_with_the_code_that_is_not_restarted(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3: a restart would meet the same bytes again, and systemd leaves it."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process, "_exit_now", leave)
    node = object.__new__(process.NodeProcess)
    with pytest.raises(SystemExit) as left:
        node._failed(error)
    assert left.value.code == code
