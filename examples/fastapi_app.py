"""FastAPI: orders that are given up unless they are paid in time, with a worker in the same process.

Run `uvicorn --factory fastapi_app:create_app`. TICKWHEEL names the nodes. The orders are in memory here; a service has
them in its database, with an outbox (outbox.py).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from tickwheel.client import AsyncClient, CancelOutcome, Delivery, Worker

PAY_WITHIN = timedelta(minutes=30)


class Order(BaseModel):
    """What is ordered, and what became of it."""

    item: str
    state: str = "open"
    timeout: str = ""
    """Id of the message that gives it up."""


class TimedOut(BaseModel):
    """The payload."""

    number: int


def create_app() -> FastAPI:
    """The application, with one client for its whole life."""
    orders: dict[int, Order] = {}

    async def give_up(delivery: Delivery) -> None:
        order = orders.get(delivery.decode(TimedOut).number)
        if order is not None and order.state == "open":
            order.state = "given up"

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(os.environ.get("TICKWHEEL", "127.0.0.1:7700")) as client:
            app.state.client = client
            worker = Worker(client, "orders", {"order-timeouts": give_up}, signals=())  # the server takes the signals
            running = asyncio.create_task(worker.run())
            yield
            worker.stop()
            await running

    app = FastAPI(lifespan=lifespan)

    def found(number: int) -> Order:
        if number not in orders:
            raise HTTPException(404, "no such order")
        return orders[number]

    @app.post("/orders", status_code=201)
    async def place(order: Order, request: Request) -> int:
        number = len(orders) + 1
        orders[number] = order
        client: AsyncClient = request.app.state.client
        receipt = await client.schedule("order-timeouts", TimedOut(number=number), delay=PAY_WITHIN, key=str(number))
        order.timeout = receipt.id
        return number

    @app.post("/orders/{number}/payment")
    async def pay(number: int, request: Request) -> Order:
        order = found(number)
        client: AsyncClient = request.app.state.client
        if await client.cancel(order.timeout) is not CancelOutcome.CANCELLED:  # final: it comes, or it never does
            raise HTTPException(409, "the order has been given up, or is being so")
        order.state = "paid"
        return order

    @app.get("/orders/{number}")
    async def show(number: int) -> Order:
        return found(number)

    return app
