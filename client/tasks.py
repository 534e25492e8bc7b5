"""Tasks that nobody awaits: an error in one of them is heard all the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

_log = logging.getLogger(__name__)


def start_task(
    work: Coroutine[Any, Any, None], what: object, failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Run `work` as a task. An error in it is logged with its traceback; `failed` then ends what depends on the task.

    `what`, as a text, names the task in the log. A cancellation is no error.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(partial(_ended, what, failed))
    return task


def _ended(what: object, failed: Callable[[BaseException], None], task: asyncio.Task[None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        _log.error("%s ended by an unforeseen error", what, exc_info=error)
        failed(error)
