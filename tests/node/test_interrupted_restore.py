"""A restore that is killed, or whose disk fails, at any call of the system: it can be run again, and no node starts on
what it has left."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tests.node.core.test_refound import stopped
from tickwheel.node.backup_files import LIST_NAME, VERSION, BackupError, restore_backup
from tickwheel.node.config import NodeConfig, read_config
from tickwheel.node.core.checkpoint import in_checkpoint
from tickwheel.node.refound import Found, refound
from tickwheel.node.server.identity import UNFINISHED_RESTORE, IdentityError, open_identity, read_identity
from tickwheel.storage.disk import DiskError
from tickwheel.storage.local import LocalDisk

CALLS = ("open", "pwritev", "ftruncate", "posix_fallocate", "fdatasync", "fsync", "replace", "unlink", "mkdir", "rmdir")


FSYNC_CALLS = 2
"""Of the last step: opens the directory, and brings it to stable storage."""
STRIDE = 7
"""One call of so many fails, other ones for each kind of fault."""


class Killed(BaseException):
    """The process has ended."""


class Faults:
    """Lets the call of that number fail, and the later ones as well if the process is killed."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: int | None) -> None:
        self.at = -1
        self.calls = 0
        self._fault = fault
        self._waits = (os.fsync, os.fdatasync)
        """Whoever is only killed needs not wait for the disk."""
        for name in CALLS:
            patch.setattr(os, name, functools.partial(self._call, getattr(os, name)))

    def arm(self, at: int) -> None:
        """From now on; -1: let nothing fail."""
        self.at, self.calls = at, 0

    def _call(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if self.at >= 0 and (number == self.at or (number > self.at and self._fault is None)):
            if self._fault is None:
                raise Killed
            raise OSError(self._fault, os.strerror(self._fault))
        return None if call in self._waits else call(*arguments, **named)


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest checkpoint of a node, as `tickwheel backup` lays it down."""
    place = tmp_path_factory.mktemp("backup")
    disk, files = stopped().disk, {}
    for path in filter(in_checkpoint, disk.paths()):
        content = disk.open(path).read_at(0, disk.size(path))
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
        files[path] = {"bytes": len(content), "crc32c": google_crc32c.value(content)}
    (place / LIST_NAME).write_text(json.dumps({"version": VERSION, "files": files}))
    return place


def restored(backup: Path, node: NodeConfig) -> Found:
    """As the command does it."""
    found: list[Found] = []
    restore_backup(backup, node.data_path, lambda done, total: None, lambda disk: found.append(refound(disk, node)))
    return found[0]


@pytest.mark.parametrize("fault", [None, errno.ENOSPC, errno.EIO], ids=["killed", "full", "failing"])
def test_it_can_be_repeated_after_a_fault_at_any_call(
    fault: int | None, backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: never a node on half of a backup, nor a second member of one identity."""
    data, uuids = tmp_path / "data", set[str]()
    flags = {"cluster.id": "anew", "node.id": "n", "node.data_dir": str(data)}
    node = read_config(None, {}, {**flags, "storage.journal_segment_bytes": "1048576"})
    (data / "lost+found").mkdir(parents=True)
    faults = Faults(monkeypatch, fault)
    wanted = restored(backup, node)
    steps = faults.calls
    for at in [*range((fault or 0) % STRIDE, steps - 10, STRIDE), *range(steps - 10, steps)]:
        shutil.rmtree(data)
        (data / "lost+found").mkdir(parents=True)
        faults.arm(at)
        try:
            restored(backup, node)
            ended = True
        except (Killed, BackupError, DiskError) as error:
            ended = False
            assert isinstance(error, Killed) or str(data) in str(error) or os.strerror(fault or 0) in str(error)
        faults.arm(-1)
        disk = LocalDisk(data)
        names = set(disk.list("")) - {"lost+found"}
        if not ended:
            if fault is None and at >= steps - FSYNC_CALLS:
                assert "identity" in names, "all that was left is to bring the end of it to stable storage"
                continue
            if names:
                assert UNFINISHED_RESTORE in names
                with pytest.raises(IdentityError, match="tickwheel restore was interrupted"):
                    open_identity(disk, "anew", "n", str(data))
            again = restored(backup, node)
            assert (again.pending, again.index) == (wanted.pending, wanted.index)
        assert UNFINISHED_RESTORE not in disk.list("")
        identity = read_identity(disk)
        assert identity is not None and identity.disk_uuid not in uuids
        uuids.add(identity.disk_uuid)
    assert len(uuids) > 20
