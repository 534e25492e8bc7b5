"""What clients and the command line ask of delivery, each through a SIGKILL of the master, on one cluster of three.

Bulk cancels and moves with their progress; levels, reset, pause of a topic, dead letters and `tickwheel consume`.
Retries, order and broadcasting: `test_retries.py`; filters, pause of a group: `test_flow.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.process.commands import COMMAND, command
from tests.process.test_recovery import until_equal
from tickwheel.client import AsyncClient, Client, Delivery, Selection, Sweep
from tickwheel.client.producer import Producer
from tickwheel.node.local_cluster import LocalCluster, LocalNode
from tickwheel.proto import common_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOUR_MS = 3_600_000
SOME, MORE = 10_000, 20_000
"""Messages of a sweep: ten steps or twenty, so that a kill comes in the middle; more for those that begin first."""
FEW = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes for all tests here; at the end they are alike."""
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 3) as started:
        yield started
        await started.wait_ready()
        await until_equal(started.nodes)


@pytest.fixture(autouse=True)
def named(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the nodes."""
    monkeypatch.setenv("TICKWHEEL_ADDRESS", ",".join(cluster.addresses))


async def tickwheel(*words: str) -> Any:
    """What a command answers."""
    return json.loads((await command(*words, "--json")).stdout or "null")


async def tickwheel_beside(*words: str) -> Any:
    """The same in a process of its own, so that several can run at once."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, "--json", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, told = await process.communicate()
    assert process.returncode == 0, (words, told)
    return json.loads(said)


async def kill(cluster: LocalCluster, node: LocalNode) -> None:
    """SIGKILL of the master; it comes back once the others have one."""
    await cluster.kill_node(node)
    await cluster.master()
    cluster.start_node(node)


# -- many at once


@dataclass(slots=True)
class Part:
    """What one sweep is to mean: messages a millisecond apart, with a key each and one tag."""

    topic: str
    prefix: str
    tag: str
    count: int
    first_id: str = ""

    async def load(self, producer: Producer, first_ms: int) -> None:
        """Schedule it."""
        for at in range(0, self.count, SOME):
            keys = [f"{self.prefix}-{number}" for number in range(at, at + SOME)]
            metas = [common_pb2.MessageMeta(key=key, tags=[self.tag]).SerializeToString() for key in keys]
            sizes = [len(meta) for meta in metas]
            due_ms = np.arange(first_ms + at, first_ms + at + SOME)
            receipt = await producer.schedule_columns(
                self.topic, due_ms, np.ones(SOME), b"x" * SOME, meta_sizes=sizes, metas=b"".join(metas)
            )
            self.first_id = self.first_id or (await receipt).texts()[0]


async def until_begun(client: AsyncClient, count: int, *asking: asyncio.Future[Any]) -> dict[str, Sweep]:
    """Wait until there are so many sweeps; raises what ended one of those who ask for them."""
    async with asyncio.timeout(60):
        while True:
            found = await client.sweeps.list()
            if len(found) == count:
                return {sweep.job_id: sweep for sweep in found}
            for task in asking:
                if task.done():
                    task.result()
            await asyncio.sleep(0.002)


async def followed(client: AsyncClient, begun: Sweep) -> Sweep:
    """To its end; progress never falls."""
    fractions = [begun.fraction]
    async for sweep in client.sweeps.follow(begun.job_id):
        fractions.append(sweep.fraction)
    assert fractions == sorted(fractions) and fractions[-1] == 1
    return sweep


async def test_sweeps_are_carried_on(cluster: LocalCluster) -> None:
    """P9: six sweeps, by topic, tag and key prefix, from client, blocking client and command line; the master dies in
    the middle of them. The next one carries each on: every message is cancelled or moved once, and no other."""
    client = cluster.client()
    first_ms = (time.time_ns() // 1_000_000 // HOUR_MS + 2) * HOUR_MS
    cancelled = [Part("off", "o", "x", SOME), Part("many", "r", "red", SOME), Part("many", "a", "x", MORE)]
    moved = [Part("later", "l", "x", SOME), Part("many", "b", "blue", SOME), Part("many", "c", "x", MORE)]
    async with client.producer() as producer:
        for part in (*cancelled, *moved):
            await part.load(producer, first_ms)
    shift = timedelta(hours=2)
    master = await cluster.master()
    with Client(",".join(cluster.addresses)) as blocking:
        assert blocking.count_pending().total == sum(part.count for part in (*cancelled, *moved))

        def by_tag() -> list[Sweep]:
            red = blocking.sweeps.cancel(Selection(topic="many", tag="red"))
            blue = blocking.sweeps.reschedule(Selection(tag="blue"), shift=shift)
            return [blocking.sweeps.wait(red.job_id), blocking.sweeps.wait(blue.job_id)]

        by_line = asyncio.ensure_future(
            asyncio.gather(
                tickwheel_beside("pending", "cancel", "many", "--key-prefix", "a-", "--yes"),
                tickwheel_beside("pending", "reschedule", "many", "--key-prefix", "c-", "--later", "2h", "--yes"),
            )
        )
        await until_begun(client, 2, by_line)
        blocked = asyncio.ensure_future(asyncio.to_thread(by_tag))
        begun = await asyncio.gather(
            client.sweeps.cancel(Selection(topic="off")),
            client.sweeps.reschedule(Selection(topic="later"), shift=shift),
        )
        before = await until_begun(client, 6, by_line, blocked)
        killed_ms = time.time_ns() // 1_000_000
        await kill(cluster, master)
        followed_ones = await asyncio.gather(*(followed(client, before[sweep.job_id]) for sweep in begun))
        ended = [*followed_ones, *await blocked]
        printed = await by_line
    ended += [await client.sweeps.get(sweep["job_id"]) for sweep in printed]
    # All of them, unless the last to begin had to wait for a processor.
    assert any(before[sweep.job_id].done and sweep.ended_ms > killed_ms for sweep in ended), "over before the kill"
    for sweep in ended:
        counts = (sweep.state, sweep.done, sweep.too_late, sweep.gone, sweep.too_far)
        assert counts == ("FINISHED", MORE if sweep.selection.key_prefix else SOME, 0, 0, 0)
    assert [sweep["done"] for sweep in printed] == [MORE, MORE]

    end_ms = first_ms + HOUR_MS
    count_old = partial(client.count_pending, due_ms_min=first_ms, due_ms_max=end_ms)
    count_new = partial(client.count_pending, due_ms_min=first_ms + 2 * HOUR_MS, due_ms_max=end_ms + 2 * HOUR_MS)
    assert ((await count_old()).total, (await client.count_pending("off")).total) == (0, 0)
    assert ((await count_new("later")).total, (await count_new("many")).total) == (SOME, SOME + MORE)
    assert (await count_new("many", tag="blue", key_prefix="b-")).total == SOME
    for part in cancelled:
        assert (await client.get(part.first_id)).state == "CANCELLED"
    for part in moved:
        message = await client.get(part.first_id)
        assert (message.state, message.due_ms) == ("PENDING", first_ms + 2 * HOUR_MS)


# -- steering


class Heard:
    """What a group has had: attempts by payload, and when each was due."""

    def __init__(self) -> None:
        self.attempts: dict[str, list[int]] = {}
        self.due_ms: dict[str, int] = {}
        self._changed = asyncio.Event()

    def note(self, payload: str, attempt: int, due_ms: int) -> None:
        """One more."""
        self.attempts.setdefault(payload, []).append(attempt)
        self.due_ms[payload] = due_ms
        self._changed.set()

    async def until(self, payloads: Sequence[str], times: int = 1) -> None:
        """Wait until all of these have come, so often at least."""
        async with asyncio.timeout(40):
            while any(len(self.attempts.get(payload, ())) < times for payload in payloads):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def printing(address: str, topic: str, group: str) -> AsyncIterator[Heard]:
    """`tickwheel consume` as a process, until it is told to end; it must end well."""
    words = ("consume", topic, "--group", group, "--json", "--address", address)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stderr is not None
    heard, out = Heard(), process.stdout

    async def read() -> None:
        while line := await out.readline():
            said = json.loads(line)
            heard.note(said["payload"], said["attempt"], said["due_ms"])

    reading = asyncio.ensure_future(read())
    try:
        yield heard
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 20)
        assert process.returncode == 0, await process.stderr.read()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


@asynccontextmanager
async def listening(client: AsyncClient, group: str, topic: str) -> AsyncIterator[Heard]:
    """A consumer that acknowledges everything."""
    heard = Heard()

    async def handle(delivery: Delivery) -> None:
        heard.note(delivery.payload.decode(), delivery.attempt, delivery.due_ms)

    async with client.consumer(group, topic) as consumer:
        running = asyncio.ensure_future(consumer.run(handle))
        yield heard
        await consumer.drain()
    await running


async def until_settled(client: AsyncClient, *names: str) -> None:
    """Wait until these groups have settled all there was."""
    async with asyncio.timeout(40):
        while True:
            left = [g for g in await client.admin.groups() if g.name in names and (g.backlog or g.in_flight)]
            if not left:
                return
            await asyncio.sleep(0.02)


async def bury(client: AsyncClient, payloads: Sequence[str]) -> list[int]:
    """These as dead letters of group `tries`; their numbers."""
    async with client.consumer("tries", "d") as consumer, asyncio.timeout(40):
        for payload in payloads:
            await client.schedule("d", payload, delay_ms=0)
        left = len(payloads)
        async for delivery in consumer:
            await delivery.dead("no use")
            left -= 1
            if not left:
                break
    return [letter.number async for letter in client.dead.list("tries")]


async def test_what_was_steered_stays_so(cluster: LocalCluster) -> None:
    """P1, P5: another table of levels, a reset, a paused topic, dead letters replayed and purged, each told to a master
    that dies at once: the next one holds to it. `tickwheel consume` goes on, and has nothing again that it had
    acknowledged."""
    client = cluster.client()
    address = ",".join(cluster.addresses)
    early, amid = [f"early-{n}" for n in range(FEW)], [f"amid-{n}" for n in range(FEW)]
    held = [f"held-{n}" for n in range(2 * FEW)]
    await asyncio.gather(*map(client.admin.create_topic, ("t", "held", "d")))
    async with (
        printing(address, "t", "cli") as cli_heard,
        listening(client, "anew", "t") as anew,
        listening(client, "held", "held") as waiting,
        client.producer() as producer,
    ):
        with Client(address) as blocking:
            await producer.schedule_many("t", [(0, text.encode()) for text in early])
            letters = await bury(client, ["left", "purged", "replayed"])
            await tickwheel("topic", "pause", "held")
            await producer.schedule_many("held", [(0, text.encode()) for text in held[:FEW]])
            old = await tickwheel("schedule", "t", "old", "--level", "2")
            await asyncio.gather(cli_heard.until(early), anew.until(early))
            await until_settled(client, "cli", "anew")
            master = await cluster.master()
            await tickwheel("settings", "set", "delay_levels=1s 2s")
            await tickwheel("dead", "purge", "tries", str(letters[1]))
            await asyncio.to_thread(blocking.replay_dead, "tries", [letters[2]])
            due_ms = time.time_ns() // 1_000_000 + 200
            await producer.schedule_many("t", [(due_ms, text.encode()) for text in amid])
            await producer.flush()
            await tickwheel("group", "reset", "anew", "--to", "earliest")
            await kill(cluster, master)

            new = await tickwheel("schedule", "t", "new", "--level", "99")
            receipt = await asyncio.to_thread(blocking.schedule, "t", "newer", level=1)
        assert (old["level"], old["delay_ms"]) == (2, 5_000)
        assert (new["level"], new["delay_ms"], receipt.level, receipt.delay_ms) == (2, 2_000, 1, 1_000)
        due = {"old": old["due_ms"], "new": new["due_ms"], "newer": receipt.due_ms}

        await producer.schedule_many("held", [(0, text.encode()) for text in held[FEW:]])
        async with listening(client, "tries", "d") as tries:
            await tries.until(["replayed"])
        assert tries.attempts == {"replayed": [1]}
        dead = await tickwheel("dead", "list", "tries")
        assert [letter["number"] for letter in dead["letters"]] == letters[:1]

        await anew.until(early, times=2)
        assert {anew.attempts[text][-1] for text in early} == {1}, "a reset begins anew"
        for heard in (cli_heard, anew):
            await heard.until([*amid, *due])
            assert {text: heard.due_ms[text] for text in due} == due
        assert {text: cli_heard.attempts[text] for text in early} == {text: [1] for text in early}

        groups = {group["name"]: group for group in await tickwheel("group", "list")}
        topics = {topic["name"]: topic for topic in await tickwheel("topic", "list")}
        assert topics["held"]["paused"] and groups["held"]["backlog"] == len(held) and not waiting.attempts
        await tickwheel("topic", "resume", "held")
        await waiting.until(held)
        assert {text: waiting.attempts[text] for text in held} == {text: [1] for text in held}
