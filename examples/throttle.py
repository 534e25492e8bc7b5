"""A customer gets at most one summary in a while, however many orders come: those that wait share one message."""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, KeyConflict, Receipt


async def ordered(client: AsyncClient, customer: str, every: timedelta) -> Receipt:
    """The customer has ordered. The first order schedules the summary, those until then find it waiting."""
    return await client.schedule(
        "summaries", customer, delay=every, unique_key=customer, on_key_conflict=KeyConflict.USE_EXISTING
    )


async def main(addresses: str) -> None:
    async with AsyncClient(addresses) as client:
        receipts = [await ordered(client, "customer-17", timedelta(milliseconds=500)) for _ in range(3)]
        print("orders:", ", ".join(receipt.key_outcome for receipt in receipts))
        async with client.consumer("mailers", "summaries", messages_max=1) as consumer:
            async for delivery in consumer:
                print("summary for", delivery.payload.decode())
                await delivery.ack()
        again = await ordered(client, "customer-17", timedelta(milliseconds=500))
        print("the next order:", again.key_outcome)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
