"""Append-only files of records: what is read, kept, flushed and restored."""

from __future__ import annotations

from random import Random

import google_crc32c
import numpy as np
import pytest

from tickwheel.node.state import sequence
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.node.state.sequence import Sequence
from tickwheel.storage.simulated import SimulatedDisk

U64 = np.dtype("<u8")


@pytest.mark.parametrize("seed", range(20))
def test_reads_as_a_list_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, reads, gathers and flushes in any order, with pieces and memory of a few records."""
    monkeypatch.setattr(sequence, "KEEP_BYTES", 80)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 48)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 4)
    rng = Random(seed)
    disk = SimulatedDisk(Random(seed))
    made, wanted = Sequence(disk, "d/s", U64), np.zeros(0, U64)
    flush = None
    for _ in range(80):
        more = np.array([rng.getrandbits(64) for _ in range(rng.randint(0, 9))], U64)
        assert made.append(more) == len(wanted)
        wanted = np.concatenate((wanted, more))
        first, count = rng.randint(0, len(wanted)), rng.randint(0, 30)
        assert made.read(first, count).tolist() == wanted[first : first + count].tolist()
        if len(wanted):
            places = np.array([rng.randrange(len(wanted)) for _ in range(rng.randint(0, 9))], np.int64)
            assert made.gather(places).tolist() == wanted[places].tolist()
        assert made.crc == google_crc32c.value(wanted.tobytes())
        if flush is None and rng.random() < 0.2:
            flush = made.begin_flush()
        elif flush is not None and rng.random() < 0.4:
            ran = rng.random() < 0.7
            if ran:
                flush.run()
            made.finish_flush(ran)
            flush = None
    made.finish_flush(False)
    made.begin_flush().run()
    assert disk.size("d/s") == 8 * len(wanted)
    kept = len(wanted) // 2
    again = Sequence(disk, "d/s", U64, count=kept, crc=google_crc32c.value(wanted[:kept].tobytes()))
    again.append(wanted[kept:])
    assert again.crc == made.crc
    assert again.read(0, len(wanted)).tolist() == wanted.tolist()


def test_memory_is_bounded() -> None:
    """However much is appended, the buffer holds the newest megabytes alone."""
    made = Sequence(SimulatedDisk(Random(1)), "s", U64)
    for start in range(0, 5_000_000, 100_000):
        made.append(np.arange(start, start + 100_000, dtype=U64))
    assert made._buffer.nbytes <= 4 * sequence.KEEP_BYTES
    assert made.read(17, 2).tolist() == [17, 18]


def test_a_file_shorter_than_the_checkpoint_says_stops_the_node() -> None:
    """It names the file and what to do."""
    with pytest.raises(ImpossibleStateError, match=r"d/s.*fetch"):
        Sequence(SimulatedDisk(Random(1)), "d/s", U64, count=1)
