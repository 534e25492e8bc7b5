"""The envelope of every frame between nodes: filled by the sender, checked by the receiver.

A frame never reaches the log if it arrives twice, comes from an earlier start of the peer, or is meant for another
cluster or node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tickwheel.proto.peer_pb2 import PeerFrame

FORMAT_VERSION = 1
BOOTS_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Refusal:
    """A peer may not connect. `reason` is for its operator."""

    reason: str
    final: bool = False
    """The peer can never connect as it is configured: it should stop."""
    removed: bool = False
    """The reason is that the peer was removed from the cluster."""


class Envelope:
    """Seals this node's frames and checks those of its peers. `boot_id` is random at each start."""

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
        """Fill the envelope of an outgoing frame, in place; returns the frame."""
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
        """Why a frame must be dropped; empty if it is accepted. Accepting counts it as seen, so ask once a frame."""
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
