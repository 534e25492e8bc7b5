"""What the core of a node can be told, with its defaults and the reason of each.

Times and sizes carry their unit in the name. What replicas must agree on is not here but in the
replicated settings (`node/state/settings.py`). Relations between fields are checked in `check`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from tickwheel.replication.cluster_clock import ClockSettings
from tickwheel.replication.cluster_clock_state import FRESH_MS

ELECTION_TIMEOUT_MS_LEAST = 100
SLEW_PPM_MOST = 500_000


class DeliveryOrder(enum.Enum):
    """Whether a dispatch is committed before its messages go out, or right after."""

    COMMIT_FIRST = "commit-first"
    PUSH_FIRST = "push-first"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Frozen, read once; see `check` for the relations."""

    sync_period_ms: int = 50
    """Tick, local index and new leases go to the slaves this often."""

    election_timeout_min_ms: int = 400
    election_timeout_max_ms: int = 700
    lease_ms: int = 300
    """The master acts only while a majority answered within this; shorter than the shortest election timeout."""

    delivery_order: DeliveryOrder = DeliveryOrder.COMMIT_FIRST
    dispatch_in_flight_max: int = 16
    """Dispatch commands proposed and not yet applied; 1 is the synchronous mode."""

    dispatch_messages_max: int = 8_192
    """Messages one dispatch command moves at most (more only when they arrive between proposal and apply)."""

    dispatch_ahead_ms: int = 8
    """A dispatch is proposed this long before it is due, so that the majority's fdatasync is hidden."""

    dispatch_period_ms: int = 5
    """Dispatches are at least this far apart unless they are full: bounds the log's growth."""

    delivery_period_ms: int = 3
    """Batches of one group and topic leave at least this far apart unless they are full: many tiny ones would cost
    the node and its consumers more time than they save."""

    push_behind_ms: int = 40
    """Push-first: how long a commit may stay behind before nothing more is delivered ahead of it. Kept under 50."""

    propose_in_flight_max: int = 8
    """Entries proposed and not applied; more wait and are merged (group commit)."""

    gather_ms: int = 4
    """Settlements make an entry so long after the last one at the earliest, behind a dispatch a little later than the
    next one is expected; a dispatch leaves at once and takes along what waits. 0: everything leaves at once."""

    gather_busy_ms: int = 16
    """Schedules wait for the answers to entries that are under way, but for each of them so long after the last one was
    proposed at the most. 0: they do not wait."""

    propose_bytes_max: int = 4 << 20
    """Bytes of entries proposed and not applied."""

    entry_bytes_target: int = 1 << 20
    """An entry takes waiting requests up to about this size; a larger single request makes its own entry."""

    intake_bytes_max: int = 64 << 20
    """Requests accepted and not yet proposed; above it callers get LIMIT_REACHED."""

    intake_requests_max: int = 50_000

    lease_default_ms: int = 30_000
    lease_min_ms: int = 100
    lease_max_ms: int = 43_200_000
    """Bounds of the lease of a delivery (12 hours)."""

    staged_messages_max: int = 16_384
    """Messages of one group and topic read from disk and waiting for credit or their time."""

    staged_bytes_max: int = 32 << 20

    batch_messages_max: int = 4_096
    """Messages in one delivered batch at most."""

    batch_bytes_max: int = 2 << 20

    sessions_max: int = 4_096
    """Open consumers of one node."""

    checkpoint_log_bytes: int = 128 << 20
    """A checkpoint is written when a restart would replay more log than this."""

    checkpoint_entries: int = 2_000
    """Or more entries: small ones cost a replay as much as large ones, 0.4 ms on a free processor."""

    checkpoint_period_ms: int = 300_000
    """And at least this often while the log grows."""

    disk_high_percent: int = 0
    """Schedules are refused while so much of the disk is used, and until 5 % less is; 0: never."""

    retention_period_ms: int = 60_000
    """How often the master looks for hours that can be removed."""

    hours_kept: int = 1
    """Whole hours before the cursor's that stay whatever is settled: a message can be looked up for a while after it
    was delivered."""

    buffer_bytes_max: int = 128 << 20
    """Arrivals kept in memory before they are merged into hour files."""

    preload_ms: int = 10_000
    """Ticks this far ahead of the clock are kept loaded."""

    segment_bytes: int = 64 << 20
    """Size of a journal file."""

    clock_tolerance_ms: int = 500
    """Clocks of a majority may differ by this much and still agree; the closest majority decides. Above what NTP leaves
    by far, so that dispatch does not stop for a badly kept clock that the warning has told of."""

    clock_holdover_ms_max: int = 600_000
    """Without agreement dispatch goes on from the last one for so long: at 200 ppm it is 120 ms off by then."""

    clock_drift_ppm_max: int = 200
    """How far an oscillator may be off: the error grows by it. Quartz keeps within 100."""

    clock_slew_ppm_max: int = 100_000
    """How much faster or slower than it should the time goes while it is corrected: a second takes ten."""

    clock_sample_period_ms: int = 500
    """How often the nodes ask each other. A drift of 200 ppm is 0.1 ms in that time."""

    clock_skew_warn_ms: int = 100
    """A clock that is off by more is warned of."""

    clock_own_until_agreed: bool = False
    """Dispatch by the master's own clock until the nodes have agreed for the first time."""

    apply_slice_ms: int = 10
    """Longest time that apply may hold the loop before other work gets its turn."""

    sweep_step_messages: int = 1_000
    """Messages that one step of a bulk cancel or move takes at most: apply takes some milliseconds for them on each
    node."""

    events_bytes_max: int = 0
    """Bytes of event files that a node keeps for traces and audits; 0: it writes none. A node's configuration has its
    own default."""

    @property
    def clock(self) -> ClockSettings:
        """What the cluster clock is told."""
        return ClockSettings(
            tolerance_ms=self.clock_tolerance_ms,
            holdover_ms_max=self.clock_holdover_ms_max,
            drift_ppm_max=self.clock_drift_ppm_max,
            slew_ppm_max=self.clock_slew_ppm_max,
            sample_period_ms=self.clock_sample_period_ms,
            skew_warn_ms=self.clock_skew_warn_ms,
            own_until_agreed=self.clock_own_until_agreed,
        )

    def check(self) -> list[str]:
        """All violated relations, in words; empty if the config is sound."""
        problems: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                problems.append(f"{field.name}: {value}: at least {least}")
        relations = [
            (
                self.election_timeout_min_ms >= ELECTION_TIMEOUT_MS_LEAST,
                f"election_timeout_min_ms: {self.election_timeout_min_ms}: at least {ELECTION_TIMEOUT_MS_LEAST}",
            ),
            (
                self.election_timeout_max_ms > self.election_timeout_min_ms,
                f"election_timeout_max_ms: {self.election_timeout_max_ms}: "
                f"above election_timeout_min_ms ({self.election_timeout_min_ms})",
            ),
            (
                self.lease_ms < self.election_timeout_min_ms,
                f"lease_ms: {self.lease_ms}: below election_timeout_min_ms ({self.election_timeout_min_ms})",
            ),
            (
                self.lease_ms >= 2 * self.sync_period_ms,
                f"lease_ms: {self.lease_ms}: at least twice sync_period_ms ({self.sync_period_ms})",
            ),
            (self.push_behind_ms < 50, f"push_behind_ms: {self.push_behind_ms}: below 50"),
            (
                self.lease_min_ms <= self.lease_default_ms <= self.lease_max_ms,
                f"lease_default_ms: {self.lease_default_ms}: "
                f"between lease_min_ms ({self.lease_min_ms}) and lease_max_ms ({self.lease_max_ms})",
            ),
            (
                self.clock_skew_warn_ms <= self.clock_tolerance_ms,
                f"clock_skew_warn_ms: {self.clock_skew_warn_ms}: "
                f"at most clock_tolerance_ms ({self.clock_tolerance_ms}), so that the warning comes first",
            ),
            (
                self.clock_sample_period_ms * 4 <= FRESH_MS,
                f"clock_sample_period_ms: {self.clock_sample_period_ms}: at most {FRESH_MS // 4}",
            ),
            (
                self.clock_holdover_ms_max >= FRESH_MS,
                f"clock_holdover_ms_max: {self.clock_holdover_ms_max}: at least {FRESH_MS}",
            ),
            (
                self.clock_slew_ppm_max <= SLEW_PPM_MOST,
                f"clock_slew_ppm_max: {self.clock_slew_ppm_max}: at most {SLEW_PPM_MOST}, or time could stand still",
            ),
        ]
        return problems + [message for holds, message in relations if not holds]


_MAY_BE_ZERO = frozenset(
    {
        "disk_high_percent",
        "events_bytes_max",
        "hours_kept",
        "dispatch_ahead_ms",
        "dispatch_period_ms",
        "gather_ms",
        "gather_busy_ms",
        "delivery_period_ms",
    }
)
