"""At-least-once made exactly-once: the effect and the message's id are stored in one transaction.

The id is the same at every attempt and after every failover, so a repeat is recognised.
"""

import asyncio
import sqlite3
import sys

from tickwheel.client import AsyncClient, Delivery


def book(database: sqlite3.Connection, delivery: Delivery) -> bool:
    """Book once. False: this message had been booked before."""
    with database:
        new = database.execute("INSERT OR IGNORE INTO done VALUES (?)", (delivery.id,)).rowcount == 1
        if new:
            amount = int(delivery.payload)
            database.execute("UPDATE account SET balance = balance + ?", (amount,))
        return new


async def main(addresses: str) -> None:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE done (id TEXT PRIMARY KEY)")
    database.execute("CREATE TABLE account (balance INTEGER)")
    database.execute("INSERT INTO account VALUES (0)")
    async with AsyncClient(addresses) as client:
        for amount in (5, 10, 20):
            await client.schedule("bookings", str(amount), delay_ms=50)
        booked = 0
        async with client.consumer("accounting", "bookings") as consumer:
            async for delivery in consumer:
                first_time = book(database, delivery)
                if delivery.attempt == 1:
                    await delivery.nack()  # as if we had died before the acknowledgement: it comes again
                else:
                    print("recognised" if not first_time else "booked", delivery.id, "attempt", delivery.attempt)
                    await delivery.ack()
                    booked += 1
                if booked == 3:
                    break
    print("balance", database.execute("SELECT balance FROM account").fetchone()[0])
    database.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
