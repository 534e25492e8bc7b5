"""A session ends a while after it was used last: each use moves its time-out, and the answer is definite."""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, CancelOutcome, KeyTaken, RescheduleOutcome

TOPIC = "session-timeouts"


async def begin(client: AsyncClient, session: str, idle: timedelta) -> bool:
    """Begin a session. False: it has begun before."""
    try:
        await client.schedule(TOPIC, session, delay=idle, unique_key=session)
    except KeyTaken:
        return False
    return True


async def use(client: AsyncClient, session: str, idle: timedelta) -> bool:
    """The session is used. False: it is over."""
    outcome, _ = await client.reschedule_by_key(TOPIC, session, delay=idle)
    return outcome is RescheduleOutcome.RESCHEDULED


async def log_out(client: AsyncClient, session: str) -> bool:
    """End the session. False: it was over."""
    outcome, _ = await client.cancel_by_key(TOPIC, session)
    return outcome is CancelOutcome.CANCELLED


async def main(addresses: str) -> None:
    idle = timedelta(milliseconds=500)
    async with AsyncClient(addresses) as client:
        print("begun:", await begin(client, "session-1", idle), await begin(client, "session-1", idle))
        for _ in range(5):
            await asyncio.sleep(0.2)
            print("used:", await use(client, "session-1", idle))
        async with client.consumer("sessions", TOPIC, messages_max=1) as consumer:
            async for delivery in consumer:
                print("timed out:", delivery.unique_key)
                await delivery.ack()
        print("used:", await use(client, "session-1", idle))
        print("begun:", await begin(client, "session-1", idle))
        print("logged out:", await log_out(client, "session-1"), await log_out(client, "session-1"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
