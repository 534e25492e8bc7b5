"""What peers say, on its way to the node: an error that nobody foresaw ends the node, not the stream it came by.

It may have left the node's state half changed; a peer would dial again at once and the node would go on with it. A full
disk never comes here: the node deals with it itself. A frame that cannot be true ends the stream alone.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.grpc_network import Inbox
from tickwheel.replication.plausible import ImplausibleFrameError


class GuardedInbox:
    """An Inbox in front of another."""

    def __init__(self, inbox: Inbox, failed: Callable[[BaseException], None]) -> None:
        """`failed` ends the process."""
        self._inbox = inbox
        self._failed = failed

    def receive(self, peer_id: str, frame: PeerFrame) -> None:
        """See Inbox."""
        try:
            self._inbox.receive(peer_id, frame)
        except ImplausibleFrameError:
            raise  # nothing was done with it: its link is dropped
        except Exception as error:
            self._failed(error)

    def peer_connected(self, peer_id: str) -> None:
        """See Inbox."""
        try:
            self._inbox.peer_connected(peer_id)
        except Exception as error:
            self._failed(error)

    def peer_disconnected(self, peer_id: str) -> None:
        """See Inbox."""
        try:
            self._inbox.peer_disconnected(peer_id)
        except Exception as error:
            self._failed(error)
