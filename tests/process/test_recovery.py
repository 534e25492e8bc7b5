"""The day after: a lost majority, a backup laid down again; each becomes a whole cluster by the commands alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.process.commands import command
from tickwheel.client import AsyncClient
from tickwheel.node.backup_files import BackupWriter
from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports, write_toml
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub


async def digest_of(node: LocalNode) -> admin_pb2.StateDigest:
    """What the node says of its state."""
    async with grpc.aio.insecure_channel(node.client_address) as channel:
        answer: admin_pb2.StateDigest = await AdminStub(channel).GetDigest(admin_pb2.GetDigestRequest(), timeout=20)
        return answer


async def until_equal(nodes: list[LocalNode]) -> None:
    """Wait until all have applied the same and agree on it."""
    async with asyncio.timeout(20):
        while True:
            digests = [await digest_of(node) for node in nodes]
            if len({(d.applied_index, d.digest) for d in digests}) == 1:
                return
            await asyncio.sleep(0.1)


def reconfigure(node: LocalNode, cluster_id: str, data: Path) -> None:
    """The configuration of a cluster of one: what the document tells an operator to write."""
    listen = {
        "client_bind": node.client_address, "peer_bind": node.peer_address, "metrics_bind": node.metrics_address,
    }  # fmt: skip
    write_toml(
        node.config_file,
        {
            "cluster": {"id": cluster_id},
            "node": {"id": node.node_id, "data_dir": str(data)},
            "listen": listen,
            "storage": {"high_water_percent": 0},  # the disk that tests run on may well be nearly full
        },
    )


async def fill(client: AsyncClient, count: int) -> None:
    """Some messages due in hours, some delivered, one of these not settled and given back; all of it applied."""
    now_ms = time.time_ns() // 1_000_000
    async with client.producer() as producer:
        await producer.schedule_many("t", [(now_ms + 3_600_000 * (1 + i % 40), b"%d" % i) for i in range(1, count)])
        await producer.schedule_many("now", [(now_ms, b"n%d" % i) for i in range(20)])
    async with client.consumer("g", "now", lease=timedelta(seconds=2)) as consumer, asyncio.timeout(20):
        seen = 0
        async for delivery in consumer:
            seen += 1
            if seen == 20:
                break  # the last one is not settled
            await delivery.ack()
    async with asyncio.timeout(20):
        while True:
            groups = await client.admin.groups()
            if not any(group.consumers or group.in_flight for group in groups):
                break
            await asyncio.sleep(0.02)
    # What was given back went into the log before this.
    await client.schedule("t", b"0", due_ms=now_ms + 3_600_000)


def prepared(cluster: LocalCluster, node_id: str) -> LocalNode:
    """One more node of the cluster, which joins when it is added as a member; it is not started."""
    client, peer, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    node = LocalNode(node_id, cluster.directory / node_id, client, peer, metrics)
    cluster.made.make([node_id])
    cluster._write_config(node, {"id": cluster.cluster_id, "join": "existing"})
    cluster.nodes.append(node)
    if cluster._client is not None:
        cluster._client.cluster.add(client)
    return node


async def join(cluster: LocalCluster, node_id: str, through: LocalNode, *, late: bool = False) -> LocalNode:
    """A new node, added by the command. `late`: it starts only when it is a member, and nobody has to wait for it."""
    newcomer = prepared(cluster, node_id)
    if not late:
        cluster.start_node(newcomer)
    added = ("member", "add", node_id, "--peer", newcomer.peer_address, "--client", newcomer.client_address)
    where = ("--address", through.client_address, "--json")
    if late:
        done = await command(*added, "--wait", "0", *where)
        assert learners(done) == [node_id], "it counts though it has nothing"
        async with AsyncClient([through.client_address]) as client:
            await client.schedule("meanwhile", b"m", delay_ms=3_600_000)
        cluster.start_node(newcomer)
    done = await command(*added, *where)
    assert node_id not in learners(done), "it has not caught up"
    return newcomer


def learners(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Members of a list that do not count yet."""
    return [member["node_id"] for member in json.loads(done.stdout) if member.get("learner")]


def content(digest: admin_pb2.StateDigest) -> dict[str, bytes]:
    """Of the state, without what a new cluster has anew and what moves with the time."""
    anew = {"settings", "members", "removed", "term", "wheel.cursor"}
    assert anew < set(digest.parts)
    return {name: value for name, value in digest.parts.items() if name not in anew}


async def test_a_lost_majority_goes_on_from_one_disk(tmp_path: Path) -> None:
    """Two disks of three are gone: recover makes a cluster of the third, with all that it had, and it grows again."""
    async with LocalCluster(tmp_path, 3) as cluster:
        async with AsyncClient(cluster.addresses) as client:
            await fill(client, 500)
        await until_equal(cluster.nodes)
        left, *lost = cluster.nodes
        before = await digest_of(left)
        config = str(left.config_file)
        reconfigure(left, "local", left.directory / "data")
        running = await command("recover", "--config", config, "--yes", code=1)
        assert "is running" in running.stderr
        for node in lost:
            await cluster.kill_node(node)
        async with grpc.aio.insecure_channel(left.client_address) as channel, asyncio.timeout(20):
            while True:  # a load balancer must not send anybody there
                health = await HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
                if health.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
                await asyncio.sleep(0.05)
        await command("status", "--address", left.client_address, code=3)
        old = await command("backup", str(tmp_path / "old"), "--address", left.client_address, code=1)
        assert "hears no master" in old.stderr and "--stale" in old.stderr
        asked = await command("backup", str(tmp_path / "old"), "--address", left.client_address, "--stale")
        assert "may be old" in asked.stderr and "cluster local, node n1, up to entry" in asked.stdout
        await cluster.kill_node(left)
        for node in lost:
            shutil.rmtree(node.directory)
            cluster.nodes.remove(node)
        same = await command("recover", "--config", config, "--yes", code=1)
        assert "an id of its own" in same.stderr
        reconfigure(left, "local-2", left.directory / "data")
        foreign = await command("node", "--config", config, code=3)
        assert "holds data of cluster local" in foreign.stderr
        asked = await command("recover", "--config", config, code=2)
        assert "are lost" in asked.stderr and "--yes" in asked.stderr
        done = await command("recover", "--config", config, "--yes", "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["old_cluster_id"] == "local" and found["old_members"] == ["n1", "n2", "n3"]
        assert found["pending"] == 500 and found["index"] >= before.applied_index
        again = await command("recover", "--config", config, "--yes", code=1)
        assert "as before" in again.stderr

        cluster.cluster_id = "local-2"
        cluster.start_node(left)
        await cluster.wait_ready()
        after = await digest_of(left)
        assert content(after) == content(before)
        for node_id in ("n2", "n3"):  # free again: nothing of the old cluster is a member of the new one
            await join(cluster, node_id, left, late=node_id == "n2")
            await cluster.wait_ready()
        await until_equal(cluster.nodes)
        await cluster.kill_node(left)
        async with AsyncClient(cluster.addresses) as client:
            assert (await client.count_pending("t")).total == 500
            async with client.consumer("g", "now") as consumer, asyncio.timeout(40):
                async for delivery in consumer:
                    assert delivery.payload.startswith(b"n") and delivery.attempt >= 2
                    await delivery.ack()
                    break


async def test_a_backup_becomes_a_cluster_again(tmp_path: Path) -> None:
    """Backed up from a slave in two tries, restored by the command, started: everything of that moment is there."""
    async with LocalCluster(tmp_path / "a", 3) as cluster:
        async with AsyncClient(cluster.addresses) as client:
            await fill(client, 300)
        await until_equal(cluster.nodes)
        master = await cluster.master()
        slave = next(node for node in cluster.nodes if node is not master)
        before = await digest_of(slave)
        begun = BackupWriter(tmp_path / "copy")
        async with (
            AsyncClient([slave.client_address]) as client,
            contextlib.aclosing(client.admin.backup(slave.client_address)) as chunks,
        ):
            begun.write(await anext(chunks))
        begun.close()
        done = await command("backup", str(tmp_path / "copy"), "--address", slave.client_address)
        assert "of an interrupted backup" in done.stderr
        alive = await command("restore", str(tmp_path / "copy"), "--config", str(slave.config_file), code=2)
        assert "begins with" in alive.stderr
        config = slave.config_file.read_text(encoding="utf-8")
        reconfigure(slave, "again", slave.directory / "data")
        alive = await command("restore", str(tmp_path / "copy"), "--config", str(slave.config_file), code=1)
        assert "a node is running" in alive.stderr
        slave.config_file.write_text(config, encoding="utf-8")
    other = LocalCluster(tmp_path / "b", 1, cluster_id="again")
    (node,) = other.nodes
    done = await command("restore", str(tmp_path / "copy"), "--config", str(node.config_file), "--json")
    assert json.loads(done.stdout)["pending"] == 300
    async with other:
        assert content(await digest_of(node)) == content(before)
        async with AsyncClient(other.addresses) as client:
            assert (await client.count_pending("t")).total == 300
            await client.schedule("t", b"more", delay_ms=3_600_000)


async def test_recover_leaves_alone_what_is_no_node(tmp_path: Path) -> None:
    """Somebody's letters: refused, and nothing is written but a lock."""
    node = LocalCluster(tmp_path, 1).nodes[0]
    data = node.directory / "data"
    data.mkdir()
    (data / "letter").write_text("mine")
    done = await command("recover", "--config", str(node.config_file), "--yes", code=1)
    assert "no data of a node" in done.stderr
    assert {path.name for path in data.iterdir()} <= {"letter", ".lock"}
