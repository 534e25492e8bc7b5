"""The deliveries that have come to a consumer and were not taken yet.

Owns the batches that wait, the rest of those whose deliveries are taken one by one, and the end. Invariants: a
delivery that was not taken stays for the next caller, however a wait or an iteration ended. All callers learn of the
end, those that wait and those that ask later. Used by `consumer.py` only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tickwheel.client.delivery import DeliveredBatch, Delivery
from tickwheel.client.errors import TickwheelError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: TickwheelError | None


class Coming:
    """The deliveries of one consumer, in the order in which they came."""

    def __init__(self) -> None:
        self._items: deque[DeliveredBatch | TickwheelError | _End] = deque()
        self._changed = asyncio.Event()
        self._begun: deque[Iterator[Delivery]] = deque()
        """The rest of each batch of which deliveries were taken."""

    def put(self, batches: Iterable[DeliveredBatch]) -> None:
        """Batches have come."""
        self._items.extend(batches)
        self._changed.set()

    def fail(self, error: TickwheelError) -> None:
        """Whoever waits next behind what has come gets this error, once."""
        self._items.append(error)
        self._changed.set()

    def end(self, error: TickwheelError | None) -> None:
        """Nothing comes any more. The first end counts."""
        self._items.append(_End(error))
        self._changed.set()

    def give_back(self, delivery: Delivery) -> None:
        """One that was taken and not used comes next."""
        self._begun.appendleft(iter((delivery,)))

    def taken(self) -> Delivery | None:
        """The next delivery of a batch that was begun; None: there is none."""
        while self._begun:
            delivery = next(self._begun[0], None)
            if delivery is not None:
                return delivery
            self._begun.popleft()
        return None

    async def delivery(self) -> Delivery | None:
        """The next delivery; None at the end. Raises the error that ended the consumer."""
        while (delivery := self.taken()) is None:
            batch = await self.batch()
            if batch is None:
                return None
            self._begun.append(iter(batch))
        return delivery

    async def batch(self) -> DeliveredBatch | None:
        """The next batch that was not begun; None at the end. Raises the error that ended the consumer."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        item = self._items[0]
        if isinstance(item, _End):
            if item.error is not None:
                raise item.error
            return None
        self._items.popleft()
        if isinstance(item, TickwheelError):
            raise item
        return item


class Iteration(AsyncIterator[T], Generic[T]):
    """Iterates over what `take` returns, until None. Unlike an asynchronous generator it goes on after a wait that was
    cancelled."""

    def __init__(self, take: Callable[[], Awaitable[T | None]]) -> None:
        self._take = take

    async def __anext__(self) -> T:
        item = await self._take()
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End, as a generator does. Deliveries that were not taken stay."""
