"""A delay index that a disk has spoiled while its node was down: real nodes recover it, and all is delivered."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from tests.process.commands import command
from tickwheel.client import AsyncClient
from tickwheel.node.local_cluster import LocalCluster, LocalNode
from tickwheel.storage.local import LocalDisk
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.unit import UNIT_BYTES

CONFIG = {"wheel": {"buffer_bytes_max": 8 << 20}, "storage": {"checkpoint_period_ms": 1_000}}
COUNT = 250
FILLER_BYTES, FILLERS = 36_000, 250
"""More than a buffer: what came before is merged."""
DAY_MS = 86_400_000
SPOILED = [0, 3, 4, *range(60, 120), COUNT - 1]
"""Single rows, and more than a page."""


async def until_in_checkpoint(node: LocalNode) -> Path:
    """Wait until a checkpoint counts every row; the file of the index."""
    data = node.directory / "data"
    async with asyncio.timeout(20):
        while True:
            manifest = await asyncio.to_thread(read_manifest, LocalDisk(str(data)))
            for file in manifest.files if manifest is not None else ():
                if file.path.endswith("0.index") and file.bytes >= COUNT * UNIT_BYTES:
                    return data / file.path
            await asyncio.sleep(0.02)


def spoil(path: Path) -> None:
    """A byte of some rows changes; of the whole page every byte is zero."""
    content = bytearray(path.read_bytes())
    for row in SPOILED:
        content[row * UNIT_BYTES + row % UNIT_BYTES] ^= 0x40
    content[60 * UNIT_BYTES : 120 * UNIT_BYTES] = bytes(60 * UNIT_BYTES)
    path.write_bytes(content)


async def until_repaired(node: LocalNode) -> list[int]:
    """Wait until the node says that it has written rows again: how many, each time."""
    async with asyncio.timeout(20):
        while True:
            lines = [json.loads(line) for line in node.log_file.read_text(encoding="utf-8").splitlines()]
            rows = [line["rows"] for line in lines if "are written again" in line["event"]]
            if rows:
                return rows
            await asyncio.sleep(0.02)


async def load(client: AsyncClient, ahead_ms: int) -> dict[bytes, int]:
    """Messages that come soon, with what lets a node merge them; when each is due."""
    async with client.producer() as producer:
        first_ms = time.time_ns() // 1_000_000 + ahead_ms
        due = {b"%d" % number: first_ms + number for number in range(COUNT)}
        await producer.schedule_many("t", [(when, text) for text, when in due.items()])
        await producer.flush()
        filler = bytes(FILLER_BYTES)
        await producer.schedule_many("filler", [(first_ms + DAY_MS, filler) for _ in range(FILLERS)])
    return due


async def delivered(client: AsyncClient, count: int) -> list[tuple[bytes, int, int, int]]:
    """Payload, due time, attempt and term of so many."""
    got: list[tuple[bytes, int, int, int]] = []
    async with client.consumer("g", "t") as consumer, asyncio.timeout(30):
        async for delivery in consumer:
            got.append((delivery.payload, delivery.due_ms, delivery.attempt, delivery.term))
            delivery.ack()
            if len(got) == count:
                break
    return got


async def test_a_damaged_index_is_repaired_and_all_are_delivered(tmp_path: Path) -> None:
    """P1: a node is killed, its index spoiled and started: it gets the rows from the others, to the byte, and as master
    it delivers all of them, each once."""
    async with LocalCluster(tmp_path, 3, config=CONFIG) as cluster:
        client = cluster.client()
        master = await cluster.master()
        node = next(node for node in cluster.nodes if node is not master)
        due = await load(client, 2_000)
        index = await until_in_checkpoint(node)
        await cluster.kill_node(node)
        whole = index.read_bytes()
        spoil(index)
        cluster.start_node(node)
        assert await until_repaired(node) == [len(SPOILED)]
        assert index.read_bytes() == whole
        await cluster.wait_ready()
        await client.admin.transfer(node.node_id)
        assert await cluster.wait_ready() is node
        term = (await client.admin.master_status()).term
        got = await delivered(client, COUNT)
        assert sorted(got) == sorted((text, when, 1, term) for text, when in due.items())


async def test_a_cluster_of_one_is_rebuilt_from_its_journal(tmp_path: Path) -> None:
    """Nobody can be asked for what is lost: the node stops and names file and command; the command lets it make its
    state anew, where what was cancelled and settled stays so."""
    async with LocalCluster(tmp_path, 1, config=CONFIG) as cluster:
        client = cluster.client()
        (node,) = cluster.nodes
        words = ("rebuild", "--config", str(node.config_file))
        await client.schedule("t", b"settled", delay_ms=0)
        assert [text for text, *_ in await delivered(client, 1)] == [b"settled"]
        due = await load(client, 6_000)
        first = await anext(client.list_pending("t", page_size=1))
        assert await client.cancel(first.id) == "CANCELLED"
        due.pop(b"0")
        refused = await command(*words, code=1)
        assert "a node is running" in refused.stderr
        index = await until_in_checkpoint(node)
        await cluster.kill_node(node)
        whole = index.read_bytes()
        spoil(index)
        cluster.start_node(node)
        assert node.process is not None
        assert await asyncio.to_thread(node.process.wait, 30) == 3
        assert "0.index" in node.log_tail() and "tickwheel rebuild" in node.log_tail()

        assert json.loads((await command(*words, "--json")).stdout)["entries"] > 10
        cluster.start_node(node)
        await cluster.wait_ready()
        got = await delivered(client, len(due))
        assert sorted((text, when) for text, when, *_ in got) == sorted(due.items())
        assert index.read_bytes() == whole
        assert (await client.count_pending()).total == FILLERS
