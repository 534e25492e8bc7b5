"""A backup of a machine that loses power at any call of the system, and a restore of one that changes meanwhile:
nothing half copied is taken for whole."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.node.test_backup_files import FILES, restored, whole
from tests.system_calls import Killed, PowerLoss
from tickwheel.node.backup_files import BLOCK_BYTES, LIST_NAME, BackupError, restore_backup
from tickwheel.storage.disk import LOCK_NAME


@pytest.mark.parametrize("names_at_once", [False, True], ids=["names lost", "names kept"])
def test_a_backup_is_whole_or_gone_on_with(
    names_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left can be restored, or is refused and completed."""
    work, found, target = tmp_path / "work", tmp_path / "found", tmp_path / "target"
    with contextlib.closing(PowerLoss(monkeypatch, work)) as power:
        at, ended = 0, False
        while not ended:
            power.close()
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            power.arm(at)
            with contextlib.suppress(Killed):
                whole(work / "b")
                ended = True
            power.at = -1
            power.survivors(found, names_at_once=names_at_once)
            try:
                assert restored(found / "b", target) == FILES
            except BackupError:
                assert not ended
                whole(found / "b")
                assert restored(found / "b", target) == FILES
            shutil.rmtree(found)
            shutil.rmtree(target)
            at += 1
    assert at > 20


@pytest.mark.parametrize("change", ["grows", "shrinks", "goes", "is another"])
def test_a_backup_that_changes_while_it_is_restored_is_refused(change: str, tmp_path: Path) -> None:
    """And the directory is empty again. A file that never ended would have filled the disk."""
    whole(tmp_path / "b", FILES | {"wheel/1/log": bytes(3 * BLOCK_BYTES)})
    file = tmp_path / "b" / "wheel/1/log"
    taken = 0

    def progress(done: int, _: int) -> None:
        nonlocal taken
        taken = done
        if change == "grows":
            with file.open("ab") as more:
                more.write(bytes(2 * BLOCK_BYTES))
        elif change == "shrinks":
            file.open("wb").close()
        elif change == "goes":
            (tmp_path / "b" / "manifest").unlink(missing_ok=True)
        else:
            (tmp_path / "b" / LIST_NAME).write_text("{}")
            (tmp_path / "b" / "manifest").write_bytes(b"another!")

    with pytest.raises(BackupError, match=r"is damaged|No such file"):
        restore_backup(tmp_path / "b", tmp_path / "d", progress, lambda disk: None)
    assert {path.name for path in (tmp_path / "d").iterdir()} <= {LOCK_NAME}
    assert taken < 10 * BLOCK_BYTES
