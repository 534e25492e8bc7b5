"""Group commit: what callers want to have in the log, merged into few entries.

Owns the commands that wait to be proposed and the callbacks of those under way. `flush` runs after
every input: as long as few entries are in flight each command leaves at once; when the log is busy
they gather and leave together. Every callback is called exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.failure import Failure, limit_reached, outcome_unknown
from tickwheel.node.state.results import Ignored, Refused
from tickwheel.proto.log_pb2 import Command, LogEntry
from tickwheel.replication.log import ProposalResult, ReplicatedLog, Verdict

FORMAT_VERSION = 1

Done = Callable[[object], None]
"""Gets the typed result of apply, or a Failure."""


@dataclass(slots=True)
class _Waiting:
    command: Command
    done: Done
    bytes: int


class PublishSource(Protocol):
    """Where publish commands come from: the publisher."""

    def take(self, bytes_max: int) -> tuple[Command, Done, int] | None:
        """A publish of waiting requests of about `bytes_max`, its callback and its size; None: nothing waits."""
        ...


class Proposer:
    """One per node; works only while the node is master."""

    def __init__(self, config: CoreConfig, wheel_group: int, now_ms: Callable[[], int]) -> None:
        self._config = config
        self._wheel_group = wheel_group
        self._now_ms = now_ms
        self._log: ReplicatedLog | None = None
        self._source: PublishSource | None = None
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._entries_in_flight = 0
        self._bytes_in_flight = 0
        self.term = 0
        """Term this node leads; 0 while it does not."""

    def attach(self, log: ReplicatedLog, source: PublishSource) -> None:
        """Connect the log below and the publisher beside."""
        self._log = log
        self._source = source

    @property
    def waiting(self) -> int:
        """Commands not yet proposed."""
        return len(self._waiting)

    @property
    def entries_in_flight(self) -> int:
        """Entries proposed and not yet applied."""
        return self._entries_in_flight

    def submit(self, command: Command, done: Done, refuse: Failure | None = None) -> None:
        """Queue a command; `done` gets its result or a Failure. `refuse` is the answer when not master."""
        if self.term == 0:
            done(refuse or outcome_unknown())
            return
        size = command.ByteSize()
        if self._waiting_bytes + size > self._config.intake_bytes_max:
            done(limit_reached("waiting_commands_bytes", self._config.intake_bytes_max))
            return
        self._waiting.append(_Waiting(command, done, size))
        self._waiting_bytes += size

    def lose(self, failure: Failure) -> None:
        """Mastership is gone: everything not yet proposed is refused with `failure`."""
        self.term = 0
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        for item in waiting:
            item.done(failure)

    def flush(self) -> None:
        """Propose what waits, as far as the limits of what is in flight allow."""
        log = self._log
        if log is None or self.term == 0:
            return
        config = self._config
        while (
            self._entries_in_flight < config.propose_in_flight_max and self._bytes_in_flight < config.propose_bytes_max
        ):
            commands, dones, _size = self._gather()
            if not commands:
                return
            entry = LogEntry(
                format_version=FORMAT_VERSION,
                wheel_group=self._wheel_group,
                term=self.term,
                stamped_ms=self._now_ms(),
                commands=commands,
            )
            self._propose(log, entry.SerializeToString(), dones)

    def _gather(self) -> tuple[list[Command], list[Done], int]:
        commands: list[Command] = []
        dones: list[Done] = []
        size = 0
        target = self._config.entry_bytes_target
        while self._waiting and size < target:
            item = self._waiting.popleft()
            self._waiting_bytes -= item.bytes
            commands.append(item.command)
            dones.append(item.done)
            size += item.bytes
        if self._source is not None and size < target:
            taken = self._source.take(target - size)
            if taken is not None:
                command, done, taken_bytes = taken
                commands.append(command)
                dones.append(done)
                size += taken_bytes
        return commands, dones, size

    def _propose(self, log: ReplicatedLog, entry: bytes, dones: Sequence[Done]) -> None:
        self._entries_in_flight += 1
        self._bytes_in_flight += len(entry)

        def settled(result: ProposalResult) -> None:
            self._entries_in_flight -= 1
            self._bytes_in_flight -= len(entry)
            if result.verdict is Verdict.COMMITTED:
                values = result.value
                assert isinstance(values, list) and len(values) == len(dones), "apply answers every command"
                for done, value in zip(dones, values, strict=True):
                    done(_answer_of(value))
                return
            failure = outcome_unknown()
            if result.verdict is Verdict.QUEUE_FULL:
                failure = limit_reached("log_in_flight", self._config.propose_in_flight_max)
            for done in dones:
                done(failure)

        log.propose(entry, settled)


def _answer_of(value: object) -> object:
    """What apply says of a command, as its caller understands it."""
    if isinstance(value, Ignored):
        # A later master led before it was applied: as if it had never been proposed, but nobody may rely on that.
        return outcome_unknown()
    if isinstance(value, Refused):
        return value.failure
    return value
