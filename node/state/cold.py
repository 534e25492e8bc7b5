"""The cold tier in the replicated state: parts that lie outside, marks on single messages, and how parts are loaded.

The content of cold messages is in Parquet files outside the cluster; the state has only the facts on which nodes must
agree. Taking over a bundle made of a part (`Ingest` with `cold`) is one command of the log, and that is the cut. A
message cancelled or moved before the cut is withheld by the same command: its unit is marked in the wheel. A message
cancelled or moved after the cut is cancelled or moved in the wheel, under its id there. So a bundle need not know of
marks, and no job can contradict an answer that a client got.

Invariants:
- A part is loaded at most once, and so is a moved message: a repeat finds nothing waiting and does nothing.
- While a part is remembered, each of its messages is in exactly one state: waiting at its time, cancelled, moved and
  waiting, loaded with its part, loaded after a move. Units of messages that were not loaded with their part are marked.
- At most MARKS_MAX marks; a further cancel or move is refused until parts are loaded.

Belongs to the state machine, its only caller; others read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refused
from tickwheel.node.state.cold_parts import (
    CHUNK,
    PAGE_PARTS,
    Chunks,
    ColdParts,
    Part,
    cold_id,
    ids_of_rows,
    is_cold,
    part_message,
    place_of,
)
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.publishing import DUE_MS_MAX
from tickwheel.node.state.results import NO_IDS
from tickwheel.proto import cold_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.units import HOUR_MS, Ids, hours_of

MARKS_MAX = 1_000_000
"""21 MB. Far more than wait for their part in most uses; a wave of cancels must not fill the memory."""
MOVED_MAX = 2_048
"""Moved messages of one bundle: apply looks at each one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cold message is. `kind`: 0 if it waits at its original time, else the kind of its mark; LOADED also if
    its part is loaded."""

    kind: int = 0
    due_ms: int = 0
    """New due time of a moved message."""
    loaded_id: int = 0
    """Id of a loaded message in the wheel."""


@dataclass(frozen=True, slots=True)
class ColdResult:
    """Result of a mark. `place` None: there is no such message. LOADED: the message was loaded and nothing was done.
    Else its place now; `refused` if it had been cancelled and so cannot be moved."""

    place: Place | None
    refused: bool = False

    @property
    def cancelled(self) -> bool:
        """Whether the message is cancelled, by this command or by one that it repeats."""
        return not self.refused and self.place is not None and self.place.kind == CANCELLED


@dataclass(frozen=True, slots=True)
class ColdCapture:
    """The cold tier at one moment; any thread may make a message of it."""

    last_part: int
    late: int
    late_ms_max: int
    jobs: list[cold_pb2.ColdJobSnapshot]
    parts: list[Part]
    marks: list[tuple[int, MarkRows]]

    def message(self) -> cold_pb2.ColdSnapshot:
        """The capture as a message for a checkpoint."""
        return cold_pb2.ColdSnapshot(
            last_part=self.last_part,
            late=self.late,
            late_ms_max=self.late_ms_max,
            jobs=self.jobs,
            parts=map(part_message, self.parts),
            marks=[cold_pb2.ColdMarksSnapshot(part=number, marks=rows.tobytes()) for number, rows in self.marks],
        )


class ColdTier:
    def __init__(self, marks_max: int = MARKS_MAX) -> None:
        self.parts = ColdParts()
        self.marks = ColdMarks()
        self._marks_max = marks_max
        self.late = 0
        """Messages ever loaded after they were due."""
        self.late_ms_max = 0
        """The largest such delay."""

    def place(self, number: int) -> Place | None:
        """The place of a cold id's message; None: there is none, or the hours into which it was loaded are gone."""
        part_number, row = place_of(number)
        mark = self.marks.get(part_number, row)
        if mark is not None:
            return Place(*mark)
        part = self.parts.get(part_number)
        if part is None or row >= part.rows:
            return None
        if part.chunks is None:
            return Place()
        return Place(LOADED, 0, int(ids_of_rows(part.chunks, np.array([row]))[0]))

    # -- commands

    def apply(self, command: cold_pb2.ColdCommand) -> cold_pb2.ColdJob | ColdResult:
        """Register a job, or mark a message. Raises RequestError."""
        kind = command.WhichOneof("body")
        if kind == "register":
            return self.parts.register(command.register)
        if kind == "mark":
            return self._mark(command.mark)
        raise refused(pb.WRONG_STATE, f"cold command {kind or 'without a body'} is not known to this version")

    def _mark(self, command: cold_pb2.ColdMark) -> ColdResult:
        moves = command.HasField("due_ms")
        if moves and not 0 <= command.due_ms <= DUE_MS_MAX:
            raise invalid("due_ms", command.due_ms, f"0 to {DUE_MS_MAX}")
        place = self.place(command.id) if is_cold(command.id) else None
        if place is None or place.kind == LOADED:
            return ColdResult(place)
        if place.kind == CANCELLED:
            return ColdResult(place, refused=moves)
        part_number, row = place_of(command.id)
        if not place.kind and len(self.marks) >= self._marks_max:
            raise RequestError(limit_reached("cold_marks", self._marks_max, 60_000))
        if moves:
            mark: Mark | None = Mark(MOVED, command.due_ms)
        else:
            part = self.parts.get(part_number)
            # If its part is loaded, its unit there is marked already: the state's mark is not needed.
            mark = None if part is not None and part.chunks is not None else Mark(CANCELLED, place.due_ms)
        self.marks.put(part_number, row, mark)
        return ColdResult(Place(MOVED, command.due_ms) if moves else Place(CANCELLED))

    # -- loading

    def problem_of(self, cold: cold_pb2.ColdLoad, units: int) -> Failure | None:
        """Why a bundle's claim about its cold content cannot be true; None if it can."""
        count = len(cold.ids) // 8
        if count:
            if len(cold.ids) != 8 * count or len(cold.due_ms) != 8 * count or not 1 <= count <= MOVED_MAX:
                return invalid(
                    "cold.ids", f"{len(cold.ids)} bytes", f"1 to {MOVED_MAX} ids, and as many due_ms"
                ).failure
            if count != units:
                return invalid("cold.ids", count, f"{units}, as the bundle has messages").failure
            return None
        if not 1 <= cold.part <= self.parts.last:
            return Failure(pb.UNKNOWN_NAME, f"no part {cold.part}", {"field": "cold.part", "value": str(cold.part)})
        part = self.parts.get(cold.part)
        if part is not None and part.rows != units:
            return invalid("cold.part", f"{units} messages", f"{part.rows}, as it was registered").failure
        if part is not None and cold.late > part.rows:
            return invalid("cold.late", cold.late, f"at most {part.rows}, as the part has messages").failure
        return None

    def wants(self, cold: cold_pb2.ColdLoad) -> bool:
        """Whether any message of the bundle waits to be loaded."""
        if not cold.ids:
            part = self.parts.get(cold.part)
            return part is not None and part.chunks is None
        pairs = zip(np.frombuffer(cold.ids, "<u8").tolist(), np.frombuffer(cold.due_ms, "<i8").tolist(), strict=True)
        return any(self._waits(number, due_ms) for number, due_ms in pairs)

    def _waits(self, number: int, due_ms: int) -> bool:
        mark = self.marks.get(*place_of(number)) if is_cold(number) else None
        return mark is not None and mark.kind == MOVED and mark.due_ms == due_ms

    def took(self, cold: cold_pb2.ColdLoad, ingested: Ingested, stamped_ms: int, wheel: WheelPort) -> Ids:
        """Decide the messages of a bundle that the wheel has just taken over: this is the cut. Returns the ids of units
        to withhold; they are marked."""
        late, late_ms = self._lateness(cold, ingested, stamped_ms)
        chunks = np.zeros(len(ingested.chunks), CHUNK)
        for name in ("first_row", "hour", "first_index"):
            chunks[name] = ingested.chunks[name]
        rows = self._withheld_moved(cold, chunks) if cold.ids else self._withheld(cold.part, chunks)
        # Rows are in the order of their due times, so late ones come first.
        late -= int(np.count_nonzero(rows < late))
        if late:
            self.late += late
            self.late_ms_max = max(self.late_ms_max, late_ms)
        return wheel.withhold(ids_of_rows(chunks, rows)) if len(rows) else NO_IDS

    def _lateness(self, cold: cold_pb2.ColdLoad, ingested: Ingested, stamped_ms: int) -> tuple[int, int]:
        """(late rows of a bundle, marked ones included; delay of the first)."""
        if not cold.HasField("late"):
            return ingested.late, 0
        if cold.ids:
            due = np.frombuffer(cold.due_ms, "<i8")
            return int(np.count_nonzero(due < stamped_ms)), max(0, stamped_ms - int(due[0]))
        part = self.parts.get(cold.part)
        assert part is not None, "looked at before"
        late = part.rows if part.due_max_ms < stamped_ms else max(cold.late, ingested.late)
        return late, max(0, stamped_ms - part.due_min_ms)

    def _withheld(self, number: int, chunks: Chunks) -> np.ndarray:
        """Rows of a part that have a mark. Marks of cancelled rows are dropped: their units in the wheel are marked."""
        part = self.parts.get(number)
        assert part is not None, "looked at before"
        marked = self.marks.of(number)
        self.marks.keep(number, marked["kind"] != CANCELLED)
        self.parts.loaded(part, chunks)
        return marked["row"].astype(np.int64)

    def _withheld_moved(self, cold: cold_pb2.ColdLoad, chunks: Chunks) -> np.ndarray:
        """Rows of a bundle of moved messages that have been moved again, cancelled or loaded since."""
        ids, due = np.frombuffer(cold.ids, "<u8").tolist(), np.frombuffer(cold.due_ms, "<i8").tolist()
        loaded = ids_of_rows(chunks, np.arange(len(ids))).tolist()
        withheld = []
        for row, (number, due_ms, loaded_id) in enumerate(zip(ids, due, loaded, strict=True)):
            if self._waits(number, due_ms):
                self.marks.put(*place_of(number), Mark(LOADED, due_ms, loaded_id))
            else:
                withheld.append(row)
        return np.array(withheld, np.int64)

    def forget(self, below: int) -> None:
        """Hours below are gone: drop the parts that were loaded into them, and marks that are no longer needed."""
        self.parts.forget(below)
        for number in self.marks.parts():
            if self.parts.get(number) is None:
                rows = self.marks.of(number)
                hours = np.where(
                    rows["kind"] == LOADED,
                    hours_of(rows["loaded_id"]),
                    rows["due_ms"] // HOUR_MS,
                )
                kept = (rows["kind"] == MOVED) | (hours >= below)
                if not kept.all():
                    self.marks.keep(number, kept)

    # -- for readers

    def next_due_ms(self) -> int:
        """First due time of messages that are not loaded, including cancelled ones of waiting parts; 0: none waits."""
        part_ms, moved_ms = self.parts.next_due_ms(), self.marks.next_moved_ms()
        if moved_ms == NEVER_MS:
            return part_ms
        return min(part_ms, moved_ms) if part_ms else moved_ms

    def list_parts(self, after: int, waiting_only: bool) -> cold_pb2.ColdParts:
        """A page of parts."""
        answer = cold_pb2.ColdParts(last_part=self.parts.last)
        jobs = list(self.parts.jobs())
        at = 0
        for part in self.parts:
            if part.number <= after or (waiting_only and part.chunks is not None):
                continue
            if len(answer.parts) == PAGE_PARTS:
                answer.more = True
                break
            while at < len(jobs) and jobs[at].first_part + jobs[at].parts <= part.number:
                at += 1
            job = jobs[at]
            answer.parts.add(
                number=part.number,
                job_id=job.job_id,
                place=part.number - job.first_part,
                day=part.day,
                rows=part.rows,
                due_min_ms=part.due_min_ms,
                due_max_ms=part.due_max_ms,
                sha256=part.sha256,
                loaded=part.chunks is not None,
                moved=self.marks.moved_of(part.number),
            )
        return answer

    def list_moved(self, after: int, due_below_ms: int) -> cold_pb2.ColdMoved:
        """A page of moved messages that wait to be loaded."""
        ids, due, more = self.marks.moved(after, due_below_ms, MOVED_MAX)
        return cold_pb2.ColdMoved(ids=np.array(ids, "<u8").tobytes(), due_ms=np.array(due, "<i8").tobytes(), more=more)

    # -- checkpoints

    def capture(self) -> ColdCapture:
        """A capture for a checkpoint."""
        return ColdCapture(
            self.parts.last, self.late, self.late_ms_max, *self.parts.capture(), list(self.marks.capture())
        )

    def restore(self, snapshot: cold_pb2.ColdSnapshot) -> None:
        """Fill a fresh tier from a checkpoint."""
        self.parts.load(snapshot)
        for item in snapshot.marks:
            self.marks.load(item.part, np.frombuffer(item.marks, MARKED))
        self.late = snapshot.late
        self.late_ms_max = snapshot.late_ms_max

    def digest(self) -> bytes:
        """Digest of the cold tier; empty if it never had any content."""
        if not self.parts.last:
            return b""
        return hashlib.sha256(self.capture().message().SerializeToString(deterministic=True)).digest()


MARKED = np.dtype([("row", "<u4"), ("kind", "u1"), ("due_ms", "<i8"), ("loaded_id", "<u8")])
"""A mark; 21 bytes."""
CANCELLED, MOVED, LOADED = 1, 2, 3
"""Kinds of marks: never to be delivered; due at `due_ms` and not loaded; moved, then loaded as `loaded_id`."""

_RECENT_MAX = 512
NEVER_MS = (1 << 63) - 1

MarkRows = NDArray[np.void]
_NONE: MarkRows = np.zeros(0, MARKED)


class Mark(NamedTuple):
    """The mark of one message."""

    kind: int
    due_ms: int = 0
    """The due time now; 0: the message was cancelled at its original time."""
    loaded_id: int = 0


class ColdMarks:
    """Marks of single messages of the cold tier: cancelled, moved to another time, or loaded after a move.

    Owns, for each part, a sorted array of marks with a small dictionary of recent ones beside it. Logical state. A
    message has at most one mark; most have none. `ColdTier` decides what a mark means for the part's loading.
    """

    def __init__(self) -> None:
        self._sorted: dict[int, MarkRows] = {}
        self._rows: dict[int, NDArray[np.uint32]] = {}  # of each, contiguous for searching
        self._recent: dict[int, dict[int, Mark | None]] = {}
        self._counts = [0, 0, 0, 0]
        self._least_ms: dict[int, int] = {}
        """Part -> first due time of its moved, waiting messages; only for parts that are not in `_unknown`."""
        self._unknown: set[int] = set()

    def __len__(self) -> int:
        return sum(self._counts)

    def count(self, kind: int) -> int:
        """Number of marks of a kind."""
        return self._counts[kind]

    def get(self, part: int, row: int) -> Mark | None:
        """The mark of one message."""
        recent = self._recent.get(part)
        if recent is not None and row in recent:
            return recent[row]
        rows = self._rows.get(part)
        if rows is None:
            return None
        at = int(rows.searchsorted(np.uint32(row)))
        if at == len(rows) or int(rows[at]) != row:
            return None
        found = self._sorted[part]
        return Mark(int(found["kind"][at]), int(found["due_ms"][at]), int(found["loaded_id"][at]))

    def put(self, part: int, row: int, mark: Mark | None) -> None:
        """Set the mark of one message; None removes it."""
        before = self.get(part, row)
        if before is not None:
            self._counts[before.kind] -= 1
        if mark is not None:
            self._counts[mark.kind] += 1
        recent = self._recent.setdefault(part, {})
        recent[row] = mark
        self._unknown.add(part)
        if len(recent) >= _RECENT_MAX:
            self.of(part)

    def of(self, part: int) -> MarkRows:
        """All marks of a part by rising row; the array never changes."""
        found = self._sorted.get(part, _NONE)
        recent = self._recent.pop(part, None)
        if recent:
            kept = found[~np.isin(found["row"], np.fromiter(recent, np.uint32, len(recent)))]
            fresh = [(row, *mark) for row, mark in recent.items() if mark is not None]
            found = np.concatenate([kept, np.array(fresh, MARKED)])
            found = found[np.argsort(found["row"], kind="stable")]
            self._set(part, found)
        return found

    def _set(self, part: int, rows: MarkRows) -> None:
        self._unknown.add(part)
        if len(rows):
            self._sorted[part] = rows
            self._rows[part] = np.ascontiguousarray(rows["row"])
        else:
            self._sorted.pop(part, None)
            self._rows.pop(part, None)

    def keep(self, part: int, kept: NDArray[np.bool_]) -> None:
        """Keep these of the marks that `of` returned; drop the others."""
        rows = self.of(part)
        for kind in (CANCELLED, MOVED, LOADED):
            self._counts[kind] -= int(np.count_nonzero(rows["kind"][~kept] == kind))
        self._set(part, rows[kept])

    def parts(self) -> list[int]:
        """Parts that have marks, rising."""
        for part in list(self._recent):
            self.of(part)
        return sorted(self._sorted)

    def _least_of(self, part: int) -> int:
        if part in self._unknown:
            self._unknown.discard(part)
            rows = self.of(part)
            self._unknown.discard(part)
            waiting = rows["due_ms"][rows["kind"] == MOVED]
            if len(waiting):
                self._least_ms[part] = int(waiting.min())
            else:
                self._least_ms.pop(part, None)
        return self._least_ms.get(part, NEVER_MS)

    def next_moved_ms(self) -> int:
        """First due time of moved messages that are not loaded; NEVER_MS if there are none."""
        for part in list(self._unknown):
            self._least_of(part)
        return min(self._least_ms.values(), default=NEVER_MS)

    def moved(self, after: int, due_below_ms: int, most: int) -> tuple[list[int], list[int], bool]:
        """Moved, waiting messages with ids above `after` that are due before a time, at most `most`: (ids, due times,
        whether there are more)."""
        ids: list[int] = []
        due: list[int] = []
        for part in self.parts():
            if cold_id(part + 1, 0) <= after or self._least_of(part) >= due_below_ms:
                continue
            rows = self.of(part)
            wanted = (rows["kind"] == MOVED) & (rows["due_ms"] < due_below_ms)
            base = cold_id(part, 0)
            if base <= after:
                wanted &= rows["row"] > after - base
            rows = rows[wanted]
            room = most - len(ids)
            ids += [base + row for row in rows["row"][:room].tolist()]
            due += rows["due_ms"][:room].tolist()
            if len(rows) > room:
                return ids, due, True
        return ids, due, False

    def moved_of(self, part: int) -> int:
        """Moved, waiting messages of a part."""
        if self._least_of(part) == NEVER_MS:
            return 0
        return int(np.count_nonzero(self.of(part)["kind"] == MOVED))

    # -- checkpoints

    def capture(self) -> Iterator[tuple[int, MarkRows]]:
        """All marks by rising part; the arrays never change."""
        return ((part, self._sorted[part]) for part in self.parts())

    def load(self, part: int, rows: MarkRows) -> None:
        """Load the marks of one part from a checkpoint."""
        self._set(part, rows)
        for kind in (CANCELLED, MOVED, LOADED):
            self._counts[kind] += int(np.count_nonzero(rows["kind"] == kind))
