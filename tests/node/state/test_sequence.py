"""Append-only files of records: what is read, kept, flushed and restored."""

from __future__ import annotations

from random import Random

import google_crc32c
import numpy as np
import pytest

from tickwheel.node.state import sequence
from tickwheel.node.state.sequence import Sequence
from tickwheel.proto.state_pb2 import SequenceSnapshot
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.storage.disk import DiskFullError
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.simulated import SimulatedDisk

U64 = np.dtype("<u8")


@pytest.mark.parametrize("seed", range(30))
def test_reads_as_a_list_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, reads, gathers, drops, flushes, failed flushes, restarts, in any order; pieces and files are small."""
    monkeypatch.setattr(sequence, "KEEP_BYTES", 80)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 6_000)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 4)
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", 2 * BLOCK_BYTES)
    rng = Random(seed)
    disk = SimulatedDisk(Random(seed))
    disk.make_dir("d")
    made, wanted, first_kept = Sequence(disk, "d/s", U64), np.zeros(0, U64), 0
    flush = None
    for _ in range(80):
        more = np.array([rng.getrandbits(64) for _ in range(rng.choice((0, 3, 200, 900)))], U64)
        assert made.append(more) == len(wanted)
        wanted = np.concatenate((wanted, more))
        if rng.random() < 0.5:  # one alone
            last = np.array([rng.getrandbits(64)], U64)
            assert made.append_one(last[0]) == len(wanted)
            wanted = np.concatenate((wanted, last))
        first, count = rng.randint(first_kept, len(wanted)), rng.randint(0, 1500)
        assert made.read(first, count).tolist() == wanted[first : first + count].tolist()
        held_from, held = made.held()
        assert held_from >= first_kept and held.tolist() == wanted[held_from:].tolist()
        if len(wanted) > first_kept:
            places = np.array([rng.randrange(first_kept, len(wanted)) for _ in range(rng.randint(0, 9))], np.int64)
            assert made.gather(places).tolist() == wanted[places].tolist()
        if rng.random() < 0.3:  # it must not matter when it was computed last
            assert made.crc == google_crc32c.value(wanted.tobytes())
        if rng.random() < 0.1:
            first_kept = rng.randint(first_kept, len(wanted))
            made.drop_below(first_kept)
        if flush is None and rng.random() < 0.2:
            flush, state = made.begin_flush(), made.snapshot()
        elif flush is not None and rng.random() < 0.4:
            ran = rng.random() < 0.7
            if ran:
                flush.run()
            made.finish_flush(ran)
            flush = None
            if ran and rng.random() < 0.3:
                # A crash, and replay of what came after the checkpoint.
                disk.fsync_dir("d")
                disk.crash()
                made = Sequence(disk, "d/s", U64, state)
                for left in {f"d/{name}" for name in disk.list("d")} - {file.path for file in made.files()}:
                    disk.remove(left)  # as a start does
                made.append(wanted[made.count :])
                made.drop_below(first_kept)
    made.finish_flush(False)
    made.begin_flush().run()
    made.finish_flush(True)
    gone = made.dropped_paths()
    made.forget_dropped(len(gone))
    for path in gone:
        disk.remove(path)
    assert {f"d/{name}" for name in disk.list("d")} == {file.path for file in made.files()}
    assert all(disk.size(file.path) == file.bytes for file in made.files())
    again = Sequence(disk, "d/s", U64, made.snapshot())
    assert again.crc == made.crc == google_crc32c.value(wanted.tobytes())
    again.append(more)
    assert again.read(first_kept, len(wanted)).tolist() == [*wanted[first_kept:].tolist(), *more.tolist()]


def test_one_record_alone_is_as_in_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields, the checksum, what is written and when."""
    monkeypatch.setattr(sequence, "PIECE_BYTES", BLOCK_BYTES)
    fields = np.dtype([("tick", "<i8"), ("position", "<u8")])
    disk = SimulatedDisk(Random(1))
    disk.make_dir("d")
    together, alone = Sequence(disk, "d/t", fields), Sequence(disk, "d/a", fields)
    rows = np.zeros(3 * BLOCK_BYTES // fields.itemsize, fields)
    rows["tick"], rows["position"] = np.arange(len(rows)) - 7, np.arange(len(rows)) * 3
    for place, row in enumerate(rows.tolist()):
        assert together.append(rows[place : place + 1]) == alone.append_one(row)
    assert alone.crc == together.crc == google_crc32c.value(rows.tobytes())
    assert alone.read(0, len(rows)).tolist() == rows.tolist()
    assert disk.size("d/a.0") == disk.size("d/t.0") > BLOCK_BYTES
    assert alone.snapshot() == together.snapshot()


def test_memory_is_bounded() -> None:
    """However much is appended, the buffer holds the newest megabytes alone."""
    made = Sequence(SimulatedDisk(Random(1)), "s", U64)
    for start in range(0, 5_000_000, 100_000):
        made.append(np.arange(start, start + 100_000, dtype=U64))
    assert made._buffer.nbytes <= 4 * sequence.KEEP_BYTES
    assert made.read(17, 2).tolist() == [17, 18]


def test_a_file_shorter_than_the_checkpoint_says_stops_the_node() -> None:
    """It names the file and what to do."""
    with pytest.raises(CorruptFileError, match=r"d/s\.0.*anew"):
        Sequence(SimulatedDisk(Random(1)), "d/s", U64, SequenceSnapshot(count=1))


@pytest.mark.parametrize("offset", [0, 4_000, 4_095, 8_191, 8_200])
def test_a_flipped_byte_is_never_handed_on(offset: int) -> None:
    """In a full block it shows when the block is read, in the last one when the node starts."""
    disk = SimulatedDisk(Random(1))
    made = Sequence(disk, "s", U64)
    made.append(np.arange(1_050, dtype=U64))
    made.begin_flush().run()
    disk.flip("s.0", offset)

    def read() -> None:
        Sequence(disk, "s", U64, made.snapshot()).read(0, 1_050)

    with pytest.raises(CorruptFileError, match=r"s\.0"):
        read()


def test_a_full_disk_loses_nothing() -> None:
    """Appending goes on in memory; the flush says DiskFullError; with room again it writes everything."""
    disk = SimulatedDisk(Random(1))
    made = Sequence(disk, "s", U64)
    disk.fill(3_000_000)
    wanted = np.arange(600_000, dtype=U64)
    for part in np.split(wanted, 60):
        made.append(part)
    with pytest.raises(DiskFullError):
        made.begin_flush().run()
    made.finish_flush(False)
    disk.make_room()
    made.begin_flush().run()
    made.finish_flush(True)
    assert Sequence(disk, "s", U64, made.snapshot()).read(0, 600_000).tolist() == wanted.tolist()


@pytest.mark.parametrize("block", [0, 3, 4])
def test_damage_in_any_block_stops_the_start(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the node that reads it later: the files are read and checked when they are opened."""
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", 4 * BLOCK_BYTES)
    disk = SimulatedDisk(Random(1))
    disk.make_dir("d")
    made = Sequence(disk, "d/s", U64)
    made.append(np.arange(3_000, dtype=U64))
    made.begin_flush().run()
    made.finish_flush(True)
    state = made.snapshot()
    Sequence(disk, "d/s", U64, state)
    file = disk.open(f"d/s.{block // 4}")
    at = block % 4 * BLOCK_BYTES + 77
    file.write_at(at, bytes([file.read_at(at, 1)[0] ^ 1]))
    with pytest.raises(CorruptFileError, match="checksum"):
        Sequence(disk, "d/s", U64, state)
