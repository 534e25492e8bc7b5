"""Requests of clients other than consuming: schedule, cancel, reschedule, look up, list, count, administer.

Each method answers its callback exactly once, with a result or a Failure. Reads that may touch the
disk run in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tickwheel.node.core.failure import Failure, RequestError, invalid, no_agreed_time
from tickwheel.node.core.intake import DUE_MS_LIMIT, KIND_DUE, IncomingBatch
from tickwheel.node.core.publisher import BatchOutcome, resolve_when
from tickwheel.node.core.work import Found, RemovedError
from tickwheel.node.state.membership import KINDS, message_of
from tickwheel.node.state.results import AdminResult, CancelResult, RescheduleResult
from tickwheel.node.state.settings import seed_settings
from tickwheel.proto import admin_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand, Cancel, Command, CreateCluster, Reschedule
from tickwheel.replication.log import Member
from tickwheel.wheel.units import CursorKey, Units, ids_of

if TYPE_CHECKING:
    from tickwheel.node.core.core import NodeCore

PAGE_DEFAULT = 100
PAGE_MAX = 1_000
BUCKETS_MAX = 10_000
BUCKET_WIDTHS_MS = (1_000, 60_000, 3_600_000)


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """Outcome of a reschedule."""

    outcome: scheduler_pb2.RescheduleOutcome.ValueType
    id: int
    due_ms: int


def id_of(message_id: common_pb2.MessageId) -> int:
    """A message id as one number."""
    return message_id.hour << 32 | message_id.index


def message_id_of(number: int, wheel_group: int) -> common_pb2.MessageId:
    """The reverse of `id_of`."""
    return common_pb2.MessageId(wheel_group=wheel_group, hour=number >> 32, index=number & 0xFFFF_FFFF)


def _no_message(number: int) -> Failure:
    text = f"{number >> 32}-{number & 0xFFFFFFFF}"
    return Failure(common_pb2.UNKNOWN_NAME, f"no message {text}", {"field": "id", "value": text})


class RequestDesk:
    """One per node."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core

    # -- producers

    def schedule(self, batch: IncomingBatch, done: Callable[[BatchOutcome | Failure], None]) -> None:
        """Schedule a checked batch; `done` when it is on stable storage of a majority."""
        failure = self._core.refusal()
        if failure is not None:
            done(failure)
            return
        self._core.publisher.schedule(batch, done)

    def cancel(self, number: int, done: Callable[[scheduler_pb2.CancelOutcome.ValueType | Failure], None]) -> None:
        """Cancel by id; the outcome is decided when the command is applied."""

        def found(unit: Found | Failure) -> None:
            if isinstance(unit, Failure):
                done(unit)
                return
            if unit.units is None:
                done(scheduler_pb2.NOT_FOUND)
                return
            command = Command(cancel=Cancel(id=number, due_ms=int(unit.units["due_ms"][0])))
            self._core.proposer.submit(command, cancelled)

        def cancelled(result: object) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            assert isinstance(result, CancelResult)
            done(result.outcome)

        self._find(number, found)

    def reschedule(self, number: int, when: int, kind: int, done: Callable[[Rescheduled | Failure], None]) -> None:
        """Move a pending message; `when` as `kind` of intake says."""
        core = self._core
        try:
            due_ms = self._one_due(when, kind)
        except RequestError as error:
            done(error.failure)
            return

        def found(unit: Found | Failure) -> None:
            if isinstance(unit, Failure):
                done(unit)
                return
            units = unit.units
            if units is None:
                done(Rescheduled(scheduler_pb2.RESCHEDULE_NOT_FOUND, 0, 0))
                return

            def read(records: list[bytes] | None, error: BaseException | None) -> None:
                if isinstance(error, RemovedError):
                    done(Rescheduled(scheduler_pb2.RESCHEDULE_NOT_FOUND, 0, 0))
                    return
                if error is not None or not records:
                    done(Failure(common_pb2.WRONG_STATE, f"the message cannot be read: {error}"))
                    return
                propose(units[0], records[0])

            core.background.read_records(units, read)

        def propose(unit: np.void, record: bytes) -> None:
            command = Reschedule(
                id=number,
                due_ms=int(unit["due_ms"]),
                new_due_ms=due_ms,
                topic_id=int(unit["topic_id"]),
                record=record,
                meta_size=int(unit["meta_size"]),
                tag_hash=int(unit["tag_hash"]),
                tag_mask=int(unit["tag_mask"]),
                key_hash=int(unit["key_hash"]),
            )
            core.proposer.submit(Command(reschedule=command), moved)

        def moved(result: object) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            assert isinstance(result, RescheduleResult)
            done(Rescheduled(result.outcome, result.new_id, result.due_ms))

        self._find(number, found)

    def _one_due(self, when: int, kind: int) -> int:
        core = self._core
        if not -DUE_MS_LIMIT <= when <= DUE_MS_LIMIT or (kind and when < 0):
            raise invalid("due_ms" if not kind else "delay_ms", when, "a time in milliseconds, a delay of 0 or more")
        if kind != KIND_DUE and not core.clock.known:
            raise RequestError(no_agreed_time())
        now_ms = core.clock.now_ms()
        due_ms = int(resolve_when(np.array([when], np.int64), kind_column(kind), now_ms, core.state.delay_levels_ms)[0])
        limit_ms = core.state.settings.delay_ms_max
        if due_ms > now_ms + limit_ms:
            raise invalid("due_ms", due_ms, f"at most {limit_ms} ms ahead of now ({now_ms})")
        return due_ms

    def _find(self, number: int, found: Callable[[Found | Failure], None]) -> None:
        """Read the unit that an id names now."""
        core = self._core
        failure = core.refusal()
        if failure is not None:
            found(failure)
            return

        def looked_up(result: Found | None, error: BaseException | None) -> None:
            if error is not None or result is None:
                found(Failure(common_pb2.WRONG_STATE, f"the message cannot be looked up: {error}"))
            else:
                found(result)

        core.background.look_up(np.array([number], np.uint64), looked_up)

    # -- reads

    def get(self, number: int, content: bool, done: Callable[[scheduler_pb2.GetResponse | Failure], None]) -> None:
        """State and, with `content`, payload and meta of one message."""
        core = self._core

        def found(result: Found | Failure) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            if result.units is None:
                done(_no_message(number))
                return
            state = scheduler_pb2.PENDING
            units = result.units
            if result.cancelled:
                state = scheduler_pb2.MESSAGE_CANCELLED
            elif CursorKey(int(units["due_ms"][0]), int(units["index"][0])) < core.wheel.cursor:
                state = scheduler_pb2.DISPATCHED
            self._describe(
                units,
                result.ids,
                content,
                lambda messages: done(
                    messages
                    if isinstance(messages, Failure)
                    else scheduler_pb2.GetResponse(message=messages[0], state=state)
                ),
            )

        self._find(number, found)

    def _describe(
        self,
        units: Units,
        ids: np.ndarray,
        content: bool,
        done: Callable[[list[scheduler_pb2.PendingMessage] | Failure], None],
    ) -> None:
        core = self._core
        group = core.identity.wheel_group
        messages = [
            scheduler_pb2.PendingMessage(
                id=message_id_of(int(number), group),
                topic=core.state.topic_name(int(unit["topic_id"])),
                due_ms=int(unit["due_ms"]),
                due_requested_ms=int(unit["due_requested_ms"]),
                payload_bytes=int(unit["size"]) - int(unit["meta_size"]),
            )
            for unit, number in zip(units, ids, strict=True)
        ]
        if not content or not messages:
            done(messages)
            return

        def read(records: list[bytes] | None, error: BaseException | None) -> None:
            if isinstance(error, RemovedError):
                done(_no_message(int(ids[0])))
                return
            if error is not None or records is None:
                done(Failure(common_pb2.WRONG_STATE, f"the message cannot be read: {error}"))
                return
            for message, unit, record in zip(messages, units, records, strict=True):
                meta_size = int(unit["meta_size"])
                message.meta.ParseFromString(record[:meta_size])
                message.payload = record[meta_size:]
            done(messages)

        core.background.read_records(units, read)

    def list_pending(
        self,
        request: scheduler_pb2.ListPendingRequest,
        done: Callable[[scheduler_pb2.ListPendingResponse | Failure], None],
    ) -> None:
        """One page of pending messages in delivery order."""
        core = self._core
        failure = core.refusal()
        if failure is not None:
            done(failure)
            return
        try:
            topic_id, due_min, due_max = self._range(request.topic, request.due_ms_min, request.due_ms_max)
            size = request.page_size or PAGE_DEFAULT
            if size > PAGE_MAX:
                raise invalid("page_size", size, f"1 to {PAGE_MAX}")
            after = _page_token(request.page_token)
        except RequestError as error:
            done(error.failure)
            return

        def scanned(units: Units | None, error: BaseException | None) -> None:
            if error is not None or units is None:
                done(Failure(common_pb2.WRONG_STATE, f"the schedule cannot be read: {error}"))
                return
            token = ""
            if len(units) == size:
                token = f"{int(units['due_ms'][-1])}.{int(units['index'][-1])}"
            self._describe(
                units,
                ids_of(units),
                request.content,
                lambda messages: done(
                    messages
                    if isinstance(messages, Failure)
                    else scheduler_pb2.ListPendingResponse(messages=messages, next_page_token=token)
                ),
            )

        core.background.scan(due_min, due_max, after, size, topic_id, scanned)

    def count_pending(
        self,
        request: scheduler_pb2.CountPendingRequest,
        done: Callable[[scheduler_pb2.CountPendingResponse | Failure], None],
    ) -> None:
        """How many messages are pending in each bucket of time."""
        core = self._core
        failure = core.refusal()
        if failure is not None:
            done(failure)
            return
        try:
            topic_id, due_min, due_max = self._range(request.topic, request.due_ms_min, request.due_ms_max)
            bucket_ms = request.bucket_ms or BUCKET_WIDTHS_MS[-1]
            if bucket_ms not in BUCKET_WIDTHS_MS:
                raise invalid("bucket_ms", bucket_ms, "1000, 60000 or 3600000")
        except RequestError as error:
            done(error.failure)
            return

        def counted(result: list[tuple[int, int]] | None, error: BaseException | None) -> None:
            if error is not None or result is None:
                done(Failure(common_pb2.WRONG_STATE, f"the schedule cannot be read: {error}"))
                return
            if len(result) > BUCKETS_MAX:
                done(invalid("bucket_ms", bucket_ms, f"at most {BUCKETS_MAX} buckets an answer").failure)
                return
            response = scheduler_pb2.CountPendingResponse(total=sum(count for _, count in result))
            for start_ms, count in result:
                response.buckets.add(start_ms=start_ms, count=count)
            done(response)

        core.background.count(due_min, due_max, bucket_ms, topic_id, counted)

    def _range(self, topic: str, due_min: int, due_max: int) -> tuple[int | None, int, int]:
        state = self._core.state
        topic_id = None
        if topic:
            topic_id = state.topic_id(topic)
            if topic_id is None:
                raise RequestError(
                    Failure(
                        common_pb2.UNKNOWN_NAME, f"topic {topic} does not exist", {"field": "topic", "value": topic}
                    )
                )
        for name, value in (("due_ms_min", due_min), ("due_ms_max", due_max)):
            if not 0 <= value <= DUE_MS_LIMIT:
                raise invalid(name, value, "a time in milliseconds since 1970, or 0")
        return topic_id, due_min, due_max or DUE_MS_LIMIT

    # -- operators

    def admin(self, command: AdminCommand, done: Callable[[AdminResult | Failure], None]) -> None:
        """Put an administrative command into the log."""
        failure = self._core.refusal()
        if failure is not None:
            done(failure)
            return
        if command.WhichOneof("body") in KINDS:
            self._core.members.change(command, done)
            return

        def applied(result: object) -> None:
            if isinstance(result, AdminResult) and result.failure is not None:
                done(result.failure)
                return
            assert isinstance(result, AdminResult | Failure)
            done(result)

        self._core.proposer.submit(Command(admin=command), applied)

    def create_cluster(self, settings: admin_pb2.Settings | None, members: Sequence[Member]) -> None:
        """The first command of a new cluster."""
        core = self._core
        command = CreateCluster(
            cluster_id=core.identity.cluster_id,
            settings=settings or seed_settings(),
            members=[message_of(member) for member in members],
        )
        core.proposer.submit(Command(admin=AdminCommand(create_cluster=command)), lambda _: None)


def kind_column(kind: int) -> np.ndarray:
    """One kind as a column."""
    return np.array([kind], np.uint8)


def _page_token(token: str) -> CursorKey | None:
    if not token:
        return None
    due, _, index = token.partition(".")
    if not (due.isdecimal() and index.isdecimal() and len(due) < 18 and len(index) < 11):
        raise invalid("page_token", token, "the next_page_token of an earlier answer")
    return CursorKey(int(due), int(index))
