"""An outbox in PostgreSQL: an order and its time-out are stored in one transaction, and a relay schedules the time-out.

No order is without its time-out, and no time-out without its order, whatever crashes when. A relay that crashes between
the schedule and its commit schedules once more, under the same key: consumers recognise the repeat by it, as in
idempotent_postgres.py.
"""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta

import psycopg
from psycopg.rows import dict_row

from tickwheel.client import AsyncClient

TABLES = """
CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'open');
CREATE TABLE IF NOT EXISTS outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    payload text NOT NULL,
    due timestamptz NOT NULL
);
"""
BATCH = 100


async def place_order(database: psycopg.AsyncConnection, order: int, pay_until: datetime) -> None:
    """The application's transaction."""
    async with database.transaction():
        await database.execute("INSERT INTO orders (id) VALUES (%s)", (order,))
        await database.execute(
            "INSERT INTO outbox (topic, payload, due) VALUES ('order-timeouts', %s, %s)", (str(order), pay_until)
        )
        await database.execute("NOTIFY outbox")


async def relay(database: psycopg.AsyncConnection, client: AsyncClient) -> int:
    """Schedule what waits in the outbox, oldest first. Returns how much. Several relays may run: each row has one."""
    async with database.transaction(), database.cursor(row_factory=dict_row) as cursor:
        await cursor.execute("SELECT * FROM outbox ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED", (BATCH,))
        rows = await cursor.fetchall()
        # Together: the client sends them in few calls. If one fails, all stay in the outbox.
        await asyncio.gather(
            *(client.schedule(row["topic"], row["payload"], at=row["due"], key=f"outbox/{row['id']}") for row in rows)
        )
        await cursor.execute("DELETE FROM outbox WHERE id = ANY(%s)", ([row["id"] for row in rows],))
    return len(rows)


async def run_relay(database: psycopg.AsyncConnection, client: AsyncClient) -> None:
    """Relay for ever: at once when told so, and every few seconds in case nobody was there to hear it."""
    await database.set_autocommit(True)
    await database.execute("LISTEN outbox")
    while True:
        while await relay(database, client):
            pass
        async for _ in database.notifies(timeout=5.0, stop_after=1):
            pass


async def main(addresses: str, dsn: str) -> None:
    async with (
        AsyncClient(addresses) as client,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as database,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as for_relay,
    ):
        await database.execute(TABLES)
        relaying = asyncio.create_task(run_relay(for_relay, client))
        await place_order(database, 17, datetime.now(UTC) + timedelta(milliseconds=200))
        async with client.consumer("orders", "order-timeouts", messages_max=1) as consumer:
            async for delivery in consumer:
                print("time is up for order", delivery.payload.decode(), "key", delivery.key)
                await delivery.ack()
        relaying.cancel()


if __name__ == "__main__":
    given = [*sys.argv[1:], "127.0.0.1:7700"]
    asyncio.run(main(given[0], os.environ.get("DATABASE", "dbname=postgres")))
