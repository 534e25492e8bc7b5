"""Files of a checkpoint for a caller who copies them, to a peer or into a backup.

Invariant: a hold on the files is given back exactly once, also when the caller goes away while the checkpoint is being
written; no later checkpoint is begun before that. The last backup keeps its hold for a while (backup.py). Called on the
node's loop by the services that send the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tickwheel.node.core.checkpoint import BackupFile, Checkpointer
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.resolving import fail, resolve


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
