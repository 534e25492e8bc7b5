"""The recipes do what docs/RECIPES.md says, on a cluster in memory or on a real node."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import psycopg
import pytest
import uvicorn
from uvicorn.config import Config

from tickwheel.client import AsyncClient, Delivery, Worker
from tickwheel.testing import FakeCluster, SyncFakeCluster

pytest_plugins = ["tickwheel.testing.fixtures"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def test_debounce(tickwheel: FakeCluster) -> None:
    """One message, `rest` after the last touch, of whichever client; the next touch after it starts over."""
    touch, rest = example("debounce").touch, timedelta(seconds=10)
    async with AsyncClient(tickwheel.address) as other:
        for client in (tickwheel.client, other, tickwheel.client, other):
            await touch(client, "notes.md", rest)
            await tickwheel.clock.advance(seconds=9)
    assert await tickwheel.take("digests") == []
    await tickwheel.clock.advance(seconds=1)
    assert [delivery.json() for delivery in await tickwheel.take("digests")] == [{"document": "notes.md"}]
    await touch(tickwheel.client, "notes.md", rest)
    await tickwheel.clock.advance(days=1)
    assert len(await tickwheel.take("digests")) == 1


async def test_throttle(tickwheel: FakeCluster) -> None:
    """At most one message in the time, for each key."""
    ordered, every = example("throttle").ordered, timedelta(minutes=10)
    for minute in range(30):
        for customer in ("ann", "bob") if minute < 5 else ("ann",):
            await ordered(tickwheel.client, customer, every)
        await tickwheel.clock.advance(minutes=1)
    taken = [delivery.payload for delivery in await tickwheel.take("summaries")]
    assert (taken.count(b"ann"), taken.count(b"bob")) == (3, 1)


async def test_a_session_times_out(tickwheel: FakeCluster) -> None:
    """Each use extends it; once it has timed out or has ended, it cannot be used, and a new one may begin."""
    recipe, idle = example("session_timeout"), timedelta(minutes=30)
    client = tickwheel.client
    assert await recipe.begin(client, "s", idle) and not await recipe.begin(client, "s", idle)
    for _ in range(5):
        await tickwheel.clock.advance(minutes=29)
        assert await recipe.use(client, "s", idle)
    assert await tickwheel.take("session-timeouts") == []
    await tickwheel.clock.advance(minutes=30)
    assert not await recipe.use(client, "s", idle) and not await recipe.log_out(client, "s")
    assert [delivery.unique_key for delivery in await tickwheel.take("session-timeouts")] == ["s"]
    assert await recipe.begin(client, "s", idle)
    assert await recipe.log_out(client, "s") and not await recipe.log_out(client, "s")
    await tickwheel.clock.advance(days=1)
    assert await tickwheel.take("session-timeouts") == []


async def test_an_idempotent_consumer(tickwheel: FakeCluster) -> None:
    """With sqlite: what is booked and not acknowledged is recognised when it comes again."""
    with sqlite3.connect(":memory:") as database:
        database.executescript(
            "CREATE TABLE done (id TEXT PRIMARY KEY); CREATE TABLE account (balance INTEGER);"
            "INSERT INTO account VALUES (0);"
        )
        book = example("idempotent_consumer").book

        async def handler(delivery: Delivery) -> None:
            book(database, delivery)
            if delivery.attempt < 3:
                raise ConnectionError

        await tickwheel.client.schedule("bookings", "5", delay=timedelta(0))
        async with tickwheel.running(Worker(tickwheel.client, "accounting", {"bookings": handler})) as worker:
            await tickwheel.clock.advance(minutes=5)
        assert worker.metrics.total("done") == 1
        assert database.execute("SELECT balance FROM account").fetchone() == (5,)
    database.close()


@pytest.fixture
async def database(postgres: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection to a schema of the test's own."""
    async with await psycopg.AsyncConnection.connect(postgres, autocommit=True) as connection:
        await connection.execute("DROP SCHEMA IF EXISTS public CASCADE")
        await connection.execute("CREATE SCHEMA public")
        yield connection


async def test_an_idempotent_consumer_with_postgres(tickwheel: FakeCluster, database: psycopg.AsyncConnection) -> None:
    """Two payments, each delivered twice, are booked once each."""
    recipe = example("idempotent_postgres")
    await database.execute(recipe.TABLES)
    booked: list[bool] = []

    async def handler(delivery: Delivery) -> None:
        booked.append(await recipe.book(database, delivery))
        if delivery.attempt == 1:
            raise ConnectionError

    for amount in (25, 17):
        await tickwheel.client.schedule("payments", {"to": "ann", "amount": amount}, delay=timedelta(hours=1))
    async with tickwheel.running(Worker(tickwheel.client, "accounting", {"payments": handler}, concurrency=1)):
        await tickwheel.clock.advance(hours=2)
    assert sorted(booked) == [False, False, True, True]
    answer = await database.execute("SELECT balance FROM account")
    assert await answer.fetchall() == [(42,)]


async def test_an_outbox(tickwheel: FakeCluster, database: psycopg.AsyncConnection, postgres: str) -> None:
    """An order that is rolled back leaves nothing; two relays schedule each row once, at its time."""
    recipe = example("outbox")
    await database.execute(recipe.TABLES)
    for order in (1, 2, 3):
        await recipe.place_order(database, order, tickwheel.clock.now + timedelta(hours=order))
    with pytest.raises(psycopg.errors.UniqueViolation):
        await recipe.place_order(database, 3, tickwheel.clock.now)
    with pytest.raises(ZeroDivisionError):
        async with database.transaction():
            await recipe.place_order(database, 4, tickwheel.clock.now)
            raise ZeroDivisionError
    async with await psycopg.AsyncConnection.connect(postgres, autocommit=True) as other:
        relayed = await asyncio.gather(*(recipe.relay(each, tickwheel.client) for each in (database, other)))
    assert sum(relayed) == 3 and await recipe.relay(database, tickwheel.client) == 0
    waiting = [message async for message in tickwheel.client.list_pending("order-timeouts", content=True)]
    assert [(message.payload, message.key) for message in waiting] == [
        (b"1", "outbox/1"), (b"2", "outbox/2"), (b"3", "outbox/3"),
    ]  # fmt: skip
    assert waiting[0].due == tickwheel.clock.now + timedelta(hours=1)


async def test_a_relay_that_crashes_repeats_itself(
    tickwheel: FakeCluster, database: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the schedule and its commit: the row stays, and is scheduled again under the same key."""
    recipe = example("outbox")
    await database.execute(recipe.TABLES)
    await recipe.place_order(database, 1, tickwheel.clock.now)
    schedule = tickwheel.client.schedule

    async def and_crash(*args: Any, **named: Any) -> None:
        await schedule(*args, **named)
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(tickwheel.client, "schedule", and_crash)
        with pytest.raises(ConnectionError):
            await recipe.relay(database, tickwheel.client)
    assert await recipe.relay(database, tickwheel.client) == 1
    assert [delivery.key for delivery in await tickwheel.take("order-timeouts")] == ["outbox/1", "outbox/1"]


@pytest.mark.usefixtures("database")
async def test_postgres_recipes_on_a_real_node(
    tickwheel_node: str, postgres: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As programs: a relay that is told of each order, and a worker whose repeats change nothing."""
    async with AsyncClient(tickwheel_node) as client:
        await client.admin.create_topic("payments")
        await client.admin.create_group("accounting", ["payments"])
    await example("outbox").main(tickwheel_node, postgres)
    assert capsys.readouterr().out == "time is up for order 17 key outbox/1\n"


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """An application behind a server of its own, and a client of it."""
    started = asyncio.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.set()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = Server(Config(app, log_level="warning", lifespan="on", ws="none"))
        running = asyncio.ensure_future(server.serve(sockets=[listening]))
        try:
            await started.wait()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{listening.getsockname()[1]}") as session:
                yield session
        finally:
            server.should_exit = True
            await running


async def test_fastapi(tickwheel: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order is given up after half an hour by the worker of the application; one that was paid stays paid."""
    monkeypatch.setenv("TICKWHEEL", tickwheel.address)
    async with served(example("fastapi_app").create_app()) as session:

        async def post(path: str, **named: Any) -> tuple[int, Any]:
            async with session.post(path, **named) as answer:
                return answer.status, await answer.json()

        async def state(order: int) -> str:
            async with session.get(f"/orders/{order}") as answer:
                return str((await answer.json())["state"])

        assert [await post("/orders", json={"item": item}) for item in ("pen", "ink")] == [(201, 1), (201, 2)]
        await tickwheel.clock.advance(minutes=29)
        status, order = await post("/orders/1/payment")
        assert (status, order["state"]) == (200, "paid")
        await tickwheel.clock.advance(minutes=1)
        assert [await state(1), await state(2)] == ["paid", "given up"]
        assert (await post("/orders/2/payment"))[0] == 409
        assert (await post("/orders/3/payment"))[0] == 404


@pytest.fixture
def shop(tickwheel_sync: SyncFakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The Django example on a database and a cluster of its own. Settings are made once in a process."""
    monkeypatch.setenv("TICKWHEEL", tickwheel_sync.address)
    monkeypatch.setenv("DATABASE", os.fspath(tmp_path / "shop.sqlite3"))
    module = example("django_app")
    module.migrate()
    yield module
    module.client().close()
    module.connection.close()


def test_django(shop: Any, tickwheel_sync: SyncFakeCluster) -> None:
    """The same through views and a worker with threads; what is rolled back schedules nothing."""
    from django.test import Client as Browser

    browser = Browser()
    with tickwheel_sync.running(shop.worker()):
        assert [browser.post("/orders").json() for _ in range(2)] == [{"order": 1}, {"order": 2}]
        with pytest.raises(ZeroDivisionError), shop.transaction.atomic():
            browser.post("/orders")
            raise ZeroDivisionError
        assert tickwheel_sync.client.count_pending("order-timeouts").total == 2
        tickwheel_sync.clock.advance(minutes=29)
        assert browser.post("/orders/1/payment").status_code == 200
        tickwheel_sync.clock.advance(minutes=1)
        assert [order.state for order in shop.Order.objects.order_by("pk")] == ["paid", "given up"]
        assert browser.post("/orders/2/payment").status_code == 409
