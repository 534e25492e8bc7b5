"""Unique keys on three real nodes, through SIGKILLs of the master: two clients never both have one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

from tickwheel.client import CancelResult, KeyTaken, Receipt
from tickwheel.node.local_cluster import LocalCluster

KEYS = 400
AT_ONCE = 8
HOUR = timedelta(hours=1)
LONG_S = 60.0


async def test_two_clients_race_for_keys(tmp_path: Path) -> None:
    """One of the two has each key, and the other is told its message. Then both cancel by key: one of them cancels the
    message, and neither meets the message that is scheduled under the key afterwards."""
    async with LocalCluster(tmp_path, 3) as cluster:
        clients = [cluster.client(), cluster.client()]
        for client in clients:
            client.timeout_s = LONG_S
        answered, room = asyncio.Event(), asyncio.Semaphore(AT_ONCE)

        async def schedule(number: int, payload: str) -> list[Receipt | KeyTaken]:
            async def one(who: int) -> Receipt | KeyTaken:
                try:
                    return await clients[who].schedule("t", payload, delay=HOUR, unique_key=f"k{number}")
                except KeyTaken as taken:
                    return taken
                finally:
                    answered.set()

            async with room:
                return list(await asyncio.gather(one(number % 2), one(1 - number % 2)))

        async def cancel(number: int) -> list[CancelResult]:
            async with room:
                results = await asyncio.gather(*(client.cancel_by_key("t", f"k{number}") for client in clients))
                answered.set()
                await clients[number % 2].schedule("t", "next", delay=HOUR, unique_key=f"k{number}")
                return list(results)

        async def through_a_kill(*work: asyncio.Task[object]) -> None:
            master = await cluster.master()
            answered.clear()
            await answered.wait()
            await cluster.kill_node(master)
            assert not all(task.done() for task in work), "it dies in the middle"
            await asyncio.gather(*work)
            cluster.start_node(master)
            await cluster.wait_ready()

        racing = [asyncio.create_task(schedule(number, f"{number}")) for number in range(KEYS)]
        await through_a_kill(*racing)
        holders: list[str] = []
        for task in racing:
            results = task.result()
            (receipt,) = [result for result in results if isinstance(result, Receipt)]
            (taken,) = [result for result in results if isinstance(result, KeyTaken)]
            assert taken.id == receipt.id
            holders.append(receipt.id)
        assert len(set(holders)) == KEYS
        assert (await clients[0].count_pending("t")).total == KEYS

        cancelling = [asyncio.create_task(cancel(number)) for number in range(KEYS)]
        await through_a_kill(*cancelling)
        for cancelled, holder in zip(cancelling, holders, strict=True):
            assert sorted(cancelled.result()) == [("CANCELLED", holder), ("NOT_FOUND", "")]
        left = [message async for message in clients[0].list_pending("t", content=True)]
        assert sorted(message.unique_key for message in left) == sorted(f"k{number}" for number in range(KEYS))
        assert {message.payload for message in left} == {b"next"} and not {m.id for m in left} & set(holders)
        for client in clients:
            await client.close()
