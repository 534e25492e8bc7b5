"""Requests of clients: cancel, reschedule, look up, administer. Messages come in by the publisher.

Reads that may touch the disk run in a worker. A refusal is raised as RequestError.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tickwheel.node.core.bulk.cold import ColdRequests
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.membership import Membership
from tickwheel.node.core.message_ids import fill_message_id, no_message
from tickwheel.node.core.metas import fitting
from tickwheel.node.core.promise import UNHEARD
from tickwheel.node.core.schedule.creations import TOPICS_PER_GROUP_MAX, Creations
from tickwheel.node.core.schedule.intake import (
    DUE_MS_LIMIT,
    KIND_DUE,
    beyond_longest_delay,
    reschedule_checksum,
)
from tickwheel.node.core.schedule.pending import PendingRequests
from tickwheel.node.core.schedule.publisher import resolve_when
from tickwheel.node.core.schedule.senders import Senders
from tickwheel.node.core.work import Found, RemovedError
from tickwheel.node.failure import Failure, Permitted, RequestError, invalid, no_agreed_time, refuse
from tickwheel.node.state.cold import CANCELLED, LOADED
from tickwheel.node.state.cold_parts import is_cold
from tickwheel.node.state.membership import KINDS, message_of
from tickwheel.node.state.names import check_open_topic
from tickwheel.node.state.producers import NOBODY, Sender
from tickwheel.node.state.results import AdminResult, CancelResult, RescheduleResult
from tickwheel.node.state.settings import LEVELS_LENGTH_MAX, QUOTAS_LENGTH_MAX, first_settings, refused_levels
from tickwheel.proto import admin_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand, Cancel, Command, CreateCluster, Reschedule
from tickwheel.replication.log import Member
from tickwheel.wheel.filters import TAG_LENGTH_MAX, TAGS_MAX
from tickwheel.wheel.units import CursorKey

RETRIES_BYTES_MAX = 128 << 10
"""Of a message's retries in an answer that may also hold the largest payload."""
START_MS_MAX = 1 << 50
"""Latest start time of a group, ms since 1970: some 35,000 years."""
SETTING_LENGTHS_MAX = {
    "delay_levels": LEVELS_LENGTH_MAX,
    "topic_quotas": QUOTAS_LENGTH_MAX,
    "client_quotas": QUOTAS_LENGTH_MAX,
    "topic_pending_max": QUOTAS_LENGTH_MAX,
}
"""Characters of settings with texts."""
FILTER_LENGTH_MAX = TAGS_MAX * (TAG_LENGTH_MAX + len(" || "))
"""Characters of a group's filter, with one blank at each side of a separator."""


def everybody(topic: str) -> Failure | None:
    """A `Permitted` that allows every topic."""
    return None


class ClientRequests:
    def __init__(
        self,
        core: Kernel,
        senders: Senders,
        creations: Creations,
        cold: ColdRequests,
        pending: PendingRequests,
        members: Membership,
    ) -> None:
        self._core = core
        self._senders = senders
        self._creations = creations
        self._cold = cold
        self._pending = pending
        self._members = members

    # -- messages

    async def cancel(self, number: int, permitted: Permitted = everybody) -> scheduler_pb2.CancelOutcome.ValueType:
        """Cancel a message by id. The outcome is decided when the command is applied."""
        if is_cold(number):
            place = await self._cold.cancel(number, permitted)
            if place is None:
                return scheduler_pb2.NOT_FOUND
            if place.kind != LOADED:
                return scheduler_pb2.CANCELLED
            number = place.loaded_id
        units = (await self._find(number, permitted)).units
        if units is None:
            return scheduler_pb2.NOT_FOUND
        command = Command(cancel=Cancel(id=number, due_ms=int(units["due_ms"][0])))
        return (await self._core.proposer.propose(command, CancelResult)).outcome

    async def reschedule(
        self, number: int, when: int, kind: int, permitted: Permitted = everybody, sender: Sender = NOBODY
    ) -> RescheduleResult:
        """Move a pending message; `kind` says what `when` is (KIND_DUE and others of intake). A repeat of the same
        sender's sequence gets the first answer."""
        self._core.require_master()
        sender = sender._replace(checksum=reschedule_checksum(number, kind, when))
        known = self._senders.known(sender, 1)
        if known is not None:
            return RescheduleResult(scheduler_pb2.RESCHEDULED, int(known.ids[0]), int(known.due_ms[0]), remembered=True)
        with self._senders.following(sender):
            due_ms = self.one_due(when, kind)
            if is_cold(number):
                place = await self._cold.move(number, due_ms, permitted)
                if place is None:
                    return RescheduleResult(scheduler_pb2.RESCHEDULE_NOT_FOUND)
                if place.kind == CANCELLED:
                    return RescheduleResult(scheduler_pb2.RESCHEDULE_CANCELLED)
                if place.kind != LOADED:
                    return RescheduleResult(scheduler_pb2.RESCHEDULED, number, due_ms)
                number = place.loaded_id
            return await self.move(number, due_ms, permitted, sender)

    async def move(
        self,
        number: int,
        due_ms: int,
        permitted: Permitted = everybody,
        sender: Sender = NOBODY,
        unique_key: bytes = b"",
    ) -> RescheduleResult:
        """Move a message that is in the wheel. The caller has checked `due_ms`. `unique_key`: digest of the key that
        led to the message; the result is stale if it no longer holds that key."""
        core = self._core
        not_found = RescheduleResult(scheduler_pb2.RESCHEDULE_NOT_FOUND)
        units = (await self._find(number, permitted)).units
        if units is None:
            return not_found
        try:
            records = await core.background.records_of(units)
        except RemovedError:
            return not_found
        unit = units[0]
        command = Reschedule(
            id=number,
            due_ms=int(unit["due_ms"]),
            new_due_ms=due_ms,
            topic_id=int(unit["topic_id"]),
            record=records[0],
            meta_size=int(unit["meta_size"]),
            tag_hash=int(unit["tag_hash"]),
            tag_mask=int(unit["tag_mask"]),
            key_hash=int(unit["key_hash"]),
            flags=int(unit["flags"]),
            unique_key=unique_key,
        )
        stated = self._senders.stated(sender, 1)
        if stated.HasField("checksum"):
            command.request.CopyFrom(stated)
        return await core.proposer.propose(Command(reschedule=command), RescheduleResult)

    def one_due(self, when: int, kind: int) -> int:
        """The due time that a reschedule asks for. Raises RequestError: no agreed time, or out of range."""
        core = self._core
        if not -DUE_MS_LIMIT <= when <= DUE_MS_LIMIT or (kind and when < 0):
            raise invalid("due_ms" if not kind else "delay_ms", when, "a time in milliseconds, a delay of 0 or more")
        if kind != KIND_DUE and not core.clock.known:
            raise RequestError(no_agreed_time())
        # From the next full millisecond: no delay may be short by a fraction of one.
        now_ms = core.clock.next_full_ms()
        whens, kinds = np.array([when], np.int64), np.array([kind], np.uint8)
        due_ms = int(resolve_when(whens, kinds, now_ms, core.state.delay_levels_ms)[0][0])
        limit_ms = core.state.settings.delay_ms_max
        if due_ms > now_ms + limit_ms:
            raise beyond_longest_delay("", when, kind, due_ms, limit_ms, now_ms)
        return due_ms

    async def _find(self, number: int, permitted: Permitted) -> Found:
        """The unit that an id names now; its `units` is None if there is none. `permitted` may refuse its topic."""
        core = self._core
        core.require_master()
        found = await core.background.look_up(number)
        if found.units is None:
            require_current(core)
        else:
            refuse(permitted(core.state.topic_name(int(found.units["topic_id"][0]))))
        return found

    # -- reads

    async def get(self, number: int, content: bool, permitted: Permitted = everybody) -> scheduler_pb2.GetResponse:
        """State of one message and, with `content`, its payload and meta."""
        core = self._core
        if is_cold(number):
            place = self._cold.find(number, permitted)
            if place.kind != LOADED:
                return self._cold.describe(number, place)
            number = place.loaded_id
        retries = core.state.waiting_retries(number)
        found = await self._find(number, permitted)
        if found.units is None and retries and retries[0][1] != number:
            # Its hour may be gone: then the first retry that waits has its content.
            found = await self._find(retries[0][1], permitted)
        units = found.units
        if units is None:
            raise RequestError(no_message(number, core.identity.wheel_group))
        state = scheduler_pb2.PENDING
        if retries:
            state = scheduler_pb2.DISPATCHED
        elif found.cancelled:
            state = scheduler_pb2.MESSAGE_CANCELLED
        elif CursorKey(int(units["due_ms"][0]), int(units["index"][0])) < core.wheel.cursor:
            state = scheduler_pb2.DISPATCHED
        messages = (await self._pending.describe(units, content, content)).messages
        if not messages:
            raise RequestError(no_message(number, core.identity.wheel_group))
        response = scheduler_pb2.GetResponse(message=messages[0], state=state)
        waiting = [
            scheduler_pb2.WaitingRetry(group=group, due_ms=due_ms, attempts=attempts)
            for group, _, due_ms, attempts in retries
        ]
        response.retries.extend(fitting(waiting, scheduler_pb2.WaitingRetry.ByteSize, RETRIES_BYTES_MAX))
        response.retries_left_out = len(waiting) - len(response.retries)
        if retries:
            fill_message_id(response.message.id, number, core.identity.wheel_group)
        return response

    # -- operators

    async def admin(self, command: AdminCommand) -> AdminResult:
        """Put an administrative command into the log. Refuses texts and lists beyond their limits, which every node
        would have to read, and new topics with names of dead letter queues."""
        self._check_lengths(command)
        self._check_new_topics(command)
        if command.HasField("settings") and command.settings.HasField("delay_levels"):
            problem = refused_levels(command.settings.delay_levels)
            if problem:
                raise invalid("delay_levels", command.settings.delay_levels, problem)
        kind = command.WhichOneof("body")
        if kind in ("create_group", "reset_group"):
            start_ms = getattr(command, kind).start_ms
            if not 0 <= start_ms <= START_MS_MAX:
                raise invalid("start_ms", start_ms, f"0 to {START_MS_MAX}")
        if kind in KINDS:
            return await self._members.change(command)
        self._creations.admit(command)
        return await self._core.proposer.propose(Command(admin=command), AdminResult)

    def _check_new_topics(self, command: AdminCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "create_topic":
            field, names = "name", [command.create_topic.name]
        elif kind == "create_group" and len(command.create_group.topics) <= TOPICS_PER_GROUP_MAX:
            field, names = "topics", list(command.create_group.topics)
        else:
            return  # `Creations.admit` refuses more topics
        for name in names:
            problem = check_open_topic(name)
            if problem and self._core.state.topic_id(name) is None:
                raise invalid(field, name, problem)

    def _check_lengths(self, command: AdminCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "settings":
            for name, most in SETTING_LENGTHS_MAX.items():
                length = len(getattr(command.settings, name))
                if length > most:
                    raise invalid(name, f"{length} characters", f"at most {most} characters")
        elif kind in ("create_group", "set_group_filter"):
            length = len(getattr(command, kind).filter)
            if length > FILTER_LENGTH_MAX:
                raise invalid("filter", f"{length} characters", f"at most {FILTER_LENGTH_MAX} characters")
        elif kind == "reset_group":
            state = self._core.state
            group_id = state.group_id(command.reset_group.name)
            held = 0 if group_id is None else len(state.group_topics(group_id))
            count, most = len(command.reset_group.topics), max(TOPICS_PER_GROUP_MAX, held)
            if count > most:
                raise invalid("topics", count, f"at most {most}")

    def create_cluster(self, settings: admin_pb2.Settings | None, members: Sequence[Member]) -> None:
        """Propose the first command of a new cluster."""
        core = self._core
        command = CreateCluster(
            cluster_id=core.identity.cluster_id,
            settings=first_settings(settings),
            members=[message_of(member) for member in members],
        )
        core.proposer.submit(Command(admin=AdminCommand(create_cluster=command)), UNHEARD)
