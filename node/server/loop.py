"""The node's event loop: uvloop's, which takes gRPC's wake-ups together.

grpc.aio polls in a thread of its own. For each event that thread writes a byte into a socket pair, and the loop's
reader takes one byte and handles all events there are. So of a burst the first turn of the loop handles everything,
and a turn for each further byte finds nothing to do. Here all bytes but one are taken before the reader is called.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvloop

WAKE_UPS_MAX = 4_096
GRPC_READER = "_handle_events"
"""Name of grpc.aio's reader, which it hands over as a partial; under another name it works as it is."""


class NodeLoop(uvloop.Loop):
    """See the module."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """See asyncio. The reader of grpc.aio is called once for all bytes that wait."""
        if isinstance(fd, socket.socket) and _name_of(callback) == GRPC_READER:
            super().add_reader(fd, _together, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _name_of(callback: Any) -> str:
    return str(getattr(getattr(callback, "func", callback), "__name__", ""))


def _together(wake_ups: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # What is taken here was written behind its event, so the reader finds that event in its queue.
    with contextlib.suppress(BlockingIOError):
        waiting = len(wake_ups.recv(WAKE_UPS_MAX, socket.MSG_PEEK))
        if waiting > 1:
            wake_ups.recv(waiting - 1)
    callback(*args)
