"""A digest is sent once a document has rested for a while: each change moves the message that waits.

The same extends a time-out: a session that is used again ends later.
"""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, Delivery, RescheduleOutcome, Worker


class Debounce:
    """One message for each key, `rest` after the last `touch`. The ids belong where the application keeps its state."""

    def __init__(self, client: AsyncClient, topic: str, rest: timedelta) -> None:
        self._client = client
        self._topic = topic
        self._rest = rest
        self._ids: dict[str, str] = {}

    async def touch(self, key: str) -> None:
        """Something has changed."""
        waiting = self._ids.get(key)
        if waiting is not None:
            outcome, _ = await self._client.reschedule(waiting, delay=self._rest)
            if outcome is RescheduleOutcome.RESCHEDULED:
                return  # the answer is final: what was due before does not come
        receipt = await self._client.schedule(self._topic, {"document": key}, delay=self._rest, key=key)
        self._ids[key] = receipt.id  # stays the message's id however often it is moved


async def main(addresses: str) -> None:
    sent = asyncio.Event()

    async def send_digest(delivery: Delivery) -> None:
        print("digest of", delivery.json()["document"])
        sent.set()

    async with AsyncClient(addresses) as client:
        digests = Debounce(client, "digests", timedelta(milliseconds=500))
        for _ in range(5):
            await digests.touch("notes.md")
            await asyncio.sleep(0.1)
        worker = Worker(client, "digest-mailers", {"digests": send_digest})
        running = asyncio.create_task(worker.run())
        await sent.wait()
        worker.stop()
        await running
        print("pending:", (await client.count_pending("digests")).total)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
