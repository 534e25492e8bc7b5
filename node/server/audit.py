"""The audit log of one node: the calls that changed the cluster through it, with caller and result, and the refusals.

JSON lines in `audit/`, in a current file and one before it, of at most FILE_BYTES_MAX each. A change is answered only
once its line is on stable storage. A refusal is answered first and noted afterwards, at most REFUSALS_PER_S a second;
the next line states how many were left out. So refused calls can neither fill the disk nor push out the changes. A line
that cannot be written is an error in the node's log and nothing more: a full disk must not keep an operator from making
room.

Everything but `_write` and `_read` runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

from tickwheel.node.logs import logger
from tickwheel.node.server.resolving import in_worker, resolve
from tickwheel.proto.access_pb2 import AuditRecord
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk

DIRECTORY = "audit"
CURRENT, BEFORE = f"{DIRECTORY}/audit.jsonl", f"{DIRECTORY}/audit.1.jsonl"
FILE_BYTES_MAX = 16 << 20
WAITING_MAX = 10_000
"""Lines waiting to be written. Lines beyond that go to the node's log as errors instead."""
REFUSALS_PER_S = 10
REQUEST_LENGTH_MAX = 2_000
"""Characters of a request that a line keeps."""

log = logger("audit")


FIELDS = tuple(field.name for field in AuditRecord.DESCRIPTOR.fields)
"""Of a line of the log, in this order."""


def _line(record: AuditRecord) -> str:
    return json.dumps({name: getattr(record, name) for name in FIELDS})


class AuditLog:
    def __init__(self, disk: Disk, executor: Executor, wall_ms: Callable[[], int], node_id: str) -> None:
        self._disk = disk
        self._executor = executor
        self._wall_ms = wall_ms
        self._node_id = node_id
        self._waiting: list[tuple[AuditRecord, asyncio.Future[None] | None]] = []
        self._writing = False
        self._second = 0
        self._refusals = 0
        self._left_out = 0

    def _record(self, user: str, by: str, peer: str, method: str, request: str, result: str) -> AuditRecord:
        left_out, self._left_out = self._left_out, 0
        return AuditRecord(
            at_ms=self._wall_ms(),
            node_id=self._node_id,
            user=user,
            by=by,
            peer=peer,
            method=method,
            request=request[:REQUEST_LENGTH_MAX],
            result=result,
            left_out=left_out,
        )

    async def changed(self, user: str, by: str, peer: str, method: str, request: str, result: str) -> None:
        """Note the end of a call that changes the cluster. Returns once the line is durable or could not be written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(self._record(user, by, peer, method, request, result), future)
        await asyncio.shield(future)

    def refused(self, user: str, by: str, peer: str, method: str, request: str, result: str) -> None:
        """Note a call that was refused for a lack of rights, up to REFUSALS_PER_S. Returns at once."""
        second = self._wall_ms() // 1_000
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        if self._refusals > REFUSALS_PER_S:
            self._left_out += 1
            return
        self._put(self._record(user, by, peer, method, request, result), None)

    def _put(self, record: AuditRecord, future: asyncio.Future[None] | None) -> None:
        if len(self._waiting) >= WAITING_MAX:
            log.error("the audit log is too slow: a line was left out", line=_line(record))
            if future is not None:
                resolve(future, None)
            return
        self._waiting.append((record, future))
        self._write_next()

    def _write_next(self) -> None:
        if self._writing or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self._writing = True

        def written(result: None, error: BaseException | None) -> None:
            self._writing = False
            if error is not None:
                lines = [_line(record) for record, _ in batch]
                log.error("the audit log cannot be written", reason=str(error), lines=lines[:100])
            for _, future in batch:
                if future is not None:
                    resolve(future, None)
            self._write_next()

        data = b"".join(_line(record).encode() + b"\n" for record, _ in batch)
        self._executor.submit(lambda: self._write(data), written)

    def _write(self, data: bytes) -> None:
        disk = self._disk
        created = not disk.exists(CURRENT)
        if not created and disk.size(CURRENT) + len(data) > FILE_BYTES_MAX:
            disk.rename(CURRENT, BEFORE)
            created = True
        file = disk.open(CURRENT, create=True)
        try:
            size = file.size()
            if size and file.read_at(size - 1, 1) != b"\n":
                data = b"\n" + data  # a crash cut the last line short
            file.append(data)
            file.fsync()
        finally:
            file.close()
        if created:
            disk.fsync_dir(DIRECTORY)

    async def newest(self, limit: int, before_ms: int) -> list[AuditRecord]:
        """At most `limit` records from before `before_ms` (0: now), newest first. Raises DiskError."""
        return await in_worker(self._executor, lambda: self._read(limit, before_ms))

    def _read(self, limit: int, before_ms: int) -> list[AuditRecord]:
        found: list[AuditRecord] = []
        for path in (CURRENT, BEFORE):
            for line in self._lines_backwards(path):
                record = _parsed(line)
                if record is not None and (not before_ms or record.at_ms < before_ms):
                    found.append(record)
                    if len(found) >= limit:
                        return found
        return found

    def _lines_backwards(self, path: str) -> Iterator[bytes]:
        if not self._disk.exists(path):
            return
        file = self._disk.open(path)
        try:
            data = file.read_at(0, FILE_BYTES_MAX)
        finally:
            file.close()
        yield from reversed(data.splitlines())


def _parsed(line: bytes) -> AuditRecord | None:
    """A line as a record; None for a line that a crash cut short."""
    try:
        return AuditRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
