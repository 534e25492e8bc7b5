"""A worker with traces on three real nodes, through a SIGKILL of the master under running handlers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.client.test_tracing import Spans, ids
from tickwheel.client import AsyncClient, Delivery, Worker
from tickwheel.client.tracing import Tracing
from tickwheel.node.local_cluster import LocalCluster

COUNT = 300
SOON_S = 60.0


async def test_handlers_and_their_traces_outlive_the_master(tmp_path: Path) -> None:
    """Each message is handled; what ran when the master died ends well. A message's spans are one trace, at every
    attempt, from its schedule to the settlement that counts."""
    spans = Spans()
    handled: Counter[bytes] = Counter()
    running_now = 0
    begun, dead, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        nonlocal running_now
        running_now += 1
        if running_now == 16:
            begun.set()
        if not dead.is_set():
            await dead.wait()
        running_now -= 1
        handled[delivery.payload] += 1
        if len(handled) == COUNT:
            done.set()

    async with (
        LocalCluster(tmp_path, 3) as cluster,
        AsyncClient(cluster.addresses, timeout_s=SOON_S, tracing=Tracing(spans.provider)) as client,
        asyncio.timeout(2 * SOON_S),
    ):
        receipts = await asyncio.gather(
            *(client.schedule("orders", str(number), delay_ms=0) for number in range(COUNT))
        )
        worker = Worker(client, "g", {"orders": handler}, concurrency=16)
        working = asyncio.ensure_future(worker.run())
        await begun.wait()
        master = await cluster.master()
        await cluster.kill_node(master)
        dead.set()
        await done.wait()
        worker.stop()
        await working
        left = [group for group in await client.admin.groups() if group.name == "g"]
        assert [group.backlog for group in left] == [0]
    assert set(handled) == {str(number).encode() for number in range(COUNT)}
    sent = {}
    for span in spans.named("send orders"):
        assert span.attributes is not None
        sent[span.attributes["messaging.message.id"]] = ids(span)
    assert set(sent) == {receipt.id for receipt in receipts} and len({trace for trace, _, _ in sent.values()}) == COUNT
    processed = spans.named("process orders")
    assert len(processed) == len(spans.named("wait orders")) == sum(handled.values())
    for span in (*processed, *spans.named("wait orders")):
        assert span.attributes is not None
        trace, send, _ = sent[span.attributes["messaging.message.id"]]
        assert (ids(span)[0], ids(span)[2]) == (trace, send)
    handlers = {ids(span)[1] for span in processed}
    settled = spans.named("ack orders")
    assert {ids(span)[2] for span in settled} == handlers
    assert {ids(span)[0] for span in settled} == {trace for trace, _, _ in sent.values()}
