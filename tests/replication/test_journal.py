"""The journal without accidents: what is written is read, truncated, compacted, reset; and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tickwheel.replication.journal import CorruptJournalError, Journal, JournalFailedError
from tickwheel.replication.journal_files import RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES, read_newest
from tickwheel.storage.disk import Disk, DiskError, DiskFullError, FsyncFailedError
from tickwheel.storage.errors import CorruptFileError, UnknownVersionError
from tickwheel.storage.local import LocalDisk
from tickwheel.storage.simulated import SimulatedDisk, SimulatedFile

SEGMENT_BYTES = 4096


def opened(disk: Disk, segment_bytes: int = SEGMENT_BYTES, cache_bytes_max: int = 1000) -> Journal:
    """The journal with segments small enough to have many."""
    return Journal.open(disk, "g0/journal", segment_bytes=segment_bytes, cache_bytes_max=cache_bytes_max)


def fill(journal: Journal, count: int, term: int, size: int = 300) -> None:
    """Append `count` entries whose commands tell their index and term."""
    for _ in range(count):
        index = journal.last_index + 1
        journal.append(index, term, f"{index}:{term}:".encode().ljust(size, b"."))


def sync(journal: Journal) -> None:
    """One whole group commit."""
    work = journal.begin_fsync()
    work.run()
    journal.finish_fsync(work)


def content(journal: Journal) -> list[tuple[int, int, bytes]]:
    """All entries held."""
    return journal.slice(journal.first_index, 1 << 20, 1 << 40)


@pytest.fixture
def disk() -> SimulatedDisk:
    """An empty disk."""
    return SimulatedDisk(Random(1))


def test_new_journal_is_empty(disk: SimulatedDisk) -> None:
    """No entries, base (0, 0), term 0, no vote."""
    journal = opened(disk)
    assert (journal.first_index, journal.last_index, journal.last_term, journal.durable_index) == (1, 0, 0, 0)
    assert (journal.base_index, journal.base_term, journal.term, journal.voted_for) == (0, 0, 0, "")
    assert journal.slice(1, 10, 1000) == []
    assert journal.bytes_after(0) == 0
    assert journal.reserve_ready


@pytest.mark.parametrize("back", [1, 2])
def test_removed_segments_that_a_power_loss_brings_back_do_no_harm(disk: SimulatedDisk, back: int) -> None:
    """Their removal is not synced: the newest of them may stand there again at the next start."""
    journal = opened(disk)
    fill(journal, 60, term=1)
    sync(journal)
    before = content(journal)
    names = sorted(name for name in disk.list("g0/journal") if name.endswith("segment"))
    kept = {name: disk.open(f"g0/journal/{name}").read_at(0, SEGMENT_BYTES * 2) for name in names}
    journal.compact(50, 1)
    fill(journal, 1, term=1)
    sync(journal)
    removed = [name for name in names if not disk.exists(f"g0/journal/{name}")]
    assert len(removed) > back
    journal.close()
    for name in removed[-back:]:
        disk.open(f"g0/journal/{name}", create=True).append(kept[name])
    again = opened(disk)
    assert 0 < again.base_index < 50 and content(again)[:-1] == before[again.base_index :]
    again.compact(50, 1)
    assert again.base_index == 50


@pytest.mark.parametrize("real", [True, False], ids=["local", "simulated"])
def test_entries_are_found_again(real: bool, tmp_path: Path) -> None:
    """Over many segments, from the cache and from disk, before and after a restart, on both disks."""
    disk: Disk = LocalDisk(tmp_path) if real else SimulatedDisk(Random(1))
    journal = opened(disk)
    fill(journal, 50, 1)
    journal.append(51, 2, b"")
    journal.append(52, 2, b"x" * 20_000)
    sync(journal)
    fill(journal, 5, 3)
    sync(journal)
    before = content(journal)
    assert len(disk.list("g0/journal")) > 4
    assert [entry[0] for entry in before] == list(range(1, 58))
    assert before[51] == (52, 2, b"x" * 20_000)
    journal.close()
    journal.close()
    again = opened(disk)
    assert content(again) == before
    assert (again.last_index, again.last_term, again.durable_index) == (57, 3, 57)
    assert again.entry(3)[2].startswith(b"3:1:")
    fill(again, 1, 4)
    assert again.last_index == 58


def test_durable_index_rises_with_the_sync_only(disk: SimulatedDisk) -> None:
    """Appends during a sync are not covered by it; several appends cost one fdatasync."""
    journal = opened(disk, segment_bytes=1 << 20)
    fill(journal, 10, 1)
    assert journal.durable_index == 0
    before = disk.counters().fsyncs
    work = journal.begin_fsync()
    fill(journal, 5, 1)
    work.run()
    assert journal.durable_index == 0
    journal.finish_fsync(work)
    assert journal.durable_index == 10
    assert disk.counters().fsyncs == before + 1
    assert journal.needs_fsync
    sync(journal)
    assert journal.durable_index == 15
    assert not journal.needs_fsync


def test_truncation_during_a_sync(disk: SimulatedDisk) -> None:
    """Entries that replace truncated ones are not covered by a sync that began before."""
    journal = opened(disk)
    fill(journal, 10, 1)
    work = journal.begin_fsync()
    work.run()
    journal.truncate_from(6)
    fill(journal, 10, 2)
    journal.finish_fsync(work)
    assert (journal.durable_index, journal.last_index) == (5, 15)
    sync(journal)
    assert journal.durable_index == 15
    journal.truncate_from(4)
    assert (journal.durable_index, journal.last_index, journal.last_term) == (3, 3, 1)
    journal.truncate_from(9)
    assert journal.last_index == 3


def test_truncation_survives_a_restart(disk: SimulatedDisk) -> None:
    """Also one that reaches back over several segments."""
    journal = opened(disk)
    fill(journal, 60, 1)
    journal.truncate_from(7)
    fill(journal, 3, 5)
    journal.truncate_from(9)
    fill(journal, 30, 6)
    before = content(journal)
    disk.kill()
    again = opened(disk)
    assert content(again) == before
    assert [again.term_at(index) for index in (6, 7, 8, 9)] == [1, 5, 5, 6]


def test_compaction_removes_whole_segments(disk: SimulatedDisk) -> None:
    """The base moves at once; files go with the next sync; what follows the base stays, also after a restart."""
    journal = opened(disk)
    fill(journal, 100, 3)
    sync(journal)
    files = len(disk.list("g0/journal"))
    replayed = journal.bytes_after(0)
    journal.compact(80, 3)
    journal.compact(40, 3)
    assert (journal.base_index, journal.base_term, journal.first_index, journal.last_index) == (80, 3, 81, 100)
    assert journal.term_at(80) == 3
    assert 0 < journal.bytes_after(80) < replayed
    before = content(journal)
    assert journal.needs_fsync
    sync(journal)
    assert len(disk.list("g0/journal")) < files / 2
    disk.kill()
    again = opened(disk)
    assert again.base_index <= 80
    assert again.slice(81, 1000, 1 << 30) == before


def test_compaction_keeps_a_segment_whose_successor_is_not_synced(disk: SimulatedDisk) -> None:
    """Otherwise a power loss could leave no segment at all, and with it no base."""
    journal = opened(disk)
    fill(journal, 100, 3)
    files = disk.list("g0/journal")
    journal.compact(100, 3)
    assert disk.list("g0/journal") == files
    sync(journal)
    journal.compact(100, 3)
    assert journal.last_index == journal.base_index == 100


def test_truncation_below_the_first_segment_left(disk: SimulatedDisk) -> None:
    """A segment may have been compacted away whose entries had been replaced: the base follows."""
    journal = opened(disk)
    fill(journal, 60, 1)
    journal.truncate_from(30)
    fill(journal, 20, 2)
    sync(journal)
    journal.compact(48, 2)
    sync(journal)
    before = content(journal)
    disk.kill()
    again = opened(disk)
    assert again.slice(49, 100, 1 << 30) == before == [again.entry(49)]
    assert again.base_index <= 48


def test_reset_begins_anew(disk: SimulatedDisk) -> None:
    """A checkpoint beyond the log, or of another history, empties it; the base is durable at once."""
    journal = opened(disk)
    fill(journal, 20, 1)
    sync(journal)
    journal.reset_to(100, 4)
    assert (journal.base_index, journal.base_term, journal.last_index, journal.last_term) == (100, 4, 100, 4)
    assert journal.durable_index == 100
    disk.crash()
    journal = opened(disk)
    assert (journal.base_index, journal.base_term, journal.last_index) == (100, 4, 100)
    fill(journal, 10, 4)
    sync(journal)
    journal.reset_to(105, 5)
    assert (journal.base_index, journal.last_index, journal.last_term, journal.durable_index) == (105, 105, 5, 105)
    fill(journal, 40, 6)
    sync(journal)
    before = content(journal)
    disk.crash()
    assert content(opened(disk)) == before


def test_reset_keeps_the_suffix(disk: SimulatedDisk) -> None:
    """A checkpoint whose last entry the log holds takes nothing acknowledged away."""
    journal = opened(disk)
    fill(journal, 20, 1)
    sync(journal)
    journal.reset_to(10, 1)
    assert (journal.base_index, journal.last_index, journal.durable_index) == (10, 20, 20)


def test_reset_during_a_sync(disk: SimulatedDisk) -> None:
    """The sync in flight ends well, covers nothing of the new log, and its reserve is not left behind."""
    journal = opened(disk)
    fill(journal, 30, 1)
    work = journal.begin_fsync()
    journal.reset_to(15, 9)
    fill(journal, 5, 9)
    work.run()
    journal.finish_fsync(work)
    assert (journal.durable_index, journal.last_index) == (15, 20)
    sync(journal)
    sync(journal)
    assert disk.list("g0/journal")[2:] == ["newest"]
    before = content(journal)
    disk.crash()
    assert content(opened(disk)) == before


def test_slices_are_bounded(disk: SimulatedDisk) -> None:
    """By count and by bytes; a single entry above the bound still comes."""
    journal = opened(disk)
    fill(journal, 30, 1, size=100)
    assert [entry[0] for entry in journal.slice(3, 4, 1 << 20)] == [3, 4, 5, 6]
    assert [entry[0] for entry in journal.slice(3, 100, 350)] == [3, 4, 5]
    assert [entry[0] for entry in journal.slice(3, 100, 1)] == [3]
    assert [entry[0] for entry in journal.slice(29, 100, 1 << 20)] == [29, 30]
    reads = disk.counters().reads
    journal.slice(1, 2, 1 << 20)
    assert disk.counters().reads == reads + 2


def test_commit_hint(disk: SimulatedDisk) -> None:
    """Written with the next sync, never above the end, lowered by a truncation."""
    journal = opened(disk)
    fill(journal, 10, 1)
    journal.note_commit(8)
    journal.note_commit(5)
    sync(journal)
    journal.note_commit(99)
    assert journal.commit_hint == 10
    disk.kill()
    again = opened(disk)
    assert again.commit_hint == 8
    again.truncate_from(4)
    assert again.commit_hint == 3


def test_hard_state(disk: SimulatedDisk) -> None:
    """Durable on return, and never back."""
    journal = opened(disk)
    journal.set_hard_state(3, "")
    journal.set_hard_state(3, "node-b")
    syncs = disk.counters().fsyncs
    journal.set_hard_state(3, "node-b")
    assert disk.counters().fsyncs == syncs
    with pytest.raises(AssertionError, match="second vote"):
        journal.set_hard_state(3, "node-c")
    with pytest.raises(AssertionError, match="back"):
        journal.set_hard_state(2, "")
    disk.crash()
    again = opened(disk)
    assert (again.term, again.voted_for) == (3, "node-b")


def test_damaged_hard_state_refuses_to_start(disk: SimulatedDisk) -> None:
    """A forgotten vote may elect two masters: the message says what to do."""
    opened(disk).set_hard_state(3, "node-b")
    disk.flip("g0/journal/hard_state", 30)
    disk.kill()
    with pytest.raises(CorruptFileError, match=r"hard_state.*remove the member and add it anew"):
        opened(disk)


def test_failed_sync_ends_the_journal(disk: SimulatedDisk) -> None:
    """After it nothing is accepted, whether or not the caller has told the journal yet."""
    journal = opened(disk)
    fill(journal, 3, 1)
    work = journal.begin_fsync()
    disk.fail_fsync()
    with pytest.raises(FsyncFailedError):
        work.run()
    with pytest.raises(JournalFailedError):
        fill(journal, 1, 1)
    with pytest.raises(FsyncFailedError):
        journal.finish_fsync(work)
    assert journal.durable_index == 0
    for use in (
        journal.begin_fsync,
        lambda: journal.set_hard_state(9, ""),
        lambda: journal.truncate_from(2),
        lambda: journal.compact(1, 1),
        lambda: journal.reset_to(9, 9),
    ):
        with pytest.raises(JournalFailedError, match="failed write"):
            use()


@pytest.mark.parametrize(
    "use",
    [
        lambda journal: fill(journal, 1, 1),
        lambda journal: journal.truncate_from(2),
        lambda journal: journal.set_hard_state(9, ""),
        lambda journal: (journal.note_commit(3), journal.begin_fsync()),
    ],
    ids=["append", "truncate", "hard state", "mark"],
)
def test_failed_write_ends_the_journal(use: Callable[[Journal], None], disk: SimulatedDisk) -> None:
    """What is on the disk is unknown from then on; what was held before can be read."""
    journal = opened(disk)
    fill(journal, 3, 1)
    before = [journal.entry(index) for index in (1, 2, 3)]
    disk.fail_write()
    with pytest.raises(DiskError, match="Input/output"):
        use(journal)
    with pytest.raises(JournalFailedError, match="failed write"):
        fill(journal, 1, 1)
    assert [journal.entry(index) for index in (1, 2, 3)] == before and journal.term == 0


def test_failed_sync_of_the_hard_state_ends_the_journal(disk: SimulatedDisk) -> None:
    """The vote did not happen, and the process must stop."""
    journal = opened(disk)
    disk.fail_fsync()
    with pytest.raises(FsyncFailedError):
        journal.set_hard_state(4, "node-a")
    assert journal.term == 0
    with pytest.raises(JournalFailedError):
        fill(journal, 1, 1)


def test_full_disk_leaves_room_to_stop(disk: SimulatedDisk) -> None:
    """On a full disk the reserve is used up first and the caller is told early; nothing written is harmed."""
    journal = opened(disk)
    fill(journal, 5, 1)
    sync(journal)
    disk.fill(0)
    while journal.reserve_ready:
        fill(journal, 1, 1)
        sync(journal)
    told_at = journal.last_index
    with pytest.raises(DiskFullError):
        while True:
            fill(journal, 1, 1)
            sync(journal)
    assert journal.last_index > told_at
    before = content(journal)
    with pytest.raises(DiskFullError):
        journal.append(journal.last_index + 1, 1, b"x" * SEGMENT_BYTES)
    assert content(journal) == before
    assert not journal.restore_reserve()
    sync(journal)
    disk.crash()
    disk.make_room()
    again = opened(disk)
    assert content(again) == before
    fill(again, 20, 1)
    sync(again)
    assert again.reserve_ready
    assert again.durable_index == again.last_index


def test_newest_segments_that_are_gone_are_missed(disk: SimulatedDisk) -> None:
    """However many of the last files an operator removes, the reserve included, and if only one entry was in them."""
    journal = opened(disk)
    while len(disk.list("g0/journal")) < 6:
        fill(journal, 1, 1)
        sync(journal)
    disk.kill()
    *_, newest, reserve = (name for name in disk.list("g0/journal") if name.endswith(".segment"))
    for name in (reserve, newest):
        disk.remove(f"g0/journal/{name}")
    for _ in range(3):
        with pytest.raises(CorruptJournalError, match=f"{newest}.*it was removed.*add it anew under a new id"):
            opened(disk)
        disk.remove(f"g0/journal/{disk.list('g0/journal')[-2]}")


def test_a_newest_segment_that_was_emptied_is_missed(disk: SimulatedDisk) -> None:
    """A crash can leave a new segment of zeros, but not once it is on record."""
    journal = opened(disk)
    while len(disk.list("g0/journal")) < 6:
        fill(journal, 1, 1)
        sync(journal)
    disk.kill()
    *_, newest, reserve = (name for name in disk.list("g0/journal") if name.endswith(".segment"))
    disk.remove(f"g0/journal/{newest}")
    disk.rename(f"g0/journal/{reserve}", f"g0/journal/{newest}")
    with pytest.raises(CorruptJournalError, match="it had been fsynced"):
        opened(disk)


def test_full_disk_records_a_new_segment_later(disk: SimulatedDisk) -> None:
    """What is in the new segment counts all the same: the record protects against removed files alone."""
    journal = opened(disk)
    disk.fill(0)
    while journal.reserve_ready:
        fill(journal, 1, 1)
        sync(journal)
    assert journal.durable_index == journal.last_index and read_newest(disk, "g0/journal") == 1
    disk.make_room()
    fill(journal, 1, 1)
    sync(journal)
    assert read_newest(disk, "g0/journal") == 2


class NoNames(SimulatedDisk):
    """Full in such a way that not even an empty file can be made."""

    none_left = False

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        if self.none_left and create and not self.exists(path):
            raise DiskFullError(f"cannot open {path!r}: No space left on device")
        return super().open(path, create=create)


def test_a_disk_without_room_for_a_name_is_full_and_not_broken() -> None:
    """A sync that takes it for a failure of its own would end the node, and no start would open the journal."""
    disk = NoNames(Random(1))
    journal = opened(disk)
    fill(journal, 5, 1)
    disk.none_left = True
    while journal.reserve_ready:
        fill(journal, 1, 1)
        sync(journal)
    assert journal.durable_index == journal.last_index
    assert not journal.restore_reserve()
    journal.close()
    again = opened(disk)
    assert again.last_index == journal.last_index and not again.reserve_ready
    disk.none_left = False
    assert again.restore_reserve()


def test_compaction_makes_room_on_a_full_disk(disk: SimulatedDisk) -> None:
    """After a checkpoint the reserve comes back without a restart."""
    journal = opened(disk)
    fill(journal, 60, 1)
    sync(journal)
    disk.fill(0)
    while journal.reserve_ready:
        fill(journal, 1, 1)
        sync(journal)
    journal.compact(journal.last_index, 1)
    assert journal.restore_reserve()
    fill(journal, 1, 1)


def test_appends_go_on_while_a_sync_makes_the_reserve(disk: SimulatedDisk) -> None:
    """The loop never takes the file that the worker is making."""
    journal = opened(disk)
    fill(journal, 12, 1)
    work = journal.begin_fsync()
    fill(journal, 40, 1)
    work.run()
    fill(journal, 10, 1)
    journal.finish_fsync(work)
    fill(journal, 20, 1)
    sync(journal)
    before = content(journal)
    assert len(before) == 82
    disk.crash()
    assert content(opened(disk)) == before


def test_damage_found_while_reading(disk: SimulatedDisk) -> None:
    """A record is checked again whenever it comes from disk."""
    journal = opened(disk)
    fill(journal, 30, 1)
    path = "g0/journal/" + disk.list("g0/journal")[0]
    disk.flip(path, SEGMENT_HEADER_BYTES + RECORD_HEADER_BYTES + 50)
    with pytest.raises(CorruptJournalError, match="entry 1 fails"):
        journal.entry(1)
    disk.flip(path, SEGMENT_HEADER_BYTES + RECORD_HEADER_BYTES + 348 + 4)
    with pytest.raises(CorruptJournalError, match="entry 2 fails"):
        journal.entry(2)


def test_newer_format_is_refused(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal of a later version is not touched."""
    opened(disk)
    disk.kill()
    monkeypatch.setattr("tickwheel.replication.journal_files.FORMAT_VERSION", 0)
    with pytest.raises(UnknownVersionError, match="version 1"):
        opened(disk)


def test_missing_segment_is_damage(disk: SimulatedDisk) -> None:
    """A hole in the numbers that a sync had covered refuses to start."""
    journal = opened(disk)
    fill(journal, 40, 1)
    sync(journal)
    fill(journal, 1, 1)
    sync(journal)
    disk.remove("g0/journal/" + disk.list("g0/journal")[1])
    disk.kill()
    with pytest.raises(CorruptJournalError, match="was removed"):
        opened(disk)


def test_a_removed_last_segment_is_damage(disk: SimulatedDisk) -> None:
    """The next one is there already, with its space reserved: an operator removed what was acknowledged."""
    journal = opened(disk)
    fill(journal, 40, 1)
    sync(journal)
    assert journal.reserve_ready
    last = [name for name in disk.list("g0/journal") if name.endswith(".segment")][-2]
    disk.kill()
    disk.remove(f"g0/journal/{last}")
    with pytest.raises(CorruptJournalError, match=f"{last}.*was removed"):
        opened(disk)


def test_names_that_an_operator_left_are_no_segments(disk: SimulatedDisk) -> None:
    """A copy beside the journal's own files harms nothing."""
    journal = opened(disk)
    fill(journal, 3, 1)
    sync(journal)
    disk.kill()
    disk.open("g0/journal/copy of 1.segment", create=True).close()
    assert opened(disk).last_index == 3


def test_an_only_segment_that_was_removed_is_missed(disk: SimulatedDisk) -> None:
    """Only the next one is left, with its space reserved: the journal began anew, without what was acknowledged."""
    journal = opened(disk)
    fill(journal, 3, 1)
    sync(journal)
    assert journal.reserve_ready
    disk.kill()
    only, reserve = (name for name in disk.list("g0/journal") if name.endswith(".segment"))
    disk.remove(f"g0/journal/{only}")
    with pytest.raises(CorruptJournalError, match=f"{only}.*was removed"):
        opened(disk)
    assert disk.exists(f"g0/journal/{reserve}")
