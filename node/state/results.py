"""Results of apply: one typed result for each command of an entry, in order.

A refusal is a `Failure` inside a result, never an exception. `ImpossibleStateError` is the exception: the log
contradicts the state, so this node must stop before it does harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure
from tickwheel.node.state.schedules import Answer, Run, Schedule
from tickwheel.proto import access_pb2, admin_pb2, common_pb2, scheduler_pb2
from tickwheel.replication.log import Member
from tickwheel.wheel.units import CursorKey, Ids, Units

NO_IDS: Ids = np.zeros(0, np.uint64)
NO_DUE: NDArray[np.int64] = np.zeros(0, np.int64)

KeyOutcomes = NDArray[np.uint8]
"""KeyOutcome of common.proto, one a message."""


def is_scheduled(keys: KeyOutcomes) -> NDArray[np.bool_]:
    """Which messages were scheduled."""
    scheduled: NDArray[np.bool_] = (keys == common_pb2.KEY_FREE) | (keys == common_pb2.KEY_REPLACED)
    return scheduled


class ImpossibleStateError(Exception):
    """The state cannot be right, or an entry cannot be applied by this version: stop the process."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing was done: the entry came from a master of an earlier term than the newest lead command."""

    term: int
    lead_term: int


@dataclass(frozen=True, slots=True)
class LeadResult:
    """`accepted` is False for a term below the newest one."""

    accepted: bool
    term: int


class RequestOutcome(NamedTuple):
    """Outcome of one request of a publish. ids and due_ms are in the order of its rows, and empty if `failure` is
    set."""

    ids: Ids = NO_IDS
    due_ms: NDArray[np.int64] = NO_DUE
    repeated: bool = False
    failure: Failure | None = None
    keys: KeyOutcomes | None = None
    """KeyOutcome of each message; None: all KEY_FREE. A message that was not scheduled has the id and due time of the
    one that holds its key."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishResult:
    """One outcome per request, in order."""

    requests: list[RequestOutcome]
    replaced: tuple[int, ...] = ()
    """Ids of messages that were cancelled because others took their unique keys."""
    scheduled: int = 0
    """Messages that it scheduled; repeats count nothing."""


class MadeReady(NamedTuple):
    """Units of one topic that entered its ready queue, from this position on."""

    topic_id: int
    topic: str
    first_position: int
    units: Units


@dataclass(frozen=True, slots=True, eq=False)
class DispatchResult:
    """The cursor after the dispatch, and how many units entered ready queues."""

    cursor: CursorKey
    dispatched: int
    discarded: int = 0
    """Units of topics that no longer exist."""
    ready: Sequence[MadeReady] = ()
    """What entered the ready queues, topic by topic."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class FilteredResult:
    """Positions that met a group's filter, and how many of them were skipped; 0, 0: the command had no effect."""

    checked: int = 0
    skipped: int = 0


@dataclass(slots=True)
class SettleResult:
    """Sums over the batches: settled (now or before); stale; not known to be dispatched. Nobody changes one: `frozen`
    would make it five times as dear, for each topic of a settlement."""

    settled: int = 0
    stale: int = 0
    unknown: int = 0
    failure: Failure | None = None
    taken: int = 0
    """Rows that the command reached; the rows behind them are unchanged."""
    parts: tuple[SettleResult, ...] = ()
    """Results of the command's batches, in order."""
    rows: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = field(default=None, compare=False)
    """Of a batch of retries whose rows did not all end alike: which of those that the command reached were settled by
    it, and which name no known message."""

    @classmethod
    def of(cls, parts: tuple[SettleResult, ...]) -> SettleResult:
        """The sum of these parts, which it keeps."""
        settled = stale = unknown = taken = 0
        failure = None
        for part in parts:
            settled += part.settled
            stale += part.stale
            unknown += part.unknown
            taken += part.taken
            failure = failure or part.failure
        return cls(settled, stale, unknown, failure, taken, parts)

    def of_rows(self, first: int, count: int) -> SettleResult:
        """The result of some of the rows that the command reached, of a batch of retries. Of several rows that name one
        message the first counts, the others are stale."""
        if self.failure is not None:
            return SettleResult(unknown=count, failure=self.failure, taken=count)
        if self.rows is None:
            settled, unknown = count if self.settled else 0, count if self.unknown else 0
        else:
            settled, unknown = (int(np.count_nonzero(column[first : first + count])) for column in self.rows)
        return SettleResult(settled, count - settled - unknown, unknown, taken=count)

    def __add__(self, other: SettleResult) -> SettleResult:
        return SettleResult(
            self.settled + other.settled,
            self.stale + other.stale,
            self.unknown + other.unknown,
            self.failure or other.failure,
            self.taken + other.taken,
        )


ONE_SETTLED = SettleResult(settled=1, taken=1)
"""Over many topics the result of nearly every batch."""


@dataclass(frozen=True, slots=True)
class DeadResult:
    """Letters of a replay or purge: changed; not there; there but not to be replayed (any more)."""

    changed: int = 0
    missing: int = 0
    kept: int = 0
    taken: int = 0
    """Numbers that the command reached."""


@dataclass(frozen=True, slots=True)
class CancelResult:
    """`outcome`: CancelOutcome of scheduler.proto. `id`: of the message that a unique key named; 0: none. `remembered`
    and `repeated` as in RescheduleResult."""

    outcome: scheduler_pb2.CancelOutcome.ValueType
    id: int = 0
    failure: Failure | None = None
    remembered: bool = False
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class RescheduleResult:
    """`outcome`: RescheduleOutcome of scheduler.proto; `new_id` and `due_ms` of the new unit if RESCHEDULED.
    `remembered`: the sender's sequence was recorded with this answer."""

    outcome: scheduler_pb2.RescheduleOutcome.ValueType
    new_id: int = 0
    due_ms: int = 0
    failure: Failure | None = None
    remembered: bool = False
    repeated: bool = False
    """This is the first answer again; nothing was done now."""
    stale: bool = False
    """Another message holds the unique key, or none does; nothing was done."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepResult:
    """State of a sweep after the command. `stale`: another step was due, so nothing was done."""

    sweep: scheduler_pb2.Sweep | None = None
    failure: Failure | None = None
    stale: bool = False
    done: int = 0
    """Messages cancelled or moved by the command,"""
    ids: Ids = field(default_factory=lambda: NO_IDS)
    """their ids,"""
    new_ids: Ids = field(default_factory=lambda: NO_IDS)
    due_ms: NDArray[np.int64] = field(default_factory=lambda: NO_DUE)
    """and of moved ones the new ids and times."""


@dataclass(frozen=True, slots=True)
class AdminResult:
    """Result of an admin command. Only the values of that command are set."""

    failure: Failure | None = None
    topic: admin_pb2.Topic | None = None
    group: admin_pb2.Group | None = None
    settings: admin_pb2.Settings | None = None
    members: tuple[Member, ...] | None = None
    """All members after the command."""
    hour_min_kept: int = 0
    """After a removal: hours below are removed."""
    unsettled_removed: int = 0
    user: access_pb2.User | None = None
    role: access_pb2.AccessRole | None = None


class RunNote(NamedTuple):
    """What a command did with a planned time of a schedule. `topic_id`: of the message; 0 without one, and of a
    cancelled run."""

    name: str
    revision: int
    run: Run
    topic_id: int


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleResult:
    """Result of a command of recurring schedules. `schedule`: as it is afterwards; as it was last if it is deleted.

    `stale`: nothing was done, since the schedule is no longer as the master had read it."""

    schedule: Schedule | None = None
    stale: bool = False
    failure: Failure | None = None
    notes: tuple[RunNote, ...] = ()
    repeated: bool = False
    """It repeats a trigger or backfill that was answered before."""
    answer: Answer | None = None
    """Of a trigger or backfill."""
    stale_rows: int = 0
    """Of `make`: rows that did nothing."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that cannot be carried out at all, for example of a kind that this version does not know."""

    failure: Failure
