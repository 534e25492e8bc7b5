"""Nodes as they describe themselves: status, version, members, handover, digest.

A field that a node of an earlier version does not send has the value of an empty protobuf field: 0, empty or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tickwheel.client.answers import reader
from tickwheel.client.moments import span_of
from tickwheel.proto import admin_pb2


class NodeRole(StrEnum):
    """The part of a node in the replicated log."""

    SLAVE = "slave"
    CANDIDATE = "candidate"
    """It asks for votes."""
    MASTER = "master"
    LEARNER = "learner"
    """It catches up and does not vote."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


class NodeState(StrEnum):
    """What a node does now."""

    RECOVERING = "recovering"
    """It replays what it had applied before it stopped."""
    SERVING = "serving"
    ALIGNING = "aligning"
    """A new master that advances to the clock."""
    READ_ONLY = "read_only"
    """Its disk is full."""
    STOPPING = "stopping"
    """It hands mastership over."""
    WITHOUT_TIME = "without_time"
    """A master whose members' clocks do not agree: it accepts messages, and dispatch waits."""
    NOT_MEMBER = "not_member"
    """It takes no part: it is not, or no longer, a member by the log that it holds."""
    ALONE = "alone"
    """It takes no part: it hears no master, or leads and hears no majority. What it shows may be old."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


class ClockState(StrEnum):
    """Whether the members' clocks agree."""

    UNAGREED = "unagreed"
    """No majority has agreed since the node's start."""
    OWN = "own"
    """The same, and the operator lets the master go by its own clock."""
    AGREED = "agreed"
    HOLDOVER = "holdover"
    """No majority agrees any more; the time is carried on from the last agreement."""
    EXPIRED = "expired"
    """The same for longer than the setting `clock.holdover_ms_max`."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


class ColdState(StrEnum):
    """Whether the cold tier is loaded in time."""

    EMPTY = "empty"
    """Nothing waits in it."""
    IN_TIME = "in_time"
    BEHIND = "behind"
    """The next message is due within `cold_warn` and `cold_lead` together and not loaded."""
    DUE_SOON = "due_soon"
    """The next message is due within `cold_lead` and not loaded: it may come late."""
    LATE = "late"
    """A message is overdue and not loaded."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another node, as the answering node sees it."""

    node_id: str
    address: str
    """host:port at which its peers reach it."""
    client_address: str
    """host:port at which clients reach it; empty if that is not known."""
    connected: bool
    learner: bool
    """It follows the log and does not count yet."""
    match_index: int
    """Its last log entry that is known to equal the master's. Only the master knows it."""
    applied_lag: int
    """Entries committed here and not applied there. Only the master knows it."""
    sync_age: timedelta
    """Since its last answer to a sync; 0 unless the master says it."""
    clock_offset: timedelta
    """How far its wall clock is ahead of the cluster's time; negative if it is behind."""
    clock_error: timedelta
    """How far `clock_offset` may be off."""
    time_offset: timedelta
    """How far its idea of the cluster's time is ahead of the answering node's."""


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """Rates a second of the last seconds, and the backlog of a topic. Deliveries and settlements are the master's."""

    name: str
    schedule_rate: float
    dispatch_rate: float
    deliver_rate: float
    settle_rate: float
    backlog: int
    """Messages that are dispatched and not settled, counted once for each group."""
    paused: bool


@dataclass(frozen=True, slots=True)
class ColdStatus:
    """What waits outside the cluster, in the cold tier."""

    state: ColdState
    parts: int
    """Parts that are not loaded."""
    days: int
    """Days in them."""
    messages: int
    """Messages in them, cancelled and moved ones included."""
    cancelled: int
    moved: int
    """Messages that were moved and wait for their new time."""
    next_due: datetime | None
    """The first due time of what is not loaded, in UTC; None: nothing waits."""
    late: timedelta
    """By how much `next_due` has passed."""
    loaded_late: int
    """Messages ever loaded after they were due."""
    loaded_late_max: timedelta
    """By how much the latest of them."""


@dataclass(frozen=True, slots=True)
class BulkStatus:
    """Bulk load on one node since its start."""

    bundles_held: int
    """Whole bundles on its disk."""
    received_bytes: int
    """Of bundles, from clients and peers."""
    bundles_taken_over: int
    messages_taken_over: int
    takeover: timedelta
    """From request to answer, of all bundles together. Only the master knows it."""
    refused: int
    """Offers, pieces and requests that were refused."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node and, if it leads, its cluster. Rates are of the last seconds, a second."""

    cluster_id: str
    node_id: str
    version: str
    wheel_group: int
    uptime: timedelta
    """Since the node's process began, or installed a checkpoint of another node."""
    role: NodeRole
    state: NodeState
    state_reason: str
    """Why the state is what it is; empty while serving, unless messages wait that cannot be read."""
    lease_held: bool
    """A majority has answered the master a moment ago."""
    term: int
    master_id: str
    """Empty: it knows no master."""
    master_address: str
    """host:port at which clients reach the master; empty: it knows none."""
    peers: tuple[PeerStatus, ...]
    first_index: int
    """The first entry of the log on this node."""
    last_index: int
    commit_index: int
    applied_index: int
    cursor_due: datetime | None
    """Due time of the next message, of the cursor, in UTC; None: the cursor has not moved yet."""
    cursor_index: int
    """Its global index."""
    tick: int
    """The cursor's tick,"""
    local_index: int
    """and how many units of that tick are behind it."""
    synced_tick: int
    """As a slave heard it from the master last, like the next field; on the master, as `tick`."""
    synced_local_index: int
    sync_age: timedelta
    """Since a slave heard the last sync; 0 on the master."""
    slot: timedelta
    """Width of a tick."""
    clock: datetime | None
    """The cluster's time on this node, in UTC; None: it has none yet."""
    clock_state: ClockState
    clock_error: timedelta | None
    """How far `clock` may be off while a majority of the clocks is right; None: by anything."""
    clock_offset: timedelta
    """How far the machine's wall clock is ahead of the cluster's time; negative if it is behind."""
    clock_slew: timedelta
    """Correction that is still to be slewed: above 0 time catches up, below 0 it waits."""
    clock_rate_ppm: float
    """How much faster than this machine's oscillator the cluster's time goes, in millionths."""
    clock_agreed_age: timedelta | None
    """Since a majority agreed last; None: it never did."""
    clock_reason: str
    """What is wrong with clocks; empty: nothing."""
    pending: int
    ready: int
    in_flight: int
    """Deliveries that are out with consumers. Only the master knows them."""
    schedule_rate: float
    dispatch_rate: float
    deliver_rate: float
    settle_rate: float
    redeliver_rate: float
    """Deliveries that were not the first of their message to the group."""
    late_p50: timedelta | None
    """How late half of the deliveries of the last seconds left at most; None: there were none. Master."""
    late_p99: timedelta | None
    """The same for 99 of 100."""
    topics: tuple[TopicStatus, ...]
    """The busiest first, at most 100."""
    unsettled_removed: int
    """Messages that retention removed and a group had not settled (once a group), or that no group ever saw."""
    unreadable_messages: int
    """Dispatched messages that wait because the master cannot read their records. Master."""
    unreadable_reason: str
    """What is wrong with them; empty: nothing."""
    cold: ColdStatus
    bulk: BulkStatus
    loop_lag: timedelta
    """How late the node's event loop runs."""
    disk_bytes_free: int
    disk_bytes_total: int
    disk_above_mark: bool
    """Its disk is above its mark. Messages are refused while half of the members or more are above theirs."""
    certificate_reason: str
    """What is wrong with the node's certificates; empty: nothing."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version and set-up of a node. It does not change while the node runs, but for `uptime` and `rights`."""

    version: str
    uptime: timedelta
    """Since the node's process began, or installed a checkpoint of another node."""
    cluster_id: str
    node_id: str
    rights: bool
    """Calls need a user with the right to make them."""
    tls: bool
    """The port for clients speaks TLS."""
    delivery_order: str
    """commit-first or push-first."""
    services: tuple[str, ...]
    """Full names of the services of the API that it serves."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A planned change of the master."""

    master_id: str
    """The new master."""
    term: int
    """Its term."""
    pause: timedelta
    """How long there was no master."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that belongs to the cluster."""

    node_id: str
    peer_address: str
    """host:port at which its peers reach it."""
    client_address: str
    """host:port at which clients reach it."""
    disk_uuid: str
    """Of its data directory; empty until it has called."""
    learner: bool
    """It follows the log and does not count yet. It counts by itself once it has caught up."""


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Hashes of the logical state of one node. Equal on all nodes at an equal applied index."""

    applied_index: int
    digest: bytes
    parts: Mapping[str, bytes]
    """Digest of each part, by name: tells where two nodes differ."""


def _clocks_agreed(wire: admin_pb2.NodeStatus) -> bool:
    """Whether a majority of the clocks has ever agreed."""
    return wire.clock_state in (admin_pb2.CLOCK_AGREED, admin_pb2.CLOCK_HOLDOVER, admin_pb2.CLOCK_EXPIRED)


def _late(ms: int) -> timedelta | None:
    return span_of(ms) if ms >= 0 else None


node_status_of = reader(
    NodeStatus,
    admin_pb2.NodeStatus,
    uptime=lambda wire: span_of(wire.uptime_s * 1_000),
    clock_error=lambda wire: span_of(wire.clock_error_ms) if _clocks_agreed(wire) else None,
    clock_agreed_age=lambda wire: span_of(wire.clock_agreed_age_ms) if _clocks_agreed(wire) else None,
    late_p50=lambda wire: _late(wire.late_p50_ms),
    late_p99=lambda wire: _late(wire.late_p99_ms),
)
server_info_of = reader(ServerInfo, admin_pb2.ServerInfo, uptime=lambda wire: span_of(wire.uptime_s * 1_000))
handover_of = reader(Handover, admin_pb2.TransferMasterResponse)
member_of = reader(Member, admin_pb2.Member)
digest_of = reader(StateDigest, admin_pb2.StateDigest)
