"""A restore that is killed, or whose disk fails, at any call of the system: it can be run again, and no node starts on
what it has left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import google_crc32c
import pytest

from tests.node.core.test_refound import stopped
from tests.system_calls import Faults, Killed
from tickwheel.node.backup_files import LIST_NAME, VERSION, BackupError, restore_backup
from tickwheel.node.config import NodeConfig, read_config
from tickwheel.node.core.checkpoint import in_checkpoint
from tickwheel.node.refound import Found, refound
from tickwheel.node.server.identity import UNFINISHED_RESTORE, IdentityError, open_identity, read_identity
from tickwheel.storage.disk import DiskError
from tickwheel.storage.local import LocalDisk

FSYNC_CALLS = 2
"""Of the last step: opens the directory, and brings it to stable storage."""
STRIDE = 7
"""One call of so many fails, other ones for each kind of fault."""


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
