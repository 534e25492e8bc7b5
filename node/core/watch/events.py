"""Records the events of messages in bounded files, for `tickwheel trace` and audits.

Once a batch, the core's thread puts references into a queue: arrays of a result, columns of a command or of a delivered
batch. A worker makes columns of them, those of all topics in one pass since it shares the interpreter with the core's
thread, and writes them (storage/events.py). If the queue is full, records are left out and counted, so writing never
delays the node. Nothing depends on these files.

A killed process loses the queued records. A replay of the journal records them again, from the last entry in the files
on. Only deliveries are lost for good: they are in no log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol

import numpy as np

from tickwheel.node.core.part import Part
from tickwheel.node.core.world import Now
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.cold import ColdResult
from tickwheel.node.state.loads import IngestResult
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import (
    AdminResult,
    CancelResult,
    DispatchResult,
    MadeReady,
    PublishResult,
    RescheduleResult,
    RunNote,
    ScheduleResult,
    SettleResult,
    SweepResult,
    is_scheduled,
)
from tickwheel.node.state.schedules import MESSAGES
from tickwheel.node.state.staging import StagingResult
from tickwheel.node.state.targets import origins_of
from tickwheel.proto.admin_pb2 import CreateGroupRequest, ResetGroupRequest
from tickwheel.proto.consumer_pb2 import LATEST, TIME, DeliverBatch
from tickwheel.proto.log_pb2 import AdminCommand, Command, Ingest, LogEntry, Publish, SettleColumns
from tickwheel.proto.scheduler_pb2 import CANCELLED, RESCHEDULED, SWEEP_FINISHED, Sweep
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.events import (
    COLUMNS,
    FROM_NOW_MS,
    NAMING,
    TOPICS_A_RECORD,
    Column,
    EventKind,
    EventRecord,
    EventRecords,
    EventWriter,
    GroupChange,
    Places,
    holding,
    locate,
    newest_index,
    paths,
)
from tickwheel.storage.loaded_events import messages_of, note_texts, rows_of
from tickwheel.storage.unit import HOUR_MS
from tickwheel.wheel.bundles import Ingested
from tickwheel.wheel.units import ids_of, join_units

DIRECTORY = "events"
QUEUE_BYTES_MAX = 32 << 20
"""Approximate bound of the records waiting to be written."""
WRITE_BYTES = 1 << 20
"""With this much waiting, the worker writes at once."""
WRITE_PERIOD_MS = 100
"""Longest wait for a write. Records become bytes in a worker that shares the interpreter with the core's thread: half a
second's records at once would delay messages for as long as that takes."""
FOUND_MAX = 1_000
"""Events in the answer to one trace, at most."""
LOST_MAX = 0xFFFF_FFFF
"""That a record can count."""
UNITS_MAX = 1_000
"""Units that one trace follows. Each retry of a message is a unit of its own."""

RUN_OF = "@"
"""Begins a text of a record that names the schedule of a run: `@<message id>=<name>`."""

Make = Callable[[], EventRecords]
"""Makes records from queued references. Runs in a worker."""


def _start_ms(request: CreateGroupRequest | ResetGroupRequest) -> int:
    """First due time of the messages that a starting group gets from those dispatched before."""
    if request.start_from == LATEST:
        return FROM_NOW_MS
    return request.start_ms if request.start_from == TIME else 0


def _column(data: bytes, dtype: str) -> Column:
    return np.frombuffer(data, dtype).astype(np.uint64)


class Names(Protocol):
    """Gives the names of topics and groups; the state machine implements it."""

    def topic_name(self, topic_id: int) -> str: ...

    def group_name(self, group_id: int) -> str: ...


class Events(Part):
    """Does nothing if `bytes_max` is 0."""

    def __init__(self, disk: Disk, executor: Executor, names: Names, node_id: str, bytes_max: int) -> None:
        self._disk = disk
        self._executor = executor
        self._names = names
        self._node_id = node_id
        self.enabled = bytes_max > 0
        self._writer = EventWriter(disk, DIRECTORY, bytes_max)
        self.noted_to = newest_index(disk, DIRECTORY) if self.enabled else 0
        """Last log entry recorded before this start. A replay records the entries beyond it."""
        self._queue: list[Make] = []
        self._queue_count = 0
        """Records that the queue makes."""
        self._queue_bytes = 0
        self._searches: list[Callable[[], None]] = []
        """Starts searches that wait for the next write, or for the end of the one under way."""
        self._writing = False
        self._under_way: Callable[[], int] | None = None
        """Writes what a worker was given; does nothing once that has begun."""
        self._stopped = False
        self._write_at_ms = 0
        self._left_out = 0
        self.lost = 0
        """Records left out since the start because the queue was full or a write failed."""
        self.written_bytes = 0
        self.failures = 0
        self._places: dict[str, Places] = {}
        """Path of an event file -> what searches found in it. A file changes only at its end."""

    def _put(self, make: Make, size: int, count: int = 1) -> None:
        """Queue what makes `count` records, of about `size` bytes together."""
        if self._queue_bytes + size > QUEUE_BYTES_MAX:
            self._leave_out(count)
            return
        self._queue.append(make)
        self._queue_count += count
        self._queue_bytes += size

    def _leave_out(self, count: int) -> None:
        self.lost += count
        self._left_out += count

    def _put_one(
        self,
        kind: EventKind,
        facts: Mapping[str, Any],
        size: int,
        *,
        detail: int = 0,
        count: int = 0,
        texts: Sequence[str] = (),
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        """Queue one record, of about `size` bytes."""
        record = EventRecords(kind, **facts, parts=[(detail, count, texts)], columns=columns or {})
        self._put(lambda: record, size)

    # -- input from the core

    def applied(self, index: int, now_ms: int, entry: LogEntry, command: Command, result: AnyResult) -> None:
        """Record an applied command."""
        facts: dict[str, Any] = {
            "at_ms": now_ms,
            "stamped_ms": entry.stamped_ms,
            "term": entry.term,
            "log_index": index,
        }
        if isinstance(result, PublishResult):
            self._schedule(command.publish, result, facts)
        elif isinstance(result, DispatchResult):
            self._dispatched(result.ready, facts)
        elif isinstance(result, StagingResult):
            if result.schedule is not None:
                self._schedule(*result.schedule, facts)
        elif isinstance(result, IngestResult):
            if result.ingested is not None:
                self._loaded(command.ingest, result.ingested, facts)
                if len(result.withheld):
                    self._ids(EventKind.CANCELLED, result.withheld, facts)
        elif isinstance(result, SettleResult):
            batches = zip(command.settle.batches, result.parts, strict=False)
            self._settled([(batch, part.taken) for batch, part in batches if part.settled], facts)
        elif isinstance(result, CancelResult):
            if result.outcome == CANCELLED and not result.repeated:
                self._ids(EventKind.CANCELLED, np.array([result.id], np.uint64), facts)
        elif isinstance(result, RescheduleResult):
            if result.outcome == RESCHEDULED and not result.repeated:
                old, new = command.reschedule.id, result.new_id
                self._moved(np.array([old], np.uint64), np.array([new], np.uint64), np.array([result.due_ms]), facts)
        elif isinstance(result, SweepResult):
            if len(result.new_ids):
                self._moved(result.ids, result.new_ids, result.due_ms, facts)
            elif len(result.ids):
                self._ids(EventKind.CANCELLED, result.ids, facts)
            if result.sweep is not None and command.sweep.WhichOneof("body") == "step" and not result.stale:
                self._deleted(result.sweep, facts)
        elif isinstance(result, ScheduleResult):
            self._runs(result.notes, facts)
        elif isinstance(result, ColdResult):
            if result.cancelled:
                self._ids(EventKind.CANCELLED, np.array([command.cold.mark.id], np.uint64), facts)
        elif isinstance(result, AdminResult):
            if result.failure is None:
                self._administered(command.admin, result, facts)
        elif command.HasField("lead") and command.lead.node_id == self._node_id:
            self._put_one(EventKind.LEADS, facts, 128, texts=(self._node_id,))

    def _administered(self, command: AdminCommand, result: AdminResult, facts: Mapping[str, Any]) -> None:
        """Record commands that decide which messages a group must get."""
        body, group = command.WhichOneof("body"), result.group
        if body == "create_group" and group is not None:
            start, topics = _start_ms(command.create_group), command.create_group.topics
            self._group(GroupChange.SUBSCRIBED, group.name, group.filter, topics, start, facts)
            if group.broadcasting:
                self._group(GroupChange.BROADCASTING, group.name, "", topics, 0, facts)
        elif body == "reset_group" and group is not None:
            start, topics = _start_ms(command.reset_group), command.reset_group.topics or group.topics
            self._group(GroupChange.RESET, group.name, group.filter, topics, start, facts)
        elif body == "set_group_filter" and group is not None:
            self._group(GroupChange.FILTERED, group.name, group.filter, group.topics, 0, facts)
        elif body == "delete_group" and group is not None:
            self._group(GroupChange.DELETED, group.name, "", group.topics, 0, facts)
        elif body == "delete_topic":
            self._group(GroupChange.DELETED, "", "", [command.delete_topic.name], 0, facts)
        elif body == "remove_hours":
            self._group(GroupChange.REMOVED, "", "", [""], result.hour_min_kept * HOUR_MS, facts)

    def _deleted(self, job: Sweep, facts: Mapping[str, Any]) -> None:
        """Record the end of a deleting sweep: its topic is gone, or its group with all topics."""
        if job.state == SWEEP_FINISHED and job.delete_topic:
            self._group(GroupChange.DELETED, "", "", [job.delete_topic], 0, facts)
        elif job.state == SWEEP_FINISHED and job.delete_group:
            self._group(GroupChange.DELETED, job.delete_group, "", [""], 0, facts)

    def _group(
        self,
        change: GroupChange,
        group: str,
        filter: str,
        topics: Sequence[str],
        start_ms: int,
        facts: Mapping[str, Any],
    ) -> None:
        for at in range(0, len(topics), TOPICS_A_RECORD):
            names = topics[at : at + TOPICS_A_RECORD]
            columns = {"due_ms": np.full(len(names), max(0, start_ms), np.uint64)}
            texts = (group, filter, *names)
            size = 128 * len(names) + 512
            self._put_one(EventKind.GROUP, facts, size, detail=change, count=len(names), texts=texts, columns=columns)

    def _schedule(self, publish: Publish, result: PublishResult, facts: Mapping[str, Any]) -> None:
        if not result.scheduled:
            return
        if result.replaced:
            self._ids(EventKind.CANCELLED, np.array(result.replaced, np.uint64), facts)
        topics = sorted(set(np.frombuffer(publish.topic_ids, "<u4").tolist()))
        texts = [f"{number}={self._names.topic_name(number)}" for number in topics]
        self._put(lambda: _scheduled(publish, result, facts, texts), 3 * len(publish.due_ms) + 512)

    def _runs(self, notes: Sequence[RunNote], facts: Mapping[str, Any]) -> None:
        """Record the messages of runs, with the names of their schedules, and those that were cancelled."""
        made = [note for note in notes if note.run.outcome in MESSAGES]
        for at in range(0, len(made), TOPICS_A_RECORD // 2):
            part = made[at : at + TOPICS_A_RECORD // 2]
            topics = [f"{number}={self._names.topic_name(number)}" for number in {note.topic_id for note in part}]
            columns = {
                "id": np.array([note.run.id for note in part], np.uint64),
                "due_ms": np.array([note.run.at_ms for note in part], np.uint64),
                "topic_id": np.array([note.topic_id for note in part], np.uint64),
            }
            texts = (*topics, *(f"{RUN_OF}{note.run.id}={note.name}" for note in part))
            size = 256 * len(part) + 512
            self._put_one(EventKind.SCHEDULED, facts, size, count=len(part), texts=texts, columns=columns)
        cancelled = [note.run.id for note in notes if note.run.id and note.run.outcome not in MESSAGES]
        if cancelled:
            self._ids(EventKind.CANCELLED, np.array(cancelled, np.uint64), facts)

    def _loaded(self, ingest: Ingest, ingested: Ingested, facts: Mapping[str, Any]) -> None:
        """Record a bundle with a single record: readers find its messages in the bundle."""
        chunks = ingested.chunks
        columns = {name: chunks[name].astype(np.uint64) for name in ("hour", "first_index", "units")}
        columns["clamp_ms"] = np.full(len(chunks), ingested.clamp_ms, np.uint64)
        texts = note_texts(ingest.segment_sha256, [self._names.topic_name(number) for number in ingest.topic_ids])
        size = 32 * len(chunks) + 512
        self._put_one(EventKind.LOADED, facts, size, count=len(chunks), texts=texts, columns=columns)

    def _settled(self, batches: Sequence[tuple[SettleColumns, int]], facts: Mapping[str, Any]) -> None:
        """Record settlements: a record for each batch, with as many of its messages as were taken."""
        names = self._names
        parts = [
            (batch.kind, taken, (names.topic_name(batch.topic_id), names.group_name(batch.group_id), batch.reason))
            for batch, taken in batches
        ]
        ids = [batch.ids[: 8 * taken] for batch, taken in batches]
        attempts = [batch.attempts[: 4 * taken] for batch, taken in batches]

        def make() -> EventRecords:
            columns = {"unit": _column(b"".join(ids), "<u8"), "attempt": _column(b"".join(attempts), "<u4")}
            return EventRecords(EventKind.SETTLED, **facts, parts=parts, columns=columns)

        self._put(make, 24 * sum(taken for _, taken in batches) + 512 * len(batches), len(batches))

    def _ids(self, kind: EventKind, ids: np.ndarray, facts: Mapping[str, Any]) -> None:
        columns = {"id": ids.astype(np.uint64)}
        self._put_one(kind, facts, ids.nbytes + 512, count=len(ids), columns=columns)

    def _moved(self, ids: np.ndarray, new_ids: np.ndarray, due_ms: np.ndarray, facts: Mapping[str, Any]) -> None:
        columns = {"id": ids.astype(np.uint64), "new_id": new_ids.astype(np.uint64), "due_ms": due_ms.astype(np.uint64)}
        self._put_one(EventKind.MOVED, facts, 3 * ids.nbytes + 512, count=len(ids), columns=columns)

    def _dispatched(self, topics: Sequence[MadeReady], facts: Mapping[str, Any]) -> None:
        """Record a dispatch: a record for each topic."""
        if not topics:
            return
        facts = {**facts, "stamped_ms": 0}

        def make() -> EventRecords:
            units = join_units([ready.units for ready in topics])
            ids, origins = ids_of(units), origins_of(units)
            columns = {"id": np.where(origins != 0, origins, ids), "unit": ids}
            parts = [(0, len(ready.units), (ready.topic,)) for ready in topics]
            return EventRecords(EventKind.DISPATCHED, **facts, parts=parts, columns=columns)

        self._put(make, sum(ready.units.nbytes for ready in topics) + 512 * len(topics), len(topics))

    def delivered(
        self, now_ms: int, consumer: str, topics: Sequence[tuple[int, str, int]], batch: DeliverBatch
    ) -> None:
        """Record a batch handed to a consumer: a record for each topic. `topics` as in `Counts.delivered`."""
        term, group = batch.term, batch.group
        ids, due_ms, attempts = batch.ids, batch.due_ms, batch.attempts

        def make() -> EventRecords:
            columns = {"id": _column(ids, "<u8"), "due_ms": _column(due_ms, "<i8"), "attempt": _column(attempts, "<u4")}
            parts = [(0, count, (topic, group, consumer)) for _, topic, count in topics]
            return EventRecords(EventKind.DELIVERED, now_ms, term=term, parts=parts, columns=columns)

        self._put(make, 3 * len(ids) + 512 * len(topics), len(topics))

    # -- writing

    def metrics(self) -> Mapping[str, MetricValue]:
        return {
            "event_file_bytes_written": float(self.written_bytes),
            "events_lost_batches": float(self.lost),
            "event_file_failures": float(self.failures),
        }

    def tick(self, now: Now) -> None:
        """Start a write if enough waits or WRITE_PERIOD_MS have passed."""
        if not self._queue or (self._queue_bytes < WRITE_BYTES and now.steady_ms < self._write_at_ms):
            return
        self._write_at_ms = now.steady_ms + WRITE_PERIOD_MS
        self.flush()

    def wait_ms(self, now: Now) -> int | None:
        """Until queued records are due. None while a write is under way: its end brings a tick."""
        return self._write_at_ms - now.steady_ms if self._queue and not self._writing else None

    def replayed_to(self, index: int) -> None:
        """The log ends at `index` at a start: what was noted beyond it is noted again."""
        self.noted_to = min(self.noted_to, index)

    def stop(self) -> None:
        """The core stops: the workers write all that is queued."""
        self._stopped = True
        self.flush()

    def close(self) -> None:
        """The node has stopped: write what no worker had begun. Call it when the workers are at rest."""
        for work in (self._under_way, self._take()):
            try:
                if work is not None:
                    work()
            except DiskError:
                self.failures += 1

    def flush(self) -> None:
        """Start a write of the queued records, unless one is under way. Searches that wait follow it."""
        if self._writing:
            return
        searches, self._searches = self._searches, []
        if not self._queue:
            for search in searches:
                search()
            return
        self._writing = True
        count, left_out = self._queue_count, self._left_out
        work = self._under_way = self._take()

        def done(size: int | None, error: BaseException | None) -> None:
            self._writing, self._under_way = False, None
            if error is None:
                self.written_bytes += size or 0
            else:
                # The journal reacts to a full or failing disk; the node can do without these files.
                self.failures += 1
                self._leave_out(count)
                self._left_out += left_out  # the record that says so was not written either
            for search in searches:
                search()
            if self._searches or self._stopped:
                self.flush()

        self._executor.submit(work, done)

    def _take(self) -> Callable[[], int]:
        queue, self._queue, self._queue_count, self._queue_bytes = self._queue, [], 0, 0
        left_out, self._left_out = self._left_out, 0

        def work() -> int:
            makes = queue.copy()
            queue.clear()
            records = [make() for make in makes]
            if left_out and records:
                count = min(left_out, LOST_MAX)
                records.append(EventRecords(EventKind.LOST, records[-1].at_ms, parts=[(0, count, ())]))
            return self._writer.append(records) if records else 0

        return work

    # -- reading

    def find(self, ids: np.ndarray, done: Callable[[FindJob | None, BaseException | None], None]) -> None:
        """Find the events of some ids. What was recorded before is written first."""
        job = FindJob(self._disk, ids.astype(np.uint64), self._places)

        def found(_: object, error: BaseException | None) -> None:
            done(None if error is not None else job, error)

        self._searches.append(lambda: self._executor.submit(job.run, found))
        self.flush()


FEW_ROWS = 64
"""Rows of a record that are compared one by one."""


class FindJob:
    """Searches the event files in a worker, newest first. After `run`, `found` lists (record, row), oldest first.

    The first search reads every record; it keeps in `places` where each lies and which ids it may hold. Later ones
    read what is new, and those records.
    """

    def __init__(self, disk: Disk, ids: Column, places: dict[str, Places]) -> None:
        """`places` may be shared by searches that run at the same time."""
        self._disk = disk
        self._ids = ids
        self._places = places
        self._known: frozenset[int] = frozenset()
        """The same as whole numbers."""
        self.found: list[tuple[EventRecord, int]] = []
        self.oldest_ms = 0
        """Time of the oldest record in the files; 0: there are none."""
        self.lost = 0
        """Records left out, summed over all files."""
        self.complete = True
        """False: there were more than FOUND_MAX events."""

    def run(self) -> None:
        """Read every file, and read again if that revealed further units of these messages."""
        known = -1
        while known < len(self._ids) <= UNITS_MAX:
            known = len(self._ids)
            self._pass()
            units = [record.columns["unit"][row] for record, row in self.found if record.kind is EventKind.DISPATCHED]
            self._ids = np.unique(np.concatenate([self._ids, np.array(units, np.uint64)]))

    def _pass(self) -> None:
        self.found, self.lost, self.complete, self.oldest_ms = [], 0, True, 0
        self._known = frozenset(self._ids.tolist())
        present = paths(self._disk, DIRECTORY)
        for path in [path for path in list(self._places) if path not in present]:
            self._places.pop(path, None)
        ids = self._ids.tolist()
        for path in reversed(present):
            places = self._places[path] = locate(self._disk, path, self._places.get(path, Places()))
            self.lost += places.lost
            self.oldest_ms = places.first_ms or self.oldest_ms
            here: list[tuple[EventRecord, int]] = []
            for record in holding(self._disk, path, places, ids):
                if record.kind is EventKind.LOADED:
                    rows = rows_of(record, np.unique(self._ids))
                    if len(rows):
                        record = messages_of(record, [self._disk], rows)
                here += [(record, row) for row in self._rows(record)]
            room = FOUND_MAX - len(self.found)
            if len(here) > room:
                self.complete = False
                here = here[-room:] if room else []
            self.found = here + self.found

    @property
    def message_of(self) -> dict[int, int]:
        """Unit id -> message id, for each unit that was dispatched."""
        return {
            int(record.columns["unit"][row]): int(record.columns["id"][row])
            for record, row in self.found
            if record.kind is EventKind.DISPATCHED
        }

    def _rows(self, record: EventRecord) -> list[int]:
        rows: set[int] = set()
        for name in NAMING:
            if name not in COLUMNS[record.kind]:
                continue
            column = record.columns[name]
            if len(column) <= FEW_ROWS:  # most records: arrays would cost more than the look
                rows.update(row for row, value in enumerate(column.tolist()) if value in self._known)
            else:
                rows.update(np.flatnonzero(np.isin(column, self._ids)).tolist())
        return sorted(rows)


def _scheduled(publish: Publish, result: PublishResult, facts: Mapping[str, Any], texts: Sequence[str]) -> EventRecords:
    taken = [len(outcome.ids) > 0 and not outcome.repeated for outcome in result.requests]
    outcomes = list(compress(result.requests, taken))
    ids = np.concatenate([outcome.ids for outcome in outcomes])
    due_ms = np.concatenate([outcome.due_ms for outcome in outcomes])
    topics = np.frombuffer(publish.topic_ids, "<u4")
    if len(topics) == 1:
        topics = topics.repeat(len(publish.due_ms) // 8)
    elif publish.rows:
        by_row = np.empty_like(topics)
        by_row[np.frombuffer(publish.rows, "<u4")] = topics
        topics = by_row
    if not all(taken):
        topics = topics[np.repeat(taken, [request.count for request in publish.requests])]
    columns = {"id": ids, "due_ms": due_ms, "topic_id": topics}
    if any(outcome.keys is not None for outcome in outcomes):
        new = np.concatenate(
            [np.ones(len(done.ids), np.bool_) if done.keys is None else is_scheduled(done.keys) for done in outcomes]
        )
        columns = {name: values[new] for name, values in columns.items()}
    columns = {name: values.astype(np.uint64) for name, values in columns.items()}
    return EventRecords(EventKind.SCHEDULED, **facts, parts=[(0, len(columns["id"]), texts)], columns=columns)
