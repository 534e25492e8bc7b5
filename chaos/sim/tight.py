"""Limits that no run reaches, made so small that every run does: what is done in pieces, and where a piece ends.

None changes what is promised. Left out are limits beyond which an answer is less exact: how far a late settlement or
an old retry is searched for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery import (
    channel,
    dead,
    fetching,
    fifo,
    handing,
    heard_leases,
    lease_feed,
    recent_units,
    retries,
)
from tickwheel.node.core.schedule import deleting, planner, publisher, sweeper
from tickwheel.node.state import burial, cold, key_holders, machine, subscription, sweeps
from tickwheel.node.state.retrying import Budget

COPIES = 2
COPIED_BYTES = 200
BOUNDS: tuple[tuple[Any, str, Any], ...] = (
    (machine, "Budget", partial(Budget, COPIES, COPIED_BYTES)),
    (burial, "COPIES_MAX", COPIES),
    (burial, "COPY_BYTES_MAX", COPIED_BYTES),
    (dead, "COPIES_MAX", COPIES),
    (retries, "COPIES_MAX", COPIES),
    (retries, "PART_ROWS", 1),
    (fifo, "AHEAD_MAX", 8),
    (fifo, "FETCHES_MAX", 1),
    (channel, "FETCHES_MAX", 1),
    (recent_units, "RECENT_UNITS_MAX", 8),
    (fetching, "READ_MESSAGES_MAX", 4),
    (handing, "BATCH_TOPICS_MAX", 2),
    (heard_leases, "JOIN_MESSAGES_MIN", 2),
    (heard_leases, "ENDS_MAX", 2),
    (lease_feed, "PIECES_UNANSWERED_MAX", 1),
    (publisher, "REFUSALS_MAX", 2),
    (sweeper, "STEP_HOURS_MAX", 2),
    (sweeper, "STEP_BYTES_MAX", 300),
    (sweeper, "AHEAD_MAX", 8),
    (sweeper, "LETTERS_MAX", 2),
    (deleting, "LETTERS_MAX", 2),
    (planner, "ROWS_MAX", 1),
    (planner, "RUNS_MAX", 2),
    (cold, "MOVED_MAX", 2),
    (key_holders, "PRUNED_DISPATCHED_MAX", 1),
    (subscription, "CHUNK", 8),
    (sweeps, "RUNNING_MAX", 2),
)
"""(module, name of its limit, small value)"""


def tightened(config: CoreConfig) -> CoreConfig:
    """The same for a node's settings."""
    return replace(
        config,
        dispatch_in_flight_max=2,
        dispatch_messages_max=8,
        propose_in_flight_max=2,
        entry_bytes_target=2_000,
        intake_requests_max=4,
        staged_messages_max=8,
        staged_bytes_max=2_000,
        batch_messages_max=8,
        batch_bytes_max=500,
    )
