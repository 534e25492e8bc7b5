"""Record files: torn ends are cut, damage is told."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.storage.disk import DiskFullError
from tickwheel.storage.errors import CorruptFileError, UnknownVersionError
from tickwheel.storage.records import HEADER_BYTES, RecordFile
from tickwheel.storage.simulated import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    """An empty disk."""
    return SimulatedDisk(Random(1))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=8))
def test_appended_is_read(batches: list[list[bytes]]) -> None:
    """Through the same object and through a new one, with offsets."""
    disk = SimulatedDisk(Random(1))
    records = RecordFile(disk, "d/r")
    starts = [records.append(batch) for batch in batches]
    assert starts == sorted(starts)
    flat = [payload for batch in batches for payload in batch]
    assert [payload for _, payload in records.records()] == flat
    records.sync()
    records.close()
    again = RecordFile(disk, "d/r")
    assert [payload for _, payload in again.records()] == flat
    assert again.size == records.size == disk.size("d/r")


def test_torn_end_is_cut(disk: SimulatedDisk) -> None:
    """Wherever the last record was cut off, the ones before stay and appends go on."""
    records = RecordFile(disk, "r")
    records.append([b"one", b"two"])
    last = records.append([b"the third of them"])
    whole = disk.size("r")
    for size in range(last, whole):
        disk.open("r").truncate(size)
        again = RecordFile(disk, "r")
        assert [payload for _, payload in again.records()] == [b"one", b"two"]
        assert disk.size("r") == last
        again.append([b"the third of them"])
    assert [payload for _, payload in RecordFile(disk, "r").records()] == [b"one", b"two", b"the third of them"]


def test_damage_in_the_middle(disk: SimulatedDisk) -> None:
    """Any flipped byte before a whole record is told, with file and offset; so is one in the header."""
    records = RecordFile(disk, "r")
    starts = [records.append([Random(number).randbytes(60)]) for number in range(4)]
    for offset in range(starts[3]):
        disk.flip("r", offset, 0x11)
        with pytest.raises((CorruptFileError, UnknownVersionError), match="'r'") as caught:
            RecordFile(disk, "r")
        if offset >= HEADER_BYTES and isinstance(caught.value, CorruptFileError):
            assert caught.value.offset == max(start for start in starts if start <= offset)
        disk.flip("r", offset, 0x11)
    assert len(list(RecordFile(disk, "r").records())) == 4


def test_lost_header_with_content_is_damage(disk: SimulatedDisk) -> None:
    """An empty or zeroed file is a new one, unless records follow."""
    RecordFile(disk, "r").append([b"abc"])
    disk.open("r").write_at(0, bytes(HEADER_BYTES))
    with pytest.raises(CorruptFileError, match="header is missing"):
        RecordFile(disk, "r")
    disk.open("s", create=True).append(bytes(100))
    assert RecordFile(disk, "s").size == HEADER_BYTES


def test_full_disk_writes_none_of_the_records(disk: SimulatedDisk) -> None:
    """All records of a call or none."""
    records = RecordFile(disk, "r")
    disk.fill(20)
    with pytest.raises(DiskFullError):
        records.append([b"a" * 5, b"b" * 5])
    records.append([b"c" * 5])
    assert [payload for _, payload in records.records()] == [b"c" * 5]


def test_later_version_is_refused(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not touched."""
    RecordFile(disk, "r")
    monkeypatch.setattr("tickwheel.storage.records.FORMAT_VERSION", 0)
    with pytest.raises(UnknownVersionError, match="version 1"):
        RecordFile(disk, "r")
