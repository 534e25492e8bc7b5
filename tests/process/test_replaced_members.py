"""Members replaced by commands while a node is away: it finds the cluster again, though it knows nobody of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.process.commands import command
from tests.process.test_recovery import join, until_equal
from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster, LocalNode
from tickwheel.node.server.process import EXIT_REMOVED


async def until_disks_are_recorded(through: LocalNode, node: LocalNode) -> None:
    """The master does so within a second of seeing a member; adding one again changes nothing and tells."""
    known = (node.node_id, node.peer_address, node.client_address)
    async with AsyncClient([through.client_address]) as client, asyncio.timeout(20):
        while True:
            if all(member.disk_uuid for member in await client.admin.add_member(*known)):
                return
            await asyncio.sleep(0.05)


async def schedule(client: AsyncClient, count: int, due_ms: int, name: str) -> set[bytes]:
    """Schedule so many messages; their payloads."""
    payloads = [f"{name} {number}".encode() for number in range(count)]
    async with client.producer() as producer:
        await producer.schedule_many("t", [(due_ms, payload) for payload in payloads])
    return set(payloads)


async def take_all(client: AsyncClient, wanted: set[bytes]) -> None:
    """Consume until all of them have come, and nothing else."""
    got: set[bytes] = set()
    async with client.consumer("g", "t") as consumer, asyncio.timeout(20):
        async for delivery in consumer:
            got.add(delivery.payload)
            await delivery.ack()
            if got >= wanted:
                break
    assert got == wanted


async def test_a_node_comes_back_to_members_that_it_never_heard_of(tmp_path: Path) -> None:
    """A slave is killed; two nodes are added, and the two that it knows are removed and gone. Then one of the new ones
    dies too: the other and the slave are the majority. Nobody would let the other in, and the cluster would stand
    still, if it did not show who the members are. What was scheduled before, meanwhile and afterwards comes."""
    async with LocalCluster(tmp_path, 3) as cluster:
        old = await cluster.master()
        slave, other = (node for node in cluster.nodes if node is not old)
        soon_ms = time.time_ns() // 1_000_000 + 1_000
        async with AsyncClient(cluster.addresses) as client:
            wanted = await schedule(client, 30, soon_ms, "before")
        await until_equal(cluster.nodes)
        await cluster.kill_node(slave)
        newcomers = await asyncio.gather(*(join(cluster, node_id, old) for node_id in ("n4", "n5")))
        await until_disks_are_recorded(old, slave)
        where = ("--address", ",".join(node.client_address for node in newcomers))
        for node in (other, old):
            await command("member", "remove", node.node_id, *where)
            await cluster.kill_node(node)
            cluster.nodes.remove(node)
        async with AsyncClient([node.client_address for node in newcomers]) as client:
            wanted |= await schedule(client, 30, soon_ms, "meanwhile")
        left, lost = newcomers
        await cluster.kill_node(lost)
        cluster.nodes.remove(lost)

        cluster.start_node(slave)
        assert (await cluster.wait_ready()) is left, "the slave lacks what came meanwhile"
        async with AsyncClient([left.client_address, slave.client_address]) as client:
            wanted |= await schedule(client, 30, soon_ms, "afterwards")
            await take_all(client, wanted)
        await until_equal([left, slave])


async def test_a_member_that_is_removed_while_it_runs_ends_with_4_and_says_so(tmp_path: Path) -> None:
    """Those that it calls tell it. Restarted it ends again; the others go on without it."""
    async with LocalCluster(tmp_path, 3) as cluster, asyncio.timeout(60):
        master = await cluster.master()
        removed, other = (node for node in cluster.nodes if node is not master)
        await until_disks_are_recorded(master, removed)
        await command("member", "remove", removed.node_id, "--address", master.client_address)
        process = removed.process
        assert process is not None and await asyncio.to_thread(process.wait) == EXIT_REMOVED
        assert "this node is no member any more" in removed.log_file.read_text(encoding="utf-8")
        cluster.start_node(removed)
        process = removed.process
        assert process is not None and await asyncio.to_thread(process.wait) == EXIT_REMOVED
        cluster.nodes.remove(removed)
        async with AsyncClient([master.client_address, other.client_address]) as client:
            await take_all(client, await schedule(client, 10, time.time_ns() // 1_000_000, "afterwards"))
        await until_equal([master, other])
