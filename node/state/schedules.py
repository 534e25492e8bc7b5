"""Recurring schedules as part of the replicated state: what each is to do, and how far it has come.

Pure. Owns the schedules by name, their count and size, and the numbers given to their revisions. A `Schedule` is
immutable: a change puts another one in its place, so a checkpoint captures all by copying references. What a command
changes is decided in recurring.py.

Beside the state it keeps, for the master, when each schedule wants its next look (`first_look_ms`, `wanting`): one
number a schedule in an array. So nothing is to be rebuilt when a node begins to lead, and schedules that do not run
cost no time.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tickwheel.node.failure import Failure, invalid, limit_reached
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.proto.parsing import parsed
from tickwheel.proto.schedules_pb2 import (
    OVERLAP_SKIP,
    RUN_BACKFILLED,
    RUN_MADE,
    RUN_TRIGGERED,
    RunOutcome,
    ScheduleDefinition,
)
from tickwheel.proto.state_pb2 import ScheduleSnapshot

SCHEDULES_MAX = 100_000
"""About 1 kB of memory each, beside payload and meta."""
SCHEDULES_BYTES_MAX = 256 << 20
"""Of names, plans, payloads and metas of all schedules: a checkpoint writes them each time."""
NAME_BYTES_MAX = 200
PAYLOAD_BYTES_MAX = 65_536
"""A schedule lies in the memory of every node and in each checkpoint."""
RUNS_KEPT = 10
AHEAD_MAX = 64
"""Runs of a schedule that are remembered as not dispatched yet. A pause, replacement or deletion can cancel only these;
more of them takes a jitter of more than 64 planned times."""
ANSWERS_KEPT = 16
"""Answers to triggers and backfills that a schedule remembers."""
AHEAD_MS = 2_000
"""So long before its planned time a run is put into the wheel: long enough for a round through the log under load,
short enough that a pause or replacement rarely has more than one run to cancel. Apply does not depend on it."""
NEVER = 1 << 62
"""The look of a schedule that has no next planned time."""
TURN_SCHEDULES = 500
TURN_BYTES = 2 << 20
"""Schedules in one turn of a digest, and their bytes: a few milliseconds."""

MESSAGES = (RUN_MADE, RUN_TRIGGERED, RUN_BACKFILLED)
"""Outcomes of runs that made a message."""

_RUN = struct.Struct("<qqQBI")
_AHEAD = struct.Struct("<qqQ")
_PLANNED_HEADER = b"tickwheel-planned"
_SCHEDULE_HEADER = b"tickwheel-schedule"


class Run(NamedTuple):
    """A planned time, or several passed over at once, and what became of it."""

    planned_ms: int
    at_ms: int
    """When its message is due; without a message the last planned time that this stands for."""
    id: int
    """0: there is no message."""
    outcome: RunOutcome.ValueType
    times: int = 1
    """Planned times that this stands for."""


class Ahead(NamedTuple):
    """A run that may not be dispatched yet."""

    planned_ms: int
    due_ms: int
    id: int


class Answer(NamedTuple):
    """The answer to a trigger or backfill, for repeats of it."""

    request_id: str
    outcome: RunOutcome.ValueType
    from_ms: int
    until_ms: int
    made: int
    next_from_ms: int
    run: bytes
    """Of a trigger: its packed Run."""


class Schedule(NamedTuple):
    """One schedule; never changed, only replaced."""

    name: str
    revision: int
    paused: bool
    next_ms: int
    """0: no planned time is left, or it is paused."""
    plan: bytes
    """ScheduleDefinition without payload and meta."""
    topic: str
    payload: bytes
    meta: bytes
    """A serialized MessageMeta, without the headers of runs."""
    count_max: int
    """Runs of the plan after which it ends; 0: no limit."""
    overlap: bool
    """False: no run while the last one is unsettled."""
    tag_hash: int
    tag_mask: int
    key_hash: int
    owner: str
    created_ms: int
    changed_ms: int
    counts: tuple[int, ...]
    """Runs by the number of their outcome."""
    counted: int = 0
    """Runs of the plan since the last put: what `count_max` limits."""
    runs: bytes = b""
    """Packed: the last RUNS_KEPT."""
    ahead: bytes = b""
    """Packed, in the order they were made; some of them may have been dispatched meanwhile."""
    answers: tuple[Answer, ...] = ()
    """Oldest first."""
    last_id: int = 0
    """The last run of the plan that was made, and when it was due."""
    last_due_ms: int = 0

    @property
    def size(self) -> int:
        """Bytes that count towards SCHEDULES_BYTES_MAX."""
        return len(self.name) + len(self.plan) + len(self.payload) + len(self.meta)

    @property
    def ended(self) -> bool:
        """No run will come unless somebody changes it."""
        return not self.paused and not self.next_ms

    @property
    def runs_left(self) -> int:
        """Runs of the plan until `count_max` is reached."""
        return max(0, self.count_max - self.counted) if self.count_max else NEVER

    def last_runs(self) -> list[Run]:
        """Oldest first."""
        return [unpack_run(row) for row in _rows(self.runs, _RUN.size)]

    def runs_ahead(self) -> list[Ahead]:
        """In the order they were made."""
        return [Ahead(*_AHEAD.unpack(row)) for row in _rows(self.ahead, _AHEAD.size)]

    def definition(self, *, content: bool = True) -> ScheduleDefinition:
        """As it was put; `content`: with payload and meta."""
        made = parsed(ScheduleDefinition, self.plan)
        if content:
            made.payload = self.payload
            if self.meta:
                made.meta.CopyFrom(parsed(MessageMeta, self.meta))
        return made

    def record(self, planned_ms: int) -> tuple[bytes, int]:
        """Record of the run of a planned time, and the size of its meta. Bytes are put behind bytes, which protobuf
        reads as one message: no library's way to write a map decides what nodes store."""
        meta = self.meta + header(_SCHEDULE_HEADER, self.name.encode()) + header(_PLANNED_HEADER, b"%d" % planned_ms)
        return meta + self.payload, len(meta)

    def noting(self, runs: Iterable[Run]) -> Schedule:
        """With these runs noted and counted."""
        counts, packed, counted = list(self.counts), self.runs, self.counted
        for run in runs:
            counts[run.outcome] += run.times
            counted += run.outcome == RUN_MADE
            packed += pack_run(run)
        return self._replace(counts=tuple(counts), counted=counted, runs=packed[-RUNS_KEPT * _RUN.size :])


def header(name: bytes, value: bytes) -> bytes:
    """One header of a serialized MessageMeta. Both are shorter than 256 bytes."""
    entry = b"\x0a" + _varint(len(name)) + name + b"\x12" + _varint(len(value)) + value
    return b"\x1a" + _varint(len(entry)) + entry


def _varint(number: int) -> bytes:
    return bytes((number,)) if number < 128 else bytes((number & 127 | 128, number >> 7))


def _rows(packed: bytes, size: int) -> Iterator[bytes]:
    return (packed[at : at + size] for at in range(0, len(packed), size))


def pack_run(run: Run) -> bytes:
    """A run as a row of `Schedule.runs`."""
    return _RUN.pack(run.planned_ms, run.at_ms, run.id, run.outcome, run.times)


def unpack_run(row: bytes) -> Run:
    """The reverse of `pack_run`."""
    planned_ms, at_ms, id, outcome, times = _RUN.unpack(row)
    return Run(planned_ms, at_ms, id, RunOutcome.ValueType(outcome), times)


def pack_ahead(rows: Iterable[Ahead]) -> bytes:
    """Rows of `Schedule.ahead`: the last AHEAD_MAX of these."""
    return b"".join(_AHEAD.pack(*row) for row in rows)[-AHEAD_MAX * _AHEAD.size :]


def no_counts() -> tuple[int, ...]:
    """Counts of a new schedule."""
    return (0,) * len(RunOutcome.keys())


class Schedules:
    """Changed by apply only."""

    def __init__(self) -> None:
        self._by_name: dict[str, Schedule] = {}
        self._names: list[str] = []
        """Rising."""
        self.last_revision = 0
        """Revisions are never used again: not even a deleted and newly created schedule meets an old one."""
        self.bytes = 0
        self._places: dict[str, int] = {}
        """Name -> place in `_looks`. Places differ from node to node."""
        self._placed: list[str] = []
        self._free: list[int] = []
        self._looks = np.zeros(0, np.int64)
        self._first_look_ms: int | None = NEVER
        """None: to be found anew."""

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Schedule | None:
        """One schedule, or None."""
        return self._by_name.get(name)

    def names_from(self, first: str) -> Iterator[str]:
        """Names from this one on, rising. Change nothing meanwhile."""
        return (self._names[at] for at in range(bisect_left(self._names, first), len(self._names)))

    @property
    def used(self) -> bool:
        """Whether the log has ever had a schedule."""
        return self.last_revision > 0

    def next_revision(self) -> int:
        """A number that was never given before."""
        self.last_revision += 1
        return self.last_revision

    def refusal(self, new: Schedule, old: Schedule | None) -> Failure | None:
        """Why a new schedule, which may replace one, is too large or finds no room; None: it is taken. The door has
        checked the sizes; a record's headers depend on them."""
        size = len(new.name.encode())
        if not 1 <= size <= NAME_BYTES_MAX:
            return invalid("definition.name", f"{size} bytes", f"1 to {NAME_BYTES_MAX} bytes").failure
        if len(new.payload) > PAYLOAD_BYTES_MAX:
            return invalid("definition.payload", f"{len(new.payload)} bytes", f"1 to {PAYLOAD_BYTES_MAX} bytes").failure
        if old is None and len(self._by_name) >= SCHEDULES_MAX:
            return limit_reached("schedules_max", SCHEDULES_MAX, 60_000)
        if self.bytes + new.size - (old.size if old is not None else 0) > SCHEDULES_BYTES_MAX:
            return limit_reached("schedules_bytes_max", SCHEDULES_BYTES_MAX, 60_000)
        return None

    def put(self, schedule: Schedule) -> None:
        """Add a schedule, or put it in the place of the one of its name."""
        old = self._by_name.get(schedule.name)
        if old is None:
            insort(self._names, schedule.name)
            self._place(schedule.name)
        else:
            self.bytes -= old.size
        self.bytes += schedule.size
        self._by_name[schedule.name] = schedule
        self._looks[self._places[schedule.name]] = look_ms(schedule)
        self._first_look_ms = None

    def remove(self, name: str) -> None:
        """Remove a schedule that is there."""
        self.bytes -= self._by_name.pop(name).size
        del self._names[bisect_left(self._names, name)]
        place = self._places.pop(name)
        self._placed[place] = ""
        self._looks[place] = NEVER
        self._free.append(place)
        self._first_look_ms = None

    # -- for the master

    @property
    def first_look_ms(self) -> int:
        """When the first schedule wants its next look; NEVER: none does."""
        if self._first_look_ms is None:
            self._first_look_ms = int(self._looks.min()) if len(self._looks) else NEVER
        return self._first_look_ms

    def wanting(self, now_ms: int, limit: int) -> list[Schedule]:
        """At most `limit` schedules that want a look by now, those first that have waited longest."""
        found = np.flatnonzero(self._looks <= now_ms)
        if len(found) > limit:
            found = found[np.argpartition(self._looks[found], limit)[:limit]]
        wanting = [(int(self._looks[place]), self._placed[place]) for place in found.tolist()]
        return [self._by_name[name] for _, name in sorted(wanting)]

    def look_later(self, name: str, at_ms: int) -> None:
        """Put off the next look at a schedule: something holds its run up. No part of the state; a change ends it."""
        self._looks[self._places[name]] = at_ms
        self._first_look_ms = None

    def _place(self, name: str) -> None:
        if self._free:
            place = self._free.pop()
            self._placed[place] = name
        else:
            place = len(self._placed)
            self._placed.append(name)
            if place >= len(self._looks):
                grown = np.full(max(64, 2 * len(self._looks)), NEVER, np.int64)
                grown[: len(self._looks)] = self._looks
                self._looks = grown
        self._places[name] = place

    # -- checkpoints and digests

    def capture(self) -> list[Schedule]:
        """All of them. They never change, so a worker may read them."""
        return list(self._by_name.values())

    def restore(self, snapshots: Iterable[ScheduleSnapshot], last_revision: int) -> None:
        """Replace the content by what a checkpoint has."""
        self.__init__()  # type: ignore[misc]
        for snapshot in snapshots:
            self.put(_restored(snapshot))
        self.last_revision = last_revision

    def digest_in_turns(self) -> Generator[None, None, bytes]:
        """Digest of the whole content, in turns of a few milliseconds."""
        sha = hashlib.sha256(struct.pack("<QQ", self.last_revision, len(self._by_name)))
        number = size = 0
        for name in self._names:
            schedule = self._by_name[name]
            small = schedule._replace(plan=b"", payload=b"", meta=b"", runs=b"", ahead=b"")
            for data in (
                repr(tuple(small)).encode(),
                schedule.plan,
                schedule.payload,
                schedule.meta,
                schedule.runs,
                schedule.ahead,
            ):
                sha.update(struct.pack("<Q", len(data)) + data)
            number += 1
            size += schedule.size
            if number >= TURN_SCHEDULES or size >= TURN_BYTES:
                number = size = 0
                yield
        return sha.digest()


def look_ms(schedule: Schedule) -> int:
    """When the master looks at a schedule next. A run that depends on whether the last one is settled is made at its
    planned time, others ahead of it."""
    if schedule.next_ms <= 0:
        return NEVER
    return schedule.next_ms - (AHEAD_MS if schedule.overlap else 0)


def unknown_schedule(name: str) -> Failure:
    """The refusal because no such schedule exists."""
    return Failure(pb.UNKNOWN_NAME, f"no schedule {name[:200]!r} exists", {"field": "name", "value": name[:200]})


# -- checkpoints


_AS_KEPT = (
    *("revision", "paused", "next_ms", "created_ms", "changed_ms", "tag_hash", "tag_mask", "key_hash"),
    *("counted", "runs", "ahead", "last_id", "last_due_ms"),
)
"""Fields that a snapshot has as the schedule has them."""


def snapshot_values(schedule: Schedule) -> dict[str, Any]:
    """The values of a ScheduleSnapshot."""
    definition = schedule.definition(content=False)
    definition.payload = schedule.payload
    return {
        "definition": definition,
        "meta": schedule.meta,
        "owner": schedule.owner,
        "counts": schedule.counts,
        "requests": [answer._asdict() for answer in schedule.answers],
        **{name: getattr(schedule, name) for name in _AS_KEPT},
    }


def _restored(snapshot: ScheduleSnapshot) -> Schedule:
    counts = list(no_counts())
    counts[: len(snapshot.counts)] = snapshot.counts
    return made_of(snapshot.definition, snapshot.meta)._replace(
        owner=sys.intern(snapshot.owner),
        counts=tuple(counts),
        answers=tuple(Answer(*(getattr(kept, name) for name in Answer._fields)) for kept in snapshot.requests),
        **{name: getattr(snapshot, name) for name in _AS_KEPT},
    )


def made_of(definition: ScheduleDefinition, meta: bytes) -> Schedule:
    """A schedule of this definition that has done nothing yet; `meta`: its serialized meta."""
    plan = ScheduleDefinition()
    plan.CopyFrom(definition)
    plan.ClearField("payload")
    plan.ClearField("meta")
    return Schedule(
        name=definition.name,
        revision=0,
        paused=False,
        next_ms=0,
        plan=plan.SerializeToString(deterministic=True),
        topic=sys.intern(definition.topic),
        payload=definition.payload,
        meta=meta,
        count_max=definition.spec.count,
        overlap=definition.overlap != OVERLAP_SKIP,
        tag_hash=0,
        tag_mask=0,
        key_hash=0,
        owner="",
        created_ms=0,
        changed_ms=0,
        counts=no_counts(),
    )
