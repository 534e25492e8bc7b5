"""What both disks promise; the simulation is worth as much as these tests."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.local import LocalDisk
from tickwheel.storage.simulated import SimulatedDisk


@pytest.fixture(params=["local", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """Either disk, empty."""
    return LocalDisk(tmp_path / "root") if request.param == "local" else SimulatedDisk(Random(1))


def test_append_returns_where_it_starts(disk: Disk) -> None:
    """Appends follow each other without gaps and are read back."""
    file = disk.open("a/b/log", create=True)
    assert file.append(b"one") == 0
    assert file.append_many([b"", b"two", memoryview(b"three"), bytearray(b"!")]) == 3
    assert file.append(b"") == 12
    assert file.size() == disk.size("a/b/log") == 12
    assert file.read_at(0, 100) == b"onetwothree!"
    assert file.read_at(3, 3) == b"two"
    assert file.read_at(12, 5) == b"" == file.read_at(99, 5)
    assert file.path == "a/b/log"


def test_many_parts_are_one_append(disk: Disk) -> None:
    """More parts than one system call takes are still written whole."""
    file = disk.open("log", create=True)
    parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]
    assert file.append_many(parts) == 0
    assert file.read_at(0, 1 << 20) == b"".join(parts)


def test_write_at_overwrites_and_extends(disk: Disk) -> None:
    """A write in place changes those bytes only; one beyond the end leaves zeros between."""
    file = disk.open("f", create=True)
    file.append(b"abcdef")
    file.write_at(2, b"XY")
    assert file.read_at(0, 10) == b"abXYef"
    file.write_at(8, b"Z")
    assert file.read_at(0, 10) == b"abXYef\0\0Z"
    file.write_at(5, b"12345")
    assert file.read_at(0, 20) == b"abXYe12345"


def test_truncate_cuts_and_lengthens(disk: Disk) -> None:
    """What was cut off does not come back when the file grows again."""
    file = disk.open("f", create=True)
    file.append(b"abcdef")
    file.truncate(3)
    assert file.size() == 3
    file.truncate(5)
    assert file.read_at(0, 10) == b"abc\0\0"
    assert file.append(b"g") == 5


def test_reserved_space_does_not_count(disk: Disk) -> None:
    """A reservation changes neither length nor where appends go, and reads stop at the length."""
    file = disk.open("f", create=True)
    file.append(b"abc")
    file.preallocate(10_000)
    assert file.size() == 3
    assert file.read_at(0, 100) == b"abc"
    assert file.append(b"de") == 3
    file.write_at(7, b"x")
    assert file.size() == 8
    assert file.read_at(0, 100) == b"abcde\0\0x"
    file.preallocate(5)
    assert file.size() == 8


def test_reserved_space_reads_as_zeros_after_reopening(disk: Disk) -> None:
    """Who opens the file again sees the reservation as zeros, and gives it back by truncating."""
    file = disk.open("f", create=True)
    file.preallocate(9000)
    file.append(b"abc")
    file.close()
    again = disk.open("f")
    assert again.size() == disk.size("f") == 9000
    assert again.read_at(0, 9000) == b"abc" + bytes(8997)
    again.truncate(3)
    assert again.append(b"d") == 3
    assert again.size() == 4


def test_append_beyond_the_reservation(disk: Disk) -> None:
    """A reservation is no limit."""
    file = disk.open("f", create=True)
    file.preallocate(10)
    file.append(b"x" * 25)
    assert file.size() == 25
    assert file.read_at(0, 99) == b"x" * 25


def test_map_shows_the_file(disk: Disk) -> None:
    """A view is as long as the file and read-only; an empty file has an empty one."""
    file = disk.open("f", create=True)
    assert len(file.map()) == 0
    file.append(b"abcdef" * 1000)
    view = file.map()
    assert view.readonly
    assert len(view) == 6000
    assert bytes(view[:6]) == b"abcdef"
    view.release()
    file.close()


def test_closing_leaves_arrays_over_a_view_alone(disk: Disk) -> None:
    """A view that something still looks at does not keep a file from being closed."""
    file = disk.open("f", create=True)
    file.append(b"abc")
    inner = memoryview(file.map())
    file.close()
    inner.release()


def test_closed_file_refuses(disk: Disk) -> None:
    """Closing twice is fine; using a closed file is an error that names it."""
    file = disk.open("f", create=True)
    file.close()
    file.close()
    for use in (file.size, file.fsync, lambda: file.append(b"x"), lambda: file.read_at(0, 1)):
        with pytest.raises(DiskError, match="'f'"):
            use()


def test_open_without_create(disk: Disk) -> None:
    """A missing file is an error, and so is a directory."""
    with pytest.raises(DiskError, match="No such file"):
        disk.open("a/b")
    disk.make_dir("a")
    with pytest.raises(DiskError, match="'a/b'"):
        disk.open("a/b")
    with pytest.raises(DiskError, match="Is a directory"):
        disk.open("a")
    disk.open("f", create=True)
    with pytest.raises(DiskError):
        disk.open("f/below", create=True)


def test_create_keeps_what_is_there(disk: Disk) -> None:
    """`create` does not empty a file."""
    disk.open("f", create=True).append(b"abc")
    assert disk.open("f", create=True).read_at(0, 9) == b"abc"


def test_two_handles_see_one_file(disk: Disk) -> None:
    """What one handle writes the other reads."""
    first, second = disk.open("f", create=True), disk.open("f")
    first.append(b"abc")
    assert second.append(b"def") == 3
    assert first.read_at(0, 10) == b"abcdef"


def test_list_and_exists(disk: Disk) -> None:
    """Names are sorted; a directory that is not there has none; the lock is not shown."""
    disk.lock()
    assert disk.list("") == []
    assert disk.list("nowhere") == []
    disk.make_dir("d/e")
    disk.make_dir("d/e")
    for name in ("b", "a", "c"):
        disk.open(f"d/{name}", create=True)
    assert disk.list("d") == ["a", "b", "c", "e"]
    assert disk.list("") == ["d"]
    assert disk.exists("d/a")
    assert disk.exists("d/e")
    assert disk.exists("")
    assert not disk.exists("d/x")
    assert not disk.exists("d/a/x")


def test_files_of_all_depths(disk: Disk) -> None:
    """Only files, whole paths, sorted; none where there is no directory."""
    disk.lock()
    assert disk.files("") == [] and disk.files("nowhere") == []
    disk.make_dir("d/empty")
    for path in ("d/b", "d/a/z", "d/a/y/x", "e"):
        disk.open(path, create=True)
    assert disk.files("d") == ["d/a/y/x", "d/a/z", "d/b"]
    assert disk.files("") == ["d/a/y/x", "d/a/z", "d/b", "e"]
    with pytest.raises(DiskError):
        disk.files("e")


def test_remove(disk: Disk) -> None:
    """Files and whole directories go; what is not there is no error; an open file stays readable."""
    file = disk.open("d/e/f", create=True)
    file.append(b"abc")
    disk.remove("d/e/f")
    disk.remove("d/e/f")
    disk.remove("x/y")
    assert file.read_at(0, 3) == b"abc"
    assert disk.list("d/e") == []
    disk.open("d/e/g", create=True)
    disk.remove("d")
    assert not disk.exists("d")


def test_rename_replaces(disk: Disk) -> None:
    """The target holds what the source held; an open handle follows the file."""
    disk.open("d/target", create=True).append(b"old")
    file = disk.open("d/source", create=True)
    file.append(b"new")
    disk.rename("d/source", "d/target")
    disk.fsync_dir("d")
    assert disk.list("d") == ["target"]
    assert disk.open("d/target").read_at(0, 9) == b"new"
    file.append(b"er")
    assert disk.open("d/target").read_at(0, 9) == b"newer"
    with pytest.raises(DiskError):
        disk.rename("d/source", "d/target")


def test_rename_directory(disk: Disk) -> None:
    """A directory takes its files along."""
    disk.open("new/deep/f", create=True).append(b"abc")
    disk.rename("new", "old")
    disk.fsync_dir("")
    assert disk.open("old/deep/f").read_at(0, 9) == b"abc"
    assert not disk.exists("new")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a\0b", ".lock", "a/"])
def test_paths_that_could_leave_the_root_are_refused(disk: Disk, path: str) -> None:
    """Neither disk follows a path out of its directory, or to its lock."""
    for use in (
        lambda: disk.open(path, create=True),
        lambda: disk.remove(path),
        lambda: disk.make_dir(path),
        lambda: disk.rename("a", path),
        lambda: disk.list(path),
        lambda: disk.exists(path),
    ):
        with pytest.raises(DiskError, match="not allowed"):
            use()


def test_root_is_no_file(disk: Disk) -> None:
    """The root can be listed and synced, not opened, removed or renamed."""
    disk.fsync_dir("")
    for use in (lambda: disk.open("", create=True), lambda: disk.remove(""), lambda: disk.rename("", "a")):
        with pytest.raises(DiskError, match="root"):
            use()


def test_sync_and_space(disk: Disk) -> None:
    """Syncing works on files and directories, and a missing directory cannot be synced."""
    file = disk.open("d/f", create=True)
    file.append(b"abc")
    file.fsync()
    disk.fsync_dir("d")
    disk.fsync_dir("d")
    assert 0 < disk.space_left() <= disk.space_total()
    with pytest.raises(DiskError, match="nowhere"):
        disk.fsync_dir("nowhere")
