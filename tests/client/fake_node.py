"""Nodes for the client's tests: the real services' behaviour on one shared state, without files or elections.

Owns an honest model: a producer's sequences are deduplicated and gaps refused, deliveries have leases and attempts,
credits bound what is out, and only the master serves. Answers can be dropped after the work was done, which is what
a client sees of a master that dies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from tickwheel.proto import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    consumer_pb2,
    consumer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

HOUR_MS = 3_600_000
LEASE_S = 30.0


def status(code: grpc.StatusCode, reason: str, message: str, **metadata: str) -> status_pb2.Status:
    """A google.rpc.Status with an ErrorInfo."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="tickwheel.v1", metadata=metadata))
    return status_pb2.Status(code=int(code.value[0]), message=message, details=[packed])


class Refusal(Exception):
    """A request that is not carried out."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = status(code, reason, message, **metadata)


class FakeState:
    """What all nodes of the fake cluster agree on."""

    def __init__(self) -> None:
        self.term = 1
        self.master: FakeNode | None = None
        self.next_index: dict[int, itertools.count[int]] = {}
        self.messages: dict[int, tuple[common_pb2.Message, int]] = {}
        self.order: list[int] = []
        self.dispatched: dict[str, list[int]] = {}
        self.cancelled: set[int] = set()
        self.producers: dict[str, tuple[int, dict[int, list[int]]]] = {}
        self.keys: dict[tuple[str, str], int] = {}
        """Which message holds a unique key, by topic and key."""
        self.outcomes: dict[tuple[str, int], list[common_pb2.KeyOutcome.ValueType]] = {}
        """KeyOutcome of each message of a request, by producer id and sequence."""
        self.settled: dict[tuple[str, int], int] = {}
        self.attempts: dict[tuple[str, int], int] = {}
        self.leased: dict[tuple[str, int], float] = {}
        self.repeats = 0
        self.changed = asyncio.Event()

    def poke(self) -> None:
        """Something that streams wait for has changed."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def publish(self, producer_id: str, sequence: int, messages: list[common_pb2.Message]) -> tuple[list[int], bool]:
        """Ids, and whether this was a repeat."""
        last, window = self.producers.get(producer_id, (0, {}))
        if producer_id and sequence in window:
            self.repeats += 1
            return window[sequence], True
        for message in messages:
            if not message.topic or message.topic.startswith("."):
                raise Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "INVALID_FIELD",
                    "topic: not allowed",
                    field="topic",
                    value=message.topic,
                    limit="1 to 127 characters",
                )
        if producer_id and window and sequence != last + 1:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_GAP", "gap", expected=str(last + 1), value=str(sequence)
            )
        taken = [self._take(message) for message in messages]
        ids = [id64 for id64, _ in taken]
        self.outcomes[producer_id, sequence] = [outcome for _, outcome in taken]
        if producer_id:
            window[sequence] = ids
            self.producers[producer_id] = (sequence, window)
        self.poke()
        return ids, False

    def _take(self, message: common_pb2.Message) -> tuple[int, common_pb2.KeyOutcome.ValueType]:
        """The id that the message gets or meets, and its KeyOutcome."""
        name = (message.topic, message.meta.unique_key)
        held = self.keys.get(name) if message.meta.unique_key else None
        if held is not None and message.on_key_conflict == common_pb2.KEY_CONFLICT_USE_EXISTING:
            return held, common_pb2.KEY_USED_EXISTING
        if held is not None and message.on_key_conflict != common_pb2.KEY_CONFLICT_REPLACE:
            return held, common_pb2.KEY_REFUSED
        id64 = self._place(message)
        if message.meta.unique_key:
            self.keys[name] = id64
        if held is None:
            return id64, common_pb2.KEY_FREE
        self.cancelled.add(held)
        return id64, common_pb2.KEY_REPLACED

    def _place(self, message: common_pb2.Message) -> int:
        now_ms = time.time_ns() // 1_000_000
        due_ms = message.due_ms if message.HasField("due_ms") else now_ms + message.delay_ms
        hour = max(due_ms, now_ms) // HOUR_MS
        id64 = hour << 32 | next(self.next_index.setdefault(hour, itertools.count()))
        self.messages[id64] = (message, due_ms)
        self.order.append(id64)
        return id64

    def due(self, group: str, topics: list[str], count: int) -> list[int]:
        """Messages to deliver now: due, not cancelled, not settled, not held."""
        now_ms, now = time.time_ns() // 1_000_000, time.monotonic()
        found: list[int] = []
        for id64 in self.order:
            message, due_ms = self.messages[id64]
            place = (group, id64)
            held = self.leased.get(place, 0.0) > now
            open_here = message.topic in topics and id64 not in self.cancelled and place not in self.settled
            if open_here and due_ms <= now_ms and not held and len(found) < count:
                found.append(id64)
        return found


class FakeNode:
    """One node: the three services as far as the client uses them. Start it, make it master, break it."""

    def __init__(self, state: FakeState, name: str) -> None:
        self.state = state
        self.name = name
        self.address = ""
        self.server: grpc.aio.Server | None = None
        self.services: list[Callable[[grpc.aio.Server], None]] = []
        """Add further services when it starts."""
        self.drop_answers = 0
        """So many answers are lost after the work was done; the connection breaks each time."""
        self.limit_answers = 0
        """So many batches are answered LIMIT_REACHED."""
        self.refusals: deque[Refusal | None] = deque()
        """What the next schedules are refused with, before anything is looked at; None: that one is not."""
        self.hangs = False
        """It keeps connections open and answers nothing."""
        self.older = False
        """It has no method that carries many messages in one call."""
        self.asked = 0
        """Questions for its status or for the master."""
        self.left_open = 0
        """Those of them that wait for another master."""
        self.waits_ms: list[int] = []
        """How long each of these was to wait."""
        self.wait_ms_max = 600_000
        self.batches: list[int] = []
        """Number of messages or rows of each such call that came, in order."""
        self.sequences: list[tuple[str, int]] = []
        """Producer id and sequence of each schedule that came, in order."""
        self.extends: list[Any] = []
        """Extensions of leases that it was asked for."""
        self.mixes = False
        """It understands batches and settlements of several topics; else it is of a version before them."""
        self.consuming = 0
        """Streams of consumers that are open."""
        self.settles: list[Any] = []
        """Settlements that it was asked for."""
        self.busy_settles = 0
        """So many settlements are refused for later."""
        self.heir = self
        """The master after TransferMaster."""
        self.handed_over = asyncio.Event()
        """TransferMaster is answered."""
        self.forbidden = ""
        """Topic that the caller has no right to: settlements that name it are refused."""

    async def start(self) -> FakeNode:
        """Listen on a free port; after a stop on the same one again."""
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        _add(
            scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler_pb2_grpc.SchedulerServicer, self, self.server
        )
        _add(consumer_pb2_grpc.add_ConsumerServicer_to_server, consumer_pb2_grpc.ConsumerServicer, self, self.server)
        _add(admin_pb2_grpc.add_AdminServicer_to_server, admin_pb2_grpc.AdminServicer, self, self.server)
        for add in self.services:
            add(self.server)
        port = self.server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()
        return self

    async def stop(self) -> None:
        """As if killed."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)

    def lead(self, *, knows_leases: bool = False) -> None:
        """Become master in a new term; the old one's streams end."""
        before = self.state.master
        self.state.term += 1
        self.state.master = self
        if not knows_leases:
            self.state.leased.clear()
        if before is not None and before is not self:
            before.state.poke()
        self.state.poke()

    def _refusal(self) -> Refusal | None:
        master = self.state.master
        if master is self:
            return None
        unavailable = grpc.StatusCode.UNAVAILABLE
        if master is None:
            return Refusal(unavailable, "NO_MASTER", "no master", retry_after_ms="20")
        return Refusal(unavailable, "NOT_MASTER", "not master", master_id=master.name, master_address=master.address)

    async def _refuse(self, context: Any, refusal: Refusal) -> None:
        data = refusal.status.SerializeToString()
        await context.abort(refusal.code, str(refusal), (("grpc-status-details-bin", data),))

    async def _lost(self, context: Any) -> None:
        self.drop_answers -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")

    # -- Scheduler

    async def Schedule(self, request: Any, context: Any) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        self.sequences.append((request.producer_id, request.sequence))
        refusal = (self.refusals.popleft() if self.refusals else None) or self._refusal()
        if refusal:
            await self._refuse(context, refusal)
        try:
            ids, _ = self.state.publish(request.producer_id, request.sequence, [request.message])
        except Refusal as error:
            await self._refuse(context, error)
        if self.drop_answers:
            await self._lost(context)
        id64, due_ms = ids[0], self.state.messages[ids[0]][1]
        (outcome,) = self.state.outcomes[request.producer_id, request.sequence]
        if outcome == common_pb2.KEY_REFUSED:
            await self._refuse(
                context,
                Refusal(
                    grpc.StatusCode.ALREADY_EXISTS, "KEY_TAKEN", "held", field="meta.unique_key",
                    value=request.message.meta.unique_key, id=f"0-{id64 >> 32}-{id64 & 0xFFFFFFFF}",
                    due_ms=str(due_ms), accepted_sequence=str(request.sequence),
                ),
            )  # fmt: skip
        return scheduler_pb2.ScheduleReceipt(
            id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFFFFFF), due_ms=due_ms, key_outcome=outcome
        )

    async def ScheduleMany(self, batch: Any, context: Any) -> Any:
        if self.older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.hangs:
            await asyncio.Event().wait()
        self.sequences.append((batch.producer_id, batch.sequence))
        self.batches.append(len(messages_of(batch)))
        receipt = scheduler_pb2.BatchReceipt(sequence=batch.sequence)
        try:
            if refusal := (self.refusals.popleft() if self.refusals else None) or self._refusal():
                raise refusal
            ids, receipt.repeated = self.state.publish(batch.producer_id, batch.sequence, messages_of(batch))
        except Refusal as error:
            await self._refuse(context, error)
        receipt.ids = np.array(ids, "<u8").tobytes()
        receipt.due_ms = np.array([self.state.messages[id64][1] for id64 in ids], "<i8").tobytes()
        receipt.key_outcomes = self._outcomes(batch)
        if self.drop_answers:
            await self._lost(context)
        return receipt

    async def ScheduleStream(self, batches: AsyncIterator[Any], context: Any) -> None:
        async for batch in batches:
            receipt = scheduler_pb2.BatchReceipt(sequence=batch.sequence)
            try:
                if refusal := (self.refusals.popleft() if self.refusals else None) or self._refusal():
                    raise refusal
                if self.limit_answers:
                    self.limit_answers -= 1
                    raise Refusal(
                        grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED", "full", retry_after_ms="10", field="intake"
                    )
                ids, receipt.repeated = self.state.publish(batch.producer_id, batch.sequence, messages_of(batch))
                receipt.ids = np.array(ids, "<u8").tobytes()
                receipt.due_ms = np.array([self.state.messages[id64][1] for id64 in ids], "<i8").tobytes()
                receipt.key_outcomes = self._outcomes(batch)
            except Refusal as error:
                receipt.error = error.status.SerializeToString()
            if self.drop_answers:
                await self._lost(context)
            await context.write(receipt)

    def _outcomes(self, batch: Any) -> bytes:
        outcomes = self.state.outcomes[batch.producer_id, batch.sequence]
        return bytes(outcomes) if any(outcomes) else b""

    async def Reschedule(self, request: Any, context: Any) -> Any:
        if refusal := self._refusal():
            await self._refuse(context, refusal)
        self.sequences.append((request.producer_id, request.sequence))
        window = self.state.producers.get(request.producer_id, (0, {}))[1]
        repeated = request.sequence in window
        id64 = request.id.hour << 32 | request.id.index
        if not repeated and id64 in self.state.cancelled:
            return scheduler_pb2.RescheduleResponse(outcome=scheduler_pb2.RESCHEDULE_CANCELLED)
        self.state.cancelled.add(id64)
        window[request.sequence] = [id64]
        self.state.producers[request.producer_id] = (request.sequence, window)
        if self.drop_answers:
            await self._lost(context)
        return scheduler_pb2.RescheduleResponse(
            outcome=scheduler_pb2.RESCHEDULED, id=request.id, due_ms=request.due_ms, remembered=True
        )

    async def Cancel(self, request: Any, context: Any) -> Any:
        if refusal := self._refusal():
            await self._refuse(context, refusal)
        if request.HasField("key"):
            return await self._cancel_by_key(request, context)
        id64 = request.id.hour << 32 | request.id.index
        if id64 not in self.state.messages:
            return scheduler_pb2.CancelResponse(outcome=scheduler_pb2.NOT_FOUND)
        self.state.cancelled.add(id64)
        return scheduler_pb2.CancelResponse(outcome=scheduler_pb2.CANCELLED)

    async def _cancel_by_key(self, request: Any, context: Any) -> Any:
        self.sequences.append((request.producer_id, request.sequence))
        last, window = self.state.producers.get(request.producer_id, (0, {}))
        if request.sequence not in window:
            held = self.state.keys.pop((request.key.topic, request.key.unique_key), None)
            if held is None:
                return scheduler_pb2.CancelResponse(outcome=scheduler_pb2.NOT_FOUND)
            self.state.cancelled.add(held)
            assert not window or request.sequence == last + 1
            window[request.sequence] = [held]
            self.state.producers[request.producer_id] = (request.sequence, window)
            self.state.poke()
        if self.drop_answers:
            await self._lost(context)
        id64 = window[request.sequence][0]
        message_id = common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFFFFFF)
        return scheduler_pb2.CancelResponse(outcome=scheduler_pb2.CANCELLED, id=message_id, remembered=True)

    async def CancelMany(self, request: Any, context: Any) -> Any:
        return await self._rows(request.ids, self._cancelled, scheduler_pb2.CancelManyResponse(), context)

    def _cancelled(self, message_id: Any, results: Any) -> None:
        id64 = message_id.hour << 32 | message_id.index
        self.state.cancelled.add(id64)
        results.add(outcome=scheduler_pb2.CANCELLED if id64 in self.state.messages else scheduler_pb2.NOT_FOUND)

    async def RescheduleMany(self, request: Any, context: Any) -> Any:
        return await self._rows(request.requests, self._moved, scheduler_pb2.RescheduleManyResponse(), context)

    def _moved(self, request: Any, results: Any) -> None:
        self.sequences.append((request.producer_id, request.sequence))
        response = scheduler_pb2.RescheduleResponse(
            outcome=scheduler_pb2.RESCHEDULED, id=request.id, due_ms=request.due_ms, remembered=True
        )
        results.add(response=response)

    async def _rows(self, rows: Any, answer: Any, response: Any, context: Any) -> Any:
        """A refusal in `refusals` is that of its row."""
        if self.older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if refusal := self._refusal():
            await self._refuse(context, refusal)
        self.batches.append(len(rows))
        for row in rows:
            refused = self.refusals.popleft() if self.refusals else None
            if refused is not None:
                response.results.add(error=refused.status.SerializeToString())
            else:
                answer(row, response.results)
        if self.drop_answers:
            await self._lost(context)
        return response

    async def ListPending(self, request: Any, context: Any) -> Any:
        if refusal := self._refusal():
            await self._refuse(context, refusal)
        start, size = int(request.page_token or 0), request.page_size or 100
        ids = self.state.order[start : start + size]
        more = start + size < len(self.state.order)
        return scheduler_pb2.ListPendingResponse(
            messages=[
                scheduler_pb2.PendingMessage(
                    id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFFFFFF),
                    topic=self.state.messages[id64][0].topic,
                    due_ms=self.state.messages[id64][1],
                )
                for id64 in ids
            ],
            next_page_token=str(start + size) if more else "",
        )

    # -- Consumer

    async def Consume(self, requests: AsyncIterator[Any], context: Any) -> None:
        if refusal := self._refusal():
            await self._refuse(context, refusal)
        first = (await anext(requests)).open
        stream = _Stream(self, first, context)
        await context.write(
            consumer_pb2.ConsumeResponse(
                opened=consumer_pb2.Opened(term=self.state.term, lease_ms=int(LEASE_S * 1000), mixes=self.mixes)
            )
        )
        reader = asyncio.ensure_future(stream.read(requests))
        self.consuming += 1
        try:
            await stream.write()
        finally:
            self.consuming -= 1
            self.state.poke()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if stream.lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")

    # -- Admin

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        master = self.state.master
        return admin_pb2.NodeStatus(
            node_id=self.name,
            role=admin_pb2.MASTER if master is self else admin_pb2.SLAVE,
            term=self.state.term,
            master_address=master.address if master else "",
            master_id=master.name if master else "",
        )

    async def TransferMaster(self, request: Any, context: Any) -> Any:
        """`heir` leads; the answer comes once `handed_over` is set."""
        self.heir.lead()
        await self.handed_over.wait()
        return admin_pb2.TransferMasterResponse(master_id=self.heir.name, term=self.state.term)

    async def AwaitMaster(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.waits_ms.append(request.wait_ms)
        if self.older:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        while True:
            if self.hangs:
                await asyncio.Event().wait()
            changed, master = self.state.changed, self.state.master
            address = master.address if master else ""
            if address and (self.state.term, address) != (request.term, request.master_address):
                return admin_pb2.AwaitMasterResponse(
                    term=self.state.term, master_address=address, leads=master is self, wait_ms_max=self.wait_ms_max
                )
            self.left_open += 1
            try:
                await changed.wait()
            finally:
                self.left_open -= 1


def _add(add: Any, base: type, node: FakeNode, server: grpc.aio.Server) -> None:
    """Serve the methods the node has; the others answer UNIMPLEMENTED."""
    own = {name: getattr(node, name) for name in vars(base) if not name.startswith("_") and hasattr(node, name)}
    add(type(base.__name__, (base,), {"__abstractmethods__": frozenset(), **own})(), server)


class _Stream:
    def __init__(self, node: FakeNode, first: Any, context: Any) -> None:
        self.node = node
        self.state = node.state
        self.group = first.group
        self.topics = list(first.topics)
        self.credits = first.credits
        self.batch_max = first.batch_messages_max or 1_024
        self.context = context
        self.term = self.state.term
        self.receipts: deque[Any] = deque()
        self.lost = False
        self.mixed = False

    async def read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if request.HasField("credits"):
                self.credits += request.credits
            elif request.HasField("mixed"):
                assert self.node.mixes, "an older node refuses a field that it does not know"
                self.mixed = request.mixed
            elif request.HasField("settle"):
                self._settle(request.settle)
            elif request.HasField("extend"):
                self.receipts.append(consumer_pb2.ConsumeResponse(extended=self._extend(request.extend)))
            self.state.poke()

    def _extend(self, extend: Any) -> Any:
        self.node.extends.append(extend)
        receipt = consumer_pb2.ExtendReceipt(sequence=extend.sequence)
        attempts = np.frombuffer(extend.attempts, "<u4").tolist()
        for id64, attempt in zip(np.frombuffer(extend.ids, "<u8").tolist(), attempts, strict=True):
            place = (self.group, id64)
            if self.state.attempts.get(place) == attempt and place not in self.state.settled:
                self.state.leased[place] = time.monotonic() + extend.lease_ms / 1_000
                receipt.extended += 1
            else:
                receipt.refused += 1
        return receipt

    def _settle(self, settle: Any) -> None:
        self.node.settles.append(settle)
        receipt = consumer_pb2.SettleReceipt(sequence=settle.sequence)
        if self.node.forbidden and self.node.forbidden in (settle.topic, *settle.topics):
            refused = status(grpc.StatusCode.PERMISSION_DENIED, "RIGHT_REQUIRED", "no right to the topic")
            receipt.error = refused.SerializeToString()
            self.receipts.append(consumer_pb2.ConsumeResponse(settled=receipt))
            return
        if self.node.busy_settles:
            self.node.busy_settles -= 1
            refused = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED", "full", retry_after_ms="1")
            receipt.error = refused.SerializeToString()
            self.receipts.append(consumer_pb2.ConsumeResponse(settled=receipt))
            return
        if settle.topics:
            assert self.node.mixes, "an older node refuses a field that it does not know"
            counts = np.frombuffer(settle.topic_counts, "<u4").tolist()
            receipt.parts = np.array([(count, 0, 0) for count in counts], "<u4").tobytes()
        attempts = np.frombuffer(settle.attempts, "<u4").tolist()
        for id64, attempt in zip(np.frombuffer(settle.ids, "<u8").tolist(), attempts, strict=True):
            place = (self.group, id64)
            if self.state.attempts.get(place) != attempt and place not in self.state.settled:
                receipt.stale += 1
                continue
            receipt.settled += 1
            self.state.leased.pop(place, None)
            if settle.outcome == consumer_pb2.ACK:
                self.state.settled[place] = settle.outcome
        if self.node.drop_answers:
            self.node.drop_answers -= 1
            self.lost = True
        self.receipts.append(consumer_pb2.ConsumeResponse(settled=receipt))

    async def write(self) -> None:
        while True:
            changed = self.state.changed
            if self.lost:
                return
            master = self.state.master
            if master is not self.node or self.state.term != self.term:
                moved = consumer_pb2.Moved(master_address=master.address if master else "")
                await self.context.write(consumer_pb2.ConsumeResponse(moved=moved))
                return
            while self.receipts:
                await self.context.write(self.receipts.popleft())
            ids = self.state.due(self.group, self.topics, min(self.credits, self.batch_max))
            if ids:
                await self._deliver(ids)
                continue
            try:
                await asyncio.wait_for(changed.wait(), 0.01)
            except TimeoutError:
                continue

    async def _deliver(self, ids: list[int]) -> None:
        topic_of = {id64: self.state.messages[id64][0].topic for id64 in ids}
        topics = list(dict.fromkeys(topic_of.values())) if self.mixed else [topic_of[ids[0]]]
        ids = [id64 for topic in topics for id64 in ids if topic_of[id64] == topic]
        self.credits -= len(ids)
        metas, records, attempts = [], [], []
        for id64 in ids:
            place = (self.group, id64)
            self.state.attempts[place] = self.state.attempts.get(place, 0) + 1
            self.state.leased[place] = time.monotonic() + LEASE_S
            attempts.append(self.state.attempts[place])
            message = self.state.messages[id64][0]
            metas.append(message.meta.SerializeToString() if message.HasField("meta") else b"")
            records.append(metas[-1] + message.payload)
        batch = consumer_pb2.DeliverBatch(
            topic=topics[0] if len(topics) == 1 else "",
            group=self.group,
            term=self.state.term,
            ids=np.array(ids, "<u8").tobytes(),
            attempts=np.array(attempts, "<u4").tobytes(),
            positions=np.arange(len(ids), dtype="<u8").tobytes(),
            due_ms=np.array([self.state.messages[id64][1] for id64 in ids], "<i8").tobytes(),
            meta_sizes=np.array([len(meta) for meta in metas], "<u4").tobytes(),
            sizes=np.array([len(record) for record in records], "<u4").tobytes(),
            records=b"".join(records),
        )
        if len(topics) > 1:
            counts = [sum(topic_of[id64] == topic for id64 in ids) for topic in topics]
            batch.topics.extend(topics)
            batch.topic_counts = np.array(counts, "<u4").tobytes()
            batch.epochs = np.zeros(len(topics), "<u4").tobytes()
        await self.context.write(consumer_pb2.ConsumeResponse(deliver=batch))


def messages_of(batch: Any) -> list[common_pb2.Message]:
    """The messages of rows or columns."""
    if batch.HasField("rows"):
        return list(batch.rows.messages)
    columns = batch.columns
    sizes = np.frombuffer(columns.payload_sizes, "<u4").tolist()
    meta_sizes = np.frombuffer(columns.meta_sizes, "<u4").tolist() or [0] * len(sizes)
    when = np.frombuffer(columns.due_ms or columns.delay_ms, "<i8").tolist()
    messages, place, meta_place = [], 0, 0
    for size, meta_size, value in zip(sizes, meta_sizes, when, strict=True):
        message = common_pb2.Message(topic=columns.topic, payload=columns.payloads[place : place + size])
        if columns.due_ms:
            message.due_ms = value
        else:
            message.delay_ms = value
        if meta_size:
            message.meta.ParseFromString(columns.metas[meta_place : meta_place + meta_size])
        if message.meta.unique_key:
            message.on_key_conflict = columns.on_key_conflict
            message.key_until_settled = columns.key_until_settled
        messages.append(message)
        place += size
        meta_place += meta_size
    return messages
