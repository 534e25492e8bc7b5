"""The real disk: short writes, a full disk, the lock."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tickwheel.storage.disk import LOCK_NAME, Buffer, DiskError, DiskFullError, FsyncFailedError
from tickwheel.storage.local import LocalDisk


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than asked; nothing is left out."""
    real = os.pwrite

    def short(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        return real(descriptor, b"".join(bytes(buffer) for buffer in buffers)[:5], offset)

    file = LocalDisk(tmp_path).open("f", create=True)
    monkeypatch.setattr(os, "pwritev", short)
    assert file.append_many([b"abc", b"defgh", b"i" * 17]) == 0
    assert file.read_at(0, 99) == b"abcdefgh" + b"i" * 17


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    """It is one of the process, and the disk is sound; what was there stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = LocalDisk(tmp_path).open("f", create=True)
    file.append(b"abc")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(DiskError, match=r"'f': File too large; .*ulimit -f, LimitFSIZE"):
            file.append(bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_at(0, 99) == b"abc"


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_cuts_the_append_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: int) -> None:
    """Half an append is cut off again, and the caller is told which file found no room."""
    real = os.pwrite
    calls = []

    def filling(descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(cause, os.strerror(cause))
        return real(descriptor, bytes(buffers[0])[:2], offset)

    file = LocalDisk(tmp_path).open("f", create=True)
    file.append(b"before")
    file.preallocate(100)
    monkeypatch.setattr(os, "pwritev", filling)
    with pytest.raises(DiskFullError, match="'f'"):
        file.append(b"after")
    assert file.size() == 6
    assert (tmp_path / "f").read_bytes() == b"before"


def test_a_read_only_file_system_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It spoke of a file that could not be cut back, which is a consequence."""

    def refused(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    file = LocalDisk(tmp_path).open("f", create=True)
    monkeypatch.setattr(os, "pwritev", refused)
    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(DiskError, match=r"cannot append to 'f': Read-only file system; mount .* writable$"):
        file.append(b"x")


def test_failed_fdatasync_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cause, even a full disk: after a failed sync the process must stop."""
    disk = LocalDisk(tmp_path)
    file = disk.open("f", create=True)

    def failing(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", failing)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(FsyncFailedError, match="'f'"):
        file.fsync()
    with pytest.raises(FsyncFailedError):
        disk.fsync_dir("")


def test_a_file_that_cannot_be_examined_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without its vote would vote again in the same term. Absent ones are still absent."""
    disk = LocalDisk(tmp_path)
    disk.open("vote", create=True).close()
    real = os.stat

    def broken(path: Any, *args: Any, **named: Any) -> os.stat_result:
        if Path(path).name == "vote":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **named)

    monkeypatch.setattr(os, "stat", broken)
    for ask in (disk.exists, disk.size):
        with pytest.raises(DiskError, match="cannot examine 'vote': Input/output error"):
            ask("vote")
    assert not disk.exists("other") and not disk.exists("other/below")
    monkeypatch.undo()
    assert disk.exists("vote") and not disk.exists("vote/below")


def test_sync_dir_syncs_what_leads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new directory is in no synced parent yet: its first fsync_dir goes up to the root, later ones do not."""
    disk = LocalDisk(tmp_path)
    disk.make_dir("a/b")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    disk.fsync_dir("a/b")
    assert synced == [str(tmp_path / "a/b"), str(tmp_path / "a"), str(tmp_path)]
    synced.clear()
    disk.fsync_dir("a/b")
    assert synced == [str(tmp_path / "a/b")]


def test_lock_keeps_others_out(tmp_path: Path) -> None:
    """A second user of the directory, in this process or another, is told so; the lock ends with the process."""
    first, second = LocalDisk(tmp_path), LocalDisk(tmp_path)
    first.lock()
    first.lock()
    with pytest.raises(DiskError, match="in use"):
        second.lock()
    script = f"from tickwheel.storage.local import LocalDisk; LocalDisk({str(tmp_path)!r}).lock()"
    attempt = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "in use by another process" in attempt.stderr
    first.unlock()
    first.unlock()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    second.lock()
    second.unlock()


def test_a_moved_directory_keeps_its_node(tmp_path: Path) -> None:
    """Its next files, a vote among them, were made at the old path: whoever put the directory back lost them."""
    disk = LocalDisk(tmp_path / "data")
    disk.lock()
    disk.stay()
    disk.open("journal/1", create=True).close()
    (tmp_path / "data").rename(tmp_path / "moved")
    disk.open("journal/2", create=True).close()
    disk.open("vote.new", create=True).close()
    disk.rename("vote.new", "vote")
    disk.make_dir("hours")
    for path in ("", "journal"):
        disk.fsync_dir(path)
    assert disk.files("") == ["journal/1", "journal/2", "vote"] and disk.list("") == ["hours", "journal", "vote"]
    disk.remove("journal")
    assert not disk.exists("journal") and disk.space_left() > 0 and disk.space_total() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """A child process gets none of our files."""
    disk = LocalDisk(tmp_path)
    disk.lock()
    disk.open("f", create=True)
    script = (
        "import os, sys; links = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')];"
        "print([link for link in links if sys.argv[1] in link])"
    )
    listing = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, close_fds=False
    )
    assert listing.stdout.strip() == "[]"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link in the place of a file could lead out of the root."""
    (tmp_path / "outside").write_bytes(b"x")
    disk = LocalDisk(tmp_path / "root")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    with pytest.raises(DiskError, match="'link'"):
        disk.open("link", create=True)


def test_reserve_is_not_offered(tmp_path: Path) -> None:
    """space_left leaves the reserve out and never goes below zero."""
    free = LocalDisk(tmp_path).space_left()
    assert LocalDisk(tmp_path, space_reserve=1 << 20).space_left() <= free
    assert LocalDisk(tmp_path, space_reserve=1 << 60).space_left() == 0


def test_files_and_directories_are_for_their_user_alone(tmp_path: Path) -> None:
    """They hold payloads; whoever starts a node may have any umask."""
    before = os.umask(0)
    try:
        disk = LocalDisk(tmp_path / "data")
        disk.lock()
        disk.make_dir("a")
        disk.open("b/c", create=True).close()
    finally:
        os.umask(before)
    made = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert modes == {"data": 0o700, "a": 0o700, "b": 0o700, "c": 0o600, LOCK_NAME: 0o600}
