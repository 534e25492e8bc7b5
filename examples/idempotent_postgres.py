"""At-least-once made exactly-once with PostgreSQL: the effect and the message's id are committed together.

The id is the same at every attempt and after every failover, so a repeat is recognised. Where the sender may schedule
one message twice, as outbox.py may, it gives both a key that is theirs alone: store the key instead.
"""

import asyncio
import os
import sys

import psycopg

from tickwheel.client import AsyncClient, Delivery, Worker

TABLES = """
CREATE TABLE IF NOT EXISTS handled (message text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, balance bigint NOT NULL);
"""


async def book(database: psycopg.AsyncConnection, delivery: Delivery) -> bool:
    """Book a payment. False: it had been booked before. Rows of `handled` may go once they are older than the
    retention."""
    payment = delivery.json()
    async with database.transaction():
        new = await database.execute("INSERT INTO handled (message) VALUES (%s) ON CONFLICT DO NOTHING", (delivery.id,))
        if not new.rowcount:
            return False
        await database.execute(
            "INSERT INTO account VALUES (%(to)s, %(amount)s) "
            "ON CONFLICT (name) DO UPDATE SET balance = account.balance + excluded.balance",
            payment,
        )
        return True


async def main(addresses: str, dsn: str) -> None:
    async with (
        AsyncClient(addresses) as client,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as database,
    ):
        await database.execute(TABLES)
        done = asyncio.Event()

        async def handler(delivery: Delivery) -> None:
            print("booked" if await book(database, delivery) else "recognised", "at attempt", delivery.attempt)
            if delivery.attempt == 1:
                raise ConnectionError("as if we had died before the acknowledgement: it comes again")
            done.set()

        await client.schedule("payments", {"to": "ann", "amount": 25}, delay_ms=50)
        worker = Worker(client, "accounting", {"payments": handler}, concurrency=1)
        running = asyncio.create_task(worker.run())
        await done.wait()
        worker.stop()
        await running
        answer = await database.execute("SELECT balance FROM account WHERE name = 'ann'")
        print("balance", (await answer.fetchone() or ["none"])[0])


if __name__ == "__main__":
    given = [*sys.argv[1:], "127.0.0.1:7700"]
    asyncio.run(main(given[0], os.environ.get("DATABASE", "dbname=postgres")))
