"""Group commit: merges the commands of many callers into few entries of the log.

Owns the commands that wait to be proposed, and the callbacks of those under way. Every callback is called
exactly once. `flush` runs after every input. Urgent commands (dispatch, membership) leave at once and take
the waiting ones along. All others wait for company, because an entry costs every node the same work however
little is in it. Settlements leave at least `gather_ms` after the last entry. Schedules leave when no entry is
under way, or `gather_busy_ms` after the last entry for each entry that is under way.

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
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Serving
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure, invalid, limit_reached, outcome_unknown, refuse
from tickwheel.node.state.keyed_append import UNTIL_SETTLED
from tickwheel.node.state.machine import FORMAT_VERSION, AnyResult, CommandResult
from tickwheel.node.state.results import Ignored, Refused
from tickwheel.node.state.schema import ENTRY_SCHEMA, holds_requests, read_entry, unknown_in
from tickwheel.proto.common_pb2 import KEY_CONFLICT_REPLACE
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.replication.log import ProposalOutcome, ProposalResult, ReplicatedLog

GATHER_BYTES_MAX = 64 << 10
"""Waiting commands of this many bytes are worth an entry: they wait no longer."""

COMMIT_MS = 50
"""Time from proposal to apply that the window of schedules aims at. The log at full speed on two cores needs about 20
ms for what one round trip holds."""
WINDOW_BYTES_MIN = 128 << 10
OTHERS_MS = 1_000
"""Schedules leave room for other commands while one of those was proposed no longer ago than this."""

NO_CHANGE = 1 << 62
_FIRST_DUE = struct.Struct("<q")
_REPLACING = frozenset({KEY_CONFLICT_REPLACE, KEY_CONFLICT_REPLACE | UNTIL_SETTLED})
"""Rules of unique keys by which a message may cancel another."""

Done = Callable[[CommandResult | Failure], None]
"""Called with the result of apply, or with a Failure if the command was not carried out."""
R = TypeVar("R")


@dataclass(slots=True)
class _Waiting:
    command: Command
    done: Done
    bytes: int
    changes_from_ms: int
    alone: bool = False
    """Needs an entry of its own. `voters`: ids of the voters from that entry on, if the command changes them."""
    voters: Sequence[str] | None = None


class PublishSource(Protocol):
    """The source of publish commands: the publisher."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the waiting requests; 0: none waits."""
        ...

    def take(self, bytes_max: int) -> tuple[Command, Done, int] | None:
        """A publish of waiting requests of about `bytes_max`, its callback and its size in bytes; None: none can go."""
        ...


class PublishWindow:
    """How many bytes of schedules may be under way in the log: as many as it commits and applies in COMMIT_MS.

    Shrinks in proportion when an entry takes longer, but once a round trip, by half at most, and only beside other
    commands. Grows by what came in time.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = bytes_max
        self._bytes_max = bytes_max
        self._in_flight = 0
        self._shrunk_ms = 0
        self._others_ms = -OTHERS_MS

    @property
    def open(self) -> bool:
        """Whether another entry may leave. A single one always may, whatever its size."""
        return self._in_flight < self.bytes

    def proposed(self, size: int, now_ms: int, *, others: bool) -> None:
        """An entry leaves with `size` bytes of schedules. `others`: it holds other commands too."""
        self._in_flight += size
        if others:
            self._others_ms = now_ms

    def answered(self, size: int, proposed_ms: int, now_ms: int, *, committed: bool) -> None:
        """An entry with `size` bytes of schedules has its answer."""
        self._in_flight -= size
        if not committed or not size:
            return
        took_ms = now_ms - proposed_ms
        if took_ms <= COMMIT_MS or now_ms - self._others_ms > OTHERS_MS:
            self.bytes = min(self._bytes_max, self.bytes + size)
        elif proposed_ms >= self._shrunk_ms:
            self._shrunk_ms = now_ms
            self.bytes = max(WINDOW_BYTES_MIN, self.bytes * max(COMMIT_MS, took_ms // 2) // took_ms)


class Proposer(Part):
    """Proposes only while the node is master (`term` is not 0); refuses commands otherwise."""

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
        self._log: ReplicatedLog | None = None
        self._source: PublishSource | None = None
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._refused: deque[tuple[Done, Failure]] = deque()
        self._refusing = False
        self._entries_in_flight = 0
        self._bytes_in_flight = 0
        self.window = PublishWindow(config.propose_bytes_max)
        self._taken_bytes = 0
        """Bytes of schedules in the entry that is about to be proposed."""
        self._changes: deque[int] = deque()
        """For each entry in flight the first due time that it can change; NO_CHANGE: none."""
        self._urgent = False
        self._after_urgent = False
        """The last entry was urgent, so an urgent one probably follows soon."""
        self._proposed_ms = 0
        """When the last entry was proposed."""
        self._gathers_from_ms = 0
        """Start of the wait for company; 0: nothing waits."""
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
    def entries_in_flight(self) -> int:
        """Entries proposed and not yet applied."""
        return self._entries_in_flight

    def submit(self, command: Command, done: Done, refuse: Failure | None = None, *, may_gather: bool = False) -> None:
        """Queue a command; `done` gets its result or a Failure. `refuse`: the answer if this node is not master.

        `may_gather`: the command may wait a few milliseconds to share an entry with others.
        """
        done = self.serving.bound(done)
        if self.term == 0:
            self._refuse([done], refuse or outcome_unknown())
            return
        size = command.ByteSize()
        if self._waiting_bytes + size > self._config.intake_bytes_max:
            self._refuse([done], limit_reached("waiting_commands_bytes", self._config.intake_bytes_max))
            return
        self._waiting.append(_Waiting(command, done, size, _changes_from_ms(command)))
        self._waiting_bytes += size
        self._urgent = self._urgent or not may_gather

    async def propose(self, command: Command, kind: type[R], *, may_gather: bool = False) -> R:
        """The result of a command, which is of this kind. Raises RequestError: apply refused it, or it may not have
        been applied. `may_gather` as in `submit`."""
        answer: Promise[CommandResult] = Promise()
        self.submit(command, answer.keep, may_gather=may_gather)
        return _accepted(command, kind, await answer)

    async def propose_alone(self, command: Command, kind: type[R]) -> R:
        """As `propose`, in an entry of its own (`submit_alone`)."""
        answer: Promise[CommandResult] = Promise()
        self.submit_alone(command, answer.keep)
        return _accepted(command, kind, await answer)

    def submit_alone(self, command: Command, done: Done, voters: Sequence[str] | None = None) -> None:
        """Queue a command for an entry of its own. `voters`: ids of the voters from that entry on, if it changes them.

        The command overtakes nothing. In push-first the messages of a waiting dispatch may have been delivered already,
        so no later command may change them first. Each caller has one such command under way at a time, so there is no
        limit to refuse by.
        """
        done = self.serving.bound(done)
        if self.term == 0:
            self._refuse([done], outcome_unknown())
            return
        size = command.ByteSize()
        changes_from_ms = NO_CHANGE if voters is not None else _changes_from_ms(command)
        self._waiting.append(_Waiting(command, done, size, changes_from_ms, alone=True, voters=voters))
        self._waiting_bytes += size
        self._urgent = True

    def may_change_from_ms(self) -> int:
        """First due time at which a waiting command or an entry in flight can change pending messages; NO_CHANGE: none
        can."""
        waiting = min((item.changes_from_ms for item in self._waiting), default=NO_CHANGE)
        return min(waiting, min(self._changes, default=NO_CHANGE))

    def end(self, failure: Failure) -> None:
        """Answer every command that is not yet proposed with `failure`."""
        self.term = 0
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        self._refuse([item.done for item in waiting], failure)

    def _refuse(self, dones: Sequence[Done], failure: Failure) -> None:
        """Answer with a failure, one after the other. A callback may submit again at once and be refused again; it gets
        that answer only after it has returned. Otherwise thousands of queued commands would overflow the stack."""
        self._refused.extend((done, failure) for done in dones)
        if not self._refusing:
            self.serving.own(self._answer_refused)

    def _answer_refused(self) -> None:
        self._refusing = True
        try:
            while self._refused:
                done, failure = self._refused.popleft()
                done(failure)
        finally:
            self._refusing = False

    def flush(self) -> None:
        """Propose waiting commands, as far as the limits on entries and bytes in flight allow."""
        log = self._log
        if log is None or self.term == 0:
            return
        config = self._config
        now_ms = self._now_ms()
        while (
            self._entries_in_flight < config.propose_in_flight_max
            and self._bytes_in_flight < config.propose_bytes_max
            and not self._gathers(now_ms)
            and self._propose_next(log, now_ms)
        ):
            pass

    def flush_all(self) -> None:
        """Propose all waiting commands, however much is in flight: a handover is about to close the log."""
        while self._log is not None and self.term and self._propose_next(self._log, self._now_ms(), everything=True):
            pass

    def _propose_next(self, log: ReplicatedLog, now_ms: int, *, everything: bool = False) -> bool:
        """Propose one entry of waiting commands. `everything`: schedules too while their window is closed. False: none
        can go."""
        self._after_urgent, self._urgent = self._urgent, False
        self._gathers_from_ms = 0
        if self._waiting and self._waiting[0].alone:
            item = self._next_waiting()
            self._urgent = bool(self._waiting)
            self._propose_sound(log, [item.command], [item.done], item.changes_from_ms, now_ms, item.voters)
            return True
        commands, dones, changes_from_ms = self._gather(schedules=everything or self.window.open)
        if not commands:
            return False
        self._proposed_ms = now_ms
        self._propose_sound(log, commands, dones, changes_from_ms, now_ms)
        return True

    def _propose_sound(
        self,
        log: ReplicatedLog,
        commands: Sequence[Command],
        dones: Sequence[Done],
        changes_from_ms: int,
        now_ms: int,
        voters: Sequence[str] | None = None,
    ) -> None:
        """Propose commands as one entry that every node can read. If they make no such entry together, try each alone
        and refuse those that fail."""
        entry = self._sound_entry(commands, now_ms)
        if entry is not None:
            self._propose(log, entry, dones, changes_from_ms, voters)
        elif len(commands) > 1:
            for command, done in zip(commands, dones, strict=True):
                self._propose_sound(log, [command], [done], changes_from_ms, now_ms)
        else:
            self.unsound_commands += 1
            kind = commands[0].WhichOneof("body") or "none"
            dones[0](invalid("request", kind, "a command that can be read back from the log").failure)

    def _sound_entry(self, commands: Sequence[Command], now_ms: int) -> bytes | None:
        """An entry of these commands, read back as apply will read it. None: it cannot be read, or it has fields
        unknown to this version."""
        try:
            data = self._entry_of(commands, now_ms)
            sound = read_entry(data) is not None
        except Exception:  # the errors that protobuf raises on writing have no common base
            return None
        if sound and any(holds_requests(command) and unknown_in(command) for command in commands):
            return None
        return data if sound else None

    def _next_waiting(self) -> _Waiting:
        item = self._waiting.popleft()
        self._waiting_bytes -= item.bytes
        return item

    def _entry_of(self, commands: Sequence[Command], now_ms: int) -> bytes:
        entry = LogEntry(
            format_version=FORMAT_VERSION,
            wheel_group=self._wheel_group,
            term=self.term,
            stamped_ms=max(now_ms, self._stamp_floor_ms()),
            commands=commands,
            schema=ENTRY_SCHEMA,
        )
        data: bytes = entry.SerializeToString()
        return data

    def _gathers(self, now_ms: int) -> bool:
        """Whether nothing should be proposed now: nothing waits, or it should go on waiting for company."""
        published = self._source.waiting_bytes if self._source is not None and self.window.open else 0
        if not self._waiting and not published:
            self._gathers_from_ms = 0
            return True
        if self._urgent or (published and not self._entries_in_flight):
            return False
        if self._waiting_bytes + published >= GATHER_BYTES_MAX:
            return False
        if not self._gathers_from_ms:
            self._gathers_from_ms = min(now_ms, self._proposed_ms)
        # A negative wait ends it: the cluster's time may have been set back before anybody acted by it.
        return 0 <= now_ms - self._gathers_from_ms < self._pause_ms

    @property
    def _pause_ms(self) -> int:
        """How long commands may wait for company. Schedules alone wait for the answer to entries under way: so entries
        grow with the load instead of coming more often. Settlements wait a little, or for the next dispatch if one has
        just left."""
        config = self._config
        if not self._waiting:
            return config.gather_busy_ms * self._entries_in_flight
        if self._after_urgent and config.gather_ms:
            return max(config.gather_ms, config.dispatch_period_ms + 1)
        return config.gather_ms

    def wait_ms(self, now: Now) -> int | None:
        """Until the next `flush` is needed."""
        if self.term == 0 or not self._gathers_from_ms:
            return None
        answered = not self._entries_in_flight and self._source is not None and self._source.waiting_bytes
        return self._gathers_from_ms + (0 if answered else self._pause_ms) - now.cluster_ms

    def _gather(self, *, schedules: bool) -> tuple[list[Command], list[Done], int]:
        """Commands of the next entry, their callbacks, and the first due time that they can change."""
        self._taken_bytes = 0
        commands: list[Command] = []
        dones: list[Done] = []
        changes_from_ms = NO_CHANGE
        size = 0
        target = self._config.entry_bytes_target
        while self._waiting and size < target:
            if self._waiting[0].alone:
                self._urgent = True
                return commands, dones, changes_from_ms
            item = self._next_waiting()
            commands.append(item.command)
            dones.append(item.done)
            changes_from_ms = min(changes_from_ms, item.changes_from_ms)
            size += item.bytes
        if schedules and self._source is not None and size < target:
            taken = self._source.take(target - size)
            if taken is not None:
                command, done, self._taken_bytes = taken
                commands.append(command)
                dones.append(done)
                changes_from_ms = min(changes_from_ms, _changes_from_ms(command))
        return commands, dones, changes_from_ms

    def _propose(
        self,
        log: ReplicatedLog,
        entry: bytes,
        dones: Sequence[Done],
        changes_from_ms: int,
        voters: Sequence[str] | None = None,
    ) -> None:
        self._entries_in_flight += 1
        self._changes.append(changes_from_ms)
        self._bytes_in_flight += len(entry)
        schedules, self._taken_bytes = self._taken_bytes, 0
        proposed_ms = self._now_ms()
        self.window.proposed(schedules, proposed_ms, others=len(dones) > (schedules > 0))

        def answered(result: ProposalResult) -> None:
            self._entries_in_flight -= 1
            self._changes.remove(changes_from_ms)
            self._bytes_in_flight -= len(entry)
            committed = result.outcome is ProposalOutcome.COMMITTED
            self.window.answered(schedules, proposed_ms, self._now_ms(), committed=committed)
            if result.outcome is ProposalOutcome.COMMITTED:
                values = result.value
                assert isinstance(values, list) and len(values) == len(dones), "apply answers every command"
                for done, value in zip(dones, values, strict=True):
                    done(_answer_of(value))
                return
            failure = outcome_unknown()
            if result.outcome is ProposalOutcome.QUEUE_FULL:
                failure = limit_reached("log_in_flight", self._config.propose_in_flight_max)
            elif result.outcome is ProposalOutcome.TOO_LARGE:
                failure = invalid("request", f"{len(entry)} bytes", "fits one entry of the log (48 MiB)").failure
            self._refuse(dones, failure)

        def settled(result: ProposalResult) -> None:
            self.serving.attempt("the answer to a command", None, answered, result)

        log.propose(entry, settled, voters)


def _accepted(command: Command, kind: type[R], result: CommandResult) -> R:
    """The result as this kind. Raises RequestError if apply refused the command."""
    assert isinstance(result, kind), f"{command.WhichOneof('body')} was answered by {result!r}"
    refuse(getattr(result, "failure", None))
    return result


def _changes_from_ms(command: Command) -> int:
    kind = command.WhichOneof("body")
    if kind == "schedule" and command.schedule.WhichOneof("body") == "make":
        # Runs enter the wheel.
        runs = (int(np.frombuffer(row.due_ms, "<i8").min()) for row in command.schedule.make.rows if row.due_ms)
        return min(runs, default=NO_CHANGE)
    if kind == "publish":
        if not _REPLACING.isdisjoint(command.publish.key_rules):
            return 0  # it may cancel any message
        # Sorted by due time: the first is the earliest.
        due: int = _FIRST_DUE.unpack_from(command.publish.due_ms)[0]
        return due
    if kind == "settle":
        # Retries enter the wheel.
        retries = (int(np.frombuffer(batch.due_ms, "<i8").min()) for batch in command.settle.batches if batch.due_ms)
        return min(retries, default=NO_CHANGE)
    if kind == "staging" and command.staging.WhichOneof("body") != "publish":
        return NO_CHANGE
    return NO_CHANGE if kind in ("dispatch", "lead", "cold") else 0


def _answer_of(value: AnyResult) -> CommandResult | Failure:
    """The result of apply in the caller's terms: its value, or a Failure."""
    if isinstance(value, Ignored):
        # A later master led before the command was applied, so it had no effect; but no caller may rely on that.
        return outcome_unknown()
    if isinstance(value, Refused):
        return value.failure
    return value
