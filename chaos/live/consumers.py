"""The consumers of a run: one group that settles all it gets, one that is slow, forgets, refuses and leaves.

Owns which messages are known to be scheduled and have not come to a group yet. Part of the workload process: uses the
public client only, writes down and judges nothing. For the records see `workload.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from tickwheel.chaos.live.history import HistoryWriter
from tickwheel.client import AsyncClient, Consumer, DeliveredBatch, TickwheelError
from tickwheel.proto import consumer_pb2

TOPIC = "chaos"
STEADY, MOODY = "steady", "moody"
GROUPS = (STEADY, MOODY)
CONSUMERS_EACH = 2
LEASE_S = {STEADY: 5.0, MOODY: 3.0}
CREDITS = {STEADY: 4_000, MOODY: 400}
MOODY_STAYS_S = (3.0, 9.0)
NACKED_SHARE, FORGOTTEN_SHARE, SLOW_SHARE = 0.06, 0.02, 0.1
NACK_DELAY_MS_MAX = 1_500
SLOW_S_MAX = 1.5
LOOK_S = 0.05
PAUSE_S = 0.2
Rows = NDArray[np.int64]


class Consuming:
    """All consumers; `run` ends only when it is cancelled."""

    def __init__(self, history: HistoryWriter, rng: random.Random, uid_of: Callable[[bytes], int | None]) -> None:
        self._history = history
        self._rng = rng
        self._uid_of = uid_of
        self._numbers = itertools.count(1)
        self._waiting: dict[str, set[int]] = {group: set() for group in GROUPS}
        self._seen: dict[str, set[int]] = {group: set() for group in GROUPS}
        self._settling: set[asyncio.Task[None]] = set()
        self.settle_all = False
        """Set it, and the moody group settles everything too."""
        self.counts = {"got": 0, "settled": 0}

    # -- what is waited for

    @property
    def waiting(self) -> int:
        """Messages that have not come to a group, of the group that misses most."""
        return max(map(len, self._waiting.values()))

    def expect(self, uids: Iterable[int]) -> None:
        """They are scheduled: each group must see them."""
        for group in GROUPS:
            self._waiting[group].update(uid for uid in uids if uid not in self._seen[group])

    def forget(self, uid: int) -> None:
        """No longer expect this message in any group."""
        for group in GROUPS:
            self._waiting[group].discard(uid)

    # -- consuming

    async def run(self, client: AsyncClient) -> None:
        """Consume with all consumers."""
        async with asyncio.TaskGroup() as tasks:
            for group in GROUPS:
                for number in range(1, CONSUMERS_EACH + 1):
                    tasks.create_task(self._consume_for_ever(client, group, f"{group}-{number}"))

    async def _consume_for_ever(self, client: AsyncClient, group: str, name: str) -> None:
        for life in itertools.count(1):
            consumer = client.consumer(
                group,
                [TOPIC],
                credits=CREDITS[group],
                lease=timedelta(seconds=LEASE_S[group]),
                name=name,
                hold_max=timedelta(0),  # leases are to run out, and their ends are what is judged
            )
            session = f"{name}/{life}"
            self._history.write("session", consumer=name, session=f"{session}.0")
            looking = asyncio.ensure_future(self._look_at_session(consumer, name, session))
            try:
                async with asyncio.timeout(self._stay_s(group)):
                    async for batch in consumer.batches():
                        self._take(group, consumer, name, f"{session}.{consumer.reconnects}", batch)
            except TickwheelError:
                await asyncio.sleep(PAUSE_S)  # no master for a minute: a new consumer asks again
            except TimeoutError:
                pass
            finally:
                looking.cancel()
                self._history.write("session", consumer=name, session=f"{session}.left")
                await consumer.close()

    def _stay_s(self, group: str) -> float | None:
        return None if group == STEADY or self.settle_all else self._rng.uniform(*MOODY_STAYS_S)

    async def _look_at_session(self, consumer: Consumer, name: str, session: str) -> None:
        before = 0
        while True:
            await asyncio.sleep(LOOK_S)
            if consumer.reconnects != before:
                before = consumer.reconnects
                self._history.write("session", consumer=name, session=f"{session}.{before}")

    def _take(self, group: str, consumer: Consumer, name: str, session: str, batch: DeliveredBatch) -> None:
        uids, rows = [], []
        for row, payload in enumerate(batch.payloads()):
            uid = self._uid_of(payload)
            if uid is None:
                self._history.write("alien", group=group, payload=payload[:200].hex())
            else:
                uids.append(uid)
                rows.append(row)
        number = next(self._numbers)
        ids, attempts = batch.ids, batch.attempts
        self._history.write(
            "got",
            g=number,
            group=group,
            consumer=name,
            session=session,
            term=batch.term,
            until=batch.lease_until_ms,
            uids=uids,
            ids=[int(ids[row]) for row in rows],
            attempts=[int(attempts[row]) for row in rows],
        )
        self.counts["got"] += len(batch)
        self._seen[group].update(uids)
        self._waiting[group].difference_update(uids)
        task = asyncio.ensure_future(self._settle(group, consumer, number, batch))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, group: str, consumer: Consumer, number: int, batch: DeliveredBatch) -> None:
        everything = np.arange(len(batch), dtype=np.int64)
        if group == STEADY or self.settle_all:
            await self._send(consumer, "ack", number, batch, everything)
            return
        if self._rng.random() < SLOW_SHARE:
            await asyncio.sleep(self._rng.random() * SLOW_S_MAX)
        dice = np.array([self._rng.random() for _ in range(len(batch))])
        nacked = dice < NACKED_SHARE
        forgotten = ~nacked & (dice < NACKED_SHARE + FORGOTTEN_SHARE)
        sends = [self._send(consumer, "ack", number, batch, everything[~nacked & ~forgotten])]
        if nacked.any():
            sends.append(self._send(consumer, "retry", number, batch, everything[nacked]))
        await asyncio.gather(*sends)

    async def _send(self, consumer: Consumer, what: str, number: int, batch: DeliveredBatch, rows: Rows) -> None:
        if not len(rows):
            return
        settlement = next(self._numbers)
        self._history.write("settle", s=settlement, g=number, what=what, rows=rows.tolist())
        try:
            if what == "ack":
                receipt = await consumer.settle_rows(batch, rows, consumer_pb2.ACK)
            else:
                delay_ms = self._rng.randrange(1, NACK_DELAY_MS_MAX)
                receipt = await consumer.settle_rows(batch, rows, consumer_pb2.RETRY, delay_ms=delay_ms)
        except TickwheelError as error:
            self._history.write("settled", s=settlement, reason=str(error))
            return
        self.counts["settled"] += receipt.settled
        self._history.write(
            "settled", s=settlement, committed=receipt.settled, stale=receipt.stale, unknown=receipt.unknown
        )
