"""Nodes compare masks of tags. Where other tags have the bits of the wanted one, the client reads the tags."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

from tickwheel.node.local_cluster import LocalCluster
from tickwheel.storage.tags import tag_mask

WANTED = ["pay"]
OTHER = [f"other-{number}" for number in range(60)]
SENT = (("a", WANTED), ("a", OTHER), ("b", OTHER), ("c", OTHER), ("c", WANTED), ("b", WANTED))
"""The last one is due after the others."""
SOON_S = 20.0


async def test_what_only_collides_is_skipped(tmp_path: Path) -> None:
    """By a consumer of several topics and by a pull: it is not delivered, and settled all the same."""
    assert tag_mask(WANTED) & tag_mask(OTHER) == tag_mask(WANTED)
    topics = sorted({topic for topic, _ in SENT})
    texts = [f"{topic} {number}" for number, (topic, _) in enumerate(SENT)]
    wanted = [text for text, (_, tags) in zip(texts, SENT, strict=True) if tags == WANTED]
    async with LocalCluster(tmp_path, 1) as cluster, cluster.client() as client, client.producer() as producer:
        await client.pulling.pull("pulling", topics, filter=WANTED[0])
        async with client.consumer("streaming", topics, filter=WANTED[0]) as consumer:
            due_ms = time.time_ns() // 1_000_000 + 100
            for text, (topic, tags) in zip(texts, SENT, strict=True):
                last = text == texts[-1]
                await producer.send(topic, text, due_ms=due_ms + 500 * last, tags=tags)
            came = []
            async with asyncio.timeout(SOON_S):
                async for delivery in consumer:
                    await delivery.ack()
                    came.append(delivery.payload.decode())
                    if len(came) == len(wanted):
                        break
            assert sorted(came) == sorted(wanted) and consumer.skipped == len(SENT) - len(wanted)
        pulled = []
        for topic in topics:
            batch = await client.pulling.pull("pulling", topic=topic, wait=timedelta(seconds=SOON_S))
            assert len(batch.records) == sum(batch.sizes) and len(batch.attempts) == len(batch.ids)
            if len(batch):
                pulled.append(batch.records[-3:].decode())
                await client.pulling.settle([batch.handle])
        assert sorted(pulled) == sorted(wanted)
        assert {group.name: group.backlog for group in await client.admin.groups()} == {"pulling": 0, "streaming": 0}
