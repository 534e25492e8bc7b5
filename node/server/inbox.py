"""Frames of peers: an unexpected error in the node ends the process, not only the stream of the frame.

The error may have left the node's state half changed. If only the stream ended, the peer would dial again at once and
the node would keep running on that state. The node itself handles a full disk, so that error does not arrive here. An
implausible frame ends its stream only.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.grpc_network import Inbox
from tickwheel.replication.plausible import ImplausibleFrameError


class StrictInbox:
    """An Inbox that passes everything to another Inbox and catches its errors."""

    def __init__(self, inbox: Inbox, failed: Callable[[BaseException], None]) -> None:
        """`failed` ends the process."""
        self._inbox = inbox
        self._failed = failed

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        try:
            return self._inbox.receive(peer_id, frame)
        except ImplausibleFrameError:
            raise  # the frame had no effect: the caller drops its link
        except Exception as error:
            self._failed(error)
            return True

    def peer_connected(self, peer_id: str) -> None:
        try:
            self._inbox.peer_connected(peer_id)
        except Exception as error:
            self._failed(error)

    def peer_disconnected(self, peer_id: str) -> None:
        try:
            self._inbox.peer_disconnected(peer_id)
        except Exception as error:
            self._failed(error)
