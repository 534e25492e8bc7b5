"""The simulated disk forgets what was not synced, and nothing else."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.storage.disk import DiskError, DiskFullError, FsyncFailedError
from tickwheel.storage.simulated import PowerLost, SimulatedDisk

SEEDS = range(40)


def crashed_contents(seed: int, page_count: int) -> bytes:
    """What a crash leaves of a synced page and `page_count` pages that were not."""
    disk = SimulatedDisk(Random(seed))
    file = disk.open("f", create=True)
    disk.fsync_dir("")
    file.append(b"s" * 5000)
    file.fsync()
    file.append(b"u" * 4096 * page_count)
    disk.crash()
    again = disk.open("f")
    return again.read_at(0, again.size())


def test_unsynced_bytes_may_be_lost_and_synced_ones_never() -> None:
    """Over many seeds: all of it lost, all of it kept, and holes; the synced part always whole."""
    seen = [crashed_contents(seed, 8) for seed in SEEDS]
    assert all(content[:5000] == b"s" * 5000 for content in seen)
    tails = [content[5000:] for content in seen]
    assert any(tail == b"" for tail in tails)
    assert any(tail == b"u" * 4096 * 8 for tail in tails)
    assert any(b"\0" in tail and tail.rstrip(b"\0").find(b"\0u") >= 0 for tail in tails)


def test_same_seed_same_crash() -> None:
    """A failing run can be repeated."""
    for seed in SEEDS:
        assert crashed_contents(seed, 8) == crashed_contents(seed, 8)


def test_file_sync_does_not_cover_its_directory_entry() -> None:
    """A created file survives for certain only after fsync_dir."""
    outcomes = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        file = disk.open("d/f", create=True)
        file.append(b"abc")
        file.fsync()
        disk.crash()
        outcomes.add(disk.exists("d/f"))
        if disk.exists("d/f"):
            assert disk.open("d/f").read_at(0, 9) == b"abc"
    assert outcomes == {True, False}


def test_sync_dir_does_not_cover_bytes() -> None:
    """After fsync_dir alone the file is there, but perhaps without content."""
    lengths = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        disk.open("d/f", create=True).append(b"abc")
        disk.fsync_dir("d")
        disk.crash()
        lengths.add(disk.size("d/f"))
    assert {0, 3} <= lengths


def test_directory_changes_are_lost_from_the_end() -> None:
    """Of several changes a prefix is kept: never the second without the first."""
    left = set()
    for seed in range(80):
        disk = SimulatedDisk(Random(seed))
        disk.make_dir("d")
        disk.fsync_dir("d")
        for name in "abc":
            disk.open(f"d/{name}", create=True)
        disk.crash()
        left.add("".join(disk.list("d")))
    assert left == {"", "a", "ab", "abc"}


def test_rename_is_whole_or_not_at_all() -> None:
    """After a crash the target is the old file or the new one, and synced content is there."""
    seen = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        for path, content in (("d/f", b"old"), ("d/f.new", b"new")):
            file = disk.open(path, create=True)
            file.append(content)
            file.fsync()
        disk.fsync_dir("d")
        disk.rename("d/f.new", "d/f")
        disk.crash()
        content = disk.open("d/f").read_at(0, 9)
        assert disk.exists("d/f.new") == (content == b"old")
        seen.add(content)
    assert seen == {b"old", b"new"}


def test_rename_between_directories_never_loses_or_doubles_the_file() -> None:
    """Syncing either directory settles the whole rename."""
    for synced in ("a", "b"):
        for seed in SEEDS:
            disk = SimulatedDisk(Random(seed))
            disk.make_dir("b")
            disk.open("a/f", create=True)
            disk.rename("a/f", "b/f")
            disk.fsync_dir(synced)
            disk.crash()
            assert disk.list("a") == []
            if synced == "b" or disk.exists("b"):
                assert disk.list("b") == ["f"]


def test_removed_and_synced_stays_removed() -> None:
    """A file that was created, removed and whose directory was synced does not come back."""
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        disk.open("d/f", create=True)
        disk.remove("d/f")
        disk.fsync_dir("d")
        disk.crash()
        assert not disk.exists("d/f")


def test_truncation_is_lost_or_kept() -> None:
    """An unsynced truncation may be undone, with the bytes that were there."""
    seen = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        file = disk.open("f", create=True)
        file.append(bytes(range(256)) * 64)
        file.fsync()
        disk.fsync_dir("")
        file.truncate(8192)
        disk.crash()
        again = disk.open("f")
        assert again.read_at(0, 99999) == (bytes(range(256)) * 64)[: again.size()]
        seen.add(again.size())
    assert seen == {8192, 16384}


def test_failed_sync_loses_for_good() -> None:
    """After a failed sync a later one that succeeds does not bring the pages to the disk."""
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        file = disk.open("f", create=True)
        disk.fsync_dir("")
        file.append(b"a" * 4096)
        file.fsync()
        file.append(b"b" * 4096)
        disk.fail_fsync()
        with pytest.raises(FsyncFailedError, match="'f'"):
            file.fsync()
        file.append(b"c" * 4096)
        file.fsync()
        assert file.read_at(4096, 1) == b"b"
        disk.crash()
        assert disk.open("f").read_at(0, 99999) == b"a" * 4096 + bytes(4096) + b"c" * 4096
    assert disk.counters().fsyncs_failed == 1


def test_ignored_sync_covers_nothing() -> None:
    """The switch behind 'removing any fdatasync fails a test' has an effect."""
    left = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        file = disk.open("f", create=True)
        disk.fsync_dir("")
        disk.ignore_fsync(lambda path: path == "f")
        file.append(b"abc")
        file.fsync()
        disk.crash()
        left.add(disk.size("f"))
    assert 0 in left
    assert disk.counters().fsyncs_ignored == 1


def test_a_forgotten_file_stays_gone() -> None:
    """No crash brings it back, and its room is free."""
    disk = SimulatedDisk(Random(1), capacity_bytes=3)
    disk.open("f", create=True).append(b"abc")
    disk.open("f").fsync()
    disk.fsync_dir("")
    disk.forget("f")
    assert not disk.exists("f") and disk.space_left() == 3
    disk.crash()
    assert not disk.exists("f") and disk.space_left() == 3


def test_kill_keeps_what_was_written() -> None:
    """The end of a process is not the end of the machine; its handles and its lock go."""
    disk = SimulatedDisk(Random(1))
    disk.lock()
    with pytest.raises(DiskError, match="in use"):
        disk.lock()
    file = disk.open("f", create=True)
    file.append(b"abc")
    disk.kill()
    with pytest.raises(DiskError, match="gone"):
        file.append(b"d")
    disk.lock()
    assert disk.open("f").read_at(0, 9) == b"abc"


def test_capacity() -> None:
    """A full disk refuses growth, whole appends only, and overwriting needs no room; removal makes room."""
    disk = SimulatedDisk(Random(1), capacity_bytes=10)
    file = disk.open("f", create=True)
    file.append(b"12345678")
    with pytest.raises(DiskFullError, match="'f'"):
        file.append(b"abc")
    with pytest.raises(DiskFullError):
        file.preallocate(11)
    assert file.size() == 8
    file.write_at(0, b"87654321")
    file.preallocate(10)
    assert disk.space_left() == 0
    file.append(b"ab")
    disk.remove("f")
    assert disk.space_left() == 10
    disk.fill(3)
    assert disk.space_left() == 3
    disk.make_room()
    disk.open("g", create=True).append(b"x" * 100)
    assert disk.counters().writes_refused == 2


def test_read_error_and_flip() -> None:
    """Reads fail while told to; a flipped byte is flipped on stable storage too."""
    disk = SimulatedDisk(Random(1))
    file = disk.open("f", create=True)
    disk.fsync_dir("")
    file.append(b"abc")
    file.fsync()
    disk.read_error("f")
    with pytest.raises(DiskError, match="Input/output"):
        file.read_at(0, 1)
    disk.heal_reads()
    file.write_at(0, b"A")
    disk.flip("f", 1, 0x20)
    disk.crash()
    assert disk.open("f").read_at(1, 2) == b"Bc"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 9000)),
            st.tuples(st.just("write"), st.integers(0, 20000)),
            st.tuples(st.just("truncate"), st.integers(0, 20000)),
            st.tuples(st.just("reserve"), st.integers(0, 30000)),
            st.tuples(st.just("sync"), st.just(0)),
        ),
        max_size=20,
    ),
    st.integers(0, 1 << 30),
)
def test_a_crash_right_after_a_sync_changes_nothing(steps: list[tuple[str, int]], seed: int) -> None:
    """Whatever was done before: once synced, the file is there byte for byte, and so it is page by page later."""
    disk = SimulatedDisk(Random(seed))
    file = disk.open("f", create=True)
    disk.fsync_dir("")
    model = bytearray()
    for number, (step, size) in enumerate(steps):
        fill = bytes([number + 1])
        if step == "append":
            file.append(fill * size)
            model += fill * size
        elif step == "write":
            file.write_at(size, fill * 5000)
            model.extend(bytes(max(0, size - len(model))))
            model[size : size + 5000] = fill * 5000
        elif step == "truncate":
            file.truncate(size)
            del model[size:]
            model.extend(bytes(size - len(model)))
        elif step == "reserve":
            file.preallocate(size)
        else:
            file.fsync()
        assert file.size() == len(model)
    assert file.read_at(0, 1 << 20) == model
    file.fsync()
    file.append(b"unsynced" * 700)
    disk.crash()
    again = disk.open("f")
    assert again.read_at(0, len(model)) == model


def test_power_is_lost_some_steps_after_a_file_is_met() -> None:
    """From the first step at such a path on, steps at any path count; the crash ends it."""
    disk = SimulatedDisk(Random(1))
    disk.lose_power_after(1, lambda path: path == "a")
    other = disk.open("b", create=True)
    for _ in range(5):
        other.append(b"x")
    disk.open("a", create=True)
    with pytest.raises(PowerLost):
        other.append(b"x")
    with pytest.raises(PowerLost):
        other.fsync()
    disk.crash()
    disk.open("a", create=True).fsync()
