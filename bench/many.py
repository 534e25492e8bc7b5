"""The cases of the benchmark with many topics, consumers or groups; and the one with nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import CREDITS, DAY_MS, HOUR_MS, Consumed, consume, schedule_columns, send_rows, spread
from tickwheel.bench.served import DRAIN_S, Cost, cluster, cost_figures, costing, delivery_figures, through_figures
from tickwheel.client import AsyncClient

RATE, QUICK_RATE = 5_000.0, 500.0
GROUPS, QUICK_GROUPS = 100, 5
TOPICS, QUICK_TOPICS = (1, 100, 1_000, 10_000), (1, 20)
ACTIVE, QUICK_ACTIVE = 200, 5
IDLE, QUICK_IDLE = 1_000, 10
SOON = spread(1_000, 2_000)
GROUP_TOPICS = 1_000
IDLE_CREDITS = 2_000
AT_ONCE = 20
"""Clients that connect at the same time."""
ATTACHED_S, LOOK_S, SETTLE_S = 120.0, 0.2, 3.0


@dataclass(frozen=True, slots=True)
class Taker:
    """A consumer with a client of its own."""

    group: str
    topics: Sequence[str]
    consumed: Consumed
    """What the consumer saw; several consumers may share one."""
    credits: int


@contextlib.asynccontextmanager
async def consumers(client: AsyncClient, addresses: Sequence[str], takers: Sequence[Taker]) -> AsyncIterator[None]:
    """Runs all of these consumers during the block; all are attached when it begins."""
    async with contextlib.AsyncExitStack() as stack:
        tasks: list[asyncio.Task[None]] = []

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        groups = {taker.group for taker in takers}
        for first in range(0, len(takers), AT_ONCE):
            for taker in takers[first : first + AT_ONCE]:
                own = await stack.enter_async_context(AsyncClient(addresses))
                running = consume(own, taker.consumed, group=taker.group, topics=taker.topics, credits=taker.credits)
                tasks.append(asyncio.create_task(running))
            await _attached(client, groups, len(tasks), tasks)
        stack.push_async_callback(end)
        yield
        for task in tasks:
            if task.done():
                task.result()


async def _attached(client: AsyncClient, names: set[str], count: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until the master counts `count` consumers of these groups. Raises the error of one that has ended."""
    async with asyncio.timeout(ATTACHED_S):
        while sum(group.consumers for group in await client.admin.groups() if group.name in names) < count:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(LOOK_S)


async def _touch(client: AsyncClient, topics: Sequence[str]) -> int:
    """Create these topics by a message to each, due at once. Returns the number of messages."""
    async with client.producer() as producer:
        receipts = [await producer.send(topic, b"first", delay_ms=0) for topic in topics]
        await asyncio.gather(*receipts)
    return len(topics)


async def t17(quick: bool) -> list[Figure]:
    """5,000/s over 1, 100, 1,000 and 10,000 topics, row by row to each in turn.

    One consumer has all of up to 1,000 topics; of 10,000 ten groups have 1,000 each, since a group has at most 1,024.
    """
    figures = []
    alone: dict[str, float] = {}
    for count in QUICK_TOPICS if quick else TOPICS:
        topics = [f"topic-{number}" for number in range(count)]
        consumed = Consumed()
        load = f"{count:,} topics" if count > 1 else "1 topic"
        async with cluster() as (nodes, client):
            first = await _touch(client, topics)
            takers = [
                Taker(f"bench-{start}", topics[start : start + GROUP_TOPICS], consumed, CREDITS)
                for start in range(0, count, GROUP_TOPICS)
            ]
            async with consumers(client, nodes.addresses, takers):
                await consumed.drained(first, DRAIN_S)
                consumed.clear()
                async with costing(nodes, client) as cost:
                    rate, seconds = (QUICK_RATE, 1.0) if quick else (RATE, 20.0)
                    result = await send_rows(client, seconds, SOON, rate, topics=topics)
                    await consumed.drained(result.messages, DRAIN_S)
        part = through_figures(result, consumed, cost, load)
        values = {figure.name: figure.value for figure in part}
        alone = alone or values
        figures += [
            *part,
            Figure("p99_of_one_topic", values["lateness_p99"] / max(1.0, alone["lateness_p99"]), "", "2", load),
            Figure("cpu_of_one_topic", values["nodes_cpu"] / alone["nodes_cpu"], "", "1.3", load),
        ]
    return figures


def _shares(cost: Cost, load: str, target: str) -> list[Figure]:
    """What each node takes while nothing is to be done."""
    shares = [100 * node_s / cost.seconds for node_s in cost.nodes_s]
    switches = [count / cost.seconds for count in cost.node_switches]
    return [
        Figure("node_cpu_mean", float(np.mean(shares)), "% of a core", target, load),
        Figure("node_cpu_max", max(shares), "% of a core", target, load),
        Figure("node_switches_mean", float(np.mean(switches)), "/s", load=load),
        Figure("node_switches_max", max(switches), "/s", load=load),
        Figure("elections", cost.elections, "", "0", load),
    ]


async def t18(quick: bool) -> list[Figure]:
    """1,000 idle consumers; 5,000/s for one consumer and for 200 of its group; 50/s for each of 100 groups.

    Each consumer has a client of its own; all of them live in this process.
    """
    figures = []
    idle, active, groups = (QUICK_IDLE, QUICK_ACTIVE, QUICK_GROUPS) if quick else (IDLE, ACTIVE, GROUPS)
    rate, seconds = (QUICK_RATE, 1.0) if quick else (RATE, 20.0)
    async with cluster() as (nodes, client):
        # Each load has a topic and groups of its own; nothing is left over for the next one.
        await _touch(client, ["idle"])
        async with consumers(client, nodes.addresses, [Taker("idle", ["idle"], Consumed(), IDLE_CREDITS)] * idle):
            await asyncio.sleep(1.0 if quick else SETTLE_S)
            async with costing(nodes, client) as cost:
                await asyncio.sleep(seconds)
        figures += _shares(cost, f"{idle:,} idle consumers", "2")
        for count in (1, active):
            consumed = Consumed()
            load = f"{count} consumers" if count > 1 else "1 consumer"
            topic = f"for-{count}"
            first = await _touch(client, [topic])
            async with consumers(client, nodes.addresses, [Taker(topic, [topic], consumed, CREDITS // count)] * count):
                await consumed.drained(first, DRAIN_S)
                consumed.clear()
                async with costing(nodes, client) as cost:
                    result = await schedule_columns(client, seconds, round(rate / 20), SOON, rate, topic=topic)
                    await consumed.drained(result.messages, DRAIN_S)
            figures += through_figures(result, consumed, cost, load)
        takers = [Taker(f"group-{number}", ["for-groups"], Consumed(), IDLE_CREDITS) for number in range(groups)]
        seen = [taker.consumed for taker in takers]
        first = await _touch(client, ["for-groups"])
        async with consumers(client, nodes.addresses, takers):
            await asyncio.gather(*(consumed.drained(first, DRAIN_S) for consumed in seen))
            for consumed in seen:
                consumed.clear()
            async with costing(nodes, client) as cost:
                result = await send_rows(client, seconds, SOON, rate / groups, topics=["for-groups"])
                await asyncio.gather(*(consumed.drained(result.messages, DRAIN_S) for consumed in seen))
    load = f"{groups} groups"
    together = Consumed(
        late_ms=[late for consumed in seen for late in consumed.late_ms],
        # A message comes once to each group.
        ids=[ids + (np.uint64(place) << np.uint64(56)) for place, one in enumerate(seen) for ids in one.ids],
        arrivals_s=[at_s for consumed in seen for at_s in consumed.arrivals_s],
    ).in_order()
    lost = sum(consumed.lost(result) for consumed in seen)
    return [*figures, *delivery_figures(together, lost, load), *cost_figures(cost, result.messages * groups, load)]


async def t19(quick: bool) -> list[Figure]:
    """Three nodes with nothing to do: processor and thread switches of each."""
    async with cluster() as (nodes, client):
        await asyncio.sleep(1.0 if quick else SETTLE_S)
        async with costing(nodes, client) as cost:
            await asyncio.sleep(1.0 if quick else 30.0)
    return _shares(cost, "", "2")


async def t20(quick: bool) -> list[Figure]:
    """Schedule row by row, `Producer.send` with an answer for each, due over 24 h. `make bench-peers` has Go's."""
    async with cluster() as (nodes, client):
        async with costing(nodes, client) as cost:
            result = await send_rows(client, 1.0 if quick else 20.0, spread(HOUR_MS, DAY_MS))
        pending = (await client.admin.master_status()).pending
    return [
        Figure("rate", result.rate, "msg/s", "120,000"),
        *cost_figures(cost, result.messages),
        Figure("failed", result.failed, "msg", "0"),
        Figure("not_pending", result.messages - pending, "msg", "0"),
    ]
