"""Filters, pause, reset, quotas, levels, and rows that nobody commits, from client and command line, on three real
nodes, through a SIGKILL."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.process.test_bad_days import until_equal
from tickwheel.client import AsyncClient, Delivery, FilterDiffers, Group
from tickwheel.client.errors import RequestRefused
from tickwheel.client.staging import Rows, StagedAttempt
from tickwheel.node.cli import program as cli
from tickwheel.node.local_cluster import LocalCluster

TAGS: tuple[tuple[str, ...], ...] = (("a",), ("x",), ("c", "b"), (), ("x", "y"))
WANTED = {0, 2}
"""Places in TAGS that `a || b` takes."""


class Ears:
    """A consumer that acknowledges all it gets."""

    def __init__(self, client: AsyncClient) -> None:
        self.got: dict[int, list[int]] = {}
        """Attempts by number of the message."""
        self._changed = asyncio.Event()
        self._consumer = client.consumer("g", "t", filter="b||a")
        self._task = asyncio.ensure_future(self._consumer.run(self._hear))

    async def _hear(self, delivery: Delivery) -> None:
        self.got.setdefault(int(delivery.payload), []).append(delivery.attempt)
        self._changed.set()

    async def until(self, numbers: set[int], times: int = 1) -> None:
        """Wait until exactly these have come, so often at least."""
        async with asyncio.timeout(30):
            while set(self.got) != numbers or min(len(seen) for seen in self.got.values()) < times:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        await self._consumer.close()
        await self._task


def matching(first: int, last: int) -> set[int]:
    """Numbers in [first, last) that the group takes."""
    return {number for number in range(first, last) if number % len(TAGS) in WANTED}


async def send(client: AsyncClient, first: int, last: int) -> None:
    """Schedule numbered messages for a moment from now."""
    async with client.producer() as producer:
        for number in range(first, last):
            await producer.send("t", str(number), delay_ms=50, tags=TAGS[number % len(TAGS)])


async def until_backlog(client: AsyncClient, count: int) -> Group:
    """Wait until so many messages are ready for the only group."""
    async with asyncio.timeout(20):
        while True:
            found = (await client.admin.groups())[0]
            if found.backlog >= count:
                return found
            await asyncio.sleep(0.05)


async def stage_and_leave(client: AsyncClient) -> StagedAttempt:
    """A bulk write whose writer is never heard of again."""
    writer = client.staging.attempt("left", "run", 0)
    due_ms = np.full(20, time.time_ns() // 1_000_000 + 3_600_000)
    await writer.write(Rows("left", due_ms, np.full(20, 5, np.uint32), b"ghost" * 20))
    staged = await writer.finish()
    assert (await client.staging.job("left")).staged_bytes > 0
    await client.admin.update_settings(staging_expiry=timedelta(seconds=1))
    return staged


async def until_expired(client: AsyncClient, staged: StagedAttempt) -> None:
    """A master looks when it begins, and every ten seconds."""
    async with asyncio.timeout(30):
        while True:
            if not (await client.staging.job("left")).staged_bytes:
                break
            await asyncio.sleep(0.05)
    with pytest.raises(RequestRefused, match="expired"):
        await client.staging.commit("left", "run", [staged])
    assert (await client.count_pending("left")).total == 0


async def test_steered_through_the_loss_of_the_master(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what matches comes, nothing while the group is paused under two masters, all of it again after a reset.
    What was staged and never committed goes, under whichever master: all nodes agree, and its commit is refused."""

    async def tickwheel(*words: str) -> str:
        capfd.readouterr()
        assert await asyncio.to_thread(cli.run, list(words)) == 0
        return capfd.readouterr().out

    async with LocalCluster(tmp_path, 3) as cluster, cluster.client() as client:
        monkeypatch.setenv("TICKWHEEL_ADDRESS", ",".join(cluster.addresses))
        await tickwheel("group", "create", "g", "t", "--filter", "b || a")
        staged = await stage_and_leave(client)
        ears = Ears(client)
        await send(client, 0, 500)
        await ears.until(matching(0, 500))
        with pytest.raises(FilterDiffers) as refused:
            async for _ in client.consumer("g", "t", filter="c"):
                raise AssertionError("refused consumers get nothing")
        assert (refused.value.value, refused.value.limit) == ("c", "a || b")

        await tickwheel("group", "pause", "g")
        await send(client, 500, 1_000)
        await cluster.kill_node(await cluster.master())
        await cluster.master()
        await send(client, 1_000, 1_500)
        held = await until_backlog(client, len(matching(500, 1_500)))
        assert (held.paused, held.filter, held.backlog) == (True, "a || b", len(matching(500, 1_500)))
        assert set(ears.got) == matching(0, 500)
        assert "paused" in await tickwheel("group", "list")
        await tickwheel("group", "resume", "g")
        await ears.until(matching(0, 1_500))

        before = {number: len(seen) for number, seen in ears.got.items()}
        await client.admin.reset_group("g", "earliest")
        await ears.until(matching(0, 1_500), times=max(before.values()) + 1)
        assert ears.got[0][-1] == 1
        await ears.close()
        await until_expired(client, staged)
        await until_equal([node for node in cluster.nodes if node.running])

        assert json.loads(await tickwheel("schedule", "t", "x", "--level", "99", "--json"))["level"] == 18
        await tickwheel("settings", "set", "delay_levels=1s 1m", "topic_quotas=q=200", "client_quotas=")
        level = json.loads(await tickwheel("schedule", "t", "x", "--level", "99", "--json"))
        assert (level["level"], level["delay_ms"]) == (2, 60_000)
        began = time.monotonic()
        async with client.producer(batch_messages_max=100) as producer:
            futures = [await producer.send("q", str(number), delay_ms=60_000) for number in range(700)]
            receipts = await asyncio.gather(*futures)
        # 200 at once, one batch overdrawn, the others as the bucket fills.
        assert time.monotonic() - began > 1.5
        assert len({receipt.id for receipt in receipts}) == 700
        assert (await client.count_pending("q")).total == 700
        alive = [node for node in cluster.nodes if node.running]
        disk = json.loads(await tickwheel("disk", "--topics", "--json", "--address", alive[0].client_address))
        assert disk[0]["node_id"] == alive[0].node_id
        assert "journal" in {part["name"] for part in disk[0]["parts"]}
