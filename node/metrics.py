"""Metrics of a node for Prometheus: their table, and the page that shows the core's numbers.

Owns the table `METRICS` (docs/METRICS.md is generated from it) and the page. The core counts in plain numbers and
arrays, never per message in a metrics library. A request for the page reads these numbers on the node's loop.
Names follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters.
"""

from __future__ import annotations

from bisect import bisect_left
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
        self._counts[bisect_left(TIME_BOUNDS_MS, took_ms)] += 1
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


def gauge(name: str, doc: str, *labels: str) -> MetricSpec:
    """A number that rises and falls."""
    return MetricSpec(name, "gauge", doc, labels)


def counter(name: str, doc: str, *labels: str) -> MetricSpec:
    """A number that only rises."""
    return MetricSpec(name, "counter", doc, labels)


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("node", "info", "Version, cluster and node id.", ("version", "cluster_id", "node_id")),
    gauge("wheel_group", "Number of the wheel group this page is about."),
    # Role and log
    gauge("master", "1 while this node is master and holds its lease."),
    gauge("role", "1 for the role the node has.", "role"),
    gauge("state", "1 for the state the node is in.", "state"),
    gauge("term", "Raft term."),
    counter("master_changes", "Times this node became master, or ceased to be."),
    gauge("log_first_index", "First entry the log still holds."),
    gauge("log_last_index", "Last entry of the log."),
    gauge("log_commit_index", "Last entry known to be committed."),
    gauge("log_applied_index", "Last entry applied."),
    gauge("applied_lag_entries", "Entries committed and not yet applied on this node."),
    gauge("peer_connected", "1 while the peer is connected.", "peer"),
    counter(
        "peer_links_dropped",
        "Links that this node dropped because a frame of the peer cannot be true. The log has each with its reason.",
    ),
    counter(
        "peer_logs_forgotten",
        "Members that came back to this master without entries that they had acknowledged. Alert on it.",
    ),
    gauge("peer_applied_lag_entries", "Entries committed here and not yet applied there.", "peer"),
    gauge("peer_sync_age_seconds", "Time since the peer's last answer to a sync.", "peer"),
    gauge("sync_age_seconds", "Time since the last sync from the master (slaves)."),
    gauge(
        "certificate_end_timestamp_seconds",
        "End of a certificate of this node, or of the authority of a port, in seconds since 1970.",
        "port",
        "what",
    ),
    # The cluster clock
    gauge(
        "clock_skew_seconds",
        "Offset of a member's wall clock (this node's own included) from the cluster's time.",
        "peer",
    ),
    gauge(
        "clock_skew_error_seconds",
        "Bound of the error of the offset between a member's wall clock and the cluster's time.",
        "peer",
    ),
    gauge("clock_disagreement_seconds", "Difference between a peer's cluster time and this node's.", "peer"),
    gauge("clock_error_seconds", "How far the cluster's time may be off on this node."),
    gauge("clock_slew_seconds", "Correction that is still to be slewed: above 0 time catches up, below 0 it waits."),
    gauge("clock_rate_ratio", "How much faster the cluster's time runs than this machine's oscillator."),
    gauge("clock_state", "1 for the state of the clocks' agreement.", "state"),
    gauge("clock_agreement_age_seconds", "Time since a majority of the clocks last agreed."),
    counter("clock_jumps_refused", "Jumps ahead that were refused: a new master's time, or this monotonic clock."),
    counter("clock_cursors_ahead", "Applied dispatches that were early by this node's clock. Alert on it."),
    # Messages
    gauge("pending_messages", "Messages scheduled, not dispatched and not cancelled."),
    gauge("topic_pending_messages", "Pending messages of the fullest topics that have a limit (master).", "topic"),
    gauge(
        "topic_pending_limit",
        "Limit of pending messages by topic_pending_max, of the fullest topics that have one (master).",
        "topic",
    ),
    gauge("ready_messages", "Messages dispatched and not yet settled by every group."),
    gauge("staged_bytes", "Bytes of rows that bulk writers have staged and not published."),
    counter("bulk_received_bytes", "Bytes of bundles received from clients and peers."),
    counter("bulk_bundles_received", "Bundles received completely on this node."),
    counter("bulk_bundles_fetched", "Bundles that this node lacked and fetched from its peers."),
    counter("bulk_bundles_removed", "Bundles removed because no load claimed them."),
    gauge("bulk_bundles_held", "Complete bundles on this node's disk."),
    counter("bulk_bundles_taken_over", "Bundles taken over."),
    counter("bulk_messages_taken_over", "Messages of bundles taken over. They also count as scheduled."),
    counter(
        "bulk_takeover_seconds", "Time from takeover requests to their answers, for those that succeeded (master)."
    ),
    counter("bulk_refusals", "Refused offers, pieces and takeovers of bundles.", "step"),
    gauge("pins", "Pinned moments that this node keeps for readers of pending messages."),
    gauge("cold_messages", "Messages in cold-tier parts that are not loaded, cancelled ones included."),
    gauge("cold_parts", "Parts of the cold tier that are not loaded."),
    gauge("cold_marks", "Cold messages that were cancelled or moved and must still be remembered."),
    gauge(
        "cold_state", "1 for the state: empty, in_time, behind (warning), due_soon (act now) or late (alert).", "state"
    ),
    gauge(
        "cold_next_due_seconds",
        "First due time of cold messages that are not loaded, in seconds since 1970. 0 means none.",
    ),
    gauge("cold_late_seconds", "How long the first due cold message that is not loaded has been overdue."),
    counter("cold_loaded_late_messages", "Cold messages loaded after they were due."),
    gauge("cold_loaded_late_seconds_max", "Lateness of the latest cold message loaded after it was due."),
    gauge("in_flight_messages", "Messages out with consumers under a lease (master)."),
    gauge("cursor_seconds", "Due time of the cursor, in seconds since 1970."),
    counter("scheduled_messages", "Messages whose schedule was applied."),
    counter("dispatched_messages", "Messages that entered ready queues."),
    counter("delivered_messages", "Deliveries to consumers by this node."),
    counter("redelivered_messages", "Deliveries that were not the first attempt."),
    counter("settled_messages", "Settlements applied."),
    counter("expired_messages", "Deliveries whose lease ran out."),
    counter("cancelled_messages", "Messages cancelled before their dispatch."),
    gauge("sweeps_running", "Bulk cancels and moves that have not ended."),
    counter("sweep_failures", "Steps of bulk cancels and moves that had to be repeated."),
    gauge("unique_keys", "Unique keys in memory, some of them of messages that hold them no longer."),
    gauge("schedules", "Recurring schedules."),
    gauge("schedules_bytes", "Names, plans and messages of recurring schedules."),
    counter("schedule_runs", "Planned times of recurring schedules, by what became of them.", "outcome"),
    counter("schedule_runs_held_up", "Looks that made no run: limits, full disks, an unknown zone (master)."),
    counter("event_file_bytes_written", "Bytes written to event files, for traces and audits."),
    counter("events_lost_batches", "Batches of events left out: they came too fast to be written, or a write failed."),
    counter("event_file_failures", "Writes of event files that failed."),
    counter("retried_messages", "Deliveries that come again through the wheel: nacks and expired leases."),
    counter("buried_messages", "Messages that became dead letters."),
    gauge("unreadable_messages", "Due messages whose records the master cannot read (master)."),
    counter("salvaged_records", "Records that this node could not read and got from another member."),
    gauge("delay_indexes_damaged", "Delay indexes that have lost rows on this node, under repair."),
    counter("index_rows_mended", "Index rows that were lost on this node and have been written again."),
    counter("set_aside_messages", "Messages that no member can read any more. They became dead letters."),
    gauge("dead_letters", "Dead letters kept, of all groups."),
    counter("filtered_messages", "Messages skipped by filters of groups, counted once for each group."),
    counter("refused_messages", "Messages refused by flow control, by limit.", "limit"),
    counter("retention_removed_messages", "Messages that retention removed before they were settled."),
    MetricSpec("lateness_seconds", "histogram", "From due time to delivery, by the cluster clock (master)."),
    # Topics that the configuration names
    counter(
        "topic_dispatched_messages",
        "Messages of the topic that entered its ready queue. (Topics in metrics.topics; updated once a second.)",
        "topic",
    ),
    counter(
        "topic_delivered_messages",
        "Deliveries of the topic's messages by this node. (Topics in metrics.topics; updated once a second.)",
        "topic",
    ),
    counter(
        "topic_settled_messages",
        "Settlements of the topic's messages applied. (Topics in metrics.topics; updated once a second.)",
        "topic",
    ),
    gauge(
        "topic_backlog_messages",
        "Messages of the topic dispatched and not settled, once for each group. (Topics in metrics.topics.)",
        "topic",
    ),
    # Consumer groups
    gauge(
        "group_backlog_messages",
        "Messages dispatched and not settled by the group (master; of the 1,000 groups created first).",
        "group",
    ),
    gauge(
        "group_oldest_unsettled_age_seconds",
        "Time since the oldest message that the group has not settled was due, to the second. 0 means none. "
        "(Master; a page looks at 1,000 subscriptions with unsettled messages.)",
        "group",
    ),
    gauge("group_in_flight_messages", "Messages of the group out with consumers under a lease (master).", "group"),
    counter(
        "group_redelivered_messages",
        "Deliveries to the group by this node that were not the first attempt (master).",
        "group",
    ),
    gauge("group_dead_letters", "Dead letters kept for the group (master).", "group"),
    gauge("groups_left_out", "Groups that have no metrics of their own because there are too many."),
    # Requests and limits
    counter("refused_calls", "Calls refused before a service saw them.", "kind"),
    counter(
        "request_faults",
        "Requests and steps that failed by a mistake of this node (NODE_FAULT). The log has each under its id.",
    ),
    counter("loop_faults", "Errors by a mistake of this node that ended a connection. The log has each."),
    gauge("client_connections", "TCP connections on the client port."),
    gauge(
        "client_connections_max",
        "Allowed connections on the client port: limits.connections_max, or what descriptors allow.",
    ),
    counter("connections_shut", "Connections ended because there were too many."),
    gauge("descriptors_open", "File descriptors in use."),
    gauge("descriptors_max", "Limit of file descriptors, without those reserved for files."),
    counter("descriptor_reserve_uses", "Files opened with a reserved descriptor because no other was left."),
    gauge("intake_requests", "Requests accepted and not yet proposed."),
    gauge("consumers", "Consumers open on this node."),
    gauge("schedule_streams", "ScheduleStream calls open on this node."),
    gauge("stream_backlog_bytes", "Deliveries waiting for slow consumers' connections."),
    # Disk
    MetricSpec(
        "fdatasync_duration_seconds",
        "histogram",
        "Time that an fdatasync of the journal took, the next file's reservation included.",
    ),
    gauge("journal_bytes", "Bytes of log that a restart would replay."),
    gauge("segment_bytes", "Bytes merged into hours' segments on disk, without bundles."),
    gauge("segments", "Segments on this node's disk: one for each hour that has one."),
    gauge("arrival_buffer_bytes", "Bytes of arrivals in memory, not yet merged into hour files."),
    counter("checkpoints", "Checkpoints written."),
    counter(
        "synced_write_failures", "Times the files with the newest synced tick and with the leases could not be written."
    ),
    gauge("disk_free_bytes", "Bytes that the data directory can still take above the reserve."),
    gauge("disk_used_ratio", "Share of the disk that is used."),
    gauge("disk_above_mark", "1 while the disk is above storage.high_water_percent."),
    # The loop
    MetricSpec("loop_lag_seconds", "histogram", "How late the loop ran due work. Says nothing of the work itself."),
    MetricSpec("tick_duration_seconds", "histogram", "How long ticks of the core took. All input waits meanwhile."),
    counter("loop_stalls", "Times the loop was late by more than 20 ms."),
    gauge("executor_waiting_works", "Jobs handed to worker threads and not finished.", "pool"),
    counter("suppressed_log_lines", "Warnings that rate limiting kept out of the log."),
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
