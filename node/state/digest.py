"""Digest of the logical state: equal on all nodes that applied the same index, whatever they cached."""

from __future__ import annotations

import hashlib
import struct

from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.ports import WheelPort
from tickwheel.proto.admin_pb2 import StateDigest


def _of(*parts: object) -> bytes:
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        sha.update(struct.pack("<Q", len(data)) + data)
    return sha.digest()


def _topics(state: ClusterState) -> bytes:
    facts = [(t.topic_id, t.name, t.fifo, t.paused, *((t.owner,) if t.owner else ())) for t in state.topics]
    return _of(state.topics.last_id, facts)


def _ready(state: ClusterState) -> bytes:
    sha = hashlib.sha256()
    for topic in state.topics:
        topic.ready.digest_into(sha)
    return sha.digest()


def _subscriptions(state: ClusterState) -> bytes:
    sha = hashlib.sha256()
    for subscription in state.groups.subscriptions():
        subscription.digest_into(sha)
    return sha.digest()


def _groups(state: ClusterState) -> bytes:
    facts = [
        (g.group_id, g.name, g.filter, g.broadcasting, g.paused, repr(g.retry), g.dead.digest(), g.waiting.digest())
        for g in state.groups
    ]
    return _of(state.groups.last_id, facts)


def digest(state: ClusterState, wheel: WheelPort) -> StateDigest:
    """Digest of each part by name, and of all together."""
    parts = {f"wheel.{name}": part for name, part in wheel.digest_parts().items()}
    members = [(m.node_id, m.peer_address, m.client_address, m.disk_uuid, m.learner) for m in state.members.values()]
    parts |= {
        "term": _of(state.lead_term),
        "settings": _of(state.cluster_id, repr(state.settings)),
        "members": _of(members, sorted(state.removed_ids)),
        "topics": _topics(state),
        "ready": _ready(state),
        "groups": _groups(state),
        "subscriptions": _subscriptions(state),
        "producers": state.producers.digest(),
        "staging": state.staging.digest(),
        "sweeps": _of(*state.sweeps.digest_parts()),
        "removed": _of(state.hour_min_kept, state.unsettled_removed),
    }
    loads = state.loads.facts()
    if loads:
        parts["loads"] = _of(loads)
    cold = state.cold.digest()
    if cold:
        parts["cold"] = cold
    owners = [(group.group_id, group.owner) for group in state.groups if group.owner]
    access = state.access.message().SerializeToString(deterministic=True)
    if access or owners:
        parts["access"] = _of(access, owners)
    whole = _of(*(item for name in sorted(parts) for item in (name, parts[name])))
    return StateDigest(applied_index=state.applied_index, digest=whole, parts=parts)
