"""The same without asyncio."""

import sys
from datetime import timedelta

from tickwheel.client import Client


def main(addresses: str) -> None:
    with Client(addresses) as client:
        receipt = client.schedule("letters", "dear reader", delay=timedelta(seconds=2), tags=["paper"])
        print("pending:", client.get(receipt.id, content=True).payload)
        outcome, moved = client.reschedule(receipt.id, delay=timedelta(milliseconds=200))
        print(outcome, moved.due_ms if moved else "")
        with client.consumer("post", "letters") as consumer:
            for delivery in consumer:
                print("received", delivery.payload.decode(), delivery.tags)
                delivery.ack()
                break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
