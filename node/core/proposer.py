"""Group commit: merges the commands of many callers into few entries of the log.

Owns the commands that wait to be proposed, and the replies to those under way. Every command has exactly one
reply. `flush` runs after every input. Urgent commands (dispatch, membership) leave at once and take
the waiting ones along. All others wait for company, because an entry costs every node the same work however
little is in it. Settlements leave at least `gather_ms` after the last entry. Schedules leave when no entry is
under way, or `gather_busy_ms` after the last entry for each entry that is under way. After an answer they wait a
moment for callers who got it (`ReturningCallers`). Under load entries leave further apart (`Spacing`).

Whatever is proposed waits behind the bytes that are under way. So schedules have a window of their own, which shrinks
while their entries take long: a flood of schedules must not hold up dispatches and settlements.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.pacing import GATHER_BYTES_MAX, PublishWindow, ReturningCallers, Spacing
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.schedule.fair_queue import Waiting
from tickwheel.node.core.serving import Fail, Serving
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure, invalid, limit_reached, outcome_unknown, refuse
from tickwheel.node.state.keyed_append import UNTIL_SETTLED
from tickwheel.node.state.machine import FORMAT_VERSION, CommandResult
from tickwheel.node.state.results import Ignored, Refused
from tickwheel.node.state.schema import ENTRY_SCHEMA, holds_requests, read_entry, unknown_in
from tickwheel.proto.common_pb2 import KEY_CONFLICT_REPLACE
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.replication.log import ProposalOutcome, ProposalResult, ReplicatedLog

ENTRY_TOPICS_MAX = 256
"""Topics that the dispatches and settlements of one entry touch; the last command may go beyond it. An entry is applied
in one go, and each topic takes 20 to 40 microseconds: heartbeats and votes should not wait longer than ten
milliseconds."""
NO_CHANGE = 1 << 62
_FIRST_DUE = struct.Struct("<q")
_REPLACING = frozenset({KEY_CONFLICT_REPLACE, KEY_CONFLICT_REPLACE | UNTIL_SETTLED})
"""Rules of unique keys by which a message may cancel another."""

R = TypeVar("R")
Answer = Reply[CommandResult]
"""Gets the result of apply, or a Failure if the command was not carried out."""


@dataclass(slots=True)
class _Item:
    """A command that waits to be proposed."""

    command: Command
    reply: Answer
    bytes: int
    messages: int
    """Messages that it schedules or settles. `changes_from_ms`: first due time that it can change; NO_CHANGE: none."""
    changes_from_ms: int
    topics: int = 1
    """Topics that it touches; a publish counts as one, since it is bounded by its size."""
    urgent: bool = False
    awaited: bool = True
    """Somebody waits for its answer, or for what it brings."""
    alone: bool = False
    """Needs an entry of its own. `voters`: ids of the voters from that entry on, if the command changes them."""
    voters: Sequence[str] | None = None
    scheduled_bytes: int = 0
    """Bytes of schedules in it. `callers`: requests that brought them."""
    callers: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """An entry under way."""

    replies: list[Answer]
    bytes: int
    proposed_ms: int
    messages: int = 0
    """Messages that it schedules or settles."""
    scheduled: int = 0
    """Messages that it schedules. `scheduled_bytes`: their size; `callers`: requests that brought them."""
    scheduled_bytes: int = 0
    callers: int = 0
    changes_from_ms: int = NO_CHANGE
    """First due time that it can change; NO_CHANGE: none."""


class PublishSource(Protocol):
    """The source of publish commands: the publisher."""

    @property
    def waiting(self) -> Waiting:
        """Requests that wait."""
        ...

    def take(self, bytes_max: int) -> tuple[Command, Answer, int] | None:
        """A publish of waiting requests of about `bytes_max`, its reply and its size in bytes; None: none can go."""
        ...


class Proposer(Part):
    """Proposes only while the node is master (`term` is not 0); refuses commands otherwise."""

    of_master = True

    def __init__(
        self,
        config: CoreConfig,
        wheel_group: int,
        now_ms: Callable[[], int],
        serving: Serving | None = None,
        stamp_floor_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """`serving` runs each callback as a piece of the request that brought it. `stamp_floor_ms` returns the
        earliest stamp that an entry may carry."""
        self.serving = serving or Serving(lambda bits: 0)
        self._config = config
        self._wheel_group = wheel_group
        self._now_ms = now_ms
        self._stamp_floor_ms = stamp_floor_ms
        self._log: ReplicatedLog
        self._source: PublishSource
        self._waiting: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._waiting_topics = 0
        self._waiting_urgent = 0
        """How many of them are urgent. `_waiting_urgent_topics`: and how many topics those touch."""
        self._waiting_urgent_topics = 0
        self._waiting_awaited = 0
        """How many of them are awaited."""
        self._refused: deque[tuple[Fail, Failure]] = deque()
        self._refusing = False
        self._flights: dict[_Flight, None] = {}
        """Entries proposed and not yet applied, as an ordered set."""
        self._bytes_in_flight = 0
        self.window = PublishWindow(config.propose_bytes_max)
        self.spacing = Spacing(config.spaced_rate_min)
        self._returning = ReturningCallers()
        self._after_urgent = False
        """The last entry was urgent, so an urgent one probably follows soon."""
        self._proposed_ms = 0
        """When the last entry was proposed."""
        self._held_until_ms = 0
        """Until then what waits is held for company; 0: nothing is held."""
        self.term = 0
        """Term this node leads; 0 while it does not."""

        self.unsound_commands = 0
        """Commands refused because their entry could not be read back: a bug, or an attack on one."""

    def attach(self, log: ReplicatedLog, source: PublishSource) -> None:
        """Connect the log and the publisher. Called once, before any command."""
        self._log = log
        self._source = source

    @property
    def waiting(self) -> int:
        """Commands waiting to be proposed; the publisher's requests are not counted."""
        return len(self._waiting)

    @property
    def crowded(self) -> bool:
        """Whether as many urgent commands wait as an entry takes. More dispatches behind them would only keep schedules
        waiting, which leave last."""
        return self._waiting_urgent_topics >= ENTRY_TOPICS_MAX

    @property
    def entries_in_flight(self) -> int:
        """Entries proposed and not yet applied."""
        return len(self._flights)

    def submit(
        self, command: Command, reply: Answer, *, may_gather: bool = False, topics: int = 1, awaited: bool = True
    ) -> None:
        """Queue a command; `reply` gets its result or a Failure.

        `may_gather`: the command may wait a few milliseconds to share an entry with others. `topics`: how many it
        touches. `awaited`: somebody waits for the answer, or for what it brings: a spaced entry comes sooner.
        """
        self._wait(_Item(command, reply, command.ByteSize(), *_weight(command), topics, not may_gather, awaited))

    def _wait(self, item: _Item) -> None:
        item.reply = self.serving.bound_reply(item.reply)
        if self.term == 0:
            self._refuse([item.reply], outcome_unknown())
            return
        if not item.alone and self._waiting_bytes + item.bytes > self._config.intake_bytes_max:
            self._refuse([item.reply], limit_reached("waiting_commands_bytes", self._config.intake_bytes_max))
            return
        self._waiting.append(item)
        self._waiting_bytes += item.bytes
        self._waiting_topics += item.topics
        self._waiting_urgent += item.urgent
        self._waiting_awaited += item.awaited
        self._waiting_urgent_topics += item.topics * item.urgent

    def _next(self) -> _Item:
        item = self._waiting.popleft()
        self._waiting_bytes -= item.bytes
        self._waiting_topics -= item.topics
        self._waiting_urgent -= item.urgent
        self._waiting_awaited -= item.awaited
        self._waiting_urgent_topics -= item.topics * item.urgent
        return item

    async def propose(self, command: Command, kind: type[R], *, may_gather: bool = False) -> R:
        """The result of a command, which is of this kind. Raises RequestError: apply refused it, or it may not have
        been applied. `may_gather` as in `submit`."""
        answer: Promise[CommandResult] = Promise()
        self.submit(command, answer.reply, may_gather=may_gather)
        return _accepted(command, kind, await answer)

    async def propose_alone(self, command: Command, kind: type[R]) -> R:
        """As `propose`, in an entry of its own (`submit_alone`)."""
        answer: Promise[CommandResult] = Promise()
        self.submit_alone(command, answer.reply)
        return _accepted(command, kind, await answer)

    def submit_alone(self, command: Command, reply: Answer, voters: Sequence[str] | None = None) -> None:
        """Queue a command for an entry of its own. `voters`: ids of the voters from that entry on, if it changes them.

        The command overtakes nothing. In push-first the messages of a waiting dispatch may have been delivered already,
        so no later command may change them first. Each caller has one such command under way at a time, so there is no
        limit to refuse by.
        """
        item = _Item(command, reply, command.ByteSize(), *_weight(command), urgent=True, alone=True, voters=voters)
        if voters is not None:
            item.changes_from_ms = NO_CHANGE
        self._wait(item)

    def may_change_from_ms(self) -> int:
        """First due time at which a waiting command or an entry in flight can change pending messages; NO_CHANGE: none
        can."""
        waiting = min((item.changes_from_ms for item in self._waiting), default=NO_CHANGE)
        return min(waiting, min((flight.changes_from_ms for flight in self._flights), default=NO_CHANGE))

    def end(self, failure: Failure) -> None:
        """Answer every command that is not yet proposed with `failure`."""
        self.term = self._returning.until_ms = 0
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = self._waiting_topics = self._waiting_urgent = self._waiting_urgent_topics = 0
        self._waiting_awaited = 0
        self._refuse([item.reply for item in waiting], failure)

    def _refuse(self, replies: Sequence[Answer], failure: Failure) -> None:
        """Answer with a failure, one after the other. A callback may submit again at once and be refused again; it gets
        that answer only after it has returned. Otherwise thousands of queued commands would overflow the stack."""
        self._refused.extend((reply.fail, failure) for reply in replies)
        if not self._refusing:
            self.serving.own(self._answer_refused)

    def _answer_refused(self) -> None:
        self._refusing = True
        try:
            while self._refused:
                fail, failure = self._refused.popleft()
                fail(failure)
        finally:
            self._refusing = False

    @property
    def _has_room(self) -> bool:
        """Whether the limits on entries and bytes in flight allow another entry."""
        config = self._config
        return len(self._flights) < config.propose_in_flight_max and self._bytes_in_flight < config.propose_bytes_max

    def flush(self) -> None:
        """Propose waiting commands, as far as the limits on entries and bytes in flight allow."""
        if self.term == 0:
            return
        now_ms = self._now_ms()
        self._held_until_ms = 0
        while self._has_room:
            leaves_ms = self._leaves_ms(now_ms)
            if leaves_ms is not None and leaves_ms > now_ms:
                self._held_until_ms = leaves_ms
            elif leaves_ms is not None and self._propose_next(now_ms):
                continue
            return

    def flush_all(self) -> None:
        """Propose all waiting commands, however much is in flight: a handover is about to close the log."""
        while self.term and self._propose_next(self._now_ms(), everything=True):
            pass

    def _propose_next(self, now_ms: int, *, everything: bool = False) -> bool:
        """Propose one entry of waiting commands. `everything`: schedules too while their window is closed. False: none
        can go."""
        self._after_urgent = bool(self._waiting_urgent)
        if self._waiting and self._waiting[0].alone:
            items = [self._next()]
        else:
            items = self._gather(schedules=everything or self.window.open)
            if not items:
                return False
            self._proposed_ms = now_ms
        self._propose(items, now_ms)
        return True

    def _gather(self, *, schedules: bool) -> list[_Item]:
        """Take the commands of the next entry."""
        items: list[_Item] = []
        size = topics = 0
        target = self._config.entry_bytes_target
        while self._waiting and size < target and topics < ENTRY_TOPICS_MAX:
            if self._waiting[0].alone:
                return items
            item = self._next()
            items.append(item)
            size += item.bytes
            topics += item.topics
        if schedules and size < target and not self._waiting:
            waiting = self._source.waiting.requests
            taken = self._source.take(target - size)
            if taken is not None:
                command, reply, taken_bytes = taken
                item = _Item(command, reply, taken_bytes, *_weight(command), scheduled_bytes=taken_bytes)
                item.callers = waiting - self._source.waiting.requests
                items.append(item)
        return items

    def _propose(self, items: Sequence[_Item], now_ms: int) -> None:
        """Propose commands as one entry that every node can read. If they make no such entry together, try each alone
        and refuse those that fail."""
        entry = self._sound_entry([item.command for item in items], now_ms)
        if entry is None:
            if len(items) > 1:
                for item in items:
                    self._propose([item], now_ms)
            else:
                self.unsound_commands += 1
                kind = items[0].command.WhichOneof("body") or "none"
                items[0].reply.fail(invalid("request", kind, "a command that can be read back from the log").failure)
            return
        proposed_ms = self._now_ms()
        flight = _Flight([], len(entry), proposed_ms)
        for item in items:
            flight.replies.append(item.reply)
            flight.messages += item.messages
            flight.scheduled += item.messages if item.scheduled_bytes else 0
            flight.scheduled_bytes += item.scheduled_bytes
            flight.callers += item.callers
            flight.changes_from_ms = min(flight.changes_from_ms, item.changes_from_ms)
        self._flights[flight] = None
        self._bytes_in_flight += flight.bytes
        if flight.scheduled_bytes:
            self._returning.until_ms = 0
        self.window.proposed(flight.scheduled_bytes, proposed_ms, others=len(items) > (flight.scheduled_bytes > 0))
        what, attempt = "the answer to a command", self.serving.attempt
        self._log.propose(entry, lambda result: attempt(what, None, self._answered, flight, result), items[0].voters)

    def _sound_entry(self, commands: Sequence[Command], now_ms: int) -> bytes | None:
        """An entry of these commands, read back as apply will read it. None: it cannot be read, or it has fields
        unknown to this version."""
        entry = LogEntry(
            format_version=FORMAT_VERSION,
            wheel_group=self._wheel_group,
            term=self.term,
            stamped_ms=max(now_ms, self._stamp_floor_ms()),
            schema=ENTRY_SCHEMA,
        )
        try:
            for command in commands:
                entry.commands.add().CopyFrom(command)
            data: bytes = entry.SerializeToString()
            if read_entry(data) is None:
                return None
        except Exception:  # the errors that protobuf raises on writing have no common base
            return None
        for command in commands:
            if holds_requests(command) and unknown_in(command):
                return None
        return data

    def _answered(self, flight: _Flight, result: ProposalResult) -> None:
        """The log has answered an entry: pass its results on, or refuse all of its commands."""
        del self._flights[flight]
        self._bytes_in_flight -= flight.bytes
        committed = result.outcome is ProposalOutcome.COMMITTED
        now_ms = self._now_ms()
        took_ms = now_ms - flight.proposed_ms
        self.window.answered(flight.scheduled_bytes, flight.proposed_ms, now_ms, committed=committed)
        if committed and self._config.gather_ms:
            self.spacing.answered(flight.messages, flight.proposed_ms, now_ms, shared=self.window.shared(now_ms))
        if committed and flight.scheduled_bytes and not self._flights and self._config.gather_busy_ms:
            waiting, alone = self._source.waiting.requests, flight.scheduled == flight.callers
            self._returning.answered(flight.callers, flight.scheduled_bytes, took_ms, waiting, now_ms, alone=alone)
        if committed:
            values = result.value
            assert isinstance(values, list) and len(values) == len(flight.replies), "apply answers every command"
            for reply, value in zip(flight.replies, values, strict=True):
                if isinstance(value, Ignored):
                    # A later master led before the command was applied, so it had no effect; but no caller may rely on
                    # that.
                    reply.fail(outcome_unknown())
                elif isinstance(value, Refused):
                    reply.fail(value.failure)
                else:
                    reply.done(value)
            return
        failure = outcome_unknown()
        if result.outcome is ProposalOutcome.QUEUE_FULL:
            failure = limit_reached("log_in_flight", self._config.propose_in_flight_max)
        elif result.outcome is ProposalOutcome.TOO_LARGE:
            failure = invalid("request", f"{flight.bytes} bytes", "fits one entry of the log (48 MiB)").failure
        self._refuse(flight.replies, failure)

    def _leaves_ms(self, now_ms: int) -> int | None:
        """When what waits leaves, if nothing more comes: now, or after a wait for company. None: nothing waits."""
        source = self._source.waiting
        published = source.bytes if self.window.open else 0
        if not self._waiting and not published:
            return None
        full = self._waiting_bytes + published >= GATHER_BYTES_MAX or self._waiting_topics >= ENTRY_TOPICS_MAX
        if full or self._waiting_urgent:
            return now_ms
        pause_ms = self.spacing.ms
        if published and not self._flights:
            leaves_ms = self._returning.leaves_ms(source.requests, now_ms)
            if leaves_ms is not None:
                return leaves_ms
        elif self._waiting:
            if not published and not self._waiting_awaited:
                pause_ms = self.spacing.unhurried_ms
            pause_ms = max(pause_ms, self._config.gather_ms)
        else:
            # Schedules alone wait for the answers to entries under way: so entries grow with the load instead of
            # coming more often.
            pause_ms = max(pause_ms, self._config.gather_busy_ms * len(self._flights))
        if self._after_urgent and pause_ms:
            # The next dispatch takes them along, if it comes when it may, to the millisecond.
            pause_ms = 2 + max(pause_ms, self._config.dispatch_period_ms)
        # A negative wait ends it: the cluster's time may have been set back before anybody acted by it.
        return self._proposed_ms + pause_ms if 0 <= now_ms - self._proposed_ms < pause_ms else now_ms

    def held_ms(self) -> int:
        """How long what waits is held, if nothing more comes; 0: not at all, or entries are not spaced."""
        if not self.spacing.ms or not self.term:
            return 0
        now_ms = self._now_ms()
        return max(0, (self._leaves_ms(now_ms) or 0) - now_ms)

    def wait_ms(self, now: Now) -> int | None:
        """Until the next `flush` is needed."""
        if not self.term:
            return None
        if self._waiting and self._has_room and (self._waiting_urgent or not self._held_until_ms):
            return 0  # it was submitted since the last `flush`, or by it: a publish may need its topic first
        return self._held_until_ms - now.cluster_ms if self._held_until_ms else None


def _accepted(command: Command, kind: type[R], result: CommandResult) -> R:
    """The result as this kind. Raises RequestError if apply refused the command."""
    assert isinstance(result, kind), f"{command.WhichOneof('body')} was answered by {result!r}"
    refuse(getattr(result, "failure", None))
    return result


def _weight(command: Command) -> tuple[int, int]:
    """How many messages a command schedules or settles, and the first due time at which it can change pending messages;
    NO_CHANGE: it changes none."""
    kind = command.WhichOneof("body")
    if kind in ("dispatch", "lead", "cold"):
        return 0, NO_CHANGE
    if kind == "publish":
        due_ms = command.publish.due_ms
        if not _REPLACING.isdisjoint(command.publish.key_rules):
            return len(due_ms) // 8, 0  # it may cancel any message
        # Sorted by due time: the first is the earliest.
        return len(due_ms) // 8, _FIRST_DUE.unpack_from(due_ms)[0]
    if kind == "staging" and command.staging.WhichOneof("body") != "publish":
        return 0, NO_CHANGE
    settled, earliest_ms = 0, NO_CHANGE
    if kind == "settle":
        for batch in command.settle.batches:
            settled += len(batch.ids) // 8
            if due_ms := batch.due_ms:  # retries enter the wheel
                earliest_ms = min(earliest_ms, int(np.frombuffer(due_ms, "<i8").min()))
        return settled, earliest_ms
    if kind == "schedule" and command.schedule.WhichOneof("body") == "make":
        for row in command.schedule.make.rows:
            if due_ms := row.due_ms:  # runs enter the wheel
                earliest_ms = min(earliest_ms, int(np.frombuffer(due_ms, "<i8").min()))
        return 0, earliest_ms
    return 0, 0
