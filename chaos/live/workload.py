"""The load of a run, a process of its own: schedules, cancels, moves, repeats, and consumers that settle or do not.

`python -m tickwheel.chaos.live.workload --addresses A,B --directory DIR --anchor MS --seed N --rate R
--ahead-ms MS --parent PID`. Uses the public client only and writes down what it did and saw; judges nothing.
SIGTERM: schedule no more, consume until all that is known to be scheduled has come to both groups or DRAIN_S went by in
which little of it came, then end. A second SIGTERM: end at once.

A message is named by its uid, which its payload carries; the payload can be made from the uid again, so a consumer
sees whether it is what was sent. Records (times in ms; `b` names one request):

| k | fields |
|---|---|
| groups | groups: all that each message must come to |
| send | b, how (due, delay, past, row, repeat), uids, asked: true time before which each must not come |
| ack | b, ids; due: the times that hold, if not all are as asked |
| again | b, ids: the same request was sent a second time under its old producer id and sequence, and answered |
| fail | b, reason, unknown: whether it may have been carried out all the same |
| cancel, move | b, uid, id; asked (move) |
| cancelled, moved | b, uid, outcome; or `fail` |
| got | g: its number, group, consumer, session, term, until (end of lease), uids, ids, attempts |
| alien | group, payload (hex): a delivery that is not one of ours |
| settle | s: its number, g, what (ack, retry), rows: places in what was got |
| settled | s, committed, stale, unknown (counts); or reason |
| session | consumer, session: its old stream is gone, this is its new one |
| end | waiting: messages that had not come |
| broken | reason: the workload itself failed |
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import zlib
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import uvloop

from tickwheel.chaos.live.consumers import GROUPS, TOPIC, Consuming
from tickwheel.chaos.live.history import HistoryWriter, TrueTime
from tickwheel.chaos.live.knobs import replace_json
from tickwheel.chaos.live.node_start import end_with_parent
from tickwheel.client import AsyncClient, BatchReceipt, OutcomeUnknown, Producer, TickwheelError
from tickwheel.client.ids import id64_of_text, id_text

TICK_S = 0.05
TICKS_BEHIND_MAX = 10
UNANSWERED_MAX = 120
"""Requests without an answer; above it nothing more is scheduled until the cluster answers again."""
DRAIN_S, DRAIN_S_MAX = 60.0, 600.0
DRAIN_LEFT = 0.8
"""The number of waiting messages must fall to this share within DRAIN_S; else the wait for them ends."""
PROGRESS_S = 0.5
PAD = b"." * 160
CHANGED_SHARE = 0.03
CHANGED_AFTER_S_MAX = 3.0
LEVELS_MS = {1: 1_000, 2: 5_000}
"""Delay levels of a new cluster that are used here."""


def payload_of(uid: int) -> bytes:
    """The payload of the message of this uid."""
    head = b"%d:%d:" % (uid, zlib.crc32(b"tickwheel chaos %d" % uid))
    return head + PAD[: 40 + uid % 100]


def uid_of(payload: bytes) -> int | None:
    """The uid of a payload; None if it is not exactly what `payload_of` makes."""
    head, _, _ = payload.partition(b":")
    if not head.isdigit() or len(head) > 15:
        return None
    return int(head) if payload == payload_of(int(head)) else None


class Patience:
    """Bounds the wait for the end of a run: it lasts while consumers catch up with a high rate, but not for messages
    that never come."""

    def __init__(self, now_s: float, waiting: int) -> None:
        self._latest_s = now_s + DRAIN_S_MAX
        self._end_s, self._mark = now_s + DRAIN_S, DRAIN_LEFT * waiting

    def over(self, now_s: float, waiting: int) -> bool:
        """Whether to give up the `waiting` messages. Progress since the last mark extends the wait."""
        if waiting < self._mark:
            self._end_s, self._mark = min(now_s + DRAIN_S, self._latest_s), DRAIN_LEFT * waiting
        return now_s >= self._end_s


class Workload:
    def __init__(
        self, addresses: list[str], directory: Path, anchor_ms: float, seed: int, rate: float, ahead_ms: int
    ) -> None:
        self._addresses = addresses
        self._directory = directory
        self._rate = rate
        self._ahead_ms = ahead_ms
        self._rng = random.Random(seed)
        self._time = TrueTime(anchor_ms)
        self._history = HistoryWriter(directory / "workload.jsonl", self._time)
        self._consuming = Consuming(self._history, random.Random(seed + 1), uid_of)
        self._uids = itertools.count(1)
        self._requests = itertools.count(1)
        self._stop = asyncio.Event()
        self._quit = asyncio.Event()
        self._unanswered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = {"sent": 0, "acked": 0, "failed": 0}

    # -- life

    def signalled(self) -> None:
        """SIGTERM or SIGINT."""
        if self._stop.is_set():
            self._quit.set()
        self._stop.set()

    async def run(self) -> None:
        """Until drained or told to quit."""
        async with AsyncClient(self._addresses) as client:
            await client.admin.create_topic(TOPIC)
            for group in GROUPS:
                await client.admin.create_group(group, [TOPIC])
            self._history.write("groups", groups=list(GROUPS))
            consumers = asyncio.ensure_future(self._consuming.run(client))
            consumers.add_done_callback(self._done)
            progress = asyncio.ensure_future(self._tell())
            try:
                await self._schedule(client)
                self._consuming.settle_all = True
                await self._drain()
            finally:
                self._history.write("end", waiting=self._consuming.waiting)
                self._write_progress("drained")
                for task in (consumers, progress, *self._tasks):
                    task.cancel()
                await asyncio.gather(consumers, progress, *self._tasks, return_exceptions=True)
        self._history.close()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        patience = Patience(loop.time(), self._consuming.waiting)
        while not patience.over(loop.time(), self._consuming.waiting) and not self._quit.is_set():
            if not self._tasks and not self._consuming.waiting:
                await asyncio.sleep(0.5)  # a delivery too many would come now
                return
            await asyncio.sleep(0.05)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._history.write("broken", reason=repr(task.exception()))
            self.signalled()

    async def _tell(self) -> None:
        while True:
            self._write_progress("draining" if self._stop.is_set() else "running")
            await asyncio.sleep(PROGRESS_S)

    def _write_progress(self, phase: str) -> None:
        told = {"phase": phase, "waiting": self._consuming.waiting, **self._counts, **self._consuming.counts}
        replace_json(self._directory / "progress.json", told)

    # -- scheduling

    async def _schedule(self, client: AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        producer = client.producer(linger_ms=1)
        began, tick = loop.time(), 0
        per_tick = max(1, round(self._rate * TICK_S))
        while not self._stop.is_set():
            tick += 1
            behind_s = loop.time() - began - tick * TICK_S
            if behind_s > TICKS_BEHIND_MAX * TICK_S:
                began += behind_s
            elif behind_s < 0:
                await asyncio.sleep(-behind_s)
            if self._unanswered >= UNANSWERED_MAX:
                continue
            how = self._rng.choices(("due", "delay", "past"), (85, 10, 5))[0]
            await self._send_batch(client, producer, how, per_tick)
            if tick % 5 == 0:
                self._spawn(self._send_row(client))
            if tick % 20 == 0:
                self._spawn(self._send_twice(client))
        self._spawn(producer.flush())

    def _sent(self, how: str, uids: list[int], asked: list[float]) -> int:
        number = next(self._requests)
        self._counts["sent"] += len(uids)
        self._unanswered += 1
        self._history.write("send", b=number, how=how, uids=uids, asked=[round(when, 3) for when in asked])
        return number

    def _acknowledged(self, number: int, uids: list[int], ids: list[int], due_ms: list[int] | None) -> None:
        self._unanswered -= 1
        self._counts["acked"] += len(uids)
        self._history.write("ack", b=number, ids=ids, **({} if due_ms is None else {"due": due_ms}))
        self._consuming.expect(uids)

    def _failed(self, number: int, uids: list[int], error: TickwheelError) -> None:
        self._unanswered -= 1
        self._counts["failed"] += len(uids)
        self._note_failure(number, error)

    def _note_failure(self, number: int, error: TickwheelError) -> None:
        self._history.write("fail", b=number, reason=str(error), unknown=isinstance(error, OutcomeUnknown))

    def _dues(self, how: str, count: int, now_ms: float) -> list[int]:
        rng = self._rng
        if how == "past":
            return [int(now_ms) - rng.randrange(1, 5_000) for _ in range(count)]
        shape = rng.random()
        if shape < 0.15:  # all in the same millisecond
            return [int(now_ms) + rng.randrange(50, self._ahead_ms)] * count
        if shape < 0.3:  # on a full second
            return [
                (int(now_ms) // 1_000 + rng.randrange(1, 2 + self._ahead_ms // 1_500)) * 1_000 for _ in range(count)
            ]
        return [int(now_ms) + rng.randrange(20, self._ahead_ms) for _ in range(count)]

    async def _send_batch(self, client: AsyncClient, producer: Producer, how: str, count: int) -> None:
        uids = [next(self._uids) for _ in range(count)]
        payloads = [payload_of(uid) for uid in uids]
        now_ms = self._time.now_ms()
        columns = np.fromiter(map(len, payloads), "<u4", count), b"".join(payloads)
        if how == "delay":
            delays = [self._rng.randrange(0, self._ahead_ms) for _ in uids]
            number = self._sent(how, uids, [now_ms + delay for delay in delays])
            future = await producer.schedule_columns(TOPIC, None, *columns, delay_ms=np.array(delays, "<i8"))
        else:
            dues = self._dues(how, count, now_ms)
            number = self._sent(how, uids, [float(due) for due in dues])
            future = await producer.schedule_columns(TOPIC, np.array(dues, "<i8"), *columns)
        self._spawn(self._await_batch(client, number, uids, future))

    async def _await_batch(
        self, client: AsyncClient, number: int, uids: list[int], future: asyncio.Future[BatchReceipt]
    ) -> None:
        try:
            receipt = await future
        except TickwheelError as error:
            self._failed(number, uids, error)
            return
        ids: list[int] = receipt.ids.tolist()
        self._acknowledged(number, uids, ids, None if receipt.due_ms is None else receipt.due_ms.tolist())
        for place, uid in enumerate(uids):
            if self._rng.random() < CHANGED_SHARE:
                self._spawn(self._change(client, uid, id_text(ids[place])))

    async def _send_row(self, client: AsyncClient) -> None:
        """One message by a call of its own, at a delay level or after a delay."""
        uid = next(self._uids)
        level = self._rng.choice((0, *LEVELS_MS))
        delay_ms = LEVELS_MS[level] if level else self._rng.randrange(self._ahead_ms)
        number = self._sent("row", [uid], [self._time.now_ms() + delay_ms])
        try:
            if level:
                receipt = await client.schedule(TOPIC, payload_of(uid), level=level)
            else:
                receipt = await client.schedule(TOPIC, payload_of(uid), delay_ms=delay_ms)
        except TickwheelError as error:
            self._failed(number, [uid], error)
        else:
            self._acknowledged(number, [uid], [id64_of_text(receipt.id)], [receipt.due_ms])

    async def _send_twice(self, client: AsyncClient) -> None:
        """A small batch by a producer that dies after the receipt and does it all again under its old name."""
        uids = [next(self._uids) for _ in range(3)]
        dues = self._dues("due", len(uids), self._time.now_ms())
        number = self._sent("repeat", uids, [float(due) for due in dues])
        name, answered = f"repeater-{number}", False
        try:
            for _ in range(2):
                async with client.producer(producer_id=name) as producer:
                    [future] = await producer.schedule_many(
                        TOPIC, [(due, payload_of(uid)) for due, uid in zip(dues, uids, strict=True)]
                    )
                    ids: list[int] = (await future).ids.tolist()
                if answered:
                    self._history.write("again", b=number, ids=ids)
                else:
                    self._acknowledged(number, uids, ids, None)
                answered = True
        except TickwheelError as error:
            if not answered:
                self._failed(number, uids, error)

    async def _change(self, client: AsyncClient, uid: int, message_id: str) -> None:
        """After a while take the message back, or move it: often in a race with its dispatch."""
        await asyncio.sleep(self._rng.random() * CHANGED_AFTER_S_MAX)
        number = next(self._requests)
        try:
            if self._rng.random() < 0.5:
                self._history.write("cancel", b=number, uid=uid, id=message_id)
                outcome: str = await client.cancel(message_id)
                self._history.write("cancelled", b=number, uid=uid, outcome=outcome)
                if outcome == "CANCELLED":
                    self._consuming.forget(uid)
            else:
                asked = int(self._time.now_ms()) + self._rng.randrange(self._ahead_ms)
                self._history.write("move", b=number, uid=uid, id=message_id, asked=asked)
                outcome, _ = await client.reschedule(message_id, due_ms=asked)
                self._history.write("moved", b=number, uid=uid, outcome=outcome)
        except TickwheelError as error:
            self._note_failure(number, error)
            self._consuming.forget(uid)  # it may come or not: nothing to wait for


async def _main(options: argparse.Namespace) -> None:
    addresses = options.addresses.split(",")
    load = Workload(addresses, options.directory, options.anchor, options.seed, options.rate, options.ahead_ms)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, load.signalled)
    await load.run()


def main() -> int:
    """Run the load; the exit code."""
    parser = argparse.ArgumentParser(description="The load of a chaos run.")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--anchor", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--ahead-ms", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    end_with_parent(options.parent)
    uvloop.run(_main(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
