"""Many reminders through a producer, received by a callback that may fail: what raises comes again."""

import asyncio
import sys
import time

from tickwheel.client import AsyncClient, Delivery

COUNT = 200


async def main(addresses: str) -> None:
    seen: set[str] = set()
    all_seen = asyncio.Event()

    async def remind(delivery: Delivery) -> None:
        if delivery.attempt == 1 and delivery.payload.endswith(b"7"):
            raise ConnectionError("the mail server is busy")  # a nack: delivered again
        seen.add(delivery.id)
        if len(seen) == COUNT:
            all_seen.set()

    async with AsyncClient(addresses) as client:
        now_ms = time.time_ns() // 1_000_000
        async with client.producer() as producer:
            for number in range(COUNT):
                await producer.send("reminders", f"reminder {number}", due_ms=now_ms + 5 * number, key=f"user-{number}")
        consumer = client.consumer("mailers", "reminders")
        running = asyncio.create_task(consumer.run(remind, concurrency=20))
        await asyncio.wait_for(all_seen.wait(), 60)
        await consumer.close()
        await running
    print(f"reminded {len(seen)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
