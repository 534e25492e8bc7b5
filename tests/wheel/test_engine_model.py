"""The wheel against a plain model, a sorted list, with jobs, checkpoints and crashes at any point."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.counting import calls_of
from tests.storage.bundle_v1 import build_v1
from tickwheel.storage import bundle
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel import window
from tickwheel.wheel.engine import CancelOutcome, Wheel, WheelConfig
from tickwheel.wheel.sweep import DISPATCHED, DONE, MARKED, UNKNOWN
from tickwheel.wheel.units import UNIT, CursorKey, Units

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
OUTCOMES = {
    "CANCELLED": DONE,
    "MOVED": DONE,
    "ALREADY_DISPATCHED": DISPATCHED,
    "NOT_FOUND": UNKNOWN,
}
"""What a command for many says where one for one says this."""


def digests(wheel: Wheel) -> dict[str, bytes]:
    """Digests of the wheel's state by name, without a pause."""
    turns = wheel.digest_in_turns()
    while True:
        try:
            next(turns)
        except StopIteration as complete:
            made: dict[str, bytes] = complete.value
            return made


def store(disk: SimulatedDisk, pieces: list[bytes]) -> None:
    """A bundle as a node has it before it is taken over: synced, under its name."""
    file = disk.open(bundle.bundle_path(bundle.name_of(pieces)), create=True)
    file.truncate(0)
    file.append(b"".join(pieces))
    file.fsync()
    file.close()
    disk.fsync_dir("")
    disk.fsync_dir(bundle.DIRECTORY)


@dataclass
class Pending:
    """A message as the model knows it."""

    key: tuple[int, int]
    record: bytes
    id: int


@dataclass
class History:
    """A wheel, its model, and the log since the last durable checkpoint, for replay after a crash."""

    seed: int
    slot_ms: int
    rng: random.Random = field(init=False)
    now_ms: int = START_MS
    first_due_from_ms: int = START_MS
    count: int = 0
    pending: list[Pending] = field(default_factory=list)
    log: list[tuple[str, object]] = field(default_factory=list)
    state: bytes = b""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.disk = SimulatedDisk(random.Random(self.seed))
        self.config = WheelConfig(slot_ms=self.slot_ms, buffer_bytes_max=30_000)
        self.wheel = Wheel(self.disk, "wheel", self.config)

    def batch(self) -> tuple[Units, bytes, list[bytes]]:
        rng = self.rng
        count = rng.choice([1, 2, 40])
        shapes = [0, -70, 3, 400, 30_000, HOUR_MS * rng.randrange(1, 400), rng.randrange(25_000)]
        due = sorted(self.now_ms + rng.choice(shapes) for _ in range(count))
        records = [b"%d." % (self.count + i) * rng.randrange(1, 5) for i in range(count)]
        self.count += count
        units = np.zeros(count, UNIT)
        units["due_requested_ms"] = due
        units["size"] = [len(record) for record in records]
        units["topic_id"] = 1
        return units, b"".join(records), records

    def append(self) -> None:
        units, blob, records = self.batch()
        self.log.append(("append", (units.copy(), blob)))
        ids = self.wheel.append(units, blob)
        for id, due, record in zip(ids.tolist(), units["due_ms"].tolist(), records, strict=True):
            assert due == max(due, self.wheel.cursor.due_ms)
            self.pending.append(Pending((due, id & 0xFFFF_FFFF), record, id))

    def ingest(self) -> None:
        """A bundle built outside: the same as the same messages appended, but for their indexes."""
        units, blob, records = self.batch()
        if self.rng.random() < 0.7:
            pieces = bundle.build(units, blob, slot_ms=self.slot_ms, topics=2)
        else:
            pieces = [build_v1(units, blob, slot_ms=self.slot_ms, topics=2)]
        name = bundle.name_of(pieces)
        store(self.disk, pieces)
        layout = bundle.check(self.disk, name)
        self.log.append(("ingest", (name, layout, self.now_ms)))
        cursor = self.wheel.cursor
        due = np.maximum(units["due_requested_ms"], cursor.due_ms)
        next_index = {hour: self.wheel.holdings.hours.units(hour) for hour in (due // HOUR_MS).tolist()}
        before = self.wheel.pending
        self.wheel.ingest(name, layout, (1, 1), self.now_ms)
        assert self.wheel.pending == before + len(units)
        self.absorb()
        for due_ms, record in zip(due.tolist(), records, strict=True):
            hour = due_ms // HOUR_MS
            index, next_index[hour] = next_index[hour], next_index[hour] + 1
            self.pending.append(Pending((due_ms, index), record, hour << 32 | index))

    def absorb(self) -> None:
        """What the node does before it applies further."""
        assert self.wheel.ingestion.absorbing and self.wheel.ingestion.lacking is None
        while self.wheel.ingestion.absorbing:
            for job in self.wheel.jobs(self.now_ms):
                if self.rng.random() < 0.3:
                    self.wheel.abandon(job)
                    continue
                job.run()
                self.wheel.finish(job)

    def look(self) -> None:
        """Units and records by id, a page of what is pending, and counts."""
        if not self.pending:
            return
        chosen = self.rng.sample(self.pending, min(5, len(self.pending)))
        lookup = self.wheel.reads.lookup(np.array([p.id for p in chosen], np.uint64))
        if not lookup.done:
            lookup.run()
        assert lookup.found.all() and (lookup.units["topic_id"] == 1).all()
        assert [(int(u["due_ms"]), int(u["index"])) for u in lookup.units] == [p.key for p in chosen]
        records = self.wheel.reads.records(lookup.units)
        if not records.done:
            records.run()
        assert records.records == [p.record for p in chosen]
        after = CursorKey(*self.rng.choice(self.pending).key) if self.rng.random() < 0.5 else None
        scan = self.wheel.reads.scan(0, self.now_ms + 200 * HOUR_MS, after, 30)
        scan.run()
        near = [p.key for p in self.pending if p.key[0] < self.now_ms + 200 * HOUR_MS]
        expected = sorted(key for key in near if after is None or key >= tuple(after))[:30]
        assert [(int(u["due_ms"]), int(u["index"])) for u in scan.units] == expected
        count = self.wheel.reads.count(0, self.now_ms + 200 * HOUR_MS, HOUR_MS)
        count.run()
        assert dict(count.buckets) == Counter(due_ms // HOUR_MS * HOUR_MS for due_ms, _ in near)

    def look_for_first_due(self) -> None:
        """The answer that is kept up to date is the one that is found."""
        if self.rng.random() < 0.3:
            self.first_due_from_ms = self.now_ms + self.rng.choice([0, -70, 400, 25_000, HOUR_MS, 200 * HOUR_MS])
        holdings = self.wheel.holdings
        found_ms = holdings._find_first_due(self.first_due_from_ms)
        assert holdings.first_due_ms(self.first_due_from_ms) == found_ms

    def cancel(self) -> None:
        if not self.pending:
            return
        chosen = self.rng.choice(self.pending)
        self.log.append(("cancel", (chosen.id, chosen.key[0])))
        assert self.wheel.cancel(chosen.id, chosen.key[0]) is CancelOutcome.CANCELLED
        assert self.wheel.cancel(chosen.id, chosen.key[0]) is CancelOutcome.CANCELLED
        self.pending.remove(chosen)

    def pump(self) -> None:
        for job in self.wheel.jobs(self.now_ms):
            if self.rng.random() < 0.1:
                self.wheel.abandon(job)
                continue
            job.run()
            self.wheel.finish(job)

    def dispatch(self) -> None:
        self.now_ms += self.rng.choice([0, 10, 900, 5_000, HOUR_MS])
        target = self.wheel.plan(self.now_ms, self.rng.choice([3, 100_000]))
        if target is None or self.rng.random() < 0.3:
            target = CursorKey(self.now_ms + 1, 0)
        self.log.append(("dispatch", target))
        expected = sorted((p for p in self.pending if p.key < tuple(target)), key=lambda p: p.key)
        dispatched = self.wheel.dispatch(target)
        job = self.wheel.reads.records(dispatched.units)
        if not job.done:
            job.run()
        assert job.records == [p.record for p in expected]
        self.pending = [p for p in self.pending if not p.key < tuple(target)]
        assert self.wheel.pending == len(self.pending)

    def checkpoint(self) -> None:
        job = self.wheel.begin_checkpoint()
        if self.rng.random() < 0.5:
            self.pump()
        job.run()
        self.wheel.checkpoint_durable(job)
        job.remove_old()
        self.state, self.log = job.state, []

    def crash(self) -> None:
        """Power is lost; the node starts from the checkpoint and replays the log."""
        before = digests(self.wheel)
        self.disk.crash()
        if not self.state:
            self.disk.remove("wheel")
        self.wheel = Wheel(self.disk, "wheel", self.config, self.state)
        for kind, content in self.log:
            if kind == "append":
                units, blob = content  # type: ignore[misc]
                self.wheel.append(units.copy(), blob)  # type: ignore[has-type]
            elif kind == "cancel":
                self.wheel.cancel(*content)  # type: ignore[misc]
            elif kind == "ingest":
                name, layout, stamped_ms = content  # type: ignore[misc]
                self.wheel.ingest(name, layout, (1, 1), stamped_ms)  # type: ignore[has-type]
                self.absorb()
            else:
                assert isinstance(content, CursorKey)
                self.wheel.dispatch(content)
        assert digests(self.wheel) == before


@pytest.mark.parametrize("seed", range(40))
def test_wheel_is_a_sorted_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "SORTED_UNITS_MAX", (window.SORTED_UNITS_MAX, 1, 3, 20)[seed % 4])
    monkeypatch.setattr(window, "SMALL_BLOCKS_MAX", (window.SMALL_BLOCKS_MAX, 2, 3)[seed % 3])
    """Whatever is merged, loaded, checkpointed or lost with the power: order, content and digest are the model's."""
    history = History(seed, random.Random(seed).choice([1000, 500, 200, 100]))
    steps = [history.append] * 5 + [history.dispatch] * 3 + [history.cancel, history.pump, history.pump]
    steps += [history.checkpoint, history.crash, history.ingest, history.ingest, history.look]
    for _ in range(150):
        history.rng.choice(steps)()
        history.look_for_first_due()
    history.now_ms += 1000 * HOUR_MS
    history.dispatch()
    history.wheel.dispatch(CursorKey(history.now_ms + 1, 0))
    assert history.wheel.pending == 0


def test_moved_message_keeps_its_first_id() -> None:
    """A reschedule appends a new unit; the old id resolves to it, and cancelling by the old id cancels it."""
    history = History(1, 1000)
    units, blob, _ = history.batch()
    ids = history.wheel.append(units, blob)
    first = int(ids[-1])
    successor = np.zeros(1, UNIT)
    successor["due_requested_ms"] = START_MS + 10 * HOUR_MS
    successor["size"] = 3
    outcome, new_id = history.wheel.move(first, int(units["due_ms"][-1]), successor, b"abc")
    assert outcome is CancelOutcome.MOVED
    assert history.wheel.marks.moves.resolve(first)[0] == new_id
    assert history.wheel.pending == len(ids)
    assert history.wheel.cancel(first, int(units["due_ms"][-1])) is CancelOutcome.CANCELLED
    assert history.wheel.pending == len(ids) - 1


def test_unknown_and_late_ids_get_definite_answers() -> None:
    """NOT_FOUND for what never was, ALREADY_DISPATCHED for what has entered the ready queue."""
    history = History(2, 1000)
    units, blob, _ = history.batch()
    ids = history.wheel.append(units, blob)
    assert history.wheel.cancel(int(ids[0]) + 10_000, int(units["due_ms"][0])) is CancelOutcome.NOT_FOUND
    history.wheel.dispatch(CursorKey(START_MS + 1000 * HOUR_MS, 0))
    assert history.wheel.cancel(int(ids[0]), int(units["due_ms"][0])) is CancelOutcome.ALREADY_DISPATCHED


def test_cost_of_append_does_not_depend_on_spread() -> None:
    """A batch over a thousand hours touches no file and makes as many blocks as a batch in one hour."""
    writes = []
    for spread in (1, 1_440):
        disk = SimulatedDisk(random.Random(0))
        wheel = Wheel(disk, "wheel", WheelConfig())
        units = np.zeros(4096, UNIT)
        units["due_requested_ms"] = np.sort(START_MS + (np.arange(4096) % spread) * HOUR_MS)
        units["size"] = 10
        before = disk.counters()
        wheel.append(units, bytes(40_960))
        assert disk.counters() == before
        writes.append(wheel.holdings.buffer_bytes)
    assert writes[1] < 2 * writes[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("moving", [False, True])
def test_many_at_once_are_one_after_the_other(seed: int, moving: bool) -> None:
    """Pending, cancelled, moved, dispatched, unknown and doubled ids in one command: each gets what it would get alone,
    and the state is the same to the byte."""
    twins = [History(seed, 1000), History(seed, 1000)]
    for history in twins:
        steps = [history.append] * 5 + [history.dispatch, history.cancel, history.pump, history.checkpoint]
        for _ in range(60):
            history.rng.choice(steps)()
        first = history.pending[0]
        successor = np.zeros(1, UNIT)
        successor["due_requested_ms"], successor["size"] = first.key[0] + 1, 1
        history.wheel.move(first.id, first.key[0], successor, b"m")
    one, many = (history.wheel for history in twins)
    job = one.reads.scan(0, START_MS + 1000 * HOUR_MS, None, 1_000)
    job.run()
    rng = random.Random(seed)
    pending = [(twins[0].pending[0].id, twins[0].pending[0].key[0])]
    pending += [(int(unit["due_ms"]) // HOUR_MS << 32 | int(unit["index"]), int(unit["due_ms"])) for unit in job.units]
    known = {number for number, _ in pending}
    old = [(START_MS // HOUR_MS << 32 | index, START_MS + 5) for index in range(0, 200, 9)]
    old = [item for item in old if item[0] not in known]
    chosen = rng.sample(pending, min(40, len(pending))) + old + rng.sample(pending, 5)
    rng.shuffle(chosen)
    ids = np.array([number for number, _ in chosen], np.uint64)
    due_ms = np.array([due for _, due in chosen], np.int64)
    successors = np.zeros(len(ids), UNIT)
    successors["due_requested_ms"] = START_MS + np.arange(len(ids)) * 300_000
    successors["size"] = np.arange(len(ids)) % 3 + 1
    records = [bytes([65 + row % 26]) * int(size) for row, size in enumerate(successors["size"])]
    expected = []
    for row, number in enumerate(ids.tolist()):
        marked, _ = one.marks.moves.resolve(number)
        was_marked = one.marks.has(marked >> 32, marked & 0xFFFF_FFFF)
        if moving:
            outcome, _ = one.move(number, int(due_ms[row]), successors[row : row + 1].copy(), records[row])
        else:
            outcome = one.cancel(number, int(due_ms[row]))
        expected.append(MARKED if was_marked else OUTCOMES[outcome.name])
    if moving:
        got, new_ids, _ = many.move_many(ids, due_ms, successors.copy(), b"".join(records))
        moved_ids = ids[np.array(got) == DONE].tolist()
        assert [many.marks.moves.resolve(number)[0] for number in moved_ids] == new_ids.tolist()
        # What was moved by this very command is moved again when it comes one by one.
        doubled = [row for row, number in enumerate(ids.tolist()) if number in ids[:row].tolist()]
        got, expected = np.delete(got, doubled), np.delete(expected, doubled).tolist()
    else:
        got = many.cancel_many(ids, due_ms)
        assert digests(one) == digests(many)
    assert got.tolist() == expected
    assert DONE in expected and DISPATCHED in expected


def test_a_command_over_many_hours_takes_few_steps() -> None:
    """Each message in an hour of its own: a cancel, a move and a look at thousands of them held up a node's apply for
    tens of milliseconds."""
    wheel = Wheel(SimulatedDisk(random.Random(0)), "wheel", WheelConfig())
    units = np.zeros(2_000, UNIT)
    units["due_requested_ms"] = START_MS + np.arange(len(units)) * HOUR_MS
    units["size"] = 1
    ids = wheel.append(units, bytes(len(units)))
    due_ms = units["due_ms"].astype(np.int64)
    successors = units[:1_000].copy()
    successors["due_requested_ms"] += 5
    assert calls_of(lambda: wheel.standing_many(ids, due_ms)) < 100
    assert calls_of(lambda: wheel.cancel_many(ids[1_000:], due_ms[1_000:])) < 100
    assert calls_of(lambda: wheel.move_many(ids[:1_000], due_ms[:1_000], successors, bytes(1_000))) < 300
    assert wheel.pending == 1_000 and wheel.marks.count == 2_000
    assert (wheel.standing_many(ids, due_ms).outcomes[1_000:] == MARKED).all()
    assert (wheel.standing_many(ids, due_ms).outcomes[:1_000] == DONE).all()
