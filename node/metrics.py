"""Metrics of a node for Prometheus: their table, and the page that shows the core's numbers.

Owns the table `METRICS` (docs/METRICS.md is generated from it) and the page. The core counts in plain numbers and
arrays, never per message in a metrics library. A request for the page reads these numbers on the node's loop.
Names follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PREFIX = "tickwheel_"


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Counts by bound, not cumulative, the last one above all bounds; and the sum, in the metric's unit."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


TIME_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


class TimeCounts:
    """Lengths of time, counted by bound, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TIME_BOUNDS_MS) + 1)
        self._sum_ms = 0.0

    def note(self, took_ns: int) -> None:
        """Count one; below 0 counts as 0."""
        took_ms = max(0, took_ns) / 1e6
        place = next((place for place, bound in enumerate(TIME_BOUNDS_MS) if took_ms <= bound), len(TIME_BOUNDS_MS))
        self._counts[place] += 1
        self._sum_ms += took_ms

    def value(self) -> HistogramValue:
        """What was counted so far, in seconds."""
        return HistogramValue([bound / 1_000 for bound in TIME_BOUNDS_MS], list(self._counts), self._sum_ms / 1_000)


MetricValue = float | Mapping[tuple[str, ...], float] | HistogramValue
"""A number; or numbers by label values; or a histogram."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` without prefix; counters without `_total`, which is added."""

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...] = ()
    prefix: str = PREFIX
    """Empty for names that Prometheus' own conventions give."""

    @property
    def exposed_name(self) -> str:
        """The name on the page."""
        return self.prefix + self.name + ("_total" if self.kind == "counter" else "")


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("node", "info", "Version, cluster and node id.", ("version", "cluster_id", "node_id")),
    MetricSpec("wheel_group", "gauge", "Number of the wheel group this page is about."),
    # Role and log
    MetricSpec("master", "gauge", "1 while this node is master and holds its lease."),
    MetricSpec("role", "gauge", "1 for the role the node has.", ("role",)),
    MetricSpec("state", "gauge", "1 for the state the node is in.", ("state",)),
    MetricSpec("term", "gauge", "Raft term."),
    MetricSpec("master_changes", "counter", "Times this node became master, or ceased to be."),
    MetricSpec("log_first_index", "gauge", "First entry the log still holds."),
    MetricSpec("log_last_index", "gauge", "Last entry of the log."),
    MetricSpec("log_commit_index", "gauge", "Last entry known to be committed."),
    MetricSpec("log_applied_index", "gauge", "Last entry applied."),
    MetricSpec("applied_lag_entries", "gauge", "Entries committed and not yet applied on this node."),
    MetricSpec("peer_connected", "gauge", "1 while the peer is connected.", ("peer",)),
    MetricSpec(
        "peer_links_dropped",
        "counter",
        "Links that this node dropped because a frame of the peer cannot be true. The log has each with its reason.",
    ),
    MetricSpec("peer_applied_lag_entries", "gauge", "Entries committed here and not yet applied there.", ("peer",)),
    MetricSpec("peer_sync_age_seconds", "gauge", "Time since the peer's last answer to a sync.", ("peer",)),
    MetricSpec("sync_age_seconds", "gauge", "Time since the last sync from the master (slaves)."),
    MetricSpec(
        "certificate_end_timestamp_seconds",
        "gauge",
        "End of a certificate of this node, or of the authority of a port, in seconds since 1970.",
        ("port", "what"),
    ),
    # The cluster clock
    MetricSpec(
        "clock_skew_seconds",
        "gauge",
        "Offset of a member's wall clock (this node's own included) from the cluster's time.",
        ("peer",),
    ),
    MetricSpec(
        "clock_skew_error_seconds",
        "gauge",
        "Bound of the error of the offset between a member's wall clock and the cluster's time.",
        ("peer",),
    ),
    MetricSpec(
        "clock_disagreement_seconds", "gauge", "Difference between a peer's cluster time and this node's.", ("peer",)
    ),
    MetricSpec("clock_error_seconds", "gauge", "How far the cluster's time may be off on this node."),
    MetricSpec(
        "clock_slew_seconds",
        "gauge",
        "Correction that is still to be slewed: above 0 time catches up, below 0 it waits.",
    ),
    MetricSpec("clock_rate_ratio", "gauge", "How much faster the cluster's time runs than this machine's oscillator."),
    MetricSpec("clock_state", "gauge", "1 for the state of the clocks' agreement.", ("state",)),
    MetricSpec("clock_agreement_age_seconds", "gauge", "Time since a majority of the clocks last agreed."),
    MetricSpec("clock_jumps_refused", "counter", "Times a new master's time was too far ahead of the last master's."),
    MetricSpec(
        "clock_cursors_ahead", "counter", "Applied dispatches that were early by this node's clock. Alert on it."
    ),
    # Messages
    MetricSpec("pending_messages", "gauge", "Messages scheduled, not dispatched and not cancelled."),
    MetricSpec(
        "topic_pending_messages",
        "gauge",
        "Pending messages of the fullest topics that have a limit (master).",
        ("topic",),
    ),
    MetricSpec(
        "topic_pending_limit",
        "gauge",
        "Limit of pending messages by topic_pending_max, of the fullest topics that have one (master).",
        ("topic",),
    ),
    MetricSpec("ready_messages", "gauge", "Messages dispatched and not yet settled by every group."),
    MetricSpec("staged_bytes", "gauge", "Bytes of rows that bulk writers have staged and not published."),
    MetricSpec("bulk_received_bytes", "counter", "Bytes of bundles received from clients and peers."),
    MetricSpec("bulk_bundles_received", "counter", "Bundles received completely on this node."),
    MetricSpec("bulk_bundles_fetched", "counter", "Bundles that this node lacked and fetched from its peers."),
    MetricSpec("bulk_bundles_removed", "counter", "Bundles removed because no load claimed them."),
    MetricSpec("bulk_bundles_held", "gauge", "Complete bundles on this node's disk."),
    MetricSpec("bulk_bundles_taken_over", "counter", "Bundles taken over."),
    MetricSpec("bulk_messages_taken_over", "counter", "Messages of bundles taken over. They also count as scheduled."),
    MetricSpec(
        "bulk_takeover_seconds",
        "counter",
        "Time from takeover requests to their answers, for those that succeeded (master).",
    ),
    MetricSpec("bulk_refusals", "counter", "Refused offers, pieces and takeovers of bundles.", ("step",)),
    MetricSpec("pins", "gauge", "Pinned moments that this node keeps for readers of pending messages."),
    MetricSpec("cold_messages", "gauge", "Messages in cold-tier parts that are not loaded, cancelled ones included."),
    MetricSpec("cold_parts", "gauge", "Parts of the cold tier that are not loaded."),
    MetricSpec("cold_marks", "gauge", "Cold messages that were cancelled or moved and must still be remembered."),
    MetricSpec(
        "cold_state",
        "gauge",
        "1 for the state: empty, in_time, behind (warning), due_soon (act now) or late (alert).",
        ("state",),
    ),
    MetricSpec(
        "cold_next_due_seconds",
        "gauge",
        "First due time of cold messages that are not loaded, in seconds since 1970. 0 means none.",
    ),
    MetricSpec(
        "cold_late_seconds", "gauge", "How long the first due cold message that is not loaded has been overdue."
    ),
    MetricSpec("cold_loaded_late_messages", "counter", "Cold messages loaded after they were due."),
    MetricSpec("cold_loaded_late_seconds_max", "gauge", "Lateness of the latest cold message loaded after it was due."),
    MetricSpec("in_flight_messages", "gauge", "Messages out with consumers under a lease (master)."),
    MetricSpec("cursor_seconds", "gauge", "Due time of the cursor, in seconds since 1970."),
    MetricSpec("scheduled_messages", "counter", "Messages whose schedule was applied."),
    MetricSpec("dispatched_messages", "counter", "Messages that entered ready queues."),
    MetricSpec("delivered_messages", "counter", "Deliveries to consumers by this node."),
    MetricSpec("redelivered_messages", "counter", "Deliveries that were not the first attempt."),
    MetricSpec("settled_messages", "counter", "Settlements applied."),
    MetricSpec("expired_messages", "counter", "Deliveries whose lease ran out."),
    MetricSpec("cancelled_messages", "counter", "Messages cancelled before their dispatch."),
    MetricSpec("sweeps_running", "gauge", "Bulk cancels and moves that have not ended."),
    MetricSpec("sweep_failures", "counter", "Steps of bulk cancels and moves that had to be repeated."),
    MetricSpec("unique_keys", "gauge", "Unique keys in memory, some of them of messages that hold them no longer."),
    MetricSpec("schedules", "gauge", "Recurring schedules."),
    MetricSpec("schedules_bytes", "gauge", "Names, plans and messages of recurring schedules."),
    MetricSpec(
        "schedule_runs", "counter", "Planned times of recurring schedules, by what became of them.", ("outcome",)
    ),
    MetricSpec(
        "schedule_runs_held_up", "counter", "Looks that made no run: limits, full disks, an unknown zone (master)."
    ),
    MetricSpec("event_file_bytes_written", "counter", "Bytes written to event files, for traces and audits."),
    MetricSpec(
        "events_lost_batches",
        "counter",
        "Batches of events left out because they came faster than they could be written.",
    ),
    MetricSpec("event_file_failures", "counter", "Writes of event files that failed."),
    MetricSpec(
        "retried_messages", "counter", "Deliveries that come again through the wheel: nacks and expired leases."
    ),
    MetricSpec("buried_messages", "counter", "Messages that became dead letters."),
    MetricSpec("unreadable_messages", "gauge", "Due messages whose records the master cannot read (master)."),
    MetricSpec("salvaged_records", "counter", "Records that this node could not read and got from another member."),
    MetricSpec("delay_indexes_damaged", "gauge", "Delay indexes that have lost rows on this node, under repair."),
    MetricSpec("index_rows_mended", "counter", "Index rows that were lost on this node and have been written again."),
    MetricSpec("set_aside_messages", "counter", "Messages that no member can read any more. They became dead letters."),
    MetricSpec("dead_letters", "gauge", "Dead letters kept, of all groups."),
    MetricSpec("filtered_messages", "counter", "Messages skipped by filters of groups, counted once for each group."),
    MetricSpec("refused_messages", "counter", "Messages refused by flow control, by limit.", ("limit",)),
    MetricSpec("retention_removed_messages", "counter", "Messages that retention removed before they were settled."),
    MetricSpec(
        "lateness_seconds",
        "histogram",
        "From due time to delivery, by the cluster clock (master).",
    ),
    # Topics that the configuration names
    MetricSpec(
        "topic_dispatched_messages",
        "counter",
        "Messages of the topic that entered its ready queue. (Topics in metrics.topics; updated once a second.)",
        ("topic",),
    ),
    MetricSpec(
        "topic_delivered_messages",
        "counter",
        "Deliveries of the topic's messages by this node. (Topics in metrics.topics; updated once a second.)",
        ("topic",),
    ),
    MetricSpec(
        "topic_settled_messages",
        "counter",
        "Settlements of the topic's messages applied. (Topics in metrics.topics; updated once a second.)",
        ("topic",),
    ),
    MetricSpec(
        "topic_backlog_messages",
        "gauge",
        "Messages of the topic dispatched and not settled, once for each group. (Topics in metrics.topics.)",
        ("topic",),
    ),
    # Consumer groups
    MetricSpec(
        "group_backlog_messages",
        "gauge",
        "Messages dispatched and not settled by the group (master; of the 1,000 groups created first).",
        ("group",),
    ),
    MetricSpec(
        "group_oldest_unsettled_age_seconds",
        "gauge",
        "Time since the oldest message that the group has not settled was due, to the second. 0 means none. "
        "(Master; a page looks at 2,000 subscriptions with unsettled messages.)",
        ("group",),
    ),
    MetricSpec(
        "group_in_flight_messages",
        "gauge",
        "Messages of the group out with consumers under a lease (master).",
        ("group",),
    ),
    MetricSpec(
        "group_redelivered_messages",
        "counter",
        "Deliveries to the group by this node that were not the first attempt (master).",
        ("group",),
    ),
    MetricSpec("group_dead_letters", "gauge", "Dead letters kept for the group (master).", ("group",)),
    MetricSpec("groups_left_out", "gauge", "Groups that have no metrics of their own because there are too many."),
    # Requests and limits
    MetricSpec(
        "refused_calls",
        "counter",
        "Calls refused before a service saw them.",
        ("kind",),
    ),
    MetricSpec(
        "request_faults",
        "counter",
        "Requests and steps that failed by a mistake of this node (NODE_FAULT). The log has each under its id.",
    ),
    MetricSpec("client_connections", "gauge", "TCP connections on the client port."),
    MetricSpec(
        "client_connections_max",
        "gauge",
        "Allowed connections on the client port: limits.connections_max, or what descriptors allow.",
    ),
    MetricSpec("connections_shut", "counter", "Connections ended because there were too many."),
    MetricSpec("descriptors_open", "gauge", "File descriptors in use."),
    MetricSpec("descriptors_max", "gauge", "Limit of file descriptors, without those reserved for files."),
    MetricSpec(
        "descriptor_reserve_uses", "counter", "Files opened with a reserved descriptor because no other was left."
    ),
    MetricSpec("intake_requests", "gauge", "Requests accepted and not yet proposed."),
    MetricSpec("consumers", "gauge", "Consumers open on this node."),
    MetricSpec("schedule_streams", "gauge", "ScheduleStream calls open on this node."),
    MetricSpec("stream_backlog_bytes", "gauge", "Deliveries waiting for slow consumers' connections."),
    # Disk
    MetricSpec(
        "fdatasync_duration_seconds",
        "histogram",
        "Time that an fdatasync of the journal took, the next file's reservation included.",
    ),
    MetricSpec("journal_bytes", "gauge", "Bytes of log that a restart would replay."),
    MetricSpec("segment_bytes", "gauge", "Bytes merged into hours' segments on disk, without bundles."),
    MetricSpec("segments", "gauge", "Segments on this node's disk: one for each hour that has one."),
    MetricSpec("arrival_buffer_bytes", "gauge", "Bytes of arrivals in memory, not yet merged into hour files."),
    MetricSpec("checkpoints", "counter", "Checkpoints written."),
    MetricSpec(
        "synced_write_failures",
        "counter",
        "Times the files with the newest synced tick and with the leases could not be written.",
    ),
    MetricSpec("disk_free_bytes", "gauge", "Bytes that the data directory can still take above the reserve."),
    MetricSpec("disk_used_ratio", "gauge", "Share of the disk that is used."),
    MetricSpec("disk_above_mark", "gauge", "1 while the disk is above storage.high_water_percent."),
    # The loop
    MetricSpec("loop_lag_seconds", "histogram", "How late the loop ran due work. Says nothing of the work itself."),
    MetricSpec("tick_duration_seconds", "histogram", "How long ticks of the core took. All input waits meanwhile."),
    MetricSpec("loop_stalls", "counter", "Times the loop was late by more than 20 ms."),
    MetricSpec("executor_waiting_works", "gauge", "Jobs handed to worker threads and not finished.", ("pool",)),
    MetricSpec("suppressed_log_lines", "counter", "Warnings that rate limiting kept out of the log."),
    # The process, under the names that Prometheus' dashboards know
    MetricSpec("process_cpu_seconds", "counter", "Processor time of the process, of user and system.", prefix=""),
    MetricSpec("process_start_time_seconds", "gauge", "Start of the process, in seconds since 1970.", prefix=""),
    MetricSpec("process_resident_memory_bytes", "gauge", "Memory of the process that is in RAM.", prefix=""),
    MetricSpec("process_virtual_memory_bytes", "gauge", "Address space of the process.", prefix=""),
    MetricSpec("process_open_fds", "gauge", "File descriptors in use, as counted a second ago at most.", prefix=""),
    MetricSpec("process_max_fds", "gauge", "Limit of file descriptors of the process.", prefix=""),
)

BY_NAME = {spec.name: spec for spec in METRICS}


def _family(spec: MetricSpec, value: MetricValue) -> Metric:
    name = spec.prefix + spec.name
    if spec.kind == "histogram":
        assert isinstance(value, HistogramValue)
        cumulated = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*value.bounds, float("inf")], value.counts, strict=True):
            cumulated += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(cumulated)))
        family = HistogramMetricFamily(name, spec.doc)
        family.add_metric([], buckets, value.sum)
        return family
    assert not isinstance(value, HistogramValue)
    rows: Mapping[tuple[str, ...], float] = value if isinstance(value, Mapping) else {(): value}
    if spec.kind == "info":
        info = InfoMetricFamily(name, spec.doc)
        for labels in rows:
            info.add_metric([], dict(zip(spec.labels, labels, strict=True)))
        return info
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family_of_rows = make(name, spec.doc, labels=spec.labels)
    for labels, number in sorted(rows.items()):
        assert len(labels) == len(spec.labels), f"{spec.name} has labels {spec.labels}"
        family_of_rows.add_metric(labels, float(number))
    return family_of_rows


class _SourceCollector(Collector):
    def __init__(self, read: Callable[[], Mapping[str, MetricValue]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        values = self._read()
        unknown = set(values) - set(BY_NAME)
        assert not unknown, f"metrics without an entry in METRICS: {sorted(unknown)}"
        return [_family(spec, values[spec.name]) for spec in METRICS if spec.name in values]

    def describe(self) -> Iterable[Metric]:
        return []


def registry_of(read: Callable[[], Mapping[str, MetricValue]]) -> CollectorRegistry:
    """A new registry, which calls `read` for its numbers at each collection."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SourceCollector(read))
    return registry


def reference() -> str:
    """The page docs/METRICS.md."""
    rows = [
        "# Metrics",
        "",
        "Generated by `tickwheel config metrics`; do not edit.",
        "",
        "Served as Prometheus text (or OpenMetrics, if asked for) at `http://<listen.metrics_bind>/metrics`. Counters",
        "count since the process started. Histograms have the usual `_bucket`, `_sum` and `_count`.",
        "[MONITORING.md](MONITORING.md) has alerts, a dashboard, and what to do.",
        "",
        "| metric | type | labels | what it is |",
        "|---|---|---|---|",
    ]
    for spec in METRICS:
        name = spec.exposed_name + ("_info" if spec.kind == "info" else "")
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        rows.append(f"| `{name}` | {spec.kind} | {labels} | {spec.doc} |")
    return "\n".join(rows) + "\n"
