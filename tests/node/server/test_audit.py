"""What the audit log keeps through accidents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tickwheel.node.server.audit import CURRENT, AuditLog
from tickwheel.storage.local import LocalDisk


class AtOnce:
    """The executor port: each work is done at once."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        done(work(), None)


async def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    """The first change after a power loss was answered as noted, and could not be read."""
    disk = LocalDisk(tmp_path)
    log = AuditLog(disk, AtOnce(), lambda: 1_000, "n1")
    for method in ("First", "Second"):
        await log.changed("user", "", "peer", method, "", "OK")
    file = disk.open(CURRENT)
    file.truncate(file.size() - 7)
    log = AuditLog(disk, AtOnce(), lambda: 2_000, "n1")
    for method in ("Third", "Fourth"):
        await log.changed("user", "", "peer", method, "", "OK")
    assert [record.method for record in await log.newest(10, 0)] == ["Fourth", "Third", "First"]
