"""A start reads the journal in pieces: what it holds at once is bounded, and it judges as if it read all at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.replication import journal_files
from tickwheel.replication.journal import Journal
from tickwheel.replication.journal_files import (
    KIND_MARK,
    SEGMENT_HEADER_BYTES,
    SegmentReader,
    fsynced_beyond,
    pack_record,
)
from tickwheel.storage.disk import DiskError
from tickwheel.storage.local import LocalDisk, LocalFile
from tickwheel.storage.simulated import SimulatedDisk

DIRECTORY = "g0/journal"
PIECE_BYTES = 100_000


def with_pieces(patch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Starts read so many bytes at once."""
    patch.setattr(journal_files, "PIECE_BYTES", piece_bytes)
    patch.setattr(journal_files, "PIECE_BYTES", piece_bytes)


@pytest.mark.parametrize("synced", [True, False], ids=["synced", "unsynced"])
def test_a_start_holds_a_piece_at_once(synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the segments are that lie there, full ones and those that are only reserved."""
    with_pieces(monkeypatch, PIECE_BYTES)
    disk = LocalDisk(tmp_path)
    segment_bytes = 40 * PIECE_BYTES
    command_bytes = 3 * PIECE_BYTES
    journal = Journal.open(disk, DIRECTORY, segment_bytes=segment_bytes, cache_bytes_max=1000)
    random = Random(1)
    for index in range(1, 60):
        journal.append(index, 1, random.randbytes(1_000 if index % 3 else command_bytes))
    if synced:
        work = journal.begin_fsync()
        work.run()
        journal.finish_fsync(work)
    journal.close()
    read: list[int] = []
    read_at = LocalFile.read_at

    def counted(file: LocalFile, offset: int, size: int) -> bytes:
        data = read_at(file, offset, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(LocalFile, "read_at", counted)
    tracemalloc.start()
    try:
        again = Journal.open(disk, DIRECTORY, segment_bytes=segment_bytes, cache_bytes_max=1000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert again.last_index == 59
    again.close()
    assert sum(read) > segment_bytes
    assert max(read) <= command_bytes
    # The longest command as it was read, the one before it, which the cache still holds, and its copy.
    assert peak_bytes < 3 * command_bytes + 2 * PIECE_BYTES


def outcome(seed: int, damage: int, piece_bytes: int) -> tuple[object, ...]:
    """What a start makes of a journal that was killed, lost its power or was damaged: its content, or the error."""
    random = Random(seed)
    disk = SimulatedDisk(Random(seed))
    journal = Journal.open(disk, DIRECTORY, segment_bytes=3_000, cache_bytes_max=1000)
    for index in range(1, 30):
        journal.append(index, 1, random.choice((b"\xc3TWr", b"\0", b"x")) * random.choice((0, 10, 99, 600)))
        journal.note_commit(index - 1)
        if random.random() < 0.3:
            work = journal.begin_fsync()
            work.run()
            journal.finish_fsync(work)
    if random.random() < 0.5:
        disk.crash()
    else:
        disk.kill()
    for _ in range(damage):
        path = f"{DIRECTORY}/{random.choice(disk.list(DIRECTORY))}"
        if disk.size(path):
            disk.flip(path, random.randrange(disk.size(path)))
    with pytest.MonkeyPatch.context() as patch:
        with_pieces(patch, piece_bytes)
        try:
            again = Journal.open(disk, DIRECTORY, segment_bytes=3_000, cache_bytes_max=1000)
        except DiskError as error:
            return (str(error),)
    entries = again.slice(again.first_index, 1 << 20, 1 << 40)
    names = disk.list(DIRECTORY)
    return entries, again.commit_hint, names, [disk.open(f"{DIRECTORY}/{name}").read_at(0, 9_000) for name in names]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), damage=st.integers(0, 2), piece_bytes=st.integers(48, 700))
def test_pieces_of_any_size_give_the_same(seed: int, damage: int, piece_bytes: int) -> None:
    """Records, torn ends and damage at the edges of pieces are judged as in one that holds the whole segment."""
    assert outcome(seed, damage, piece_bytes) == outcome(seed, damage, 1 << 20)


@pytest.mark.parametrize("piece_bytes", [48, 64, 100])
def test_a_header_at_the_edge_of_a_piece_is_seen(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever says behind a torn place that it had been fsynced counts, wherever the pieces meet: else durable entries
    would be cut away."""
    with_pieces(monkeypatch, piece_bytes)
    disk = SimulatedDisk(Random(1))
    for offset in range(SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + 2 * piece_bytes):
        file = disk.open("segment", create=True)
        file.truncate(0)
        file.append(bytes(offset) + pack_record(1, offset, KIND_MARK, 1, 0, b"", 700) + bytes(offset % 3))
        assert fsynced_beyond(SegmentReader(file), 1, SEGMENT_HEADER_BYTES, 699), offset
        assert not fsynced_beyond(SegmentReader(file), 1, SEGMENT_HEADER_BYTES, 700), offset
