"""Requests of clients other than consuming: schedule, cancel, reschedule, look up, list, count, administer.

Each method answers its callback exactly once, with a result or a Failure. Reads that may touch the
disk run in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tickwheel.node.core.cold import ColdDesk
from tickwheel.node.core.creations import Creations
from tickwheel.node.core.failure import Failure, Permitted, RequestError, invalid, no_agreed_time
from tickwheel.node.core.intake import DUE_MS_LIMIT, KIND_DUE, IncomingBatch, reschedule_checksum
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.membership import MemberDesk
from tickwheel.node.core.pending import PendingDesk
from tickwheel.node.core.publisher import BatchOutcome, Publisher, Rescheduled, resolve_when
from tickwheel.node.core.senders import Senders
from tickwheel.node.core.work import Found, RemovedError
from tickwheel.node.state.cold_parts import is_cold
from tickwheel.node.state.membership import KINDS, message_of
from tickwheel.node.state.producers import NOBODY, Sender
from tickwheel.node.state.results import AdminResult, CancelResult, RescheduleResult
from tickwheel.node.state.settings import first_settings, refused_levels
from tickwheel.proto import admin_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand, Cancel, Command, CreateCluster, Reschedule
from tickwheel.replication.log import Member
from tickwheel.wheel.units import CursorKey

START_MS_MAX = 1 << 50
"""Latest start time of a group, ms since 1970: some 35,000 years."""


def everybody(topic: str) -> Failure | None:
    """A `Permitted` that allows every topic."""
    return None


def id_of(message_id: common_pb2.MessageId) -> int:
    """A message id as one number: the hour in the upper 32 bits, the index in the lower."""
    return message_id.hour << 32 | message_id.index


def message_id_of(number: int, wheel_group: int) -> common_pb2.MessageId:
    """The reverse of `id_of`."""
    return common_pb2.MessageId(wheel_group=wheel_group, hour=number >> 32, index=number & 0xFFFF_FFFF)


def _no_message(number: int) -> Failure:
    text = f"{number >> 32}-{number & 0xFFFFFFFF}"
    return Failure(common_pb2.UNKNOWN_NAME, f"no message {text}", {"field": "id", "value": text})


class RequestDesk:
    def __init__(
        self,
        core: Kernel,
        senders: Senders,
        publisher: Publisher,
        creations: Creations,
        cold: ColdDesk,
        pending: PendingDesk,
        members: MemberDesk,
    ) -> None:
        self._core = core
        self._senders = senders
        self._publisher = publisher
        self._creations = creations
        self._cold = cold
        self._pending = pending
        self._members = members

    # -- producers

    def schedule(self, batch: IncomingBatch, done: Callable[[BatchOutcome | Failure], None]) -> None:
        """Schedule a checked batch; `done` is called once it is on stable storage of a majority. A repeat of a
        remembered sequence gets the first answer."""
        failure = self._core.refusal()
        if failure is not None:
            done(failure)
            return
        known = self._senders.known(batch.sender, batch.count)
        if known is None:
            self._publisher.schedule(batch, self._senders.follow(batch.sender, done))
        elif isinstance(known, Failure):
            done(known)
        else:
            done(BatchOutcome(known.ids, known.due_ms, repeated=True))

    def cancel(
        self,
        number: int,
        done: Callable[[scheduler_pb2.CancelOutcome.ValueType | Failure], None],
        permitted: Permitted = everybody,
    ) -> None:
        """Cancel a message by id. The outcome is decided when the command is applied."""
        if is_cold(number):
            self._cold.cancel(number, done, permitted, lambda loaded_id: self.cancel(loaded_id, done, permitted))
            return

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

        self._find(number, found, permitted)

    def reschedule(
        self,
        number: int,
        when: int,
        kind: int,
        done: Callable[[Rescheduled | Failure], None],
        permitted: Permitted = everybody,
        sender: Sender = NOBODY,
    ) -> None:
        """Move a pending message; `kind` says what `when` is (KIND_DUE and others of intake). A repeat of the same
        sender's sequence gets the first answer."""
        core = self._core
        failure = core.refusal()
        if failure is not None:
            done(failure)
            return
        sender = replace(sender, checksum=reschedule_checksum(number, kind, when))
        known = self._senders.known(sender, 1)
        if isinstance(known, Failure):
            done(known)
            return
        if known is not None:
            done(Rescheduled(scheduler_pb2.RESCHEDULED, int(known.ids[0]), int(known.due_ms[0]), remembered=True))
            return
        done = self._senders.follow(sender, done)
        try:
            due_ms = self._one_due(when, kind)
        except RequestError as error:
            done(error.failure)
            return
        if is_cold(number):
            self._cold.move(
                number,
                due_ms,
                done,
                permitted,
                lambda loaded_id: self.move(loaded_id, due_ms, done, permitted, sender),
            )
            return
        self.move(number, due_ms, done, permitted, sender)

    def move(
        self,
        number: int,
        due_ms: int,
        done: Callable[[Rescheduled | Failure], None],
        permitted: Permitted = everybody,
        sender: Sender = NOBODY,
    ) -> None:
        """Move a message that is in the wheel. The caller has checked `due_ms`."""
        core = self._core

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
                flags=int(unit["flags"]),
            )
            stated = self._senders.stated(sender, 1)
            if stated.HasField("checksum"):
                command.request.CopyFrom(stated)
            core.proposer.submit(Command(reschedule=command), moved)

        def moved(result: object) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            assert isinstance(result, RescheduleResult)
            if result.failure is not None:
                done(result.failure)
                return
            done(Rescheduled(result.outcome, result.new_id, result.due_ms, result.remembered))

        self._find(number, found, permitted)

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

    def _find(self, number: int, found: Callable[[Found | Failure], None], permitted: Permitted = everybody) -> None:
        """Read the unit that an id names now; its `units` is None if there is none. A Failure if `permitted` refuses
        its topic."""
        core = self._core
        failure = core.refusal()
        if failure is not None:
            found(failure)
            return

        def looked_up(result: Found | None, error: BaseException | None) -> None:
            if error is not None or result is None:
                found(Failure(common_pb2.WRONG_STATE, f"the message cannot be looked up: {error}"))
                return
            refusal = None
            if result.units is not None:
                refusal = permitted(core.state.topic_name(int(result.units["topic_id"][0])))
            found(result if refusal is None else refusal)

        core.background.look_up(np.array([number], np.uint64), looked_up)

    # -- reads

    def get(
        self,
        number: int,
        content: bool,
        done: Callable[[scheduler_pb2.GetResponse | Failure], None],
        permitted: Permitted = everybody,
    ) -> None:
        """State of one message and, with `content`, its payload and meta."""
        core = self._core
        if is_cold(number):
            self._cold.get(number, done, permitted, lambda loaded_id: self.get(loaded_id, content, done, permitted))
            return
        retries = core.state.waiting_retries(number)
        asked = {number}

        def found(result: Found | Failure) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            if result.units is None:
                # Its hour may be gone: then the first retry that waits has its content.
                retry = next((unit_id for _, unit_id, _, _ in retries), number)
                if retry in asked:
                    done(_no_message(number))
                else:
                    asked.add(retry)
                    self._find(retry, found, permitted)
                return
            state = scheduler_pb2.PENDING
            units = result.units
            if retries:
                state = scheduler_pb2.DISPATCHED
            elif result.cancelled:
                state = scheduler_pb2.MESSAGE_CANCELLED
            elif CursorKey(int(units["due_ms"][0]), int(units["index"][0])) < core.wheel.cursor:
                state = scheduler_pb2.DISPATCHED

            def described(messages: list[scheduler_pb2.PendingMessage] | Failure) -> None:
                if isinstance(messages, Failure):
                    done(messages)
                elif not messages:
                    done(_no_message(number))
                else:
                    response = scheduler_pb2.GetResponse(message=messages[0], state=state)
                    for group, _, due_ms, attempts in retries:
                        response.retries.add(group=group, due_ms=due_ms, attempts=attempts)
                    if retries:
                        response.message.id.hour, response.message.id.index = number >> 32, number & 0xFFFF_FFFF
                    done(response)

            self._pending.describe(units, content, content, described)

        self._find(number, found, permitted)

    # -- operators

    def admin(self, command: AdminCommand, done: Callable[[AdminResult | Failure], None]) -> None:
        """Put an administrative command into the log. `done` gets the result of apply, or a Failure."""
        failure = self._core.refusal()
        if failure is not None:
            done(failure)
            return
        if command.HasField("settings") and command.settings.HasField("delay_levels"):
            problem = refused_levels(command.settings.delay_levels)
            if problem:
                done(invalid("delay_levels", command.settings.delay_levels, problem).failure)
                return
        kind = command.WhichOneof("body")
        if kind in ("create_group", "reset_group"):
            start_ms = getattr(command, kind).start_ms
            if not 0 <= start_ms <= START_MS_MAX:
                done(invalid("start_ms", start_ms, f"0 to {START_MS_MAX}").failure)
                return
        if kind in KINDS:
            self._members.change(command, done)
            return
        failure = self._creations.refusal(command)
        if failure is not None:
            done(failure)
            return

        def applied(result: object) -> None:
            if isinstance(result, AdminResult) and result.failure is not None:
                done(result.failure)
                return
            assert isinstance(result, AdminResult | Failure)
            done(result)

        self._core.proposer.submit(Command(admin=command), applied)

    def create_cluster(self, settings: admin_pb2.Settings | None, members: Sequence[Member]) -> None:
        """Propose the first command of a new cluster."""
        core = self._core
        command = CreateCluster(
            cluster_id=core.identity.cluster_id,
            settings=first_settings(settings),
            members=[message_of(member) for member in members],
        )
        core.proposer.submit(Command(admin=AdminCommand(create_cluster=command)), lambda _: None)


def kind_column(kind: int) -> np.ndarray:
    """The kind as a column of one row."""
    return np.array([kind], np.uint8)
