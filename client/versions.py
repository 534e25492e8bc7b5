"""Knows the nodes whose version lacks the calls that carry many messages.

An unknown method is refused before anything is looked at. So the refusal is certain, and the same request may go to the
node in the older form.
"""

from __future__ import annotations

import time
import weakref

import grpc

ASK_AGAIN_S = 60.0
"""After this long the node may have been upgraded."""


class OlderNodes:
    """Channels to nodes that lack a method."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[grpc.aio.Channel, float] = weakref.WeakKeyDictionary()

    def lacks(self, channel: grpc.aio.Channel) -> bool:
        """Whether the node is known to lack the method."""
        seen_s = self._seen.get(channel)
        return seen_s is not None and time.monotonic() - seen_s < ASK_AGAIN_S

    def note(self, channel: grpc.aio.Channel, error: grpc.aio.AioRpcError) -> bool:
        """Note what a call ended with. Returns whether the node lacks the method."""
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return False
        self._seen[channel] = time.monotonic()
        return True
