"""The case of the benchmark about the web console: how long the calls of its pages take, what open pages cost nodes.

The console runs in a process of its own. The calls here are those that the scripts of the pages make, and `next` is
followed as they follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.figures import Figure
from tickwheel.bench.load import DAY_MS, HOUR_MS, WAITING_MAX, now_ms
from tickwheel.bench.served import Cost, cluster, costing
from tickwheel.client import AsyncClient, Selection
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto.common_pb2 import MessageMeta

MINUTE_MS = 60_000
PAYLOAD_BYTES = 16
CAMPAIGN = "newsletter"
"""A topic whose messages are all due in one minute."""
GROUP, SCREEN = "screens", "screen-0"
"""The group and the topic of the dead letters."""
LONE_TAG, LONE_KEY = "lone", "nobody/1"
"""Tag and key of a single message: a search for it has to examine everything."""
DEAD_LETTERS_CREDITS = 2_000
FOLLOWED_MAX = 5
"""Pieces of a count that are requested; later ones would cost the same."""
PAUSE_S = 0.02
"""Pause between two calls: a reader looks at the answer."""
LIMIT_MS = "200"
POLL_S = 5.0
"""Pages with lists ask again this often (static/pages/*.js)."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the cluster holds, and how long it is measured."""

    topics: int
    of_topic: int
    campaign: int
    groups: int
    dead: int
    schedules: int
    rounds: int
    """Visits to every page."""
    pages: int
    seconds: float
    """How long the cost of open pages is measured."""

    @property
    def messages(self) -> int:
        """Messages that stay pending; those of the first minutes are not counted."""
        return self.topics * self.of_topic + self.campaign


FULL = Size(5_000, 1_800, 1_000_000, 200, 5_000, 1_000, 50, 100, 30.0)
QUICK = Size(20, 200, 4_000, 5, 100, 20, 2, 10, 1.0)


# -- what lies in the cluster


def _metas(rng: np.random.Generator, count: int) -> tuple[NDArray[np.uint32], bytes]:
    """Metas of a topic's messages: a tenth is red, a thousandth gold, and the keys are of 100,000 customers."""
    made = []
    for customer, chance in zip(rng.integers(0, 100_000, count).tolist(), rng.random(count).tolist(), strict=True):
        tags = ["red"] if chance < 0.1 else ["gold"] if chance > 0.999 else []
        made.append(MessageMeta(key=f"customer-{customer}/{customer % 7}", tags=tags).SerializeToString())
    return np.array([len(meta) for meta in made], np.uint32), b"".join(made)


async def fill(client: AsyncClient, size: Size) -> str:
    """Fill an empty cluster. Returns the id of a message that stays pending."""
    await _put_pending(client, size)
    gate = asyncio.Semaphore(50)

    async def put(number: int) -> None:
        async with gate:
            await client.schedules.put(f"daily/{number}", "runs", b"go", cron=f"{number % 60} {number % 24} * * *")

    await asyncio.gather(*map(put, range(size.schedules)))
    for number in range(size.groups):
        share = max(1, size.topics // size.groups)
        await client.admin.create_group(
            f"group-{number}", [f"topic-{number * share + place}" for place in range(share) if place < size.topics]
        )
    await _put_dead(client, size.dead)
    await client.schedule("topic-1", b"alone", delay_ms=5 * DAY_MS, tags=[LONE_TAG], key=LONE_KEY)
    receipt = await client.schedule("topic-1", {"number": 1}, delay_ms=HOUR_MS, key="customer-3/3", tags=["red"])
    return receipt.id


async def _put_pending(client: AsyncClient, size: Size) -> None:
    rng = np.random.default_rng(5)
    shapes = [_metas(rng, size.of_topic) for _ in range(min(50, size.topics))]
    start_ms = now_ms()
    piece = size.of_topic
    sizes, payloads = np.full(piece, PAYLOAD_BYTES, np.uint32), bytes(PAYLOAD_BYTES * piece)
    waiting = []
    async with client.producer() as producer:

        async def send(topic: str, due_ms: NDArray[np.int64], number: int) -> None:
            meta_sizes, metas = shapes[number % len(shapes)]
            sent = await producer.schedule_columns(topic, due_ms, sizes, payloads, meta_sizes=meta_sizes, metas=metas)
            waiting.append(sent)
            if len(waiting) > WAITING_MAX:
                await waiting.pop(0)

        for number in range(size.topics):
            await send(f"topic-{number}", start_ms + MINUTE_MS + rng.integers(0, 7 * DAY_MS, piece), number)
        campaign_ms = (start_ms // DAY_MS + 1) * DAY_MS + 9 * HOUR_MS
        for number in range(size.campaign // piece):
            await send(CAMPAIGN, campaign_ms + rng.integers(0, MINUTE_MS, piece), number)
        for future in waiting:
            await future


async def _put_dead(client: AsyncClient, count: int) -> None:
    async with client.producer() as producer:
        receipts = [await producer.send(SCREEN, b"\x00\x01", delay_ms=0, tags=["red"]) for _ in range(count)]
        await asyncio.gather(*receipts)
    await client.admin.create_group(GROUP, [SCREEN])
    async with client.consumer(GROUP, [SCREEN], credits=DEAD_LETTERS_CREDITS) as consumer:
        left = count
        async for batch in consumer.batches():
            await asyncio.gather(*(delivery.dead("no such screen") for delivery in batch))
            left -= len(batch)
            if left <= 0:
                return


# -- what pages ask


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that a page shows."""

    load: str
    """For people."""
    call: str
    query: dict[str, object] = field(default_factory=dict)
    follow: bool = False
    """Ask for all further pieces, as the count under the histogram does."""


def _span(name: str, **query: object) -> list[Asked]:
    """The page of pending messages: a histogram and a list of the same selection."""
    step_ms = query.pop("step_ms")
    return [
        Asked(f"histogram, {name}", "count", {**query, "step_ms": step_ms}, follow=True),
        Asked(f"pending, {name}", "pending", query),
    ]


def questions(message_id: str, size: Size) -> list[Asked]:
    """Everything that pages ask, but for reports of chaos runs, which no node is asked for."""
    now, minute = now_ms(), (now_ms() // DAY_MS + 1) * DAY_MS + 9 * HOUR_MS
    day: dict[str, object] = {"due_ms_max": now + DAY_MS, "step_ms": 900_000}
    everything: dict[str, object] = {"step_ms": HOUR_MS}
    found = [
        Asked("session", "session"),
        Asked("overview", "picture"),
        Asked("topics", "topics"),
        Asked("topics by backlog", "topics", {"sort": "backlog", "descending": "true"}),
        Asked("topics by name", "topics", {"name": "topic-12"}),
        Asked("topics, last page", "topics", {"page": max(1, size.topics // 50)}),
        Asked("topic", "topic", {"name": "topic-1"}),
        Asked("groups", "groups"),
        Asked("groups by name", "groups", {"name": "group-1", "sort": "backlog", "descending": "true"}),
        Asked("group", "group", {"name": GROUP}),
        Asked("groups with dead letters", "groups", {"dead": "true"}),
        Asked("dead letters", "dead", {"group": GROUP}),
        Asked("dead letter", "letter", {"group": GROUP, "number": min(9, size.dead - 1)}),
        Asked("sweeps", "sweeps"),
        Asked("schedules", "schedules"),
        Asked("schedules by name", "schedules", {"prefix": "daily/9"}),
        Asked("schedule", "schedule", {"name": "daily/9"}),
        Asked("message", "message", {"id": message_id}),
        Asked("trace", "trace", {"id": message_id}),
        Asked("settings", "settings"),
        Asked("users and roles", "access"),
        Asked("audit log", "audit"),
        *_span("10 min", due_ms_max=now + 10 * MINUTE_MS, step_ms=5_000),
        *_span("1 h", due_ms_max=now + HOUR_MS, step_ms=30_000),
        *_span("24 h", **day),
        *_span("7 days", due_ms_max=now + 7 * DAY_MS, step_ms=2 * HOUR_MS),
        *_span("all", **everything),
        *_span(
            "an hour by minutes", due_ms_min=minute - HOUR_MS // 2, due_ms_max=minute + HOUR_MS // 2, step_ms=60_000
        ),
        *_span("a minute by seconds", due_ms_min=minute, due_ms_max=minute + MINUTE_MS, step_ms=1_000),
    ]
    filters: list[tuple[str, dict[str, object]]] = [
        ("a topic", {"topic": "topic-7"}),
        ("a topic of one minute", {"topic": CAMPAIGN}),
        ("a tag of a tenth", {"tag": "red"}),
        ("a tag of a thousandth", {"tag": "gold"}),
        ("the tag of one", {"tag": LONE_TAG}),
        ("a tag of none", {"tag": "none"}),
        ("a key", {"key": "customer-17/3"}),
        ("the key of one", {"key": LONE_KEY}),
        ("a key of none", {"key": "none"}),
        ("the beginning of a tenth of the keys", {"key_prefix": "customer-1"}),
        ("the beginning of one key", {"key_prefix": "nobody/"}),
        ("topic, tag and key's beginning", {"topic": CAMPAIGN, "tag": "red", "key_prefix": "customer-4"}),
    ]
    for name, query in filters:
        found += _span(f"{name}, all", **query, **everything)
    found += _span("a tag of a tenth, 24 h", tag="red", **day)
    found += _span("the beginning of a tenth of the keys, 24 h", key_prefix="customer-1", **day)
    return found


# -- a console, and who reads it


@contextlib.asynccontextmanager
async def console_of(addresses: Iterable[str], *options: str) -> AsyncIterator[str]:
    """Runs a console process during the block; yields its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tickwheel.node.cli.main", "console"),
        *("--addresses", ",".join(addresses), "--bind", "127.0.0.1:0", *options),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode()
        found = re.search(r"http://[\w.:]+", said)
        if found is None:
            raise RuntimeError(f"the console says: {said!r}")
        yield found.group()
    finally:
        process.terminate()
        await process.wait()


Times = dict[str, list[float]]
"""How long the calls of each load took, in ms."""


async def _ask(session: aiohttp.ClientSession, asked: Asked, times: Times) -> None:
    following = ""
    for _ in range(FOLLOWED_MAX):
        query = {name: str(value) for name, value in asked.query.items()}
        began = time.perf_counter()
        async with session.get(
            f"/api/{asked.call}", params=query | ({"next": following} if following else {})
        ) as answer:
            body = await answer.json()
            took_ms = (time.perf_counter() - began) * 1_000
            if answer.status != 200:
                raise RuntimeError(f"{asked.load}: {answer.status} {body}")
        times[asked.load].append(took_ms)
        following = body.get("next", "")
        if not (asked.follow and following):
            return


async def read_pages(url: str, message_id: str, size: Size) -> Times:
    """Visit every page again and again, in random order, while one page stays open."""
    times: Times = defaultdict(list)
    rng = random.Random(7)
    async with open_pages(url, 1), aiohttp.ClientSession(url) as session:
        for number in range(size.rounds + 1):
            if number == 1:
                times.clear()  # the first visit opens connections
            order = questions(message_id, size)
            rng.shuffle(order)
            for asked in order:
                await _ask(session, asked, times)
                await asyncio.sleep(PAUSE_S)
    return times


@contextlib.asynccontextmanager
async def open_pages(url: str, count: int, polled: tuple[str, ...] = ()) -> AsyncIterator[list[int]]:
    """Keeps so many pages open during the block, each with its stream. Page n also polls the n-th call of `polled`, as
    its script would. The block begins once each page has had a picture; the list counts them."""
    seen = [0] * count
    first = [asyncio.Event() for _ in range(count)]

    async def stream(session: aiohttp.ClientSession, place: int) -> None:
        async with session.get("/api/stream") as answer:
            async for line in answer.content:
                if line.startswith(b"event: picture"):
                    seen[place] += 1
                    first[place].set()

    async def poll(session: aiohttp.ClientSession, call: str) -> None:
        while True:
            async with session.get(f"/api/{call}") as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{call}: {answer.status} {await answer.text()}")
            await asyncio.sleep(POLL_S)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        tasks = [asyncio.create_task(stream(session, place)) for place in range(count)]
        if polled:
            tasks += [asyncio.create_task(poll(session, polled[place % len(polled)])) for place in range(count)]
        try:
            await asyncio.gather(*(event.wait() for event in first))
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


def _shares(cost: Cost) -> NDArray[np.float64]:
    return np.array(cost.nodes_s) / cost.seconds * 100


async def page_costs(nodes: LocalCluster, client: AsyncClient, url: str, size: Size) -> list[Figure]:
    """Processor time of each node without and with open pages."""
    figures = []
    async with costing(nodes, client) as quiet:
        await asyncio.sleep(size.seconds)
    loads: dict[str, tuple[str, ...]] = {
        "overview": (),
        "lists": ("topics", "groups", "sweeps", "schedules", "groups?dead=true", "topic?name=topic-1"),
    }
    for name, polled in loads.items():
        async with open_pages(url, size.pages, polled) as seen:
            before = sum(seen)
            async with costing(nodes, client) as cost:
                await asyncio.sleep(size.seconds)
            pictures = (sum(seen) - before) / size.pages / cost.seconds
        load = f"{size.pages} pages: {name}"
        more = np.maximum(0.0, _shares(cost) - _shares(quiet))
        figures += [
            Figure("node_cpu_more_max", float(more.max()), "% of a core", "5", load),
            Figure("node_cpu_max", float(_shares(cost).max()), "% of a core", load=load),
            Figure("pictures", pictures, "/s a page", load=load),
            Figure("elections", cost.elections, "", "0", load),
        ]
    return [Figure("node_cpu_max", float(_shares(quiet).max()), "% of a core", load="no page"), *figures]


def time_figures(times: Times) -> list[Figure]:
    """The percentiles of the calls of each load."""
    figures = []
    for load, calls_ms in sorted(times.items()):
        p50, p99 = np.percentile(calls_ms, (50, 99))
        figures += [Figure("call_p50", float(p50), "ms", load=load), Figure("call_p99", float(p99), "ms", load=load)]
    slowest = max(figure.value for figure in figures if figure.name == "call_p99")
    return [Figure("slowest_call_p99", slowest, "ms", LIMIT_MS), *figures]


async def t22(quick: bool) -> list[Figure]:
    """The web console beside ten million pending messages and 5,000 topics: each call, and a hundred open pages."""
    size = QUICK if quick else FULL
    async with cluster() as (nodes, client):
        message_id = await fill(client, size)
        async with console_of(nodes.addresses) as url:
            await client.sweeps.wait((await client.sweeps.cancel(Selection("topic-3"))).job_id)
            times = await read_pages(url, message_id, size)
            costs = await page_costs(nodes, client, url, size)
        pending = (await client.admin.master_status()).pending
    return [Figure("pending", pending, "msg"), *time_figures(times), *costs]
