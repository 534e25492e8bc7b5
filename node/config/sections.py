"""The configuration tree of a node: one frozen dataclass a TOML section, every field with bounds and words.

Owns names, defaults and bounds. `read.py` fills it, `relations.py` checks what fields promise each other,
`reference.py` turns it into docs/CONFIG.md. Read once at start and never changed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tickwheel.node.config import fields
from tickwheel.node.core.config import CoreConfig, DeliveryOrder
from tickwheel.node.state.settings import SLOT_MS_ALLOWED
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.replication.cluster_clock import FRESH_MS
from tickwheel.replication.log import Member

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ClusterSection:
    """The cluster that this node belongs to."""

    id: str = fields.name("Name of the cluster. Data of another cluster is refused. Required.")
    join: str = fields.choice(
        "new",
        ("new", "existing"),
        "`new`: found the cluster together with `members`. `existing`: wait until an operator adds this node to a "
        "running cluster (`tickwheel member add`). It matters only while the data directory is empty.",
    )
    members: tuple[Member, ...] = fields.members(
        "Members the new cluster starts with, the same list on each of them. Empty: this node alone."
    )


@dataclass(frozen=True, slots=True)
class NodeSection:
    """Identity of this node, and the place of its data."""

    id: str = fields.name("Name of this node in the cluster. Never use it again for another disk. Required.")
    data_dir: str = fields.text("", "Directory for journal, segments and checkpoints. Required.", allowed="a path")


@dataclass(frozen=True, slots=True)
class ListenSection:
    """Where the node listens, and what it tells others to dial."""

    client_bind: str = fields.address(
        "127.0.0.1:7700", "Address on which the client and admin services listen.", port_min=0
    )
    client_advertised: str = fields.address(
        "", "Address at which clients reach this node.", empty="the same as client_bind"
    )
    peer_bind: str = fields.address(
        "127.0.0.1:7701", "Address on which this node listens for the other nodes.", port_min=0
    )
    peer_advertised: str = fields.address(
        "", "Address at which the other nodes reach this node.", empty="the same as peer_bind"
    )
    metrics_bind: str = fields.address(
        "127.0.0.1:7702",
        "Address of metrics and probes (plain HTTP: `/metrics`, `/livez`, `/readyz`, `/healthz`). Shows numbers, "
        "states and names, never what a message holds.",
        empty="no metrics and no probes",
        port_min=0,
    )
    insecure: bool = fields.flag(
        False, "Allow addresses other than loopback without TLS. Anybody who reaches the ports can then do anything."
    )


@dataclass(frozen=True, slots=True)
class RaftSection:
    """Elections, lease, the 50 ms sync, and how much may be in flight in the replicated log."""

    election_timeout_min_ms: int = fields.core_number(
        "election_timeout_min_ms", 100, 60_000, "Shortest silence of the master before a slave stands for election."
    )
    election_timeout_max_ms: int = fields.core_number(
        "election_timeout_max_ms", 101, 120_000, "Longest such silence. Each node draws its timeout between the two."
    )
    lease_ms: int = fields.core_number(
        "lease_ms",
        20,
        60_000,
        "How long the master may act after a majority was last heard. It is below "
        "election_timeout_min_ms, so that an isolated master stops before another one starts.",
    )
    sync_period_ms: int = fields.core_number(
        "sync_period_ms", 10, 1_000, "Pause between syncs of cursor and leases to each slave."
    )
    propose_in_flight_max: int = fields.core_number(
        "propose_in_flight_max",
        1,
        4_096,
        "Log entries proposed and not yet applied. Further requests wait and are merged.",
    )
    propose_bytes_max: int = fields.core_number(
        "propose_bytes_max", MIB, GIB, "Bytes of log entries proposed and not yet applied."
    )
    entry_bytes_target: int = fields.core_number(
        "entry_bytes_target", 64 * KIB, 4 * MIB, "Waiting requests are merged into one log entry up to about this size."
    )
    apply_slice_ms: int = fields.core_number(
        "apply_slice_ms",
        1,
        50,
        "How long the application of entries may hold the loop before other work gets its turn.",
    )


@dataclass(frozen=True, slots=True)
class DispatchSection:
    """Moving due messages from the wheel to ready queues."""

    in_flight_max: int = fields.core_number(
        "dispatch_in_flight_max", 1, 256, "Dispatch commands in flight at once. 1 is the synchronous mode."
    )
    messages_max: int = fields.core_number(
        "dispatch_messages_max", 1, 1_000_000, "Messages that one dispatch command moves at most."
    )
    ahead_ms: int = fields.core_number(
        "dispatch_ahead_ms",
        0,
        50,
        "How long before its first message is due a dispatch is proposed. Under load it takes along what is due up to "
        "40 ms later. Messages are held until they are due.",
    )
    period_ms: int = fields.core_number(
        "dispatch_period_ms",
        0,
        1_000,
        "Shortest pause between dispatches that are not full. It bounds the growth of the log.",
    )


@dataclass(frozen=True, slots=True)
class DeliverySection:
    """Handing ready messages to consumers."""

    order: str = fields.choice(
        "commit-first",
        ("commit-first", "push-first"),
        "`commit-first`: a dispatch is committed before its messages are delivered. `push-first`: the"
        " messages are delivered while the dispatch is being committed. A failover then repeats what "
        "was delivered since the last 50 ms sync.",
    )
    push_behind_ms: int = fields.core_number(
        "push_behind_ms",
        1,
        49,
        "push-first: how long the commit may stay behind. At that limit nothing more is delivered ahead of it.",
    )
    lease_ms: int = fields.core_number(
        "lease_default_ms", 100, 43_200_000, "How long a delivery may stay unsettled if the consumer names no lease."
    )
    staged_messages_max: int = fields.core_number(
        "staged_messages_max",
        64,
        1_000_000,
        "Messages of one group and topic that were read ahead and wait for credits.",
    )
    staged_bytes_max: int = fields.core_number(
        "staged_bytes_max",
        8 * MIB,
        4 * GIB,
        "Bytes of such messages. Beyond that they wait on disk; one larger message is still read.",
    )
    batch_messages_max: int = fields.core_number(
        "batch_messages_max", 1, 10_000, "Messages in one batch to a consumer."
    )
    batch_bytes_max: int = fields.core_number(
        "batch_bytes_max",
        64 * KIB,
        64 * MIB,
        "Bytes in one batch to a consumer. A single larger message is still sent.",
    )
    stream_bytes_max: int = fields.number(
        8 * MIB, 8 * MIB, GIB, "Bytes of deliveries that wait for the connection of one slow consumer."
    )
    sessions_max: int = fields.core_number("sessions_max", 1, 1_000_000, "Consumers open on this node.")


@dataclass(frozen=True, slots=True)
class ClockSection:
    """The cluster clock: what a majority of the nodes' wall clocks agrees on. Due times are compared with it alone."""

    tolerance_ms: int = fields.core_number(
        "clock_tolerance_ms",
        1,
        60_000,
        "How far apart the clocks of a majority may be and still agree. The closest majority decides."
        " Its differences are part of the error that is shown.",
    )
    holdover_ms_max: int = fields.core_number(
        "clock_holdover_ms_max",
        5_000,
        30 * 86_400_000,
        "How long dispatch continues from the last agreement when no majority agrees any more. Then it stops.",
    )
    skew_warn_ms: int = fields.core_number(
        "clock_skew_warn_ms",
        1,
        60_000,
        "Nodes warn of a node whose wall clock is further off the cluster's time than this.",
    )
    drift_ppm_max: int = fields.core_number(
        "clock_drift_ppm_max",
        1,
        50_000,
        "How much an oscillator may be off, in millionths. The error grows by it between agreements.",
    )
    slew_ppm_max: int = fields.core_number(
        "clock_slew_ppm_max",
        500,
        500_000,
        "How much too fast or too slow the cluster's time may run while it is corrected, in "
        "millionths. Once a master goes by the time, it is never set.",
    )
    sample_period_ms: int = fields.core_number(
        "clock_sample_period_ms", 50, FRESH_MS // 4, "Pause between two questions to another node for its clock."
    )
    own_until_agreed: bool = fields.core_flag(
        "clock_own_until_agreed",
        "Let a master dispatch by its own clock until the nodes have agreed on a time for the first "
        "time since its start. If false, the master accepts schedules with due times meanwhile, and "
        "dispatch waits.",
    )


@dataclass(frozen=True, slots=True)
class WheelSection:
    """Memory of the wheel. Neither value affects any id, order or answer."""

    buffer_bytes_max: int = fields.core_number(
        "buffer_bytes_max",
        8 * MIB,
        64 * GIB,
        "Arrivals kept in memory before they are merged into hour files. If the disk cannot keep up, "
        "a master refuses schedules at twice this much. At three times this much a node stops "
        "applying its log. Both end when the disk has caught up.",
    )
    preload_ms: int = fields.core_number("preload_ms", 1_000, 600_000, "How far ahead of the clock ticks are loaded.")


@dataclass(frozen=True, slots=True)
class StorageSection:
    """Journal, checkpoints, disk space."""

    journal_segment_bytes: int = fields.core_number(
        "segment_bytes", MIB, GIB, "Size of one journal file. It is preallocated."
    )
    checkpoint_log_bytes: int = fields.core_number(
        "checkpoint_log_bytes", MIB, 64 * GIB, "A checkpoint is written once a restart would replay more log than this."
    )
    checkpoint_entries: int = fields.core_number(
        "checkpoint_entries",
        100,
        10_000_000,
        "A checkpoint is also written once a restart would replay "
        "more entries than this. A restart replays 1,000 to 3,000 a "
        "second.",
    )
    checkpoint_period_ms: int = fields.core_number(
        "checkpoint_period_ms", 1_000, 86_400_000, "Longest time between checkpoints while the log grows."
    )
    high_water_percent: int = fields.number(
        85,
        0,
        99,
        "From this share of its disk on, a node is above its high-water mark, until 5 % less is used."
        " A master above the mark hands over to a member with room. New schedules are refused while "
        "half of the members or more are above theirs; all else goes on. 0: no mark.",
        core="disk_high_percent",
    )
    events_bytes_max: int = fields.number(
        256 * MIB,
        0,
        1024 * GIB,
        "Bytes of event files kept for `tickwheel trace` and audits. The oldest are removed first. 0:"
        " none are written, which saves up to 3 % of a core (0.03 ms a batch on the loop, 0.15 ms in "
        "a worker).",
        core="events_bytes_max",
    )
    space_reserve_bytes: int = fields.number(
        256 * MIB,
        0,
        1024 * GIB,
        "With less free space than this a node is above its high-water mark, whatever "
        "`high_water_percent` says. A master then hands over to a member with room. Schedules are "
        "refused unless a majority of the members has room.",
    )


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Limits of what connections may ask of this node. At each limit callers get a retryable LIMIT_REACHED."""

    request_bytes_max: int = fields.number(8 * MIB, 5 * MIB, 64 * MIB, "Size of one gRPC message in either direction.")
    intake_bytes_max: int = fields.core_number(
        "intake_bytes_max", 8 * MIB, 4 * GIB, "Bytes of requests accepted and not yet proposed."
    )
    intake_requests_max: int = fields.core_number(
        "intake_requests_max", 16, 10_000_000, "Number of requests accepted and not yet proposed."
    )
    stream_batches_max: int = fields.number(
        32,
        1,
        4_096,
        "Batches of one ScheduleStream that are being processed; 16 small ones of one message without a producer id "
        "count as one. Further batches are not read meanwhile.",
    )
    calls_max: int = fields.number(10_000, 16, 1_000_000, "Calls and streams served at once on the client port.")
    connections_max: int = fields.number(
        10_000,
        8,
        1_000_000,
        "TCP connections on the client port. Fewer are allowed if the limit of open files "
        "(LimitNOFILE) has no room for them beside what the node itself needs. Excess connections are"
        " ended: those of the address with the most, idle ones first.",
    )
    connection_idle_ms: int = fields.number(
        300_000, 1_000, 86_400_000, "A connection without a call is closed after this time. Clients open a new one."
    )
    connection_streams_max: int = fields.number(
        2_048, 16, 1_000_000, "Calls and streams at once on one connection. Further ones wait in the client."
    )
    caller_calls_max: int = fields.number(
        5_000, 16, 1_000_000, "Calls and streams at once from one address, over all its connections."
    )
    status_streams_max: int = fields.number(64, 1, 10_000, "WatchStatus streams at once.")
    stop_ms: int = fields.number(
        10_000, 100, 600_000, "How long a stop may take: handover, open calls, last fsync. Then it is forced."
    )


@dataclass(frozen=True, slots=True)
class TlsSection:
    """Certificates (PEM files). Each port has TLS once its certificate is named."""

    client_cert_file: str = fields.text("", "Server certificate of the client port.", allowed="a path, or empty")
    client_key_file: str = fields.text("", "Private key of that certificate.", allowed="a path, or empty")
    client_ca_file: str = fields.text("", "Authority that signs certificates of clients.", allowed="a path, or empty")
    require_client_cert: bool = fields.flag(
        True, "Refuse clients without a certificate. If false, such clients get the client role, never the admin role."
    )
    admin_names: tuple[str, ...] = fields.names(
        "Common names of certificates with the admin role, beside those whose organisational unit is `tickwheel-admin`."
    )
    client_names: tuple[str, ...] = fields.names(
        "Common names of certificates with the client role, beside those whose organisational unit is"
        " `tickwheel-client`. `*` gives the role to every certificate of the authority, whatever the "
        "certificate says."
    )
    peer_cert_file: str = fields.text(
        "", "This node's certificate on the peer port, both as server and as client.", allowed="a path, or empty"
    )
    peer_key_file: str = fields.text("", "Private key of that certificate.", allowed="a path, or empty")
    peer_ca_file: str = fields.text("", "Authority that signs certificates of nodes.", allowed="a path, or empty")


@dataclass(frozen=True, slots=True)
class MetricsSection:
    """What the page `/metrics` shows beyond what it always has."""

    topics: tuple[str, ...] = fields.topics(
        "metrics_topics",
        100,
        "Topics with metrics of their own: messages dispatched, delivered and settled, and the backlog. A topic need "
        "not exist yet.",
    )


@dataclass(frozen=True, slots=True)
class LogSection:
    """What the process writes to standard error."""

    level: str = fields.choice("info", ("debug", "info", "warning", "error"), "Lowest level that is written.")
    format: str = fields.choice("json", ("json", "console"), "One JSON object a line, or text for human readers.")


@dataclass(frozen=True, slots=True)
class SeedSection:
    """First values of the replicated settings of a new cluster. Only `UpdateSettings` changes them later."""

    delay_levels: str | None = fields.text(
        None, "Delay levels, shortest first.", allowed="up to 64 of a number and s, m, h or d, with blanks; or absent"
    )
    slot_ms: int | None = fields.optional_number(
        SLOT_MS_ALLOWED[0], SLOT_MS_ALLOWED[-1], "Width of a tick: 1000, 500, 200 or 100. It can never be changed."
    )
    attempts_max: int | None = fields.setting("attempts_max", "Deliveries of a message before it is a dead letter.")
    delay_ms_max: int | None = fields.setting("delay_ms_max", "How far ahead a message may be due.")
    payload_bytes_max: int | None = fields.setting("payload_bytes_max", "Size of a payload.")
    batch_messages_max: int | None = fields.setting("batch_messages_max", "Messages in a batch.")
    retention_ms: int | None = fields.setting(
        "retention_ms", "How long dispatched messages are kept that a group has not settled."
    )
    topics_auto_create: bool | None = fields.optional_flag("Create a topic when it is first scheduled to.")
    groups_auto_create: bool | None = fields.optional_flag("Create a group when it first consumes.")
    window_messages_max: int | None = fields.setting(
        "window_messages_max", "Messages between a group's floor and its newest delivery."
    )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything one node is told. Get it from `read_config`; the parts have been checked against each other."""

    cluster: ClusterSection = field(default_factory=ClusterSection)
    node: NodeSection = field(default_factory=NodeSection)
    listen: ListenSection = field(default_factory=ListenSection)
    raft: RaftSection = field(default_factory=RaftSection)
    dispatch: DispatchSection = field(default_factory=DispatchSection)
    delivery: DeliverySection = field(default_factory=DeliverySection)
    clock: ClockSection = field(default_factory=ClockSection)
    wheel: WheelSection = field(default_factory=WheelSection)
    storage: StorageSection = field(default_factory=StorageSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    tls: TlsSection = field(default_factory=TlsSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    log: LogSection = field(default_factory=LogSection)
    seed: SeedSection = field(default_factory=SeedSection)

    @property
    def client_address(self) -> str:
        """host:port told to clients."""
        return self.listen.client_advertised or self.listen.client_bind

    @property
    def peer_address(self) -> str:
        """host:port told to the other nodes."""
        return self.listen.peer_advertised or self.listen.peer_bind

    @property
    def data_path(self) -> Path:
        return Path(self.node.data_dir)

    @property
    def members(self) -> tuple[Member, ...]:
        """First members of a new cluster: the list, or this node alone."""
        if self.cluster.join == "existing":
            return ()
        return self.cluster.members or (Member(self.node.id, self.peer_address, self.client_address),)

    @property
    def seed_settings(self) -> Settings:
        """First replicated settings of a new cluster; absent fields take the state machine's defaults."""
        return Settings(**dataclasses.asdict(self.seed))

    @property
    def core(self) -> CoreConfig:
        """The part that NodeCore is built from: every field that names one of its own, and the delivery order."""
        values: dict[str, Any] = {}
        for section in dataclasses.fields(self):
            content = getattr(self, section.name)
            for item in dataclasses.fields(content):
                spec: fields.FieldSpec = item.metadata[fields.KEY]
                if spec.core:
                    values[spec.core] = getattr(content, item.name)
        return CoreConfig(delivery_order=DeliveryOrder(self.delivery.order), **values)
