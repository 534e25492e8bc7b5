"""The node's event loop: uvloop's, with gRPC's wake-ups merged.

grpc.aio polls in its own thread. For each event that thread writes a byte into a socket pair; the loop's reader takes
one byte and handles all waiting events. So after a burst the first pass of the loop handles everything, and a pass for
each further byte finds nothing to do. Here all bytes but one are taken before the reader is called.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvloop

WAKE_UPS_MAX = 4_096
GRPC_READER = "_handle_events"
"""Name of grpc.aio's reader, passed as a partial. If a new version renames it, it works without this optimization."""


class NodeLoop(uvloop.Loop):
    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """As in asyncio, but the reader of grpc.aio is called once for all waiting bytes."""
        if isinstance(fd, socket.socket) and _name_of(callback) == GRPC_READER:
            super().add_reader(fd, _together, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _name_of(callback: Any) -> str:
    return str(getattr(getattr(callback, "func", callback), "__name__", ""))


def _together(wake_ups: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # Each byte was written after its event was queued, so the reader finds the events of all bytes taken here.
    with contextlib.suppress(BlockingIOError):
        waiting = len(wake_ups.recv(WAKE_UPS_MAX, socket.MSG_PEEK))
        if waiting > 1:
            wake_ups.recv(waiting - 1)
    callback(*args)
