"""A digest is sent once a document has rested for a while: each change replaces the message that waits."""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, Delivery, KeyConflict, Worker


async def touch(client: AsyncClient, document: str, rest: timedelta) -> None:
    """The document has changed. Any process may call it: the document is the unique key, and the cluster decides."""
    await client.schedule(
        "digests", {"document": document}, delay=rest, unique_key=document, on_key_conflict=KeyConflict.REPLACE
    )


async def main(addresses: str) -> None:
    sent = asyncio.Event()

    async def send_digest(delivery: Delivery) -> None:
        print("digest of", delivery.json()["document"])
        sent.set()

    async with AsyncClient(addresses) as client:
        for _ in range(5):
            await touch(client, "notes.md", timedelta(milliseconds=500))
            await asyncio.sleep(0.1)
        worker = Worker(client, "digest-mailers", {"digests": send_digest})
        running = asyncio.create_task(worker.run())
        await sent.wait()
        worker.stop()
        await running
        print("pending:", (await client.count_pending("digests")).total)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
