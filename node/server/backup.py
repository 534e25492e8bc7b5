"""Backup: a consistent copy of this node's state, sent in chunks."""

from __future__ import annotations

import asyncio

import google_crc32c

from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.watch.status import backup_origin
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.copying import files_to_copy
from tickwheel.node.server.resolving import fail, resolve
from tickwheel.proto import admin_pb2, common_pb2
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.transport.server import ServerStream as Context

CHUNK_BYTES = 1 << 20


class Backups:
    """Sends backups of a node."""

    def __init__(self, calls: Calls, disk: Disk, executor: Executor) -> None:
        self._calls = calls
        self._disk = disk
        self._executor = executor

    async def serve(self, request: admin_pb2.BackupRequest, context: Context) -> None:
        """Send one backup."""
        stale_reason = backup_origin(self._calls.core).stale_reason
        if stale_reason and not request.stale:
            text = f"a backup of this node may be old: {stale_reason}. Ask another node, or take it as it is (--stale)"
            raise RequestError(Failure(common_pb2.WRONG_STATE, text, {"field": "stale"}))
        files = await files_to_copy(self._calls.core.checkpointer, self._calls.wake)
        if isinstance(files, Failure):
            raise RequestError(files)
        try:
            origin: admin_pb2.BackupOrigin | None = backup_origin(self._calls.core)
            total_bytes = sum(file.bytes for file in files)
            for number in range(len(files)):
                await self._send_file(context, files, number, total_bytes, origin)
                origin = None
        finally:
            self._calls.core.checkpointer.copied(files)

    async def _send_file(
        self,
        context: Context,
        files: list[BackupFile],
        number: int,
        total_bytes: int,
        origin: admin_pb2.BackupOrigin | None,
    ) -> None:
        file, last_file = files[number], number == len(files) - 1
        offset = 0
        while True:
            size = min(CHUNK_BYTES, file.bytes - offset)
            data = await self._read(file.path, offset, size)
            if len(data) < size:
                text = f"{file.path} was removed meanwhile; start the backup again"
                raise RequestError(Failure(common_pb2.WRONG_STATE, text))
            # Checked after the read: the file was there, unchanged, until then.
            if not self._calls.core.checkpointer.progressed(files):
                text = "the backup stood still for too long; start it again"
                raise RequestError(Failure(common_pb2.WRONG_STATE, text))
            end = offset + size
            chunk = admin_pb2.BackupChunk(
                path=file.path,
                offset=offset,
                data=data,
                crc32c=google_crc32c.value(data),
                file_bytes=file.bytes,
                total_bytes=total_bytes,
                last=last_file and end >= file.bytes,
                origin=None if offset else origin,
            )
            await context.write(chunk)
            offset = end
            if offset >= file.bytes:
                return

    async def _read(self, path: str, offset: int, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()

        def read() -> bytes:
            try:
                file = self._disk.open(path)
            except DiskError:
                return b""
            try:
                return file.read_at(offset, size)
            finally:
                file.close()

        def done(data: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                fail(future, error)
            else:
                resolve(future, data or b"")

        self._executor.submit(read, done)
        return await future
