"""Schedule a message and receive it. Run `tickwheel up` first; argument: addresses of the cluster."""

import asyncio
import sys
import time
from datetime import timedelta

from tickwheel.client import AsyncClient


async def main(addresses: str) -> None:
    async with AsyncClient(addresses) as client:
        receipt = await client.schedule("greetings", "hello", delay=timedelta(milliseconds=300))
        print("scheduled", receipt.id)
        async with client.consumer("readers", "greetings") as consumer:
            async for delivery in consumer:
                late_ms = time.time_ns() // 1_000_000 - delivery.due_ms
                print("received", delivery.id, delivery.payload.decode(), f"{late_ms} ms after its time")
                await delivery.ack()
                if delivery.id == receipt.id:
                    break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
