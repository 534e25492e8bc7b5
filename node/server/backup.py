"""Backup: a consistent copy of this node's state, sent in chunks. A caller who holds a part of it gets the rest.

Invariant: a hold on the files of a checkpoint, for a backup or a peer, is given back exactly once, also when the caller
goes away while the checkpoint is being written; no later checkpoint is begun before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import google_crc32c

from tickwheel.node.core.checkpoint import BackupFile, Checkpointer, in_checkpoint
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.status import backup_origin
from tickwheel.node.failure import Failure, RequestError, invalid, refused
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.resolving import fail, in_worker, resolve
from tickwheel.proto import admin_pb2, common_pb2
from tickwheel.replication.copied_file import COMPARED_BYTES_PER_S, HELD_FILES_MAX, HELD_PATH_BYTES_MAX, pieces
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.transport.server import ServerStream as Context

KEPT_MS_MAX = 3_600_000
"""How long after its first copy began a checkpoint is kept for another try. No later one is written meanwhile, and the
journal grows: callers who try again and again must not hold it up for ever."""


async def files_to_copy(checkpointer: Checkpointer, wake: Callable[[], None]) -> list[BackupFile]:
    """The files of a checkpoint to copy. They stay until the caller calls `copied`, while it reports progress with
    `progressed`. Raises RequestError: there are none."""
    future: asyncio.Future[list[BackupFile]] = asyncio.get_running_loop().create_future()

    def done(files: list[BackupFile]) -> None:
        if not resolve(future, files):
            checkpointer.copied(files)  # the caller is gone

    def refused(failure: Failure) -> None:
        fail(future, RequestError(failure))

    checkpointer.request(Reply(done, refused))
    wake()
    try:
        return await future
    except asyncio.CancelledError:
        # The files may have come just before: `done` took the caller for one who still waits.
        if not future.cancelled() and future.exception() is None:
            checkpointer.copied(future.result())
        raise


def _held(request: admin_pb2.BackupRequest) -> dict[str, common_pb2.HeldFile]:
    """What the caller holds, by path. Raises RequestError if it names too much."""
    if len(request.held) > HELD_FILES_MAX:
        raise invalid("held", f"{len(request.held)} files", f"at most {HELD_FILES_MAX}")
    for number, file in enumerate(request.held):
        if len(file.path.encode()) > HELD_PATH_BYTES_MAX or not in_checkpoint(file.path):
            allowed = f"the path of a file of a checkpoint, at most {HELD_PATH_BYTES_MAX} bytes"
            raise invalid(f"held[{number}].path", file.path, allowed)
    return {file.path: file for file in request.held}


class Backups:
    """Sends backups of a node."""

    def __init__(self, calls: Calls, disk: Disk, executor: Executor) -> None:
        self._calls = calls
        self._disk = disk
        self._executor = executor
        self._left: list[BackupFile] | None = None
        """Files of the last copy, whole or broken: what was sent may not have arrived. They stay held for its next try,
        or a link that breaks often would never carry the files that every checkpoint writes. At most COPY_STALL_MS from
        try to try, and KEPT_MS_MAX in all."""
        self._copied: list[BackupFile] | None = None
        self._copied_from_ms = 0
        """The files copied last, and the steady time at which their first copy began."""

    async def serve(self, request: admin_pb2.BackupRequest, context: Context) -> None:
        """Send one backup: all of it, or what the caller does not hold."""
        held = _held(request)
        stale_reason = backup_origin(self._calls.core).stale_reason
        if stale_reason and not request.stale:
            text = f"a backup of this node may be old: {stale_reason}. Ask another node, or take it as it is (--stale)"
            raise refused(common_pb2.WRONG_STATE, text, field="stale")
        kept_ms = self._calls.core.steady_ms() - self._copied_from_ms
        if not held or kept_ms > KEPT_MS_MAX:
            self._give_back()  # so this caller gets a new checkpoint
        files = await files_to_copy(self._calls.core.checkpointer, self._calls.wake)
        if files is not self._copied:
            self._copied, self._copied_from_ms = files, self._calls.core.steady_ms()
        self._give_back()
        try:
            origin: admin_pb2.BackupOrigin | None = backup_origin(self._calls.core)
            total_bytes = sum(file.bytes for file in files)
            for number, file in enumerate(files):
                last_file = number == len(files) - 1
                async for chunk in self._chunks(file, held.get(file.path), total_bytes, last_file=last_file):
                    # Checked after the read: the file was there, unchanged, until then.
                    if not self._calls.core.checkpointer.progressed(files):
                        raise refused(common_pb2.WRONG_STATE, "the backup stood still for too long; start it again")
                    if origin is not None:
                        chunk.origin.CopyFrom(origin)
                        origin = None
                    await context.write(chunk)
        finally:
            self._give_back()
            self._left = files

    def _give_back(self) -> None:
        """Hold the files of the last copy no longer; those of a checkpoint that is gone are not held any more."""
        left, self._left = self._left, None
        if left is not None:
            self._calls.core.checkpointer.copied(left)

    async def _chunks(
        self, copied: BackupFile, held: common_pb2.HeldFile | None, total_bytes: int, *, last_file: bool
    ) -> AsyncIterator[admin_pb2.BackupChunk]:
        async def read(offset: int, size: int) -> bytes:
            try:
                data = await self._read(copied.path, offset, size)
            except DiskError as error:
                text = f"this node cannot read its own files: {error}. Ask another node"
                raise refused(common_pb2.WRONG_STATE, text) from error
            if len(data) < size:
                raise refused(common_pb2.WRONG_STATE, f"{copied.path} was removed meanwhile; start the backup again")
            return data

        async for piece in pieces(copied, held, read):
            if piece.compared:  # or the caller thinks that nothing comes
                yield admin_pb2.BackupChunk(path=copied.path, comparing=True, total_bytes=total_bytes)
                await asyncio.sleep(len(piece.data) / COMPARED_BYTES_PER_S)
                continue
            yield admin_pb2.BackupChunk(
                path=copied.path,
                offset=piece.offset,
                data=piece.data,
                crc32c=google_crc32c.value(piece.data),
                file_bytes=copied.bytes,
                total_bytes=total_bytes,
                last=last_file and piece.offset + len(piece.data) >= copied.bytes,
            )

    async def _read(self, path: str, offset: int, size: int) -> bytes:
        """Fewer bytes if there are no more; none if the file is gone. Raises DiskError."""

        def read() -> bytes:
            if not self._disk.exists(path):
                return b""
            file = self._disk.open(path)
            try:
                return file.read_at(offset, size)
            finally:
                file.close()

        return await in_worker(self._executor, read)
