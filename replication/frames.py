"""The envelope of every frame between nodes: written when it leaves, checked when it arrives.

What arrives twice, from an earlier start of the peer, for another cluster or for another node never
reaches the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import PeerFrame

FORMAT_VERSION = 1
BOOTS_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a peer may not speak here, in words for its operator."""

    reason: str
    final: bool = False
    """It never may, as it is: it should stop."""
    removed: bool = False
    """Because it was removed from the cluster."""


class Envelope:
    """One node's side of its envelopes."""

    def __init__(self, cluster_id: str, node_id: str, boot_id: int, wheel_group: int, disk_uuid: str) -> None:
        self._cluster_id = cluster_id
        self._node_id = node_id
        self.boot_id = boot_id
        self._wheel_group = wheel_group
        self._disk_uuid = disk_uuid
        self._sequence = 0
        self._seen: dict[str, tuple[int, int]] = {}
        self._past_boots: dict[str, deque[int]] = {}

    def seal(self, frame: PeerFrame, peer_id: str, term: int, connection_id: int) -> PeerFrame:
        """Fill the envelope of an outgoing frame."""
        self._sequence += 1
        frame.cluster_id = self._cluster_id
        frame.sender_id = self._node_id
        frame.receiver_id = peer_id
        frame.boot_id = self.boot_id
        frame.sequence = self._sequence
        frame.term = term
        frame.connection_id = connection_id
        frame.format_version = FORMAT_VERSION
        frame.wheel_group = self._wheel_group
        frame.disk_uuid = self._disk_uuid
        return frame

    def refuses(self, peer_id: str, frame: PeerFrame) -> str:
        """Why a frame is dropped; empty if it is taken (and then never again)."""
        if frame.cluster_id != self._cluster_id:
            return f"it is of cluster {frame.cluster_id}"
        if frame.sender_id != peer_id or frame.receiver_id != self._node_id:
            return f"it goes from {frame.sender_id} to {frame.receiver_id}"
        if frame.wheel_group != self._wheel_group:
            return f"it is of wheel group {frame.wheel_group}"
        if not FORMAT_VERSION - 1 <= frame.format_version <= FORMAT_VERSION + 1:
            return f"it has format {frame.format_version}"
        boot_id, sequence = self._seen.get(peer_id, (0, 0))
        if frame.boot_id != boot_id:
            past = self._past_boots.setdefault(peer_id, deque(maxlen=BOOTS_REMEMBERED))
            if frame.boot_id in past:
                return "it is of an earlier start"
            past.append(boot_id)
        elif frame.sequence <= sequence:
            return "it came twice"
        self._seen[peer_id] = (frame.boot_id, frame.sequence)
        return ""

    def boot_of(self, peer_id: str) -> int:
        """The newest start of a peer that was heard of."""
        return self._seen.get(peer_id, (0, 0))[0]
