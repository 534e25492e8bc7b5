"""Configuration of a node's core: each field with its default and the reason.

Times and sizes carry their unit in the name. Values on which replicas must agree are not here but in the
replicated settings (`node/state/settings.py`). Bounds and relations are those of the configuration: node/config.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tickwheel.replication.cluster_clock import ClockSettings


class DeliveryOrder(enum.Enum):
    """Whether messages go out after their dispatch is committed (commit-first) or before (push-first)."""

    COMMIT_FIRST = "commit-first"
    PUSH_FIRST = "push-first"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Read once at start; made by `NodeConfig.core`, which has checked the values."""

    sync_period_ms: int = 50
    """How often the master sends tick, local index and new leases to the slaves."""

    election_timeout_min_ms: int = 400
    election_timeout_max_ms: int = 700
    lease_ms: int = 300
    """The master acts only while a majority answered within this time; shorter than the shortest election timeout."""

    delivery_order: DeliveryOrder = DeliveryOrder.COMMIT_FIRST
    dispatch_in_flight_max: int = 16
    """Dispatch commands proposed and not yet applied; 1 is the synchronous mode."""

    dispatch_messages_max: int = 8_192
    """Messages that one dispatch command moves at most; more only if they arrive between proposal and apply."""

    dispatch_ahead_ms: int = 12
    """A dispatch is proposed this long before its first message is due: that hides the majority's fdatasync. It takes
    along what is due a little later (`Spacing` in pacing.py)."""

    dispatch_period_ms: int = 8
    """Least pause between dispatches that are not full: bounds the log's growth."""

    delivery_period_ms: int = 4
    """Least pause between batches of one group and topic that are not full: many tiny ones would cost the node and its
    consumers more time than they save."""

    push_behind_ms: int = 40
    """Push-first: while a commit is later than this, nothing more is delivered ahead. Kept under 50."""

    propose_in_flight_max: int = 8
    """Entries proposed and not yet applied. Further commands wait and are merged (group commit)."""

    gather_ms: int = 4
    """Least time from the last entry to an entry of settlements; more while entries are spaced (`Spacing` in
    pacing.py). A dispatch leaves at once and takes waiting commands along. 0: settlements leave at once, and entries
    are not spaced."""

    spaced_rate_min: int = 500
    """Entries are spaced while at least so many messages a second are scheduled and settled."""

    gather_busy_ms: int = 16
    """Schedules wait for the answers to entries under way, at most this long for each such entry, counted from the last
    proposal. 0: they do not wait."""

    propose_bytes_max: int = 4 << 20
    """Bytes of entries proposed and not yet applied."""

    entry_bytes_target: int = 1 << 20
    """An entry takes waiting requests up to about this size. A larger single request makes its own entry."""

    intake_bytes_max: int = 64 << 20
    """Bytes of requests accepted and not yet proposed; beyond it callers get LIMIT_REACHED."""

    intake_requests_max: int = 50_000

    lease_default_ms: int = 30_000
    lease_min_ms: int = 100
    lease_max_ms: int = 43_200_000
    """Upper bound of a delivery's lease (12 hours)."""

    staged_messages_max: int = 16_384
    """Messages of one group and topic that are read from disk and wait for credit or their time."""

    staged_bytes_max: int = 32 << 20

    batch_messages_max: int = 4_096
    """Messages in one delivered batch."""

    batch_bytes_max: int = 2 << 20

    sessions_max: int = 4_096
    """Open consumers of one node."""

    checkpoint_log_bytes: int = 128 << 20
    """A checkpoint is written when a restart would replay more log than this."""

    checkpoint_entries: int = 2_000
    """A checkpoint is also written when a restart would replay more entries: small ones cost a replay as much as large
    ones, 0.4 ms on a free processor."""

    checkpoint_period_ms: int = 300_000
    """A checkpoint is also written this often while the log grows."""

    disk_high_percent: int = 0
    """Schedules are refused from this share of the disk in use until it is 5 % less; 0: never."""

    retention_period_ms: int = 60_000
    """How often the master looks for removable hours."""

    hours_kept: int = 1
    """Whole hours before the cursor's that are kept even if all is settled: a message can be looked up for a while
    after its delivery."""

    buffer_bytes_max: int = 128 << 20
    """Bytes of arrivals kept in memory before they are merged into hour files."""

    preload_ms: int = 10_000
    """Ticks up to this far ahead of the clock are kept loaded."""

    segment_bytes: int = 64 << 20
    """Size of a journal file."""

    clock_tolerance_ms: int = 500
    """Clocks of a majority may differ by this much and still agree; the closest majority decides. Far above the error
    that NTP leaves: a badly kept clock is warned of and must not stop dispatch."""

    clock_holdover_ms_max: int = 600_000
    """How long dispatch goes on from the last agreement: at 200 ppm the time is 120 ms off by then."""

    clock_drift_ppm_max: int = 200
    """Assumed error of an oscillator, by which the uncertainty grows. Quartz keeps within 100."""

    clock_slew_ppm_max: int = 100_000
    """How much faster or slower the time runs while it is corrected: 100,000 ppm corrects a second in ten."""

    clock_sample_period_ms: int = 500
    """How often the nodes ask each other for the time. A drift of 200 ppm makes 0.1 ms meanwhile."""

    clock_skew_warn_ms: int = 100
    """A clock that is off by more causes a warning."""

    clock_own_until_agreed: bool = False
    """Dispatch by the master's own clock until the nodes agree for the first time."""

    apply_slice_ms: int = 10
    """Longest time that apply holds the core's thread before other work gets a turn."""

    sweep_step_messages: int = 1_000
    """Messages that one step of a bulk cancel or move takes: their apply costs each node some milliseconds."""

    events_bytes_max: int = 0
    """Bytes of event files that a node keeps for traces and audits; 0: it writes none. The node's configuration has its
    own default."""

    metrics_topics: tuple[str, ...] = ()
    """Topics with metrics of their own."""

    @property
    def clock(self) -> ClockSettings:
        """The settings of the cluster clock."""
        return ClockSettings(
            tolerance_ms=self.clock_tolerance_ms,
            holdover_ms_max=self.clock_holdover_ms_max,
            drift_ppm_max=self.clock_drift_ppm_max,
            slew_ppm_max=self.clock_slew_ppm_max,
            sample_period_ms=self.clock_sample_period_ms,
            skew_warn_ms=self.clock_skew_warn_ms,
            own_until_agreed=self.clock_own_until_agreed,
        )
