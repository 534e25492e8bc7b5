"""An order is given up unless it is paid in time: the payment cancels the timeout, and the answer is definite."""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, CancelOutcome


async def main(addresses: str) -> None:
    async with AsyncClient(addresses) as client:
        paid = await client.schedule("order-timeouts", "order 1", delay=timedelta(seconds=30), key="order-1")
        await client.schedule("order-timeouts", "order 2", delay=timedelta(milliseconds=500), key="order-2")
        # Order 1 is paid before its time-out, and the answer is final.
        outcome = await client.cancel(paid.id)
        if outcome is CancelOutcome.ALREADY_DISPATCHED:
            print("too late: order 1 is being given up")
        print("order 1 paid:", outcome)
        print("once more:", await client.cancel(paid.id))
        async with client.consumer("orders", "order-timeouts") as consumer:
            async for delivery in consumer:
                print("given up:", delivery.payload.decode())
                await delivery.ack()
                break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
