"""Damage to delay logs under three running nodes: delivered from elsewhere, or set aside and shown to the operator."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from tests.process.commands import command
from tickwheel.client import Delivery
from tickwheel.node.local_cluster import LocalCluster, LocalNode

COUNT = 200
BAD_PAGE, LOST = 20, 60


def payload_of(number: int) -> bytes:
    """Longer than some blocks of the log."""
    return b"<%05d>" % number * 5_000


def delay_log(node: LocalNode, number: int) -> tuple[Path, int] | None:
    """Where a message's payload lies, once the hour is merged."""
    for path in (node.directory / "data").glob("wheel/hours/*/*.log"):
        at = path.read_bytes().find(payload_of(number)[:70])
        if at >= 0:
            return path, at + 15_000
    return None


async def flip(node: LocalNode, number: int) -> None:
    """Change one byte of a payload behind the node's back."""
    async with asyncio.timeout(20):
        while (place := await asyncio.to_thread(delay_log, node, number)) is None:
            pass
    path, at = place
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


async def test_a_bad_page_and_a_lost_payload(tmp_path: Path) -> None:
    """P1: what one disk spoils is delivered all the same; what all spoil is a dead letter and says why; all run on."""
    config = {"wheel": {"buffer_bytes_max": 8 << 20}}
    async with LocalCluster(tmp_path, 3, config=config) as cluster:
        address = ",".join(node.client_address for node in cluster.nodes)
        client = cluster.client()
        got: set[int] = set()
        complete = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            number = int(delivery.payload[1:6])
            assert delivery.payload == payload_of(number)
            got.add(number)
            if len(got) == COUNT - 1:
                complete.set()

        await client.admin.create_group("g", ["t"])
        async with client.producer() as producer:
            due_ms = time.time_ns() // 1_000_000 + 1_000
            await producer.schedule_many("t", [(due_ms, payload_of(number)) for number in range(COUNT)])
        master = await cluster.master()
        await flip(master, BAD_PAGE)
        for node in cluster.nodes:
            await flip(node, LOST)
        # Nobody reads a payload before a consumer asks for it, due or not.
        async with client.consumer("g", "t") as consumer:
            running = asyncio.ensure_future(consumer.run(handle))
            await asyncio.wait_for(complete.wait(), 20)
            assert got == set(range(COUNT)) - {LOST}
            async with asyncio.timeout(20):
                while not (await client.dead.page("g", size=1)).total:
                    await consumer.drain()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        shown = json.loads((await command("dead", "show", "g", "0", "--address", address, "--json")).stdout)
        assert shown["cause"] == "payload_lost" and shown["payload_missing"] and "payload" not in shown
        assert "0.log" in shown["error"] and "does not match its CRC" in shown["error"]
        traced = (await command("trace", shown["id"], "--address", address)).stdout
        assert "dead" in traced.lower() and "no member can read" in traced
        assert (await cluster.master()) is master
        assert all(node.running for node in cluster.nodes)
