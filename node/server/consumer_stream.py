"""Consume: the stream of one consumer.

Opens a session of the core, passes credits, settlements and extensions in, and batches and receipts out. Each
stream has one writer. At most SETTLES_MAX settlements of a stream are in work; further ones are not read meanwhile.

When a lease runs out, the consumer's connection is pinged. Until it answers, none of its consumers is handed anything:
their process may have stopped, and a retry would wait there for another lease. A consumer whose batches still wait to
be written gets nothing until they are.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.node.server.callers import NOTHING, Caller
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.checks import consuming, settling
from tickwheel.node.server.errors import serialized_status
from tickwheel.node.server.outbox import CreditGate, Outbox
from tickwheel.node.server.resolving import resolve
from tickwheel.node.state.rights import Rights
from tickwheel.proto import common_pb2, consumer_pb2
from tickwheel.transport.connection import StreamOverError
from tickwheel.transport.server import ServerConnection
from tickwheel.transport.server import ServerStream as Context

SETTLES_MAX = 256
MOVED_REASONS = frozenset({common_pb2.NOT_MASTER, common_pb2.NO_MASTER})
"""A session that ends for one of these reasons continues at another node."""

Asked = tuple[bool, Rights, str, tuple[str, ...]]
"""Whether a caller passes every check, its rights (another object after each change of rights), group, topics."""


class ConsumerStream:
    """One open consumer."""

    def __init__(
        self,
        calls: Calls,
        stream_bytes_max: int,
        who: Caller,
        first: consumer_pb2.OpenConsumer,
        ran_out: Callable[[], None],
    ) -> None:
        """`ran_out` is called when a lease of unsettled messages has run out, unless the stream is suspended."""
        self._ran_out = ran_out
        self._calls = calls
        self._who = who
        self._first = first
        self._gate = CreditGate(stream_bytes_max)
        self._session: ConsumerHandle | None = None
        self._in_work = 0
        self._half_closed = False
        self._closed_by_client = False
        self._suspended = False
        self._answers = True
        """False: its connection has not answered since a lease ran out."""
        self._room = asyncio.Event()
        self._room.set()
        self.outbox = Outbox()
        self.failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """Whether it was closed."""
        return self._closed_by_client

    def refusal(self) -> Failure | None:
        """The refusal if the user lacks the right to consume this; None: it has it."""
        return consuming(self._who, self._first, self._calls.core.state)

    def asked(self) -> Asked:
        """What `refusal` depends on, beside the group's topics."""
        free = self._who.free
        return free, NOTHING if free else self._who.rights, self._first.group, tuple(self._first.topics)

    def end(self, failure: Failure) -> None:
        """End the stream from outside with `failure`; its open deliveries go to other consumers."""
        self.failure = failure
        self.close()

    async def open(self) -> None:
        """Open the session of the core. Raises RequestError for a refusal."""
        first = consumer_pb2.OpenConsumer()
        first.CopyFrom(self._first)
        first.credits = self._gate.add(first.credits)
        outcome: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        core, actor = self._calls.core, self._who.actor

        async def opening() -> None:
            session = await core.parts.consumers.open(first, self._deliver, self._closed, actor, self._ran_out)
            if self._closed_by_client or outcome.done():
                session.close()  # the caller is gone; this stream may learn of that in a later pass of the loop
            else:
                self._session = session
                if self._suspended:
                    session.suspend()

        def opened(failure: Failure | None) -> None:
            resolve(outcome, failure)

        def failed(failure: Failure) -> None:
            if not resolve(outcome, failure):
                self.fail(failure)

        self._calls.serve(failed, lambda: core.serving.start(opening(), opened))
        self._calls.wake()
        failure = await outcome
        if failure is not None:
            raise RequestError(failure)

    def close(self) -> None:
        """End the stream and the session. Idempotent."""
        self._closed_by_client = True
        self.outbox.end()
        session, self._session = self._session, None
        if session is not None:
            self._calls.serve(lambda failure: None, session.close)
            self._calls.wake()

    def fail(self, failure: Failure) -> None:
        """End the stream after an error of this node; the first failure counts."""
        self.failure = self.failure or failure
        self.outbox.end()

    def written(self, response: consumer_pb2.ConsumeResponse) -> None:
        """A response has been written to the network: pass on credits that were held back."""
        self.outbox.written()
        if response.HasField("deliver"):
            self._pass_credits(self._gate.written(len(response.deliver.ids) // 8))
        self._resume()

    def suspend(self) -> None:
        """Have the consumer handed nothing until `answers`, and until everything that waits has been written."""
        self._answers = False
        if not self._suspended:
            self._suspended = True
            if self._session is not None:
                self._session.suspend()

    def answers(self) -> None:
        """Its connection has answered since `suspend`."""
        self._answers = True
        self._resume()

    def _resume(self) -> None:
        if self._suspended and self._answers and not self.outbox.unwritten:
            self._suspended = False
            if self._session is not None and self._session.resume():
                self._calls.wake()

    async def read(self, requests: AsyncIterator[consumer_pb2.ConsumeRequest]) -> None:
        """Take requests until the client ends its side. The stream then ends once all settlements are answered."""
        try:
            async for request in requests:
                self._take(request)
                await self._room.wait()
        except RequestError as error:
            self.failure = error.failure
            self.outbox.end()
            return
        except StreamOverError:  # the connection is gone
            self.outbox.end()
            return
        except Exception as error:  # else the stream would stay open without a reader
            self.fail(self._calls.fault(error))
            return
        self._half_closed = True
        self._end_if_done()

    def _take(self, request: consumer_pb2.ConsumeRequest) -> None:
        session = self._session
        if session is None:
            return
        content = request.WhichOneof("content")
        if content == "credits":
            self._pass_credits(self._gate.add(request.credits))
        elif content == "settle":
            settle = request.settle
            self._begin_work()
            refusal = settling(self._who, settle, self._calls.core.state)
            if refusal is not None:
                self._not_settled(settle.sequence, refusal)
                return
            reply = Reply(self._settled, partial(self._not_settled, settle.sequence))
            self._calls.serve_for_log(self.fail, session.settle, settle, reply)
        elif content == "extend":
            extend = request.extend
            self._begin_work()
            refusal = settling(self._who, extend, self._calls.core.state)
            if refusal is not None:
                self._not_extended(extend.sequence, refusal)
                return
            self._calls.serve(self.fail, lambda: self._extend(session, extend))
            self._calls.wake()
        elif content == "mixed":
            session.mix(request.mixed)
        else:
            raise invalid("content", content or "absent", "after open: credits, settle, extend or mixed")

    def _pass_credits(self, credits: int) -> None:
        if credits and self._session is not None and self._session.credit(credits):
            self._calls.wake()

    def _begin_work(self) -> None:
        self._in_work += 1
        if self._in_work >= SETTLES_MAX:
            self._room.clear()

    def _end_work(self, response: consumer_pb2.ConsumeResponse) -> None:
        self.outbox.put(response)
        self._in_work -= 1
        self._room.set()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._half_closed and self._in_work == 0:
            self.outbox.end()

    def _settled(self, receipt: consumer_pb2.SettleReceipt) -> None:
        self._end_work(consumer_pb2.ConsumeResponse(settled=receipt))

    def _not_settled(self, sequence: int, failure: Failure) -> None:
        self._settled(consumer_pb2.SettleReceipt(sequence=sequence, error=serialized_status(failure)))

    def _extend(self, session: ConsumerHandle, extend: consumer_pb2.ExtendBatch) -> None:
        try:
            receipt = session.extend(extend)
        except RequestError as error:
            self._not_extended(extend.sequence, error.failure)
            return
        self._end_work(consumer_pb2.ConsumeResponse(extended=receipt))

    def _not_extended(self, sequence: int, failure: Failure) -> None:
        receipt = consumer_pb2.ExtendReceipt(sequence=sequence, error=serialized_status(failure))
        self._end_work(consumer_pb2.ConsumeResponse(extended=receipt))

    def _deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        self._gate.queued(len(batch.ids) // 8, len(batch.records))
        response = consumer_pb2.ConsumeResponse()
        response.deliver.CopyFrom(batch)  # the constructor would copy it twice
        self.outbox.put(response)

    def _closed(self, failure: Failure) -> None:
        self._session = None
        if failure.reason in MOVED_REASONS:
            metadata = failure.metadata
            moved = consumer_pb2.Moved(
                master_id=metadata.get("master_id", ""), master_address=metadata.get("master_address", "")
            )
            self.outbox.put(consumer_pb2.ConsumeResponse(moved=moved))
        else:
            self.failure = failure
        self.outbox.end()

    def opened(self) -> consumer_pb2.ConsumeResponse | None:
        """The first response; None if the session is closed already."""
        if self._session is None:
            return None
        return consumer_pb2.ConsumeResponse(opened=self._session.opened())


class ConsumerStreams:
    """The consumers of a node that are connected by a stream."""

    def __init__(self, calls: Calls, stream_bytes_max: int) -> None:
        self._calls = calls
        self._stream_bytes_max = stream_bytes_max
        self._streams: dict[ServerConnection, set[ConsumerStream]] = {}
        self._asked: set[ServerConnection] = set()
        """Connections that have not answered since a lease of one of their consumers ran out."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes of deliveries that wait for the connections of slow consumers."""
        return sum(stream.outbox.bytes for stream in self._all())

    def _all(self) -> Iterator[ConsumerStream]:
        return itertools.chain.from_iterable(self._streams.values())

    def _leave(self, connection: ServerConnection, stream: ConsumerStream) -> None:
        streams = self._streams[connection]
        streams.discard(stream)
        if not streams:
            del self._streams[connection]
            self._asked.discard(connection)

    def _doubt(self, connection: ServerConnection) -> None:
        """A lease of a consumer on this connection ran out: suspend all of them until it answers."""
        for stream in self._streams.get(connection, ()):
            stream.suspend()
        if connection not in self._asked:
            self._asked.add(connection)
            connection.ask(partial(self._answered, connection))

    def _answered(self, connection: ServerConnection) -> None:
        self._asked.discard(connection)
        for stream in self._streams.get(connection, ()):
            stream.answers()

    async def look(self) -> None:
        """Called when rights have changed: ends the streams of users that have lost their right to consume.

        Other work gets a turn after each stream. Streams that open meanwhile were judged by the changed rights already.
        After another change meanwhile the caller looks again: only the streams that are left were judged by it.
        """
        refusals: dict[Asked, Failure | None] = {}
        for stream in list(self._all()):
            if stream.ended:
                continue  # meanwhile
            asked = stream.asked()
            if asked not in refusals:
                refusals[asked] = stream.refusal()
            refusal = refusals[asked]
            if refusal is not None:
                stream.end(refusal)
            await asyncio.sleep(0)

    async def serve(
        self, requests: AsyncIterator[consumer_pb2.ConsumeRequest], caller: Caller, context: Context
    ) -> None:
        """Serve one consumer to the end of its stream."""
        first = await anext(requests, None)
        if first is None or not first.HasField("open"):
            content = first.WhichOneof("content") if first is not None else None
            raise invalid("content", content or "absent", "the first message must be open")
        connection = context.server_connection
        stream = ConsumerStream(
            self._calls, self._stream_bytes_max, caller, first.open, partial(self._doubt, connection)
        )
        refusal = stream.refusal()
        if refusal is not None:
            raise RequestError(refusal)
        reader: asyncio.Task[None] | None = None
        self._streams.setdefault(connection, set()).add(stream)
        if connection in self._asked:
            stream.suspend()
        try:
            await stream.open()
            opened = stream.opened()
            if opened is not None:
                await context.write(opened)
            reader = asyncio.ensure_future(stream.read(requests))
            while (response := await stream.outbox.next()) is not None:
                await context.write(response)
                stream.written(response)
            if stream.failure is not None:
                raise RequestError(stream.failure)
        finally:
            self._leave(connection, stream)
            stream.close()
            if reader is not None:
                reader.cancel()
