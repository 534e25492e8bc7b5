"""Mails by a worker: a busy server is tried again later, an address that does not exist becomes a dead letter."""

import asyncio
import sys
from datetime import timedelta

from tickwheel.client import AsyncClient, Dead, Delivery, ExponentialBackoff, Retry, RetryPolicy, Worker

ADDRESSES = ("ada@example.org", "busy@example.org", "nobody@example.org", "broken@example.org")


class ServerBusyError(Exception):
    """The mail server asks us to come again."""


class NoSuchAddressError(Exception):
    """It will never work."""


async def send(delivery: Delivery) -> None:
    address = delivery.json()["to"]
    if address.startswith("busy") and delivery.attempt == 1:
        raise ServerBusyError("greylisted")
    if address.startswith("nobody"):
        raise NoSuchAddressError(address)
    if address.startswith("broken"):
        raise RuntimeError("a bug")  # no rule: again by the group's policy, a dead letter after three attempts
    print("sent to", address, "at attempt", delivery.attempt)


async def main(addresses: str) -> None:
    async with AsyncClient(addresses) as client:
        backoff = ExponentialBackoff(initial=timedelta(milliseconds=100), maximum=timedelta(minutes=5), jitter=0.2)
        await client.admin.create_topic("mails")
        await client.admin.create_group("senders", ["mails"], retry=RetryPolicy(backoff=backoff, attempts_max=3))
        for address in ADDRESSES:
            await client.schedule("mails", {"to": address}, delay=timedelta(milliseconds=50))
        rules = {ServerBusyError: Retry(timedelta(milliseconds=500)), NoSuchAddressError: Dead()}
        worker = Worker(client, "senders", {"mails": send}, timeout=timedelta(seconds=30), on_error=rules)
        running = asyncio.create_task(worker.run())  # a service would await it: it ends with SIGTERM
        while True:
            letters = [letter async for letter in client.dead.list("senders")]
            if len(letters) == 2 and worker.metrics.total("done") == 2:
                break
            await asyncio.sleep(0.1)
        worker.stop()
        await running
        for letter in letters:
            print("dead after", letter.attempts, "attempts:", letter.error)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
