"""Rows of a delay index that were lost are written again to the byte, with what another wheel has of the same log."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tickwheel.storage.segment import CorruptSegmentError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.engine import Wheel, WheelConfig
from tickwheel.wheel.repair_jobs import RepairJob, SurveyJob, UnlikeUnitError
from tickwheel.wheel.units import HOUR_MS, LACKING, UNIT

START_MS = 500_000 * HOUR_MS
HOUR = 500_000
PATH = f"wheel/hours/{HOUR}/0"


class Member:
    """One wheel and its disk; merges when its buffer is full."""

    def __init__(self, seed: int, buffer_bytes_max: int, slot_ms: int) -> None:
        self.disk = SimulatedDisk(random.Random(seed))
        self.slot_ms = slot_ms
        self.wheel = Wheel(self.disk, "wheel", WheelConfig(slot_ms=slot_ms, buffer_bytes_max=buffer_bytes_max))

    def append(self, due_ms: list[int], records: list[bytes]) -> None:
        units = np.zeros(len(due_ms), UNIT)
        units["due_requested_ms"] = due_ms
        units["size"] = [len(record) for record in records]
        units["tag_mask"] = due_ms
        self.wheel.append(units, b"".join(records))
        for job in self.wheel.jobs(0):
            job.run()
            self.wheel.finish(job)

    def content(self, suffix: str = "index") -> bytes:
        file = self.disk.open(f"{PATH}.{suffix}")
        try:
            return file.read_at(0, file.size())
        finally:
            file.close()

    def survey(self) -> SurveyJob:
        job = SurveyJob(self.wheel.holdings.open_hour(HOUR))
        job.run()
        return job

    def repair(self, job: SurveyJob, units: dict[int, np.void]) -> None:
        RepairJob(self.wheel.holdings.open_hour(HOUR), self.slot_ms, job.bad, units).run()

    def units_of(self, job: SurveyJob) -> dict[int, np.void]:
        """What it has of what another one has lost."""
        lookup = self.wheel.reads.lookup(job.ids, following=False)
        lookup.run()
        assert lookup.found.all()
        return dict(zip(job.ids.tolist(), lookup.units, strict=True))


def members(seed: int, slot_ms: int = 1_000) -> tuple[Member, Member]:
    """Two that have applied the same, with other merges."""
    rng = random.Random(seed)
    one, other = Member(seed, 9_000, slot_ms), Member(seed + 1, 70_000, slot_ms)
    for _ in range(40):
        count = rng.choice([1, 3, 50])
        due = sorted(START_MS + rng.randrange(5_000) // rng.choice([1, 400]) for _ in range(count))
        # Not zeros alone, which stand for a record that was never here.
        records = [rng.randbytes(rng.randrange(0, 30)).replace(b"\0", b"0") for _ in due]
        one.append(due, records)
        other.append(due, records)
    assert one.content() and other.content() and one.content() != other.content()
    return one, other


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_as_they_were(seed: int) -> None:
    """Single bytes, whole pages, an end that is gone, a file that reads nothing: the same bytes as before again."""
    one, other = members(seed, (1_000, 100)[seed % 2])
    rng = random.Random(seed)
    before, size = one.content(), len(one.content())
    for id in (HOUR << 32 | 3, HOUR << 32 | 7):  # moved ones: their rows are what they were
        moved = np.zeros(1, UNIT)
        moved["due_requested_ms"] = START_MS + 3 * HOUR_MS
        for member in (one, other):
            lookup = member.wheel.reads.lookup(np.array([id], np.uint64))
            lookup.run()
            member.wheel.move(id, int(lookup.units["due_ms"][0]), moved.copy(), b"")
    kind = seed % 4
    if kind == 0:
        for _ in range(20):
            one.disk.flip(f"{PATH}.index", rng.randrange(size), rng.randrange(1, 256))
    elif kind in (1, 2):
        page = rng.randrange(max(1, size // 4_096 - 1)) * 4_096
        file = one.disk.open(f"{PATH}.index")
        file.write_at(page, bytes(min(4_096, size - page)))
        if kind == 2:
            file.truncate(page + 1_000)
        file.close()
    job = one.survey()
    if kind == 3:
        one.disk.read_error(f"{PATH}.index")
        job = one.survey()
        one.disk.heal_reads()
        assert len(job.ids) == size // 96
    assert len(job.ids)
    one.repair(job, other.units_of(job))
    assert one.content() == before
    assert not len(one.survey().ids)


def test_what_is_not_it_is_refused() -> None:
    """A unit of another time or place is not written, whoever gives it; nor is anything when the heads are damaged."""
    one, other = members(1)
    damaged = one.disk
    damaged.flip(f"{PATH}.index", 5 * 96 + 8)
    job = one.survey()
    right = other.units_of(job)
    broken = one.content()
    for name, value in (("due_ms", START_MS + 900_000), ("index", 1 << 30), ("offset", 1 << 40), ("size", 1 << 20)):
        wrong = {id: unit.copy() for id, unit in right.items()}
        for unit in wrong.values():
            unit[name] = value
        with pytest.raises(UnlikeUnitError):
            one.repair(job, wrong)
    assert one.content() == broken
    damaged.flip(f"{PATH}.heads", 10)
    with pytest.raises(CorruptSegmentError):
        one.survey()


def test_what_was_never_here_is_not_taken_for_a_record() -> None:
    """P2: zeros that stand for a record this node never had are said to be that again; real records are not."""
    one, other = Member(1, 9_000, 1_000), Member(2, 9_000, 1_000)
    records = [b"x" * 40 if n % 3 else bytes(40) for n in range(100)]
    for member in (one, other):
        member.append([START_MS + n for n in range(100)], records)
    one.disk.flip(f"{PATH}.index", 0)
    one.disk.flip(f"{PATH}.index", 96)
    job = one.survey()
    one.repair(job, other.units_of(job))
    lookup = one.wheel.reads.lookup(np.array([HOUR << 32, HOUR << 32 | 1], np.uint64))
    lookup.run()
    assert (lookup.units["flags"] & LACKING).astype(bool).tolist() == [True, False]
