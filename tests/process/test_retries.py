"""Retries, dead letters, order, broadcasting on three real nodes, by client and command line, over a killed master."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.process.commands import command
from tests.process.test_recovery import digest_of, until_equal
from tickwheel.client import AsyncClient, Client, Delivery, ExponentialBackoff, RetryPolicy
from tickwheel.client.admin import AdminClient
from tickwheel.node.local_cluster import LocalCluster

COUNT = 300


async def said(*words: str) -> Any:
    """What a command answers as JSON."""
    return json.loads((await command(*words, "--json")).stdout)


async def test_tries_end_well_over_a_killed_master(tmp_path: Path) -> None:
    """P1: message n fails n % 4 times, or always; the master is killed; each comes until it succeeds or is dead."""
    async with LocalCluster(tmp_path, 3) as cluster:
        address = ",".join(node.client_address for node in cluster.nodes)
        words = ("--retry-initial", "400ms", "--retry-factor", "1", "--attempts-max", "5", "--address", address)
        created = await said("group", "create", "g", "t", *words)
        assert created["retry"]["attempts_max"] == 5
        client = cluster.client()
        tries: dict[int, list[int]] = {}
        left = {number for number in range(COUNT) if number % 4 != 3}
        complete = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            number = int(delivery.payload)
            tries.setdefault(number, []).append(delivery.attempt)
            if number % 4 == 3 or delivery.attempt <= number % 4:
                raise RuntimeError(f"try {delivery.attempt} of {number}")
            left.discard(number)
            if not left:
                complete.set()

        lease = timedelta(seconds=2)
        async with client.consumer("g", "t", lease=lease) as consumer, client.producer() as producer:
            running = asyncio.ensure_future(consumer.run(handle, concurrency=64))
            now_ms = time.time_ns() // 1_000_000
            await producer.schedule_many("t", [(now_ms, b"%d" % number) for number in range(COUNT)])
            cluster.signal_node(await cluster.master(), signal.SIGKILL)
            await asyncio.wait_for(complete.wait(), 40)
            async with asyncio.timeout(20):
                while (await client.dead.page("g", size=1)).total < COUNT // 4:
                    await consumer.drain()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        repeats = sum(len(seen) - len(set(seen)) for seen in tries.values())
        assert sorted(tries) == list(range(COUNT))
        assert all(seen[-1] > n % 4 or n % 4 == 3 for n, seen in tries.items())
        assert repeats <= COUNT, "a failover may repeat what was not settled, once"
        dead = [number for number in range(COUNT) if number % 4 == 3]
        await _dead_letters(address, client, dead)
        alive = [node for node in cluster.nodes if node.running]
        await until_equal(alive)
        assert (await digest_of(alive[0])).digest


async def _dead_letters(address: str, client: AsyncClient, dead: list[int]) -> None:
    """Listed, shown, replayed and purged by the command line and both clients."""
    where = ("--address", address)
    async with asyncio.timeout(20):
        listed = await said("dead", "list", "g", *where)
        while listed["total"] < len(dead):
            listed = await said("dead", "list", "g", *where)
    assert (listed["queue"], listed["total"]) == ("%DLQ%g", len(dead))
    shown = [await client.dead.get("g", letter["number"]) for letter in listed["letters"][:5]]
    assert {int(letter.payload or b"") for letter in shown} <= set(dead)
    first = await said("dead", "show", "g", str(shown[0].number), *where)
    assert (first["cause"], first["attempts"]) == ("refused", 5)
    assert first["error"] == f"RuntimeError: try 5 of {first['payload']}"
    one = await said("dead", "replay", "g", str(shown[0].number), *where)
    assert one == {"replayed": 1, "missing": 0, "kept": 0}
    rest = await asyncio.to_thread(_replay_rest, address)
    assert rest == len(dead) - 2
    got: list[int] = []
    async with client.consumer("g") as consumer, asyncio.timeout(15):
        async for delivery in consumer:
            assert delivery.attempt == 1
            got.append(int(delivery.payload))
            await delivery.ack()
            if len(got) == len(dead) - 1:
                break
    assert sorted(got) == sorted(set(dead) - {int(shown[1].payload or b"")})
    assert (await said("dead", "list", "g", *where))["total"] == 0


def _replay_rest(address: str) -> int:
    """By the blocking client: purge one, replay all that are left."""
    with Client(address) as client:
        letters = list(client.dead_letters("g"))
        assert client.purge_dead("g", [letters[0].number]).changed == 1
        return client.replay_dead("g").changed


async def test_order_and_broadcast_over_a_killed_master(tmp_path: Path) -> None:
    """A FIFO topic keeps the order of each message group; a broadcasting group loses nothing to all its consumers.

    (Who is not attached again yet when the others have answered for a message misses it: docs/CLIENT.md.)
    """
    async with LocalCluster(tmp_path, 3) as cluster:
        address = ",".join(node.client_address for node in cluster.nodes)
        await command("topic", "create", "ordered", "--fifo", "--address", address)
        client = cluster.client()
        pause = timedelta(milliseconds=100)
        backoff = ExponentialBackoff(initial=pause, factor=1.0, maximum=pause)
        admin: AdminClient = client.admin
        await admin.create_group("g", ["ordered"], retry=RetryPolicy(backoff=backoff))
        await admin.create_group("all", ["ordered"], broadcasting=True)
        done: dict[str, list[int]] = {name: [] for name in "abc"}
        heard: list[set[str]] = [set(), set()]
        failed: set[str] = set()
        complete = asyncio.Event()

        def look() -> None:
            if all(len(set(seen)) == 20 for seen in done.values()) and len(heard[0] | heard[1]) == 60:
                complete.set()

        async def handle(delivery: Delivery) -> None:
            name, number = delivery.payload.decode().split("-")
            if number == "7" and name not in failed:
                failed.add(name)
                raise RuntimeError("not yet")
            done[name].append(int(number))
            look()

        async def hear(place: int) -> None:
            async with client.consumer("all") as consumer:
                async for delivery in consumer:
                    heard[place].add(delivery.payload.decode())
                    await delivery.ack()
                    look()

        listeners = [asyncio.ensure_future(hear(place)) for place in range(2)]
        async with client.consumer("g") as consumer, client.producer() as producer:
            listeners.append(asyncio.ensure_future(consumer.run(handle, concurrency=8)))
            now_ms = time.time_ns() // 1_000_000
            for number in range(20):
                for name in "abc":
                    await producer.send("ordered", f"{name}-{number}", due_ms=now_ms + number, message_group=name)
            await producer.flush()
            cluster.signal_node(await cluster.master(), signal.SIGKILL)
            await asyncio.wait_for(complete.wait(), 40)
            for task in listeners:
                task.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)
        for seen in done.values():
            first = list(dict.fromkeys(seen))
            assert first == list(range(20)), "in order, whatever the failover repeated"
        assert all(heard)
