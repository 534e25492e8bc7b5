"""Digest of the logical state: equal on all nodes that applied the same index, whatever they cached.

Its time grows with topics, subscriptions, producers and staged jobs, so it is made in turns, like the capture of a
checkpoint: nothing may be applied between two turns of one digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Generator
from typing import TypeVar

from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.ports import WheelPort
from tickwheel.proto.admin_pb2 import StateDigest

TURN_TOPICS = 500
TURN_GROUPS = 50
TURN_SUBSCRIPTIONS = 500
TURN_BYTES = 2 << 20
"""These bounds limit one turn to a few milliseconds each. The last is for windows of subscriptions and staged jobs."""

T = TypeVar("T")
Turns = Generator[None, None, T]


def _of(*parts: object) -> bytes:
    sha = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        sha.update(struct.pack("<Q", len(data)) + data)
    return sha.digest()


def _listed(facts: list[str]) -> str:
    """As str() of a list of what these are the repr() of."""
    return f"[{', '.join(facts)}]"


def _topics(state: ClusterState) -> Turns[bytes]:
    facts = []
    for number, t in enumerate(state.topics, 1):
        facts.append(repr((t.topic_id, t.name, t.fifo, t.paused, *((t.owner,) if t.owner else ()))))
        if number % TURN_TOPICS == 0:
            yield
    return _of(state.topics.last_id, _listed(facts))


def _ready(state: ClusterState) -> Turns[bytes]:
    sha = hashlib.sha256()
    for number, topic in enumerate(state.topics, 1):
        topic.ready.digest_into(sha)
        if number % TURN_TOPICS == 0:
            yield
    return sha.digest()


def _subscriptions(state: ClusterState) -> Turns[bytes]:
    sha = hashlib.sha256()
    number = size = 0
    for subscription in state.groups.subscriptions():
        size += subscription.digest_into(sha)
        number += 1
        if number >= TURN_SUBSCRIPTIONS or size >= TURN_BYTES:
            number = size = 0
            yield
    return sha.digest()


def _groups(state: ClusterState) -> Turns[bytes]:
    facts = []
    number = size = 0
    for g in state.groups:
        kept = g.dead.digest(), g.waiting.digest()
        facts.append(repr((g.group_id, g.name, g.filter, g.broadcasting, g.paused, repr(g.retry), *kept)))
        number += 1
        size += g.waiting.size
        if number >= TURN_GROUPS or size >= TURN_BYTES:
            number = size = 0
            yield
    return _of(state.groups.last_id, _listed(facts))


def _staging(state: ClusterState) -> Turns[bytes]:
    sha, size = hashlib.sha256(), 0
    for content in state.staging.digest_parts():
        sha.update(content)
        size += len(content)
        if size >= TURN_BYTES:
            size = 0
            yield
    return sha.digest()


def digest(state: ClusterState, wheel: WheelPort) -> StateDigest:
    """Digest of each part by name, and of all together, in one piece."""
    turns = digest_in_turns(state, wheel)
    while True:
        try:
            next(turns)
        except StopIteration as complete:
            made: StateDigest = complete.value
            return made


def digest_in_turns(state: ClusterState, wheel: WheelPort) -> Turns[StateDigest]:
    """As `digest`, in turns of a few milliseconds; nothing may be applied in between."""
    of_wheel = yield from wheel.digest_in_turns()
    parts = {f"wheel.{name}": part for name, part in of_wheel.items()}
    members = [(m.node_id, m.peer_address, m.client_address, m.disk_uuid, m.learner) for m in state.members.values()]
    parts |= {
        "term": _of(state.lead_term),
        "settings": _of(state.cluster_id, repr(state.settings)),
        "members": _of(members, sorted(state.removed_ids)),
        "sweeps": _of(*state.sweeps.digest_parts()),
        "removed": _of(state.hour_min_kept, state.unsettled_removed),
    }
    yield
    parts["topics"] = yield from _topics(state)
    parts["ready"] = yield from _ready(state)
    parts["groups"] = yield from _groups(state)
    parts["subscriptions"] = yield from _subscriptions(state)
    parts["producers"] = yield from state.producers.digest_in_turns()
    parts["staging"] = yield from _staging(state)
    loads = state.loads.facts()
    if loads:
        parts["loads"] = _of(loads)
    cold = state.cold.digest()
    if cold:
        parts["cold"] = cold
    if state.schedules.used:
        parts["schedules"] = yield from state.schedules.digest_in_turns()
    if state.unique_keys.used:
        parts["unique_keys"] = yield from state.unique_keys.digest_in_turns()
    owners = [(group.group_id, group.owner) for group in state.groups if group.owner]
    access = state.access.message().SerializeToString(deterministic=True)
    if access or owners:
        parts["access"] = _of(access, owners)
    whole = _of(*(item for name in sorted(parts) for item in (name, parts[name])))
    return StateDigest(applied_index=state.applied_index, digest=whole, parts=parts)
