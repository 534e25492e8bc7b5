"""Bad days of real nodes: damaged disks, a full one, kills under load."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest

from tickwheel.client import AsyncClient, NodeRole, NodeState, NodeStatus
from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub

KILL_ROUNDS = int(os.environ.get("TICKWHEEL_KILL_ROUNDS", "2"))
"""How often all nodes are killed under load; `TICKWHEEL_KILL_ROUNDS=20` for the long run."""


def now_ms() -> int:
    """This machine's clock, which the nodes share."""
    return time.time_ns() // 1_000_000


async def digests(nodes: list[LocalNode]) -> set[tuple[int, bytes]]:
    """(applied index, digest) of each; one element when all agree."""
    found = set()
    for node in nodes:
        async with grpc.aio.insecure_channel(node.client_address) as channel:
            digest = await AdminStub(channel).GetDigest(admin_pb2.GetDigestRequest(), timeout=20)
            found.add((digest.applied_index, digest.digest))
    return found


async def until_equal(nodes: list[LocalNode]) -> None:
    """Wait until all have applied the same and agree on it."""
    async with asyncio.timeout(20):
        while True:
            if len(await digests(nodes)) == 1:
                return
            await asyncio.sleep(0.1)


async def ended(node: LocalNode) -> int:
    """Exit code of a node that ends by itself."""
    assert node.process is not None
    return await asyncio.to_thread(node.process.wait, 20)


def said(node: LocalNode) -> str:
    """Its log; never a traceback."""
    text = node.log_file.read_text(encoding="utf-8")
    assert "Traceback" not in text
    return text


async def refuses_to_start(copy: LocalCluster, data: Path, path: Path) -> None:
    """With a copy of `data` in which a byte of the file at `path` is another one."""
    (node,) = copy.nodes
    await asyncio.to_thread(shutil.copytree, data, node.directory / "data")
    damaged = node.directory / "data" / path.relative_to(data)
    content = bytearray(damaged.read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 0x20
    damaged.write_bytes(content)
    copy.start_node(node)
    try:
        assert await ended(node) == 3, path
    finally:
        await copy.stop()
    assert path.name in said(node) and "anew under a new id" in said(node), node.log_tail()
    shutil.rmtree(node.directory)


async def test_a_flipped_byte_refuses_to_start_and_says_which_file(tmp_path: Path) -> None:
    """In the middle of whatever file a node has: exit code 3, the file, what to do; with none, it has everything."""
    async with LocalCluster(tmp_path, 1, config={"storage": {"journal_segment_bytes": 1 << 20}}) as cluster:
        node = cluster.nodes[0]
        async with AsyncClient(cluster.addresses) as client:
            async with client.producer() as producer:
                await producer.schedule_many("t", [(now_ms() + 3_600_000, b"%d" % number) for number in range(50)])
                await producer.schedule_many("now", [(now_ms(), b"now")])
            async with client.consumer("g", "now") as consumer, asyncio.timeout(20):
                await (await anext(aiter(consumer))).ack()
            copied = {chunk.path async for chunk in client.admin.backup(node.client_address)}
            await client.schedule("t", b"behind the checkpoint", delay_ms=3_600_000)
        await cluster.stop_node(node)
        data = node.directory / "data"
        journal = max((data / "journal").glob("*.segment"), key=lambda path: len(path.read_bytes().rstrip(b"\0")))
        paths = [data / name for name in sorted(copied)]
        assert {path.relative_to(data).parts[0] for path in paths} == {"manifest", "state", "wheel"}
        some = [journal, data / "journal" / "hard_state", data / "identity", *paths]
        two = asyncio.Semaphore(2)

        async def refuses(number: int, path: Path) -> None:
            async with two:
                await refuses_to_start(LocalCluster(tmp_path / f"copy-{number}", 1), data, path)

        await asyncio.gather(*(refuses(number, path) for number, path in enumerate(some)))
        cluster.start_node(node)
        await cluster.wait_ready()
        async with AsyncClient(cluster.addresses) as client:
            assert (await client.count_pending("t")).total == 51


async def test_damage_that_a_serving_master_meets_makes_another_lead_first(tmp_path: Path) -> None:
    """A byte of the ready queue is spoiled under it: it hands over, ends with 3 and says why, and nothing is lost."""
    count = 2_000  # more ids than a node has in memory after a restart
    async with LocalCluster(tmp_path, 3) as cluster, AsyncClient(cluster.addresses) as client:
        async with client.producer() as producer:
            await producer.schedule_many("t", [(now_ms(), b"%d" % number) for number in range(count)])
        master = await cluster.master()
        slave = next(node for node in cluster.nodes if node is not master)
        async with asyncio.timeout(20):
            while not [chunk async for chunk in client.admin.backup(slave.client_address) if ".ids." in chunk.path]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await cluster.stop_node(slave)
        cluster.start_node(slave)
        await cluster.wait_ready()
        await client.admin.transfer(slave.node_id)
        (path,) = (slave.directory / "data" / "state" / "ready").glob("*.ids.0")
        content = bytearray(path.read_bytes())
        content[100] ^= 0x10
        path.write_bytes(content)
        got: set[bytes] = set()
        async with client.consumer("g", "t") as consumer, asyncio.timeout(30):
            async for delivery in consumer:
                got.add(delivery.payload)
                delivery.ack()
                if len(got) == count:
                    break
        assert await ended(slave) == 3
        assert (await cluster.master()) is not slave
        text = slave.log_file.read_text(encoding="utf-8")
        assert path.name in text and "anew under a new id" in text, slave.log_tail()


async def test_a_node_whose_files_are_removed_under_it_leaves(tmp_path: Path) -> None:
    """It went on, and acknowledged what its disk would not keep. As a master it hands over first."""
    async with LocalCluster(tmp_path, 3) as cluster, cluster.client() as client:
        master = await cluster.master()
        sent = [await client.schedule("t", b"before", delay_ms=3_600_000)]
        for path in (master.directory / "data").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert await ended(master) == 3
        text = said(master)
        assert "were removed" in text and "anew under a new id" in text, master.log_tail()
        sent.append(await client.schedule("t", b"after", delay_ms=3_600_000))
        assert (await client.count_pending("t")).total == len(sent)


async def test_a_node_that_others_look_for_elsewhere_says_so(tmp_path: Path) -> None:
    """Its host got another address: it heard nobody, and nothing named the reason."""
    async with LocalCluster(tmp_path, 1) as cluster:
        (node,) = cluster.nodes
        await cluster.stop_node(node)
        (port,) = free_ports(1)
        text = node.config_file.read_text(encoding="utf-8")
        node.config_file.write_text(text.replace(node.peer_address, f"127.0.0.1:{port}"), encoding="utf-8")
        cluster.start_node(node)
        await cluster.wait_ready()
        async with asyncio.timeout(20):
            while "another address" not in said(node):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert '"listen.peer_advertised"' in said(node) and f'"known": "{node.peer_address}"' in said(node)


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Three file systems of their own, 64 MiB each; skipped where they cannot be mounted."""
    mounted: list[Path] = []
    try:
        for number in range(3):
            place = tmp_path / f"n{number + 1}" / "data"
            place.mkdir(parents=True)
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
            try:
                done = subprocess.run(mount, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("no mount command here")
            if done.returncode:
                pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
            mounted.append(place)
        yield mounted
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("whose", ["master", "slave"])
async def test_a_full_disk_halts_a_node_and_it_recovers(tmp_path: Path, small_disks: list[Path], whose: str) -> None:
    """It takes no part and says why, the others go on; with room it is a member again, and nothing is lost."""
    assert len(small_disks) == 3
    # Without a mark: this is about what happens when there is none, or when others fill the disk.
    config = {"storage": {"journal_segment_bytes": 1 << 20, "space_reserve_bytes": 0, "high_water_percent": 0}}
    async with LocalCluster(tmp_path, 3, config=config) as cluster, cluster.client() as client:
        sent = [await client.schedule("t", b"before", delay_ms=3_600_000)]
        master = await cluster.master()
        victim = master if whose == "master" else next(node for node in cluster.nodes if node is not master)
        ballast = victim.directory / "data" / "ballast"
        fill(ballast)
        async with asyncio.timeout(30):
            reason = ""
            while "full" not in reason:
                sent.append(await client.schedule("t", bytes(200_000), delay_ms=3_600_000, timeout_s=20))
                status = (await cluster.statuses()).get(victim.node_id)
                if isinstance(status, NodeStatus):
                    reason = status.state_reason
        assert isinstance(status, NodeStatus)
        assert status.state is NodeState.READ_ONLY
        assert status.role is not NodeRole.MASTER
        assert "free space" in reason
        assert (await cluster.master()) is not victim
        async with AsyncClient([victim.client_address]) as other:
            assert await other.admin.statuses()
        ballast.unlink()
        await cluster.wait_ready()
        sent.append(await client.schedule("t", b"after", delay_ms=3_600_000))
        await until_equal(cluster.nodes)
        assert (await client.count_pending("t")).total == len(sent)
        assert "disk is full" in said(victim), "an operator finds it in the log"


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


async def test_nodes_are_killed_at_random_moments_under_load(tmp_path: Path) -> None:
    """SIGKILL of each node once, then of all three at once again and again: none lost, none early, digests equal."""
    async with LocalCluster(tmp_path, 3) as cluster:
        await killed_under_load(cluster, [*([node] for node in cluster.nodes), *[list(cluster.nodes)] * KILL_ROUNDS])


async def killed_under_load(cluster: LocalCluster, rounds: list[list[LocalNode]]) -> None:
    """Schedule and consume all along; in each round kill some nodes at a random moment and start them again."""
    rng = random.Random(len(rounds))
    acknowledged: dict[str, int] = {}
    delivered: dict[str, list[int]] = {}
    settling: list[asyncio.Future[object]] = []
    stop = asyncio.Event()

    async def produce(client: AsyncClient) -> None:
        while not stop.is_set():
            due = now_ms() + np.asarray([rng.randrange(100, 1_500) for _ in range(50)])
            async with client.producer() as producer:
                (batch,) = await producer.schedule_many("t", [(int(when), b"payload") for when in due])
                acknowledged.update(zip((await batch).texts(), due.tolist(), strict=True))
            await asyncio.sleep(0.02)

    async def consume(client: AsyncClient) -> None:
        # A short lease: what was under way to the consumer when a master died is held for so long.
        async with client.consumer("g", "t", lease=timedelta(seconds=2)) as consumer:
            async for batch in consumer.batches():
                for delivery in batch:
                    delivered.setdefault(delivery.id, []).append(now_ms())
                settling.append(asyncio.ensure_future(batch.ack()))

    async with AsyncClient(cluster.addresses, timeout_s=60) as client:
        producing = asyncio.create_task(produce(client))
        consuming = asyncio.create_task(consume(client))
        for victims in rounds:
            before = len(acknowledged)
            async with asyncio.timeout(30):
                while len(acknowledged) < before + 200:
                    assert not producing.done(), producing.exception()
                    await asyncio.sleep(0.01)
            await asyncio.sleep(rng.random() * 0.3)
            await asyncio.gather(*(cluster.kill_node(node) for node in victims))
            for node in victims:
                cluster.start_node(node)
            await cluster.wait_ready()
        stop.set()
        await producing
        async with asyncio.timeout(30):
            while True:
                if set(acknowledged) <= set(delivered):
                    break
                await asyncio.sleep(0.05)
        consuming.cancel()
        await asyncio.gather(consuming, *settling, return_exceptions=True)
    early = [id for id, when in acknowledged.items() if delivered[id][0] < when]
    assert not early
    assert len(acknowledged) >= 200 * len(rounds)
    await until_equal(cluster.nodes)
    for node in cluster.nodes:
        said(node)
