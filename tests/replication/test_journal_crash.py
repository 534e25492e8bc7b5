"""The journal and accidents: power lost at any point, killed processes, damaged bytes.

What is checked after each restart: all that had been durable is there unchanged, nothing is there
that was never appended, term and vote are those last set, and no crash is taken for damage.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.replication.journal import CorruptJournalError, Journal
from tickwheel.storage.disk import DiskFullError, FsyncFailedError
from tickwheel.storage.simulated import PowerLost, SimulatedDisk

SEGMENT_BYTES = 20_000
DIRECTORY = "g0/journal"


class Life:
    """Random use of a journal over several lives of a node, and what must hold in the next one."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.disk = SimulatedDisk(Random(seed + 1))
        self.journal = self.open()
        self.term = 1
        # Everything ever appended at an index, and the entries that count now.
        self.appended: dict[int, set[tuple[int, bytes]]] = {}
        self.durable: dict[int, tuple[int, bytes]] = {}
        self.hard_states = {(0, "")}
        self.compacted = 0
        self.resetting: tuple[int, int] | None = None

    def open(self) -> Journal:
        return Journal.open(self.disk, DIRECTORY, segment_bytes=SEGMENT_BYTES, cache_bytes_max=3000)

    def run(self, steps: int) -> None:
        """Do random things; the accident may come in any of them."""
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        journal, rng = self.journal, self.rng
        kind = rng.choices(
            ("append", "sync", "slow sync", "truncate", "vote", "compact", "reset", "commit"),
            (10, 6, 4, 2, 1, 1, 0.3, 2),
        )[0]
        if kind == "append":
            for _ in range(rng.randint(1, 4)):
                self.append()
        elif kind == "sync":
            self.sync(between=())
        elif kind == "slow sync":
            self.sync(between=rng.choices(("append", "truncate", "compact"), (5, 2, 1), k=rng.randint(0, 4)))
        elif kind == "truncate":
            self.truncate()
        elif kind == "compact":
            self.compact()
        elif kind == "vote":
            self.term += 1
            new = (self.term, rng.choice(("", "a", "node-b")))
            self.hard_states.add(new)
            journal.set_hard_state(*new)
            self.hard_states = {new}
        elif kind == "reset":
            index = journal.base_index + rng.randint(0, 30)
            term = self.term + (index > journal.last_index or rng.random() < 0.5)
            if index <= journal.last_index and rng.random() < 0.5:
                term = journal.term_at(index)
            self.term = max(self.term, term)
            self.resetting = (index, term)
            journal.reset_to(index, term)
            self.resetting = None
            self.compacted = index
            self.note_durable()
        else:
            journal.note_commit(rng.randint(0, journal.last_index))

    def append(self) -> None:
        index = self.journal.last_index + 1
        command = self.rng.randbytes(self.rng.choice((0, 1, 40, 700, 5000, 9000)))
        if self.rng.random() < 0.2:
            command = bytes(len(command))
        self.appended.setdefault(index, set()).add((self.term, command))
        self.journal.append(index, self.term, command)

    def truncate(self) -> None:
        low, high = self.journal.first_index, self.journal.last_index
        if low <= high:
            index = self.rng.randint(max(low, high - 8), high)
            self.journal.truncate_from(index)
            self.durable = {at: entry for at, entry in self.durable.items() if at < index}
            self.term += 1

    def compact(self) -> None:
        low, high = self.journal.base_index, self.journal.durable_index
        if low < high:
            index = self.rng.randint(low + 1, high)
            self.compacted = index
            self.journal.compact(index, self.journal.term_at(index))

    def sync(self, between: tuple[str, ...] | list[str]) -> None:
        work = self.journal.begin_fsync()
        ran_at = self.rng.randint(0, len(between))
        for number, kind in enumerate(between):
            if number == ran_at:
                work.run()
            {"append": self.append, "truncate": self.truncate, "compact": self.compact}[kind]()
        if ran_at == len(between):
            work.run()
        self.journal.finish_fsync(work)
        self.note_durable()

    def note_durable(self) -> None:
        journal = self.journal
        self.durable = {
            index: journal.entry(index)[1:] for index in range(journal.first_index, journal.durable_index + 1)
        }

    def restart(self) -> None:
        """Open the journal again and check it."""
        self.journal = journal = self.open()
        assert (journal.term, journal.voted_for) in self.hard_states
        self.hard_states = {(journal.term, journal.voted_for)}
        assert journal.durable_index == journal.last_index
        assert journal.commit_hint <= journal.last_index
        if self.resetting is not None and (journal.base_index, journal.base_term) == self.resetting:
            self.compacted = self.resetting[0]
        else:
            assert journal.base_index <= self.compacted
            for index, entry in self.durable.items():
                if index > self.compacted:
                    assert journal.last_index >= index, f"entry {index} is lost, the last is {journal.last_index}"
                    assert journal.entry(index)[1:] == entry
        self.resetting = None
        previous = journal.base_term
        for index, term, command in journal.slice(journal.first_index, 1 << 30, 1 << 40):
            assert (term, command) in self.appended[index]
            assert term >= previous
            previous = term
        self.note_durable()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 40))
def test_power_lost_at_any_point(seed: int) -> None:
    """Five lives of random work, each ended in the middle of some call, the restart's own included."""
    life = Life(seed)
    for _ in range(5):
        life.disk.lose_power_after(life.rng.randint(0, 60))
        with pytest.raises(PowerLost):
            life.run(1000)
        life.disk.crash()
        while life.rng.random() < 0.4:
            life.disk.lose_power_after(life.rng.randint(0, 8))
            try:
                life.open()
            except PowerLost:
                life.disk.crash()
            else:
                life.disk.crash()
        life.restart()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 40))
def test_killed_processes_and_then_a_power_loss(seed: int) -> None:
    """What a killed process had written but not synced counts after its restart, so it must be durable then."""
    life = Life(seed)
    for _ in range(4):
        life.run(life.rng.randint(0, 30))
        life.disk.kill()
        life.restart()
        if life.rng.random() < 0.5:
            life.disk.crash()
            life.restart()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 40))
def test_failed_syncs_and_full_disks(seed: int) -> None:
    """The journal stops, the process restarts after a power loss, and what had been durable still is."""
    life = Life(seed)
    for _ in range(4):
        life.run(life.rng.randint(0, 20))
        if life.rng.random() < 0.5:
            life.disk.fail_fsync()
            with pytest.raises(FsyncFailedError):
                life.run(1000)
        else:
            life.disk.fill(life.rng.randint(0, 30_000))
            with pytest.raises(DiskFullError):
                life.run(10_000)
        life.disk.crash()
        life.disk.make_room()
        life.restart()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 40))
def test_flipped_byte_refuses_to_start(seed: int) -> None:
    """Any byte of what had been fsynced before the last sync: the error names file, place and what to do."""
    rng = Random(seed)
    disk = SimulatedDisk(Random(seed + 1))
    journal = Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES)
    places: list[tuple[str, int]] = []
    for batch in range(rng.randint(2, 8)):
        places = [
            (f"{DIRECTORY}/{name}", offset)
            for name, end in [(segment.file.path.rsplit("/", 1)[1], segment.end) for segment in journal._segments]
            for offset in range(end)
        ]
        for _ in range(rng.randint(1, 4)):
            journal.append(journal.last_index + 1, batch + 1, rng.randbytes(rng.choice((0, 5, 600, 9000))))
        work = journal.begin_fsync()
        work.run()
        journal.finish_fsync(work)
    path, offset = rng.choice(places)
    disk.flip(path, offset, rng.randint(1, 255))
    disk.kill()
    with pytest.raises(CorruptJournalError) as caught:
        Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES)
    message = str(caught.value)
    assert caught.value.path in message
    assert f"byte {caught.value.offset}" in message
    assert "Remove the member and add it anew under a new id" in message
    if caught.value.path == path:
        assert caught.value.offset <= offset


def test_flipped_byte_in_the_last_record_is_no_torn_tail() -> None:
    """A record of which every sector is there cannot be torn: also the newest one is not cut away in silence."""
    for offset in range(200, 1700, 7):
        disk = SimulatedDisk(Random(1))
        journal = Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES)
        journal.append(1, 1, Random(2).randbytes(2000))
        work = journal.begin_fsync()
        work.run()
        journal.finish_fsync(work)
        disk.flip(journal._segments[-1].file.path, offset)
        disk.kill()
        with pytest.raises(CorruptJournalError, match="no crash leaves it like this"):
            Journal.open(disk, DIRECTORY, segment_bytes=SEGMENT_BYTES)
