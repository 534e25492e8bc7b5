"""Apply is total: whatever a master may propose gives a result, of every command, with every bound among its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TypeVar

import numpy as np
from google.protobuf.message import EncodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.state.solo import HOUR_0, Solo
from tickwheel.chaos.fuzz.messages import Maker
from tickwheel.node.core.watch.counts import Counts
from tickwheel.node.core.watch.events import Events
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import CancelResult, Ignored, PublishResult, RescheduleResult, ScheduleResult
from tickwheel.node.state.schedules import Schedule
from tickwheel.node.state.schema import EARLIER_SCHEMAS, ENTRY_SCHEMA, read_entry
from tickwheel.node.state.settings import BOUNDS
from tickwheel.node.state.unique_keys import digest_of
from tickwheel.proto.common_pb2 import KEY_REPLACED
from tickwheel.proto.log_pb2 import Command, LogEntry, Publish, ScheduleCommand
from tickwheel.proto.scheduler_pb2 import CANCELLED, RESCHEDULED
from tickwheel.proto.schedules_pb2 import RUN_BACKFILLED, RUN_TRIGGERED
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.units import HOUR_MS

A = TypeVar("A")
ENTRIES = 60
DELAY_MS_MAX = BOUNDS["delay_ms_max"][1]
ONE, TWO = b"\1\0\0\0", b"\2\0\0\0"
FITTED = ("publish", "schedule", "cancel", "reschedule", "dispatch", "settle")
"""Kinds of commands that meet what others have left: twice as many of them."""
KEYS, NAMES = ("a", "b", "c"), ("report", "backup")


class AtOnce:
    """An executor without threads."""

    def submit(self, work: Callable[[], A], done: Callable[[A | None, BaseException | None], None]) -> None:
        """Run it here; an error is the test's."""
        done(work(), None)


class Masterful:
    """Commands over the schema of the log, as any master could propose them whatever clients ask for.

    A master says what it has read itself: when a message is due that it cancels or moves, what time it is. Everything
    else is by chance, columns that do not fit each other included. But chance alone never hits a unique key that is
    held, or the revision of a recurring schedule: of most such commands more fits (`_fit_*`).
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.solo = Solo(seed)
        self.solo.create("g", "g2")
        now_ms = self.solo.now_ms
        self.due_ms = [now_ms + number * 100 for number in range(20)]
        self.ids = self.solo.publish(self.due_ms, b"payload")
        self.solo.dispatch(now_ms + 1_000)
        hints = {
            "group_id": lambda rng: rng.choice((1, 2)),
            "topic_id": lambda rng: 1,
            "ids": lambda rng: b"".join(rng.choice(self.ids).to_bytes(8, "little") for _ in range(rng.choice((1, 2)))),
            "topic_ids": lambda rng: ONE,
            "attempts": lambda rng: rng.choice((ONE, ONE + ONE, TWO, b"\0\0\0\0")),
            "count": lambda rng: rng.choice((0, 1, 1, 2)),
            "sizes": lambda rng: ONE,
            "records": lambda rng: b"x",
            "unique_keys": lambda rng: rng.choice((digest_of(rng.choice(KEYS)), bytes(16))),
            "unique_key": lambda rng: rng.choice((b"", digest_of(rng.choice(KEYS)))),
            "key_rules": lambda rng: bytes([rng.randrange(8)]),
            "positions": lambda rng: np.array([rng.randrange(12)], "<u8").tobytes(),
        }
        self.maker = Maker(self.rng, now_ms, hints)
        self.events = Events(SimulatedDisk(Random(seed)), AtOnce(), self.solo.state, "a", 1 << 20)
        self.counts = Counts(self.solo.state)

    def command(self) -> Command:
        """One, of any kind."""
        while True:
            made = self.maker.message(Command.DESCRIPTOR)
            assert isinstance(made, Command)
            kind = made.WhichOneof("body")
            if kind not in FITTED and self.rng.random() < 0.5:
                continue
            if kind not in ("lead",) and not (kind == "admin" and made.admin.HasField("create_cluster")):
                self._as_read(made)
                return made

    def _as_read(self, made: Command) -> None:
        now_ms, rng = self.solo.now_ms, self.rng
        kind = made.WhichOneof("body")
        row = rng.randrange(len(self.ids))
        if kind == "cancel":
            made.cancel.id, made.cancel.due_ms = self.ids[row], self.due_ms[row]
            if made.cancel.unique_key:
                made.cancel.id, made.cancel.topic_id = 0, 1
                made.cancel.unique_key = digest_of(rng.choice(KEYS))
        elif kind == "reschedule":
            made.reschedule.id, made.reschedule.due_ms = self.ids[row], self.due_ms[row]
            made.reschedule.new_due_ms = min(made.reschedule.new_due_ms, now_ms + DELAY_MS_MAX)
            if made.reschedule.unique_key:
                made.reschedule.topic_id, made.reschedule.unique_key = 1, digest_of(key := rng.choice(KEYS))
                made.reschedule.record, made.reschedule.meta_size = b"x", 0
                holder = self.solo.state.key_holder("t", key)
                if holder is not None:
                    made.reschedule.id, made.reschedule.due_ms = holder.id, holder.due_ms
        elif kind == "dispatch":
            made.dispatch.due_ms, made.dispatch.index = now_ms + rng.randrange(-10, 300), rng.randrange(40)
        elif kind == "replay_dead":
            made.replay_dead.due_ms = now_ms
        elif kind == "sweep" and made.sweep.HasField("step"):
            made.sweep.step.ids = self.ids[row].to_bytes(8, "little")
            made.sweep.step.due_ms = self.due_ms[row].to_bytes(8, "little")
            self._soon(made.sweep.step.moved)
        elif kind == "publish":
            self._soon(made.publish)
            if rng.random() < 0.6:
                self._fit_keys(made.publish)
        elif kind == "schedule" and made.schedule.WhichOneof("body") is not None:
            self._fit_schedule(made.schedule)
        elif kind == "settle":
            for batch in made.settle.batches:
                self._column_soon(batch, "due_ms")

    def _fit_keys(self, publish: Publish) -> None:
        """Columns that fit each other, with unique keys."""
        now_ms, rng = self.solo.now_ms, self.rng
        for request in publish.requests:
            request.count = rng.choice((0, 1, 2))
        count = sum(request.count for request in publish.requests)
        due_ms = sorted(now_ms + rng.choice((-5, 100, 300, HOUR_MS)) for _ in range(count))
        publish.due_ms = np.array(due_ms, "<i8").tobytes()
        publish.sizes, publish.records, publish.topic_ids = ONE * count, b"x" * count, ONE
        for column in ("rows", "meta_sizes", "tag_hashes", "tag_masks", "key_hashes"):
            publish.ClearField(column)
        publish.unique_keys = b"".join(digest_of(rng.choice(KEYS)) for _ in range(count))
        publish.key_rules = bytes(rng.randrange(8) for _ in range(count))

    def _fit_schedule(self, made: ScheduleCommand) -> None:
        """Names, and of most commands revisions and times, as the master has read them."""
        now_ms, rng, body = self.solo.now_ms, self.rng, made.WhichOneof("body")
        command = getattr(made, body or "")
        if body == "make":
            for row in command.rows:
                row.name = rng.choice(NAMES)
                old = self._schedule(row.name)
                if old is not None:
                    row.revision, row.expected_ms, row.next_ms = old.revision, old.next_ms, now_ms + rng.randrange(1000)
                planned_ms = sorted(now_ms + rng.choice((-100, 0, 5, 1_000)) for _ in range(rng.choice((0, 1, 2))))
                row.planned_ms = np.array(planned_ms, "<i8").tobytes()
                row.due_ms = np.array([at_ms + rng.choice((0, 20)) for at_ms in planned_ms], "<i8").tobytes()
            return
        if body == "put":
            command.definition.name, command.definition.topic = rng.choice(NAMES), rng.choice(("t", "t", "gone"))
            command.definition.payload = b"x"
            command.definition.ClearField("meta")
            if rng.random() < 0.7:
                command.meta = b""
        else:
            command.name = rng.choice(NAMES)
        if rng.random() < (0.7 if body == "delete" else 0.1):
            return
        old = self._schedule(command.definition.name if body == "put" else command.name)
        command.read_revision = 0 if old is None else old.revision
        command.from_ms = now_ms
        if body in ("put", "resume"):
            command.next_ms = now_ms + rng.choice((-10, 50, HOUR_MS))
        elif body == "extra":
            command.outcome = rng.choice((RUN_TRIGGERED, RUN_BACKFILLED))
            command.request_id = f"r{rng.randrange(30)}"
            command.planned_ms, command.due_ms = np.array([now_ms], "<i8").tobytes(), now_ms

    def _schedule(self, name: str) -> Schedule | None:
        return self.solo.state.schedules.get(name)

    def _soon(self, columns: object) -> None:
        self._column_soon(columns, "due_ms")

    def _column_soon(self, columns: object, name: str) -> None:
        data: bytes = getattr(columns, name)
        if data and len(data) % 8 == 0:
            due = np.frombuffer(data, "<i8")
            setattr(columns, name, np.minimum(due, self.solo.now_ms + DELAY_MS_MAX).tobytes())

    def entry(self, schema: int) -> LogEntry | None:
        """An entry of one to three commands, through the bytes that the log has; None: not one that can be written."""
        commands = [self.command() for _ in range(self.rng.choice((1, 1, 2, 3)))]
        entry = LogEntry(format_version=1, term=1, stamped_ms=self.solo.now_ms, commands=commands, schema=schema)
        try:
            return read_entry(entry.SerializeToString())
        except EncodeError:
            return None

    def observe(self, entry: LogEntry, results: list[AnyResult]) -> None:
        """Count and note, as a node does of what it has applied."""
        now_ms = self.solo.now_ms
        for command, result in zip(entry.commands, results, strict=True):
            self.counts.applied(command, result)
            self.events.applied(self.solo.index, now_ms, entry, command, result)
        self.events.flush()

    def apply(self, entry: LogEntry) -> list[AnyResult]:
        """To the state; a restart applies it again."""
        solo = self.solo
        solo.index += 1
        solo.log[solo.index] = entry
        solo.now_ms += 50
        return solo.state.apply(solo.index, 1, entry)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0, ENTRY_SCHEMA, *EARLIER_SCHEMAS]))
def test_apply_gives_a_result_for_all_that_the_door_lets_through(seed: int, schema: int) -> None:
    """One result for each command; work beside it, checkpoints and a start from one go on; the digest is the same."""
    world = Masterful(seed)
    for number in range(ENTRIES):
        entry = world.entry(schema)
        if entry is None:
            continue
        results = world.apply(entry)
        assert len(results) == len(entry.commands)
        assert not any(result is None or isinstance(result, Ignored) for result in results), entry
        world.observe(entry, results)
        for command, result in zip(entry.commands, results, strict=True):
            if isinstance(result, PublishResult):
                assert len(result.requests) == len(command.publish.requests)
        if number % 20 == 19:
            world.solo.pump()
            world.solo.checkpoint()
    assert world.solo.now_ms > HOUR_0 * HOUR_MS
    assert (world.events.failures, world.events.lost) == (0, 0)
    before = world.solo.state.digest()
    world.solo.restart()
    assert world.solo.state.digest() == before


def test_the_entries_reach_unique_keys_and_recurring_schedules() -> None:
    """Every way of either is among what the test above applies."""
    reached: Counter[str] = Counter()
    for seed in range(30):
        world = Masterful(seed)
        for _ in range(ENTRIES):
            entry = world.entry(ENTRY_SCHEMA)
            if entry is None:
                continue
            for command, result in zip(entry.commands, world.apply(entry), strict=True):
                _count(command, result, reached)
            for key in KEYS:
                holder = world.solo.state.key_holder("t", key)
                if holder is not None:
                    reached["held when dispatched" if holder.dispatched else "held"] += 1
    wanted = ["held", "held when dispatched", "replaced", "cancel by key", "reschedule by key", "runs made"]
    wanted += ["put", "put again", "pause", "resume", "delete", "extra", "make"]
    assert [what for what in wanted if not reached[what]] == []


def _count(command: Command, result: AnyResult, reached: Counter[str]) -> None:
    if isinstance(result, PublishResult):
        keys = [request.keys for request in result.requests if request.keys is not None]
        reached["replaced"] += sum(int(np.count_nonzero(column == KEY_REPLACED)) for column in keys)
    elif isinstance(result, CancelResult):
        reached["cancel by key"] += bool(command.cancel.unique_key) and result.outcome == CANCELLED
    elif isinstance(result, RescheduleResult):
        reached["reschedule by key"] += bool(command.reschedule.unique_key) and result.outcome == RESCHEDULED
    elif isinstance(result, ScheduleResult) and result.failure is None and not result.stale:
        body = command.schedule.WhichOneof("body") or ""
        if body != "make" or len(command.schedule.make.rows) > result.stale_rows:
            reached[body] += 1
        reached["put again"] += body == "put" and bool(command.schedule.put.read_revision)
        reached["runs made"] += sum(bool(note.run.id) for note in result.notes)
