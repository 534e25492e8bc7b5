"""Descriptors kept for files: in a process of its own, whose limit is small and whose sockets take all they get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import errno, os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 128))
from tickwheel.storage.descriptors import DescriptorReserve
from tickwheel.storage.disk import DiskFullError, NoDescriptorError
from tickwheel.storage.local import LocalDisk

def greedy():
    taken = []
    try:
        while True:
            taken.append(socket.socket())
    except OSError:
        return taken

def opened(disk, files):
    try:
        while True:
            file = disk.open(f"journal/{len(files)}", create=True)
            file.append(b"x")
            files.append(file)
    except NoDescriptorError as error:
        assert isinstance(error, DiskFullError) and "journal" in str(error), error
        return len(files)

root = sys.argv[1]
reserve = DescriptorReserve()
reserve.take(40)
assert reserve.limit == 88, "the soft limit goes up to the hard one, less the reserve"
plain, disk = LocalDisk(root + "/plain"), LocalDisk(root + "/disk", descriptors=reserve)
disk.make_dir("journal"), plain.make_dir("journal")
sockets = greedy()
files = []
assert opened(plain, files) == 0
try:
    plain.fsync_dir("journal")
    raise SystemExit("a directory was synced without a descriptor")
except NoDescriptorError:
    pass
assert 30 <= opened(disk, files) <= 40, len(files)
assert reserve.uses >= 30
# Even with the reserve used up, what is closed again at once can be done.
disk.fsync_dir("journal")
disk.fsync_dir("")
assert len(disk.list("journal")) >= len(files)
disk.remove("journal/0")
for file in files:
    assert file.read_at(0, 1) == b"x"
    file.close()
# The spare descriptor may be another's by then: it must not be closed once more.
files, sockets = [], sockets + greedy()
opened(disk, files)
def while_another_takes_it():
    files.append(open("/dev/null"))
    raise OSError(errno.EIO, "as work may fail")
for _ in range(3):
    try:
        reserve.run_briefly(while_another_takes_it)
        raise SystemExit("it did not fail")
    except OSError as error:
        assert error.errno in (errno.EIO, errno.EMFILE), error
for file in files:
    os.fstat(file.fileno()) if hasattr(file, "fileno") else file.size()
    file.close()
disk.fsync_dir("journal")
again = disk.open("journal/1")
assert bytes(again.map()) == b"xx", "a mapping keeps a descriptor of its own"
assert len(greedy()) == 0, "sockets get nothing of the reserve"
"""


def test_sockets_leave_files_their_descriptors(tmp_path: Path) -> None:
    """The journal, checkpoints and syncs of directories go on when connections have taken all there is."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", ["EMFILE", "ENFILE"])
def test_no_descriptor_is_like_a_full_disk(number: str) -> None:
    """All who bear a full disk bear this: it may pass."""
    import errno

    from tickwheel.storage.disk import DiskFullError, NoDescriptorError
    from tickwheel.storage.local import _translated

    error = _translated(OSError(getattr(errno, number), "none left"), "open", "journal/1")
    assert isinstance(error, NoDescriptorError) and isinstance(error, DiskFullError)
