"""The path of a schedule request into the log: it waits for its turn, gets topics and due times, becomes a publish.

Owns the bounded queue of accepted requests. Connections have equal shares of it (fair_queue.py); the requests of one
connection, and those of one producer, keep their order. A request that needs a new topic waits until the topic has been
created through the log, and all requests behind it wait too.

Messages that come one by one wait together (joining.py), whatever connections they came by, and have one share
together. Each is judged, refused and answered by itself; only the columns and the log have them as one request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel, not_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.proposer import Answer
from tickwheel.node.core.schedule.creations import Creations
from tickwheel.node.core.schedule.fair_queue import FairQueue
from tickwheel.node.core.schedule.flow import FlowControl
from tickwheel.node.core.schedule.intake import (
    KIND_DELAY,
    KIND_DUE,
    KIND_LEVEL,
    IncomingBatch,
    MetaColumns,
    Row,
    beyond_longest_delay,
)
from tickwheel.node.core.schedule.joining import ROW_BYTES, JoinedRows, RowCaller
from tickwheel.node.core.schedule.senders import Senders
from tickwheel.node.core.serving import Fail
from tickwheel.node.core.world import Now, fractions
from tickwheel.node.failure import Failure, RequestError, limit_reached, no_agreed_time
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.results import AdminResult, KeyOutcomes, PublishResult
from tickwheel.node.state.unique_keys import DIGEST
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.admin_pb2 import CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand, Command, Publish

ROWS = "rows"
"""The flow of the messages that wait together."""
BUFFERS_ACCEPTED_MAX = 2
"""A master refuses schedules once unmerged messages fill this many arrival buffers."""
REFUSALS_MAX = 64
"""One `take` ends once it has refused this many requests. Telling one caller takes a tenth of a millisecond, and no
heartbeat leaves meanwhile."""
ROOM_WAIT_MS = 200
"""While the queue stays crowded, one of the waiting requests is let in at these intervals."""
TOPICS_HINT_MS = 60_000
"""Retry hint when there may be no more topics: an operator has to act first."""
MERGE_HINT_MS = 500
"""Retry hint when the arrival buffers are full."""


@dataclass(frozen=True, slots=True)
class AppliedLevels:
    """For each message its delay level, capped at the highest of the table, and that level's delay; 0 and 0: none."""

    levels: NDArray[np.uint32]
    delays_ms: NDArray[np.int64]


class BatchOutcome(NamedTuple):
    """A batch is on stable storage of a majority. Arrays are in the order of the request's messages."""

    ids: NDArray[np.uint64]
    due_ms: NDArray[np.int64]
    repeated: bool
    levels: AppliedLevels | None = None
    """Set if the request asked for a level and is not a repetition."""
    keys: KeyOutcomes | None = None
    """As in RequestOutcome."""


@dataclass(slots=True, eq=False)
class _Request:
    batch: IncomingBatch
    reply: Reply[BatchOutcome]
    bytes: int
    caller: Fail | None
    due: NDArray[np.int64] | None = None
    """Due times in ms, once the request is judged."""
    levels: AppliedLevels | None = None

    @property
    def topics(self) -> Sequence[str]:
        return self.batch.topics

    @property
    def actor(self) -> str:
        return self.batch.actor

    def __len__(self) -> int:
        return 1


class Publisher(Part):
    """The queue is empty while the node is not master."""

    of_master = True

    def __init__(
        self, core: Kernel, creations: Creations, senders: Senders, flow: FlowControl, disk_room: DiskRoom
    ) -> None:
        self._core = core
        self._config = core.config
        self._state = core.state
        self._wheel = core.wheel
        self._clock = core.clock
        self._proposer = core.proposer
        self._serving = core.serving
        self._random_bits = core.random_bits
        self._creations = creations
        self._senders = senders
        self._flow = flow
        self._disk_room = disk_room
        self._queue: FairQueue[_Request | JoinedRows] = FairQueue()
        self.waiting = self._queue.all
        """Accepted requests that are not yet proposed."""
        self._open: dict[str, tuple[JoinedRows, int]] = {}
        """Topic -> rows in the queue that its next row may join, and their tag."""
        self._creating: set[str] = set()
        self._outside: deque[Promise[None]] = deque()
        """Streams that wait for room in the queue."""
        self._let_in_ms = 0
        """Steady time at which the first of them is let in although the queue is still crowded; 0: not known yet."""
        self.cut_short = False
        """The last `take` stopped early, after refusals or a failure: call it again soon."""

    def crowded(self, flow: str) -> bool:
        """Whether a caller that can wait, as a stream can, should wait (`room`) rather than be refused: the queue is
        half full and its flow has its share of that half, or little is left for anybody."""
        return self._filled(2) and (self._filled(2, flow) or self._filled(3))

    def _filled(self, quarters: int, flow: str | None = None) -> bool:
        """Whether so much of the queue is taken. With a flow: whether that takes its share of so much of the queue."""
        config, queue = self._config, self._queue
        waiting, flows = (queue.all, 1) if flow is None else (queue.of(flow), queue.flows)
        return (
            4 * flows * waiting.requests >= quarters * config.intake_requests_max
            or 4 * flows * waiting.bytes >= quarters * config.intake_bytes_max
        )

    async def room(self) -> None:
        """Wait while the queue is half full; not for ever, since callers that do not wait could keep it so."""
        if self._filled(2):
            promise: Promise[None] = Promise()
            self._outside.append(promise)
            await promise

    def _let_in(self) -> None:
        outside, self._outside = self._outside, deque()
        for promise in outside:
            promise.keep(None)

    def tick(self, now: Now) -> None:
        if not self._outside:
            self._let_in_ms = 0
        elif not self._filled(2):
            self._let_in()
        elif not self._let_in_ms:
            self._let_in_ms = now.steady_ms + ROOM_WAIT_MS
        elif now.steady_ms >= self._let_in_ms:
            self._let_in_ms = now.steady_ms + ROOM_WAIT_MS
            self._outside.popleft().keep(None)

    def full(self) -> Failure | None:
        """Why no message is accepted now: disks or arrival buffers are full. None: there is room."""
        refusal = self._disk_room.refusal()
        if refusal is None and self.arrivals_full():
            return limit_reached("wheel.buffer_bytes_max", self._config.buffer_bytes_max, MERGE_HINT_MS)
        return refusal

    def arrivals_full(self) -> bool:
        """Whether the messages waiting to be merged into hour files fill `BUFFERS_ACCEPTED_MAX` arrival buffers."""
        return self._wheel.holdings.buffer_bytes >= BUFFERS_ACCEPTED_MAX * self._config.buffer_bytes_max

    def schedule(self, batch: IncomingBatch, reply: Reply[BatchOutcome]) -> None:
        """Queue a checked request; `reply` is told once it is on stable storage of a majority. A repeat of a remembered
        sequence gets the first answer. The request is refused at once if this node cannot serve it now, or if the disk,
        the arrival buffers or the queue are full."""
        refusal = self._core.refusal()
        if refusal is not None:
            reply.fail(refusal)
            return
        size, flow = batch.bytes, batch.connection
        keys = [flow]
        if batch.producer_id:
            try:
                known = self._senders.known(batch.sender, batch.count)
            except RequestError as error:
                reply.fail(error.failure)
                return
            if known is not None:
                reply.done(BatchOutcome(known.ids, known.due_ms, repeated=True, keys=known.keys))
                return
            reply = self._senders.follow(batch.sender, reply)
            # With whom it comes from: naming somebody else's producer id holds nobody up.
            keys.append(f"{batch.actor} {batch.owner} {batch.producer_id}")
        refusal = self._refusal(size, flow)
        if refusal is not None:
            reply.fail(refusal)
            return
        serving = self._serving
        self._queue.put(_Request(batch, serving.bound_reply(reply), size, serving.caller), flow, keys)

    def schedule_row(self, row: Row, client: str, actor: str, caller: RowCaller) -> None:
        """Queue a checked message that may be joined with others; refused like a request. The caller is told once it
        is on stable storage of a majority. `client` and `actor` as in `IncomingBatch`."""
        size, connection = len(row.payload) + ROW_BYTES, caller.connection
        refusal = self._core.refusal() or self._refusal(size, ROWS)
        if refusal is not None:
            caller.fail(refusal)
            return
        rows, tag = self._open.get(row.topic, (None, 0))
        if rows is not None and rows.takes(row, client, actor) and self._queue.may_grow(tag, connection):
            rows.add(row.when, row.payload, caller)
            self._queue.grow(tag, ROWS, connection, size)
            return
        rows = JoinedRows(row.topic, row.kind, client, actor)
        rows.add(row.when, row.payload, caller)
        if self._queue.of(connection).requests:
            # Behind this connection's own requests. Rows of other connections must not wait for these.
            self._queue.put(rows, connection, (connection,))
        else:
            self._open[row.topic] = rows, self._queue.put(rows, ROWS, (connection,))

    def _refusal(self, size: int, flow: str) -> Failure | None:
        """Why a request of `size` bytes cannot be queued. Once the queue is three quarters full, the rest is kept for
        flows that have less than their share."""
        config = self._config
        refusal = self.full()
        if refusal is not None:
            return refusal
        queue = self._queue
        if queue.all.bytes + size > config.intake_bytes_max and queue:
            return limit_reached("intake_bytes", config.intake_bytes_max)
        if queue.all.requests >= config.intake_requests_max:
            return limit_reached("intake_requests", config.intake_requests_max)
        if self._filled(3):
            own, flows = queue.of(flow), queue.flows
            if own.bytes * flows >= config.intake_bytes_max:
                return limit_reached("intake_bytes", config.intake_bytes_max // flows)
            if own.requests * flows >= config.intake_requests_max:
                return limit_reached("intake_requests", config.intake_requests_max // flows)
        return None

    def _next(self) -> _Request | JoinedRows:
        """Take the first of the queue. No more rows may join it."""
        item = self._queue.pop()
        if isinstance(item, JoinedRows) and self._open.get(item.topic, (None, 0))[0] is item:
            del self._open[item.topic]
        return item

    def end(self, failure: Failure) -> None:
        """Answer all waiting requests with `failure`. None was proposed, so clients can safely send them elsewhere."""
        queue = self._queue.remove(lambda item: True)
        self._open.clear()
        self._creating.clear()
        for item in queue:
            self._refuse(item, failure)
        self._let_in()
        self._let_in_ms = 0

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"intake_requests": float(self.waiting.requests)}

    def wait_ms(self, now: Now) -> int | None:
        """None; 0 if requests wait although the last publish had room for none of them, or somebody for room that is
        there; or until one of those who wait is let in."""
        if (self.cut_short and self._queue and self._proposer.window.open) or (self._outside and not self._filled(2)):
            return 0
        return self._let_in_ms - now.steady_ms if self._outside and self._let_in_ms else None

    def take(self, bytes_max: int) -> tuple[Command, Answer, int] | None:
        """Make one publish of waiting requests of about `bytes_max`, at least one; None: none can go now. Requests that
        flow control or their due time forbid are refused on the way."""
        taken: list[_Request] = []
        size = 0
        now_ms = self._clock.now_ms()
        refused = 0
        self.cut_short = False
        while (head := self._queue.head) is not None and (not taken or size + head.bytes <= bytes_max):
            if not self._topics_known(head):
                break
            item = self._next()
            if isinstance(item, JoinedRows):
                refused += len(item)
                for request in self._judge_rows(item, now_ms):
                    taken.append(request)
                    size += request.bytes
                    refused -= request.batch.count
            else:
                self._serving.run(item.caller, self._find_due, item, now_ms)
                if item.due is not None:
                    taken.append(item)
                    size += item.bytes
                else:
                    refused += 1
            if refused >= REFUSALS_MAX:
                self.cut_short = True
                break
        if not taken:
            return None
        command = self._publish_or_fail(taken)
        if command is None and len(taken) > 1:
            # The mistake may be in one of them: that one fails alone, and the others go without it.
            taken = [request for request in taken if self._publish_or_fail([request]) is not None]
            command = self._publish_or_fail(taken, last=True) if taken else None
        if command is None:
            return None
        return command, Reply(partial(self._applied, taken), partial(self._failed, taken)), size

    def _judge_rows(self, rows: JoinedRows, now_ms: int) -> list[_Request]:
        """Find the due times of rows, each as if it were alone; returns what may go into the log. Rows that do so go as
        one request, unless limits apply to them: those count requests."""
        judged: list[_Request] = []
        alone: Iterable[JoinedRows] = rows.each() if len(rows) > 1 else (rows,)
        if len(rows) > 1 and not self._flow.limits(rows.actor):
            mistakes: list[Failure] = []
            far: list[int] = []

            def judge() -> None:
                request = self._request_of(rows)
                too_far = self._too_far(request.batch)
                if too_far.any():
                    far.extend(np.flatnonzero(too_far).tolist())
                    request = self._request_of(rows.only(np.flatnonzero(~too_far).tolist()))
                if request.batch.count:
                    self._find_due(request, now_ms)
                if request.due is not None:
                    judged.append(request)

            self._serving.run(mistakes.append, judge)
            if not mistakes:
                alone = (rows.only((row,)) for row in far)
        for row in alone:
            request = self._request_of(row)
            self._serving.run(request.caller, self._find_due, request, now_ms)
            if request.due is not None:
                judged.append(request)
        return judged

    def _request_of(self, rows: JoinedRows) -> _Request:
        refuse = partial(self._refuse, rows)
        return _Request(rows.batch(), Reply(partial(self._tell, rows), refuse), rows.bytes, refuse)

    def _tell(self, rows: JoinedRows, outcome: BatchOutcome) -> None:
        """Tell each row's caller its part of the outcome. A mistake in that fails this caller alone."""
        run = self._serving.run
        ids, dues = outcome.ids.tolist(), outcome.due_ms.tolist()
        levels = delays = [0] * len(ids)
        if outcome.levels is not None:
            levels, delays = outcome.levels.levels.tolist(), outcome.levels.delays_ms.tolist()
        for caller, number, due_ms, level, delay_ms in zip(rows.callers, ids, dues, levels, delays, strict=True):
            run(caller.fail, caller.placed, number, due_ms, level, delay_ms)

    def _refuse(self, item: _Request | JoinedRows, failure: Failure) -> None:
        if isinstance(item, _Request):
            item.reply.fail(failure)
            return
        for caller in item.callers:
            self._serving.run(caller.fail, caller.fail, failure)

    def _publish_or_fail(self, taken: list[_Request], *, last: bool = False) -> Command | None:
        """`publish_of` as a piece of all these requests. None: it failed. Then a single one was told; several were told
        if this was the `last` try."""

        def failed(failure: Failure) -> None:
            self.cut_short = True  # other requests may wait behind these
            if last or len(taken) == 1:
                self._failed(taken, failure)

        dues = [request.due for request in taken if request.due is not None]
        batches = [request.batch for request in taken]
        return self._serving.run(failed if taken[0].caller is not None else None, self.publish_of, batches, dues)

    def _applied(self, taken: list[_Request], result: CommandResult) -> None:
        """Answer the requests of a publish that was applied."""
        assert isinstance(result, PublishResult) and len(result.requests) == len(taken)
        self._flow.answered([request.batch for request in taken])
        for request, outcome in zip(taken, result.requests, strict=True):
            if outcome.failure is not None:
                request.reply.fail(outcome.failure)
            else:
                levels = None if outcome.repeated else request.levels
                answer = BatchOutcome(outcome.ids, outcome.due_ms, outcome.repeated, levels, outcome.keys)
                request.reply.done(answer)

    def _failed(self, taken: list[_Request], failure: Failure) -> None:
        """Answer the requests of a publish that was not made, or not applied."""
        self._flow.answered([request.batch for request in taken])
        for request in taken:
            request.reply.fail(failure)

    def _topics_known(self, item: _Request | JoinedRows) -> bool:
        state = self._state
        missing = [name for name in item.topics if state.topic_id(name) is None]
        if not missing:
            return True
        wanted = [name for name in missing if name not in self._creating]
        if not wanted:
            return False
        if not state.settings.topics_auto_create:
            text = f"topic {wanted[0]} does not exist"
            unknown = Failure(pb.UNKNOWN_NAME, text, {"field": "topic", "value": wanted[0]})
            self._refuse_head(not_current(self._core) or unknown)
            return False
        topics_max = state.settings.topics_max
        if len(state.topics) + len(self._creating) + len(wanted) > topics_max:
            self._refuse_head(limit_reached("topics_max", topics_max, TOPICS_HINT_MS))
            return False
        allowed = self._creations.topics(len(wanted))
        for name in wanted[:allowed]:
            self._creating.add(name)
            creation = AdminCommand(create_topic=CreateTopicRequest(name=name), actor=item.actor)
            command = Command(admin=creation)
            self._proposer.submit(command, Reply(partial(self._created, name), partial(self._not_created, name)))
        if allowed < len(wanted):
            # The allowed part is created although the batch is refused: so a batch of any size gets through in the end.
            self._refuse_head(self._creations.topics_refused(len(wanted) - allowed))
        return False

    def _created(self, name: str, result: CommandResult) -> None:
        self._creating.discard(name)
        if isinstance(result, AdminResult) and result.failure is not None:
            self._open.pop(name, None)
            for item in self._queue.remove(lambda item: name in item.topics):
                self._refuse(item, result.failure)

    def _not_created(self, name: str, _: Failure) -> None:
        self._creating.discard(name)  # the next `take` tries again

    def _refuse_head(self, failure: Failure) -> None:
        item = self._next()
        self.cut_short = bool(self._queue)  # requests behind it need not wait
        self._refuse(item, failure)

    def _too_far(self, batch: IncomingBatch) -> NDArray[np.bool_]:
        """Which of the messages `_find_due` will refuse for their time."""
        full_ms = self._clock.next_full_ms()
        due, _ = resolve_when(batch.when, batch.kinds, full_ms, self._state.delay_levels_ms)
        return due > full_ms + self._state.settings.delay_ms_max

    def _find_due(self, request: _Request, now_ms: int) -> None:
        """Give a request its absolute due times (`due`), or refuse it: no agreed time, too far ahead, or flow control.
        Run it as a piece of the request: a mistake fails this one alone."""
        batch = request.batch
        if not self._clock.known and np.any(np.not_equal(batch.kinds, KIND_DUE)):
            request.reply.fail(no_agreed_time())
            return
        # Relative times count from the next full millisecond: no delay may be short by a fraction of one.
        full_ms = self._clock.next_full_ms()
        due, request.levels = resolve_when(batch.when, batch.kinds, full_ms, self._state.delay_levels_ms)
        limit_ms = self._state.settings.delay_ms_max
        latest = int(due[0]) if len(due) == 1 else int(due.max())
        if latest > full_ms + limit_ms:
            row = int(due.argmax())
            kind = batch.kinds if isinstance(batch.kinds, int) else int(batch.kinds[row])
            when = int(batch.when[row])
            request.reply.fail(beyond_longest_delay(f"[{row}]", when, kind, latest, limit_ms, full_ms).failure)
            return
        if batch.jitter_ms is not None:
            due = spread(due, batch.jitter_ms, full_ms + limit_ms, self._random_bits)
        refusal = self._flow.admit(batch, due, now_ms)
        if refusal is not None:
            request.reply.fail(refusal)
            return
        request.due = due

    def publish_of(self, batches: list[IncomingBatch], dues: list[NDArray[np.int64]]) -> Command:
        """A command that publishes all batches, its columns sorted by due time. Every topic must exist. `dues`: due
        times of each batch."""
        due = dues[0] if len(dues) == 1 else np.concatenate(dues)
        order: NDArray[np.int64] | None = None
        if len(due) > 1 and (due[1:] < due[:-1]).any():
            order = np.argsort(due, kind="stable")
        command = Command()
        publish = command.publish
        publish.requests.extend([self._senders.stated(b.sender, b.count) for b in batches])
        publish.topic_ids = self._topic_column(batches, order)
        publish.due_ms = (due if order is None else due[order]).tobytes()
        publish.sizes = _joined([b.sizes for b in batches], order)
        records = batches[0].records if len(batches) == 1 else b"".join([b.records for b in batches])
        if order is not None:
            publish.rows = order.astype("<u4").tobytes()
            records = reorder_records(records, np.concatenate([b.sizes for b in batches]), order)
        publish.records = records
        if any(b.metas is not None for b in batches):
            _put_metas(publish, batches, order)
        return command

    def _topic_column(self, batches: list[IncomingBatch], order: NDArray[np.int64] | None) -> bytes:
        """The topic of each message; a single one if all have the same."""
        topic_id = self._state.topic_id
        ids = [topic_id(name) or 0 for batch in batches for name in batch.topics]
        table = np.array(ids, "<u4")
        if len(set(ids)) == 1:
            return table[:1].tobytes()
        if len(ids) == len(batches):  # as of single messages
            column = np.repeat(table, [batch.count for batch in batches])
        else:
            parts: list[NDArray[np.uint32]] = []
            first = 0
            for batch in batches:
                own = table[first : first + len(batch.topics)]
                parts.append(np.repeat(own, batch.count) if batch.topic_of is None else own[batch.topic_of])
                first += len(own)
            column = np.concatenate(parts)
        return (column if order is None else column[order]).tobytes()


def resolve_when(
    when: NDArray[np.int64], kinds: NDArray[np.uint8] | int, now_ms: int, levels_ms: NDArray[np.int64]
) -> tuple[NDArray[np.int64], AppliedLevels | None]:
    """Absolute due times in ms from absolute times, delays or levels, as `kinds` says; and the levels, None if there is
    none. Level 0 is no delay; a level above the highest counts as the highest."""
    if isinstance(kinds, int):
        if kinds == KIND_DUE:
            return when, None
        if kinds == KIND_DELAY:
            return when + now_ms, None
        kinds = np.full(len(when), kinds, np.uint8)
    due = np.where(kinds == KIND_DUE, when, when + now_ms)
    asks = kinds == KIND_LEVEL
    if not asks.any():
        return due, None
    levels = np.where(asks, np.minimum(when, len(levels_ms)), 0)
    delays_ms = np.concatenate(([0], levels_ms))[levels]
    due[asks] = now_ms + delays_ms[asks]
    return due, AppliedLevels(levels.astype(np.uint32), delays_ms)


def spread(
    due_ms: NDArray[np.int64], windows_ms: NDArray[np.int64], latest_ms: int, random_bits: Callable[[int], int]
) -> NDArray[np.int64]:
    """Due times moved within their windows of jitter, both ends included, but not beyond `latest_ms`: messages that
    everybody schedules for the full hour come due over the window instead. The master draws before it makes the
    command: the log and the receipt hold the drawn time."""
    moved = due_ms + np.floor(fractions(len(due_ms), random_bits) * (windows_ms + 1)).astype(np.int64)
    return np.maximum(due_ms, np.minimum(moved, latest_ms))


def reorder_records(records: bytes, sizes: NDArray[np.uint32], order: NDArray[np.int64]) -> bytes:
    """The concatenated records in another order: record `order[i]` comes at place i."""
    size = int(sizes[0])
    if (sizes == size).all():
        return np.frombuffer(records, np.uint8).reshape(len(sizes), size)[order].tobytes()
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    view = memoryview(records)
    return b"".join([view[a:b] for a, b in zip(starts[order].tolist(), ends[order].tolist(), strict=True)])


def _put_metas(publish: Publish, batches: list[IncomingBatch], order: NDArray[np.int64] | None) -> None:
    """Fill the columns of metas and unique keys; where a batch has none there are zeros."""
    metas = [b.metas or MetaColumns.none(b.count) for b in batches]
    publish.meta_sizes = _joined([m.sizes for m in metas], order)
    publish.tag_hashes = _joined([m.tag_hashes for m in metas], order)
    publish.tag_masks = _joined([m.tag_masks for m in metas], order)
    publish.one_tag_hashes = True
    publish.key_hashes = _joined([m.key_hashes for m in metas], order)
    keys = [b.unique_keys for b in batches]
    if any(k is not None for k in keys):
        counts = [b.count for b in batches]
        digests = [np.zeros(n, DIGEST) if k is None else k.digests for n, k in zip(counts, keys, strict=True)]
        rules = [np.zeros(n, np.uint8) if k is None else k.rules for n, k in zip(counts, keys, strict=True)]
        publish.unique_keys, publish.key_rules = _joined(digests, order), _joined(rules, order)


def _joined(columns: Sequence[NDArray[Any]], order: NDArray[np.int64] | None) -> bytes:
    """The columns of all batches as one, in this order."""
    column = columns[0] if len(columns) == 1 else np.concatenate(columns)
    return (column if order is None else column[order]).tobytes()
