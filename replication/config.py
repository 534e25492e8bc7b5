"""Limits and timings of the replicated log, with the relations that must hold between them.

Owned by the node's configuration, read once; for values that break a relation `RaftConfig` raises a ValueError that
names them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """Timings in milliseconds, sizes in bytes."""

    election_timeout_ms_min: int = 400
    election_timeout_ms_max: int = 700
    append_period_ms: int = 50
    """A heartbeat at least this often; also how often the sync goes out."""
    lease_ms: int = 300
    """How long the answers of a majority let the master act, from when the questions were sent."""
    fallback_ms: int = 350
    """A master steps down after this long without answers of a majority."""
    campaign_round_ms: int = 100
    """Pause between rounds of the pre-vote question; an answer may take three rounds."""
    answer_within_ms: int = 20
    """A slave whose disk takes longer answers its master unsuccessfully meanwhile, as a sign of life."""
    commit_notice_ms: int = 30
    """A master tells slaves of a higher commit index after this, unless a message with entries does so earlier. Under
    load such messages come more often, every 24 ms at least about (pacing.py in node/core). A separate frame costs a
    slave a tenth of what an entry costs."""
    stall_ms: int = 150
    """A longer pause between two ticks of a master is a stall: a new round of answers is needed for the lease. A slave
    whose tick comes later than this may have unread frames: it reads them before it asks for an election."""
    batch_bytes_max: int = 1 << 20
    """Bytes of entries in one message; a single entry may be larger."""
    batch_entries_max: int = 1024
    window_bytes_max: int = 4 << 20
    """Bytes sent to a slave and not acknowledged. Bounds how much data a heartbeat must wait behind."""
    window_messages_max: int = 64
    command_bytes_max: int = 48 << 20
    """Holds one payload of the largest size and its columns."""
    proposals_max: int = 4096
    proposal_bytes_max: int = 64 << 20
    """Bytes of all proposals that are not applied yet."""
    apply_slice_ms: int = 10
    apply_batch_entries: int = 64
    apply_entries_max: int = 1024
    """Entries applied in one tick at most, however quickly."""
    journal_tail_bytes_max: int = 64 << 20
    """Bytes of log kept below a checkpoint for slaves that are only a little behind."""
    disk_retry_ms: int = 1000
    fsync_hang_ms: int = 1500
    """A master whose fdatasync takes longer stands down. It is no candidate until that fdatasync ends."""
    handover_wait_ms: int = 2000
    handover_answer_ms: int = 1000
    checkpoint_hint_ms: int = 1000
    """How often a slave that is too far behind is told so."""

    def lease_over_ms(self, lease_ms: int) -> int:
        """After this long without its master, a slave that has lost the connection to it may vote and stand.

        `lease_ms` is the master's, which may be configured differently; 0: it did not tell. The result is above it, as
        the nodes' steady clocks may run at different rates, and at most the shortest election timeout.
        """
        timeout_ms = self.election_timeout_ms_min
        if not 0 < lease_ms < timeout_ms:
            return timeout_ms
        return lease_ms + max(1, (timeout_ms - lease_ms) // 3)

    def __post_init__(self) -> None:
        def need(held: bool, text: str) -> None:
            if not held:
                raise ValueError(text)

        need(
            self.append_period_ms * 3 < self.election_timeout_ms_min,
            f"append_period_ms ({self.append_period_ms}) must be below a third of "
            f"election_timeout_ms_min ({self.election_timeout_ms_min})",
        )
        need(
            self.election_timeout_ms_min < self.election_timeout_ms_max,
            f"election_timeout_ms_max ({self.election_timeout_ms_max}) must be above "
            f"election_timeout_ms_min ({self.election_timeout_ms_min})",
        )
        need(
            self.append_period_ms * 2 <= self.lease_ms < self.election_timeout_ms_min,
            f"lease_ms ({self.lease_ms}) must be at least two append periods and below "
            f"election_timeout_ms_min ({self.election_timeout_ms_min})",
        )
        need(
            self.append_period_ms * 2 <= self.fallback_ms < self.election_timeout_ms_min,
            f"fallback_ms ({self.fallback_ms}) must be at least two append periods and below "
            f"election_timeout_ms_min ({self.election_timeout_ms_min})",
        )
        need(
            self.window_bytes_max >= self.batch_bytes_max,
            f"window_bytes_max ({self.window_bytes_max}) must hold one batch ({self.batch_bytes_max})",
        )
        need(
            self.proposal_bytes_max >= self.command_bytes_max,
            f"proposal_bytes_max ({self.proposal_bytes_max}) must hold one command ({self.command_bytes_max})",
        )
