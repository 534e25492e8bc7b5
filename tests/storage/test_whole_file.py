"""Small files written whole, and the manifest: the old one or the new one, never something else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.proto.log_pb2 import Manifest, ManifestFile
from tickwheel.storage.disk import DiskFullError, FsyncFailedError
from tickwheel.storage.errors import CorruptFileError, UnknownVersionError
from tickwheel.storage.manifest import read_manifest, restore_files, write_manifest
from tickwheel.storage.simulated import PowerLost, SimulatedDisk
from tickwheel.storage.whole_file import read_whole, write_whole


@pytest.fixture
def disk() -> SimulatedDisk:
    """An empty disk."""
    return SimulatedDisk(Random(1))


def test_written_is_read(disk: SimulatedDisk) -> None:
    """A shorter content replaces a longer one whole; a file that is not there is None."""
    assert read_whole(disk, "d/f") is None
    write_whole(disk, "d/f", b"x" * 10_000)
    write_whole(disk, "d/f", b"")
    assert read_whole(disk, "d/f") == b""
    write_whole(disk, "d/f", memoryview(b"abc"))
    assert read_whole(disk, "d/f") == b"abc"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 10))
def test_old_or_new_after_any_crash(seed: int, steps: int) -> None:
    """Whatever step the power goes in; after the call has returned it is the new one."""
    disk = SimulatedDisk(Random(seed))
    write_whole(disk, "d/f", b"old" * 5000)
    disk.lose_power_after(steps)
    allowed = {b"new" * 4000}
    try:
        write_whole(disk, "d/f", b"new" * 4000)
    except PowerLost:
        allowed.add(b"old" * 5000)
    disk.crash()
    assert read_whole(disk, "d/f") in allowed


def lost(sabotage: Callable[[SimulatedDisk], None]) -> bool:
    """Whether some seed finds the new content gone or damaged after a write has returned."""
    for seed in range(60):
        disk = SimulatedDisk(Random(seed))
        write_whole(disk, "d/f", b"old")
        sabotage(disk)
        write_whole(disk, "d/f", b"new")
        disk.crash()
        try:
            if read_whole(disk, "d/f") != b"new":
                return True
        except CorruptFileError:
            return True
    return False


def test_both_syncs_are_needed() -> None:
    """Leaving out either is found; with both nothing is."""
    assert not lost(lambda disk: None)
    assert lost(lambda disk: disk.ignore_fsync(lambda path: True))
    assert lost(lambda disk: disk.ignore_fsync_dir(lambda path: True))


def test_failures_leave_the_old_file(disk: SimulatedDisk) -> None:
    """A full disk or a failed sync: the caller is told, the old content stays."""
    write_whole(disk, "f", b"old")
    disk.fill(5)
    with pytest.raises(DiskFullError):
        write_whole(disk, "f", b"new")
    disk.make_room()
    disk.fail_fsync()
    with pytest.raises(FsyncFailedError):
        write_whole(disk, "f", b"new")
    assert read_whole(disk, "f") == b"old"


def test_every_flipped_byte_is_found(disk: SimulatedDisk) -> None:
    """Also in the header; the message names file and what to do."""
    write_whole(disk, "f", b"content")
    for offset in range(disk.size("f")):
        disk.flip("f", offset)
        with pytest.raises((CorruptFileError, UnknownVersionError), match="'f'"):
            read_whole(disk, "f", advice="Do this")
        disk.flip("f", offset)
    disk.open("f").truncate(10)
    with pytest.raises(CorruptFileError, match=r"too few.*Do this"):
        read_whole(disk, "f", advice="Do this")


def test_manifest(disk: SimulatedDisk) -> None:
    """It comes back as it was, with its version; a later version and other content are refused."""
    assert read_manifest(disk) is None
    manifest = Manifest(applied_index=7, applied_term=2, wheel=b"w", files=[ManifestFile(path="a", bytes=3)])
    write_manifest(disk, manifest)
    assert read_manifest(disk) == manifest
    assert manifest.format_version == 1
    manifest.format_version = 9
    write_whole(disk, "manifest", manifest.SerializeToString())
    with pytest.raises(UnknownVersionError, match="version 9"):
        read_manifest(disk)
    write_whole(disk, "manifest", b"\xff\xff")
    with pytest.raises(CorruptFileError, match="not a manifest"):
        read_manifest(disk)


def test_restored_files_have_the_length_that_counts(disk: SimulatedDisk) -> None:
    """Longer ones are cut; missing, short or changed ones are damage."""
    disk.open("a", create=True).append(b"abcdef")
    wanted = ManifestFile(path="a", bytes=3, crc32c=google_crc32c.value(b"abc"))
    restore_files(disk, Manifest(files=[wanted]))
    assert disk.size("a") == 3
    for path, count, crc32c, cause in (
        ("a", 3, 1, "checksum"),
        ("a", 4, 0, "by the manifest it has 4 bytes"),
        ("b", 0, 0, "is missing"),
    ):
        with pytest.raises(CorruptFileError, match=cause):
            restore_files(disk, Manifest(files=[ManifestFile(path=path, bytes=count, crc32c=crc32c)]))
